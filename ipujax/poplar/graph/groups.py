"""Vertex groups of a graph's compute sets: added as groups, built from single vertices, or of replicas.

Input: additions to a graph. Output: the vertex groups of each compute set, up to date after each addition. An unchanged
group stays the same object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipujax.poplar.graph.replica_tensors import Replicas
from ipujax.poplar.vertex import VertexStore
from ipujax.runtime.graph import ComputeSet, VertexGroup


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
