"""What the rules of the verifier look at: a program's steps and vertex groups, listed once, and their flat runs.

Rules are functions from `Facts` to the errors they find. The quick tests of a rule look at an access as a whole, in
O(rank); `access_runs` is exact, in the number of contiguous runs of all blocks, where a quick test decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.exchange import Bases, Runs, block_runs, concat_runs
from ipujax.runtime.graph import (
    Access,
    ComputeSet,
    Execute,
    Field,
    Graph,
    Program,
    VertexGroup,
    boxes,
    distinct,
    own_tensors,
)
from ipujax.runtime.tensor import Origin, Tensor, Variable


@dataclass(frozen=True, eq=False, slots=True)
class Connection:
    """One field of a vertex group and what it is connected to."""

    compute_set: ComputeSet
    group: VertexGroup
    field: Field
    access: Access

    @property
    def where(self) -> Origin:
        """The user's line."""
        return self.compute_set.origin if self.group.origin == Origin() else self.group.origin

    def __str__(self) -> str:
        return f"field {self.field.name} of {self.group.codelet.name} in {self.compute_set.name}"


@dataclass(frozen=True, eq=False, slots=True)
class Facts:
    """A program to verify.

    Args:
        graph: holds mappings and vertex groups.
        program: the whole program.
        nodes: its nodes, each once, parents first.
        connections: for each compute set that runs, and that the graph knows, the fields of all its groups.
        effects: what programs read and write.
    """

    graph: Graph
    program: Program
    nodes: tuple[Program, ...]
    connections: dict[ComputeSet, tuple[Connection, ...]]
    effects: EffectsOf

    @classmethod
    def of(cls, graph: Graph, program: Program, effects: EffectsOf) -> Facts:
        """Lists a program once."""
        nodes = tuple(distinct(program))
        sets = dict.fromkeys(node.compute_set for node in nodes if isinstance(node, Execute))
        known = {each: tuple(_connections(each, graph.groups[each])) for each in sets if each in graph.groups}
        return cls(graph, program, nodes, known, effects)

    def fields(self) -> Iterator[Connection]:
        """The fields of all vertex groups."""
        for connections in self.connections.values():
            yield from connections

    def groups(self) -> Iterator[tuple[ComputeSet, VertexGroup]]:
        """All vertex groups that run."""
        for compute_set in self.connections:
            for group in self.graph.groups[compute_set]:
                yield compute_set, group

    def tensors(self) -> Iterator[tuple[Tensor, Connection | Program]]:
        """All tensors a program touches, and what touches them."""
        for connection in self.fields():
            yield connection.access.tensor, connection
        for node in self.nodes:
            for tensor in own_tensors(node):
                yield tensor, node


def where(what: Connection | Program) -> Origin:
    """The user's line of what touches a tensor."""
    return what.where if isinstance(what, Connection) else getattr(what, "origin", Origin())


def _connections(compute_set: ComputeSet, groups: list[VertexGroup]) -> Iterator[Connection]:
    for group in groups:
        # Unequal numbers are for the rule on types to refuse.
        for field, access in zip(group.codelet.fields, group.accesses, strict=False):
            yield Connection(compute_set, group, field, access)


def access_runs(group: VertexGroup, access: Access, bases: Bases) -> Runs:
    """The contiguous runs of memory each vertex of a group touches, by the number of the vertex among those that exist.

    Args:
        group: the vertices.
        access: one of its accesses.
        bases: where each variable starts in a common flat space.
    """
    box = boxes(group, access)
    some = np.flatnonzero(np.all(box.length > 0, axis=1))
    return concat_runs(block_runs(access.tensor.node, some, box.start[some], box.length[some], bases))


def tensor_runs(tensor: Tensor, bases: Bases) -> Runs:
    """The contiguous runs of memory of a whole tensor, as of vertex 0."""
    if tensor.size == 0:
        return concat_runs([])
    start = np.zeros((1, tensor.ndim), np.int64)
    length = np.array([tensor.shape], np.int64).reshape(1, tensor.ndim)
    return concat_runs(block_runs(tensor.node, np.zeros(1, np.int64), start, length, bases))


def element_name(flat: int, bases: Bases) -> str:
    """The variable and index of one element of a common flat space."""
    variable = max((v for v, base in bases.items() if base <= flat), key=lambda v: bases[v])
    return f"{variable!r}{_index(flat - bases[variable], variable)}"


def _index(element: int, variable: Variable) -> list[int]:
    return [int(i) for i in np.unravel_index(element, variable.shape)]
