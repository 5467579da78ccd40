"""Placing operands and results of a plan on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import (
    GROUP_CHANNELS,
    MemoryOrder,
    linear_mapping,
    map_by_plan,
    map_linearly,
    view_digits,
)
from ipujax.lowering.layout.place import share_out
from ipujax.lowering.poplin.partials import combine, monoid_of
from ipujax.lowering.poplin.product_plan import Grid, Plan
from ipujax.lowering.poplin.spec import Memory
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Dim, Graph, Sequence as ProgramSequence, Term
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    Blocked,
    Tensor,
    element_bytes,
    even_cuts,
)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What vertices of a plan write.

    Args:
        tensor: the result, or its partial results with a leading dimension of slots.
        slot: the index of that dimension, none or one.
        held: how the variable of the result keeps its elements.
    """

    tensor: Tensor
    slot: tuple[Dim, ...]
    held: MemoryOrder

    def combined(self, graph: Graph, plan: Plan, prog: ProgramSequence, name: str) -> Tensor:
        """The result, after combining partial results if there are any."""
        if not self.slot:
            return self.tensor
        (variable,) = self.tensor.variables()
        total = combine(graph, Tensor.of(variable), plan.spec.out_dtype, prog, name, plan.tiles_used)
        return self.held.of_view(total)


def is_free(graph: Graph, operand: Tensor) -> bool:
    """Whether `place_by_plan` will place an operand: no tile mapping yet, and a view of one whole variable."""
    return not graph.is_mapped(operand) and view_digits(operand) is not None


def memory_of(operand: Tensor, axes: Sequence[int]) -> Memory:
    """How an operand is kept, as `ConvSpec` has it; one of several variables as if by rows.

    Args:
        operand: a view.
        axes: what each of its dimensions follows.
    """
    if operand.affine is None:
        return tuple(zip(axes, operand.shape, strict=True))
    rows = zip(axes, operand.affine.dims, strict=True)
    pieces = [(abs(stride), axis, size) for axis, group in rows for size, stride in group if stride]
    return tuple((axis, size) for _, axis, size in sorted(pieces, reverse=True))


def place_by_plan(graph: Graph, operand: Tensor, plan: Plan, cuts: Sequence[np.ndarray], tile: np.ndarray) -> None:
    """Maps an operand without a mapping: each block spread over the tiles that use it, or it lies evenly on the plan's.

    Args:
        graph: holds the variable.
        operand: a view; nothing happens when it is mapped.
        plan: says which.
        cuts: boundaries of each of its dimensions.
        tile: the tiles, one dimension for each of the operand's and then any over which its blocks are shared.
    """
    if graph.is_mapped(operand):
        return
    block_bytes = prod(int(np.diff(c).max()) for c in cuts) * element_bytes(operand.dtype)
    if plan.lays_linearly or not is_free(graph, operand) or block_bytes < MIN_BYTES_PER_TILE:
        map_linearly(graph, operand, plan.tiles_used)
        return
    users = tile.reshape((*tile.shape[: operand.ndim], -1))
    wanted = max(1, min(users.shape[-1], block_bytes // MIN_BYTES_PER_TILE))
    map_by_plan(graph, operand, *share_out(cuts, users, wanted, range(operand.ndim)))


def result_variable(
    graph: Graph, plan: Plan, grid: Grid, kept: tuple[int, ...], reduced: tuple[int, ...], channel: int, name: str
) -> Result:
    """Adds the variable vertices write: the result, or partial results with one slot for each block of `reduced`.

    Args:
        graph: graph to add to.
        plan: dtypes and whether there are partial results.
        grid: the blocks.
        kept: axes of the result's dimensions.
        reduced: axes that are summed over.
        channel: that of `kept` which output channels are along.
        name: debug name.
    """
    held = _held([grid.cuts[axis] for axis in kept], kept.index(channel))
    slots, dtype = plan.slots, plan.spec.partials_dtype
    if slots == 1:
        mapping = _result_mapping(grid, kept, reduced, held)
        out = graph.add_variable(held.variable_shape, plan.spec.out_dtype, name, mapping)
        return Result(held.of_view(out), (), held)
    with_slots = held.behind(slots)
    mapping = _result_mapping(grid, kept, reduced, with_slots)
    out = graph.add_variable(with_slots.variable_shape, dtype, f"{name}/partials", mapping, monoid_of(dtype))
    terms, weight = [], slots
    for axis in reduced:
        weight //= grid.tile.shape[axis]
        if grid.tile.shape[axis] > 1:
            terms.append(Term(axis, weight, "block"))
    return Result(with_slots.of_view(out), (Dim(tuple(terms)),), held)


def _held(cuts: Sequence[np.ndarray], channel: int) -> MemoryOrder:
    """The order a result is kept in: its channels in groups, if its blocks cut none."""
    shape = [int(cut[-1]) for cut in cuts]
    if np.any(cuts[channel] % GROUP_CHANNELS):
        return MemoryOrder.own(shape)
    return MemoryOrder.with_channels(shape, channel)


@remembered
def _result_mapping(grid: Grid, kept: tuple[int, ...], reduced: tuple[int, ...], held: MemoryOrder) -> Blocked:
    cuts = [grid.cuts[axis] for axis in kept]
    uncut = [axis for axis in range(grid.tile.ndim) if axis not in (*reduced, *kept)]
    boxes = np.transpose(grid.tile, (*reduced, *kept, *uncut)).reshape(-1, *(len(c) - 1 for c in cuts))
    slots = len(boxes)
    return held.mapping(cuts, boxes[0]) if slots == 1 else held.mapping([even_cuts(slots, slots), *cuts], boxes)


def zeros(graph: Graph, shape: tuple[int, ...], dtype: Any, name: str) -> Tensor:
    """A tensor of zeros: what a sum over nothing is."""
    mapping = linear_mapping(graph, prod(shape), dtype)
    return graph.add_constant(np.zeros(shape, dtype), name, mapping)
