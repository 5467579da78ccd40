"""Mapping of operands and results of a plan to tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import GROUP_CHANNELS, MemoryOrder, linear_mapping, map_by_plan, map_linearly, view_digits
from ipujax.lowering.layout.place import share_out
from ipujax.lowering.poplin.partials import cast_results, combine_and_cast, monoid_of
from ipujax.lowering.poplin.spec import Memory
from ipujax.lowering.poplin.tile_plan import Grid, Plan
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Dim, Graph, Term
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, Blocked, Tensor, element_bytes, even_cuts


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Tensor that the vertices of a plan write."""

    tensor: Tensor  # the result, or its partial results with a leading dimension of slots
    slot: tuple[Dim, ...]  # index of the slot that a vertex writes; empty where there are no partial results
    order: MemoryOrder  # memory order of the variable of the combined result, which has no slots

    def combine_partials(self, builder: Builder, plan: Plan) -> Tensor:
        """Returns the result, after combining partial results if there are any."""
        if not self.slot:
            return cast_results(builder, self.tensor, plan.spec.out_dtype)
        (variable,) = self.tensor.variables()
        total = combine_and_cast(builder, Tensor.of(variable), plan.spec.out_dtype, plan.tiles_used)
        return self.order.of_view(total)


def is_free(graph: Graph, operand: Tensor) -> bool:
    """True if `place_by_plan` maps an operand: no tile mapping yet, and a view of one variable in full."""
    return not graph.is_mapped(operand) and view_digits(operand) is not None


def memory_of(operand: Tensor, axes: Sequence[int]) -> Memory:
    """Memory order of an operand, from the axis of each dimension; row-major for a view of several variables."""
    if operand.affine is None:
        return tuple(zip(axes, operand.shape, strict=True))
    rows = zip(axes, operand.affine.dims, strict=True)
    strided = [(abs(stride), axis, size) for axis, group in rows for size, stride in group if stride]
    return tuple((axis, size) for _, axis, size in sorted(strided, reverse=True))


def place_by_plan(
    graph: Graph, operand: Tensor, plan: Plan, cuts: Sequence[np.ndarray], tile: np.ndarray, *, is_reordered: bool
) -> None:
    """Maps an unmapped operand: each block spread over the tiles that use it, or all evenly over the plan's tiles.

    Args:
        graph: the graph.
        operand: the operand; one that is mapped stays where it is.
        plan: the plan.
        cuts: boundaries of the blocks along each of its dimensions.
        tile: tile of each block of the plan, with the operand's dimensions first, then those that share it.
        is_reordered: whether the plan reads it in another order: no tile can use its part, so it is spread evenly.
    """
    if graph.is_mapped(operand):
        return
    block_bytes = prod(int(np.diff(c).max()) for c in cuts) * element_bytes(operand.dtype)
    # `is_free`: a whole variable that no other operation has mapped; a view of others has no blocks of its own.
    if plan.maps_linearly or is_reordered or not is_free(graph, operand) or block_bytes < MIN_BYTES_PER_TILE:
        map_linearly(graph, operand, plan.tiles_used)
        return
    users = tile.reshape((*tile.shape[: operand.ndim], -1))  # of each block of the operand, along the last axis
    # As many of them as get a part that is worth a tile.
    tiles = max(1, min(users.shape[-1], block_bytes // MIN_BYTES_PER_TILE))
    map_by_plan(graph, operand, *share_out(cuts, users, tiles, range(operand.ndim)))


def result_variable(
    graph: Graph, plan: Plan, grid: Grid, out_axes: tuple[int, ...], reduced: tuple[int, ...], channel: int, name: str
) -> Result:
    """Adds the variable of the result, or of partial results with one slot for each block of the reduced axes.

    Args:
        graph: graph to add to.
        plan: the plan.
        grid: its blocks.
        out_axes: axis of the grid for each dimension of the result.
        reduced: axes of the grid that are reduced, in the order in which blocks are numbered.
        channel: axis of the output channels.
        name: debug name.
    """
    # Order of the dimensions in memory: channels in groups, if the blocks cut none.
    order = _result_order([grid.cuts[axis] for axis in out_axes], out_axes.index(channel))
    slots = plan.slots
    partials_dtype = plan.spec.partials_dtype
    if slots == 1:
        mapping = _result_mapping(grid, out_axes, reduced, order)
        out_dtype = plan.spec.vertex_dtype  # the result's own where vertices write it, else that of partial results
        title = name if out_dtype == plan.spec.out_dtype else f"{name}/partials"
        out = graph.add_variable(order.variable_shape, out_dtype, title, mapping)
        return Result(tensor=order.of_view(out), slot=(), order=order)
    with_slots = order.behind(slots)  # the slot is the first dimension
    mapping = _result_mapping(grid, out_axes, reduced, with_slots)
    monoid = monoid_of(partials_dtype)  # that combines the slots: sums, of bools ors
    out = graph.add_variable(with_slots.variable_shape, partials_dtype, f"{name}/partials", mapping, monoid)
    terms = []  # the slot that a vertex writes, by the numbers of its block along the reduced axes
    weight = slots  # the slot is the index of a block, the last reduced axis fastest
    for axis in reduced:
        weight //= grid.tile.shape[axis]
        if grid.tile.shape[axis] > 1:
            terms.append(Term(axis, weight, "block"))
    # `order` is that of the result, into which the slots are combined.
    return Result(tensor=with_slots.of_view(out), slot=(Dim(tuple(terms)),), order=order)


def _result_order(cuts: Sequence[np.ndarray], channel: int) -> MemoryOrder:
    """Memory order of a result: its channels in groups, if its blocks cut none."""
    shape = [int(cut[-1]) for cut in cuts]
    if np.any(cuts[channel] % GROUP_CHANNELS):
        return MemoryOrder.own(shape)
    return MemoryOrder.with_channels(shape, channel)


@remembered
def _result_mapping(grid: Grid, out_axes: tuple[int, ...], reduced: tuple[int, ...], order: MemoryOrder) -> Blocked:
    cuts = [grid.cuts[axis] for axis in out_axes]
    unused = [axis for axis in range(grid.tile.ndim) if axis not in (*reduced, *out_axes)]
    tiles = np.transpose(grid.tile, (*reduced, *out_axes, *unused)).reshape(-1, *(len(c) - 1 for c in cuts))
    slots = len(tiles)
    return order.mapping(cuts, tiles[0]) if slots == 1 else order.mapping([even_cuts(slots, slots), *cuts], tiles)


def zeros(graph: Graph, shape: tuple[int, ...], dtype: Any, name: str) -> Tensor:
    """Adds a tensor of zeros, the sum over no elements."""
    mapping = linear_mapping(graph, prod(shape), dtype)
    return graph.add_constant(np.zeros(shape, dtype), name, mapping)
