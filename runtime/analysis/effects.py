"""Effects: variables that a program reads and writes, for liveness, the engine's loop state and the verifier.

A variable is *killed* by a step that writes all of it without reading it: its earlier value is dead. Writes inside a
compute set are disjoint (a rule of the verifier), so a count of elements decides whether all of it is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from ipujax.runtime.graph import (
    Block,
    Branch,
    CrossReplicaCopy,
    Execute,
    Graph,
    Loop,
    Program,
    VertexGroup,
    extents,
    fold,
    whole_axes,
)
from ipujax.runtime.tensor import Indexed, Tensor, Variable, leaves


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of running a program on variables, seen from outside.

    Args:
        reads: variables whose value from before the program may be read.
        writes: variables that may be written.
        kills: variables that are certainly written in full before any read.
    """

    reads: frozenset[Variable] = frozenset()
    writes: frozenset[Variable] = frozenset()
    kills: frozenset[Variable] = frozenset()

    def then(self, later: Effects) -> Effects:
        """Return the effects of this and, after it, of `later`."""
        return _in_order((self, later))

    def or_else(self, other: Effects) -> Effects:
        """Return the effects of one of two programs, either of which may run."""
        return Effects(self.reads | other.reads, self.writes | other.writes, self.kills & other.kills)

    def maybe(self) -> Effects:
        """Return the effects of a program that may be skipped: it kills nothing."""
        return Effects(self.reads, self.writes, frozenset())


def _in_order(parts: Iterable[Effects]) -> Effects:
    """Return the effects of programs one after the other."""
    reads: set[Variable] = set()
    writes: set[Variable] = set()
    kills: set[Variable] = set()
    for part in parts:
        reads |= part.reads - kills
        writes |= part.writes
        kills |= part.kills - reads
    return Effects(frozenset(reads), frozenset(writes), frozenset(kills))


def _of_leaf(reads: Iterable[Tensor], writes: Iterable[tuple[Tensor, int]]) -> Effects:
    """Return the effects of a step, which writes some number of the elements of each written tensor."""
    read = frozenset(v for tensor in reads for v in tensor.variables())
    counts: dict[Variable, int] = {}
    for tensor, elements in writes:
        for variable, share in _written_elements(tensor, elements).items():
            counts[variable] = counts.get(variable, 0) + share
    # Writes of a step are disjoint, so a count of all elements is a write of all; a read comes before any write.
    kills = frozenset(v for v, count in counts.items() if count >= v.size) - read
    return Effects(read, frozenset(counts), kills)


def _written_elements(tensor: Tensor, elements: int) -> dict[Variable, int]:
    """Return the elements of each variable that are surely written when `elements` of a tensor are."""
    variables = tensor.variables()
    if len(variables) == 1:
        return {variables[0]: elements}
    shares = dict.fromkeys(variables, 0)
    if elements == tensor.size:  # of a part of it, the share of each variable is unknown: count none
        for leaf in leaves(tensor.node):
            if isinstance(leaf, Indexed):
                for number, variable in enumerate(leaf.variables):
                    shares[variable] += int(np.count_nonzero(leaf.which == number))
            else:
                shares[leaf.variable] += prod(leaf.shape)
    return shares


def written_elements(group: VertexGroup, field: int) -> int:
    """Return the number of elements that the vertices of a group write through field number `field`."""
    access = group.accesses[field]
    is_full = bool(group.tile.size and group.tile.min() >= 0)
    named = whole_axes(group, access)
    # Vertices on each block of an axis that no dimension names all write the complete tensor.
    if is_full and named is not None:
        return access.tensor.size * prod(axis.blocks for n, axis in enumerate(group.axes) if n not in named)
    lengths = [dim.length for dim in extents(group, access)]
    if is_full:
        return _grid_sum(lengths, group.grid)
    # Some blocks have no vertex: sum over the others.
    total = (group.tile >= 0).astype(int)
    for length in lengths:
        total = total * length
    return int(total.sum())


def _grid_sum(factors: list[np.ndarray], grid: tuple[int, ...]) -> int:
    """Sum a product of factors over a grid, without making the grid where each factor varies along one axis."""
    # Factors along different axes sum one by one; if two share an axis, only their product can be summed.
    along = [[axis for axis, n in enumerate(factor.shape) if n > 1] for factor in factors]
    used = [axis for axes in along for axis in axes]
    if len(set(used)) != len(used):
        product = np.ones((1,) * len(grid), np.int64)
        for factor in factors:
            product = product * factor
        factors = [product]
        used = [axis for axis, n in enumerate(product.shape) if n > 1]
    return prod(int(factor.sum()) for factor in factors) * prod(n for axis, n in enumerate(grid) if axis not in used)


def group_tensors(group: VertexGroup) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """Return the tensors that a group reads, and those that it writes with the number of elements it writes."""
    reads = []
    writes = []
    for number, (field, access) in enumerate(zip(group.codelet.fields, group.accesses, strict=True)):
        if field.is_read:
            reads.append(access.tensor)
        if field.is_written:
            writes.append((access.tensor, written_elements(group, number)))
    return reads, writes


def computed_from(group: VertexGroup) -> list[tuple[Tensor, list[Tensor]]]:
    """Return each tensor that a group writes, with the tensors that its elements are computed from."""
    reads, writes = group_tensors(group)
    sources = group.codelet.sources
    operands = [reads] * len(writes) if sources is None else [[reads[n] for n in sorted(each)] for each in sources]
    return [(tensor, read) for (tensor, _), read in zip(writes, operands, strict=True)]


def written_in_full(tensor: Tensor) -> frozenset[Variable]:
    """Return the variables of which every element is written when all of a tensor is."""
    return _of_leaf([], [(tensor, tensor.size)]).kills


class EffectsOf:
    """Effects of programs of one graph, each node computed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._effects = fold(self._combined_effects)

    def __call__(self, program: Program) -> Effects:
        """Return the effects of `program`."""
        return self._effects(program)

    def _combined_effects(self, program: Program, children: list[Effects]) -> Effects:
        """Combine the effects of the programs inside a node."""
        match program:
            case Execute(compute_set):
                groups = [group_tensors(group) for group in self.graph.groups[compute_set]]
                return _of_leaf((t for reads, _ in groups for t in reads), (w for _, writes in groups for w in writes))
            case Block():
                return _in_order(children)
            case Loop(test=None):
                return children[0] if program.trips else Effects()
            case Loop():
                # The test runs before the first iteration and after each: only the first run is certain.
                test = children[0].then(_of_leaf(program.reads, []))
                return test.then(children[1].then(test).maybe())
            case Branch():
                return _of_leaf(program.reads, []).then(reduce(Effects.or_else, children))
        effects = _of_leaf(program.reads, [(tensor, tensor.size) for tensor in program.writes])
        replicas = self.graph.replication_factor
        # A replica that no other sends to keeps its destination, so the copy may do nothing.
        is_partial = isinstance(program, CrossReplicaCopy) and not program.reaches_all(replicas)
        return effects.maybe() if is_partial else effects
