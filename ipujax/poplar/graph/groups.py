"""Vertex groups of a graph's compute sets: added as groups, built from single vertices, or of replicas.

Input: additions to a graph. Output: the vertex groups of each compute set, up to date after each addition. An unchanged
group stays the same object.

A tensor of a replicated graph inside the top-level graph is a *template*, which stands for a tensor of each replica in
the graph of all replicas; a replica gets a share of the machine. A tensor of the top-level graph itself stands for
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from ipujax.poplar.vertex import VertexStore
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import ComputeSet, VertexGroup
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable, concat


class Replicas(Protocol):
    """A replicated graph; see `replicated.ReplicatedBase`."""

    replicas: int
    instances: dict[Variable, tuple[Variable, ...]]
    groups: dict[ComputeSet, list[VertexGroup]]

    def in_replica(self, tensor: Tensor, replica: int) -> Tensor: ...

    def group_in_replica(self, group: VertexGroup, replica: int) -> VertexGroup: ...

    def groups_of_replicas(self, compute_set: ComputeSet) -> list[VertexGroup]: ...


class HasReplicas(Protocol):
    """A top-level graph with its replicated graphs."""

    replicated: list[Replicas]


def replicated_graph_of(top: HasReplicas, *tensors: Tensor) -> Replicas | None:
    """Return the replicated graph of tensors, None without one; refuse tensors of several."""
    variables = {variable for tensor in tensors for variable in tensor.variables()}
    graphs = [graph for graph in top.replicated if any(v in graph.instances for v in variables)]
    if len(graphs) > 1:
        raise GraphError("tensors of different replicated graphs are used together", got=list(tensors))
    return graphs[0] if graphs else None


def in_each_replica(top: HasReplicas, tensor: Tensor) -> list[Tensor]:
    """Return the instance of a template in each replica; a tensor that is not a template stays as it is."""
    graph = replicated_graph_of(top, tensor)
    return [tensor] if graph is None else [graph.in_replica(tensor, r) for r in range(graph.replicas)]


def all_replicas(top: HasReplicas, tensor: Tensor) -> Tensor:
    """Return the instances of a template as one tensor, [replicas, *shape]; other tensors stay as they are."""
    if replicated_graph_of(top, tensor) is None:
        return tensor
    return concat([instance.expand_dims(0) for instance in in_each_replica(top, tensor)])


def share_of_ipus(target: Target, replicas: int) -> Target:
    """Return the machine of one replica, in entire IPUs; raises GraphError if replicas do not divide the IPUs."""
    return target.replace(num_ipus=_share(target.num_ipus, replicas, "IPUs"))


def share_of_tiles(target: Target, replicas: int) -> Target:
    """Return the machine of one of several replicas: entire IPUs if there are several, else tiles of the single one."""
    if target.num_ipus > 1:
        return share_of_ipus(target, replicas)
    return target.replace(tiles_per_ipu=_share(target.tiles_per_ipu, replicas, "tiles"))


def _share(total: int, replicas: int, unit: str) -> int:
    if not isinstance(replicas, int | np.integer) or isinstance(replicas, bool) or replicas < 1 or total % replicas:
        expected = f"a divisor of {total} {unit}"
        raise GraphError(f"a graph cannot have {replicas!r} replicas", expected=expected, got=repr(replicas))
    return int(total // replicas)


class GroupTable(dict[ComputeSet, list[VertexGroup]]):
    """Vertex groups by compute set, built on access: all read methods use iteration and `[]`."""

    # `dict` reads its storage directly in these four methods, past `__getitem__` of the subclasses.

    def get(self, compute_set: ComputeSet, default: Any = None) -> Any:
        return self[compute_set] if compute_set in self else default  # noqa: SIM401 this is `get`

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[compute_set] for compute_set in self]

    def items(self) -> Any:
        return [(compute_set, self[compute_set]) for compute_set in self]


class Groups(GroupTable):
    """Vertex groups of each compute set.

    Args:
        vertices: the vertices added one by one.

    Attributes:
        replicated: graphs whose vertices occur once for each of their replicas.
    """

    def __init__(self, vertices: VertexStore) -> None:
        super().__init__()
        self._vertices = vertices
        self.replicated: list[Replicas] = []

    def __getitem__(self, compute_set: ComputeSet) -> list[VertexGroup]:
        groups = super().__getitem__(compute_set) + self._vertices.groups(compute_set)
        return groups + [group for graph in self.replicated for group in graph.groups_of_replicas(compute_set)]

    def added(self, compute_set: ComputeSet) -> list[VertexGroup]:
        """Return the mutable list of the groups that were added as groups."""
        return super().__getitem__(compute_set)


class TemplateGroups(Groups):
    """Vertex groups of one replica, in the compute sets of the parent graph."""

    def __init__(self, vertices: VertexStore, parent: dict[ComputeSet, list[VertexGroup]]) -> None:
        super().__init__(vertices)
        self._parent = parent

    # Compute sets are the parent's; the first addition to one of them makes its list here.
    def __missing__(self, compute_set: ComputeSet) -> list[VertexGroup]:
        if compute_set not in self._parent:
            raise KeyError(compute_set)
        return self.setdefault(compute_set, [])

    def __contains__(self, compute_set: object) -> bool:
        return compute_set in self._parent

    def __iter__(self) -> Iterator[ComputeSet]:
        return iter(self._parent)

    def __len__(self) -> int:
        return len(self._parent)
