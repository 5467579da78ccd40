"""Steps, vertex groups and connections of a program, listed once for all rules of the verifier, and their flat runs.

A rule is a function from an `Inventory` to errors. Its quick test looks at an access as a whole, in O(rank); where that
decides nothing, `access_runs` is exact, in time proportional to the contiguous runs of all blocks.
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
    direct_tensors,
    distinct,
    vertex_blocks,
)
from ipujax.runtime.tensor import Origin, Tensor, Variable


@dataclass(frozen=True, eq=False, slots=True)
class Connection:
    """One field of a vertex group and the access it is connected to."""

    compute_set: ComputeSet
    group: VertexGroup
    field: Field
    access: Access

    @property
    def origin(self) -> Origin:
        """Return the origin of the group, or that of its compute set if the group has none."""
        return self.compute_set.origin if self.group.origin == Origin() else self.group.origin

    def __str__(self) -> str:
        return f"field {self.field.name} of {self.group.codelet.name} in {self.compute_set.name}"


@dataclass(frozen=True, eq=False, slots=True)
class Inventory:
    """Everything in a program that a rule looks at.

    Args:
        graph: holds mappings and vertex groups.
        program: the whole program.
        nodes: its nodes, each once, parents first.
        connections: for each compute set of the graph that runs, the fields of all its groups.
        effects: variables that programs read and write.
    """

    graph: Graph
    program: Program
    nodes: tuple[Program, ...]
    connections: dict[ComputeSet, tuple[Connection, ...]]
    effects: EffectsOf

    @classmethod
    def of(cls, graph: Graph, program: Program, effects: EffectsOf) -> Inventory:
        """List the nodes and connections of a program."""
        nodes = tuple(distinct(program))
        sets = dict.fromkeys(node.compute_set for node in nodes if isinstance(node, Execute))
        # A compute set of another graph is left out here, and refused by the rule "unknown-compute-set".
        connections = {each: tuple(_connect(each, graph.groups[each])) for each in sets if each in graph.groups}
        return cls(graph, program, nodes, connections, effects)

    def fields(self) -> Iterator[Connection]:
        """Yield the fields of all vertex groups."""
        for connections in self.connections.values():
            yield from connections

    def groups(self) -> Iterator[tuple[ComputeSet, VertexGroup]]:
        """Yield all vertex groups that run, each with its compute set."""
        for compute_set in self.connections:
            for group in self.graph.groups[compute_set]:
                yield compute_set, group

    def tensors(self) -> Iterator[tuple[Tensor, Connection | Program]]:
        """Yield all tensors of the program, each with the field or node that reads or writes it."""
        for connection in self.fields():
            yield connection.access.tensor, connection
        for node in self.nodes:
            for tensor in direct_tensors(node):
                yield tensor, node


def origin_of(user: Connection | Program) -> Origin:
    """Return the origin of a field or node that uses a tensor."""
    # Not every node of a program has an origin: a `Sequence` has none.
    return user.origin if isinstance(user, Connection) else getattr(user, "origin", Origin())


def _connect(compute_set: ComputeSet, groups: list[VertexGroup]) -> Iterator[Connection]:
    for group in groups:
        # The rule "type-mismatch" refuses a group with more or fewer accesses than fields.
        for field, access in zip(group.codelet.fields, group.accesses, strict=False):
            yield Connection(compute_set, group, field, access)


def access_runs(group: VertexGroup, access: Access, bases: Bases) -> Runs:
    """Return the contiguous runs of memory that vertices touch through `access`, numbered by existing vertex."""
    # `bases`: the first element of each variable in a common flat space.
    blocks = vertex_blocks(group, access)
    # A block of fill alone has length 0 in some dimension, and touches no memory.
    vertices = np.flatnonzero(np.all(blocks.length > 0, axis=1))
    return concat_runs(block_runs(access.tensor.node, vertices, blocks.start[vertices], blocks.length[vertices], bases))


def tensor_runs(tensor: Tensor, bases: Bases) -> Runs:
    """Return the contiguous runs of memory of a whole tensor, as those of vertex 0."""
    if tensor.size == 0:
        return concat_runs([])
    start = np.zeros((1, tensor.ndim), np.int64)
    length = np.array([tensor.shape], np.int64).reshape(1, tensor.ndim)
    return concat_runs(block_runs(tensor.node, np.zeros(1, np.int64), start, length, bases))


def element_name(flat: int, bases: Bases) -> str:
    """Return variable and index of element `flat` of a common flat space, for messages."""
    variable = max((v for v, base in bases.items() if base <= flat), key=lambda v: bases[v])
    return f"{variable!r}{_index(flat - bases[variable], variable)}"


def _index(element: int, variable: Variable) -> list[int]:
    return [int(i) for i in np.unravel_index(element, variable.shape)]
