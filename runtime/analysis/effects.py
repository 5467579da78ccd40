"""What a program reads and writes: the facts that liveness, the engine's loop state and the verifier share.

A variable is *killed* by a step that writes all of it without reading it: whatever it held before is dead. Writes
inside a compute set are disjoint (a rule of the verifier), so counting elements tells whether all of it is written.
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
    """What running a program does to variables, seen from outside.

    Args:
        reads: variables whose value from before the program may be read.
        writes: variables that may be written.
        kills: variables that are certainly written in full before any read.
    """

    reads: frozenset[Variable] = frozenset()
    writes: frozenset[Variable] = frozenset()
    kills: frozenset[Variable] = frozenset()

    def then(self, later: Effects) -> Effects:
        """The effects of this and, after it, of `later`."""
        return _in_order((self, later))

    def or_else(self, other: Effects) -> Effects:
        """The effects of either."""
        return Effects(self.reads | other.reads, self.writes | other.writes, self.kills & other.kills)

    def maybe(self) -> Effects:
        """The effects if it may be skipped."""
        return Effects(self.reads, self.writes, frozenset())


def _in_order(parts: Iterable[Effects]) -> Effects:
    """The effects of programs one after the other."""
    reads: set[Variable] = set()
    writes: set[Variable] = set()
    kills: set[Variable] = set()
    for part in parts:
        reads |= part.reads - kills
        writes |= part.writes
        kills |= part.kills - reads
    return Effects(frozenset(reads), frozenset(writes), frozenset(kills))


def _of_leaf(reads: Iterable[Tensor], writes: Iterable[tuple[Tensor, int]]) -> Effects:
    read = frozenset(v for tensor in reads for v in tensor.variables())
    counts: dict[Variable, int] = {}
    for tensor, elements in writes:
        for variable, share in _shares(tensor, elements).items():
            counts[variable] = counts.get(variable, 0) + share
    killed = frozenset(v for v, count in counts.items() if count >= v.size) - read
    return Effects(read, frozenset(counts), killed)


def _shares(tensor: Tensor, elements: int) -> dict[Variable, int]:
    """How many elements of each of its variables are surely written when `elements` of a tensor are."""
    variables = tensor.variables()
    if len(variables) == 1:
        return {variables[0]: elements}
    shares = dict.fromkeys(variables, 0)
    if elements == tensor.size:
        for leaf in leaves(tensor.node):
            if isinstance(leaf, Indexed):
                for number, variable in enumerate(leaf.variables):
                    shares[variable] += int(np.count_nonzero(leaf.which == number))
            else:
                shares[leaf.variable] += prod(leaf.shape)
    return shares


def written_elements(group: VertexGroup, field: int) -> int:
    """Number of elements the vertices of a group write through field number `field`."""
    access, is_full = group.accesses[field], bool(group.tile.size and group.tile.min() >= 0)
    named = whole_axes(group, access)
    if is_full and named is not None:
        return access.tensor.size * prod(axis.blocks for n, axis in enumerate(group.axes) if n not in named)
    lengths = [dim.length for dim in extents(group, access)]
    if is_full:
        return _grid_sum(lengths, group.grid)
    total = (group.tile >= 0).astype(int)
    for length in lengths:
        total = total * length
    return int(total.sum())


def _grid_sum(factors: list[np.ndarray], grid: tuple[int, ...]) -> int:
    """The sum over a grid of a product of factors, without making the grid where each factor varies along one axis."""
    along = [[axis for axis, n in enumerate(factor.shape) if n > 1] for factor in factors]
    used = [axis for axes in along for axis in axes]
    if len(set(used)) != len(used):
        product = np.ones((1,) * len(grid), np.int64)
        for factor in factors:
            product = product * factor
        factors, used = [product], [axis for axis, n in enumerate(product.shape) if n > 1]
    return prod(int(factor.sum()) for factor in factors) * prod(n for axis, n in enumerate(grid) if axis not in used)


def group_tensors(group: VertexGroup) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """The tensors a group reads, and those it writes with the number of elements it writes."""
    reads, writes = [], []
    for number, (field, access) in enumerate(zip(group.codelet.fields, group.accesses, strict=True)):
        if field.is_read:
            reads.append(access.tensor)
        if field.is_written:
            writes.append((access.tensor, written_elements(group, number)))
    return reads, writes


def written_in_full(tensor: Tensor) -> frozenset[Variable]:
    """The variables of which nothing is left as it was when all of a tensor is written."""
    return _of_leaf([], [(tensor, tensor.size)]).kills


class EffectsOf:
    """Effects of programs of one graph, each node computed once.

    Args:
        graph: holds the vertex groups of the compute sets.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._effects = fold(self._combined)

    def __call__(self, program: Program) -> Effects:
        """The effects of `program`."""
        return self._effects(program)

    def _combined(self, program: Program, children: list[Effects]) -> Effects:
        """The effects of a node from those of the programs inside it."""
        match program:
            case Execute(compute_set):
                groups = [group_tensors(group) for group in self.graph.groups[compute_set]]
                return _of_leaf((t for reads, _ in groups for t in reads), (w for _, writes in groups for w in writes))
            case Block():
                return _in_order(children)
            case Loop(test=None):
                return children[0] if program.trips else Effects()
            case Loop():
                test = children[0].then(_of_leaf(program.reads, []))
                return test.then(children[1].then(test).maybe())
            case Branch():
                return _of_leaf(program.reads, []).then(reduce(Effects.or_else, children))
        effects = _of_leaf(program.reads, [(tensor, tensor.size) for tensor in program.writes])
        replicas = self.graph.replication_factor
        is_partial = isinstance(program, CrossReplicaCopy) and None in program.sources(replicas)
        return effects.maybe() if is_partial else effects
