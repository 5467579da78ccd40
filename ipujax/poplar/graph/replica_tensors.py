"""Tensors of replicated graphs in the graph of all replicas, and the share of a machine that a replica gets.

Input: the top-level graph, and a tensor that may be of a replicated graph inside it: a *template*, which stands for a
tensor of each replica. Output: those tensors. A tensor of the top-level graph itself stands for itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

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
