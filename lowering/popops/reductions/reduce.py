"""Reductions by a monoid over some dimensions: each tile reduces its elements, then partial results are combined.

A reduction that is split over tiles writes to a variable that has a slot of partial results for each block of the
reduced dimensions, on the tiles that compute them.

The first stage runs in the partition of least cost of all stages: that of the operand, or an even one. An unmapped
operand is mapped to it. Partials are combined in one to three stages, see `partials`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import Grids, map_linearly, mapping_like, memory_order
from ipujax.lowering.layout.choose import choose, even_placement, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Source, Work, spans
from ipujax.lowering.layout.place import along, place_operand, placed_axes
from ipujax.lowering.popops.reductions.partials import combining_cost, reduce_partials_in_place
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import REDUCERS as REDUCERS, neutral, reduce_codelet
from ipujax.runtime.graph import Access, Builder, Dim, Graph, Term, element
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, even_cuts


def num_slots(placement: Blocked, axes: Sequence[int]) -> int:
    """Number of blocks into which the reduced dimensions are cut."""
    return prod(len(placement.cuts[d]) - 1 for d in axes)


def partial_results(
    graph: Graph, placement: Blocked, axes: Sequence[int], dtype: Any, monoid: str, name: str
) -> tuple[Tensor, Access]:
    """Adds the variable that the vertices of a reduction write, on their own tiles, and their access to it.

    It is the result itself if no reduced dimension is cut. Else it has partial results, which are still to be combined:
    dimension 0 has a slot for each of the blocks that give the same result.

    Args:
        graph: graph to add to.
        placement: blocks of the operand, and their tiles, where the vertices run.
        axes: reduced dimensions, in order.
        dtype: dtype of the result.
        monoid: monoid by which partial results combine.
        name: debug name.

    Returns:
        The variable, and the access by which each vertex writes its block.
    """
    result_dims = [d for d in range(len(placement.cuts)) if d not in axes]
    cuts = tuple(placement.cuts[d] for d in result_dims)
    slots = num_slots(placement, axes)
    shape = tuple(int(cut[-1]) for cut in cuts)
    tiles = np.transpose(placement.tile, [*axes, *result_dims]).reshape([slots, *(len(cut) - 1 for cut in cuts)])
    if slots == 1:
        out = graph.add_variable(shape, dtype, name, blocked_mapping(cuts, tiles[0]))
        return out, Access(out, tuple(map(element, result_dims)))
    mapping = blocked_mapping((even_cuts(slots, slots), *cuts), tiles)
    out = graph.add_variable((slots, *shape), dtype, f"{name}/partials", mapping, monoid)
    split = [d for d in axes if len(placement.cuts[d]) > 2]
    # The slot is the index of a block among those of the reduced dimensions, the last one fastest.
    weights = [num_slots(placement, split[n + 1 :]) for n in range(len(split))]
    slot = Dim(tuple(Term(d, weight, "block") for d, weight in zip(split, weights, strict=True)))
    return out, Access(out, (slot, *map(element, result_dims)))


def reduce(builder: Builder, x: Tensor, axes: Sequence[int], monoid: str, uncut: Sequence[int] = ()) -> Tensor:
    """Reduces a tensor over dimensions `axes` by a monoid, a key of `REDUCERS`; returns a new tensor of equal dtype.

    Chooses the partition of `x` over tiles that costs least, adds vertices by it, and combines their partial results
    where it cuts a reduced dimension. Of a tensor without elements the result is a constant, the neutral element.

    Args:
        builder: graph, program and debug name.
        x: the tensor.
        axes: its reduced dimensions.
        monoid: key of `REDUCERS`.
        uncut: its dimensions that are not cut if it is unmapped, so that others read it in long pieces.
    """
    graph = builder.graph
    axes = tuple(sorted(axes))
    out_shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if not x.size:
        map_linearly(graph, x)
        return graph.add_constant(neutral(monoid, x.dtype), builder.name).broadcast_in_dim(out_shape, ())
    order = memory_order(x)
    if order is not None and not order.is_own:  # a view: its variable is reduced, over the same elements
        variable_axes = [number for number, d in enumerate(order.view_dims) if d in axes]
        reduced = reduce(builder, order.of_variable(x), variable_axes, monoid, order.inner_dims)
        return order.without(axes).of_view(reduced)
    x, axes = _with_joined_dims(graph, x, axes)
    work = _work_of(x.shape, axes, x.dtype, monoid, source_of(graph, x))
    combination = _CombinationCost(axes, x.dtype, monoid)
    cut_dims = [d for d in range(x.ndim) if d not in uncut or source_of(graph, x) != "free"]
    placement = choose(graph, x.shape, cut_dims, work, [x], cost_after=combination)
    place_operand(builder.graph, x, work.fields[0].spans, placement)
    out, out_access = partial_results(builder.graph, placement, axes, x.dtype, monoid, builder.name)
    grid = [replace(a, kind="reduce") if d in axes else a for d, a in enumerate(placed_axes(placement))]
    accesses = (along(x, range(x.ndim)), out_access)
    add_vertices(builder, work.codelet, grid, accesses, placement.tile)
    if num_slots(placement, axes) > 1:
        out = reduce_partials_in_place(builder, out)
    return out.reshape(out_shape)


def even_reduction(graph: Graph, shape: tuple[int, ...], axes: tuple[int, ...], dtype: Any, monoid: str) -> Blocked:
    """The even partition in which a reduction of an unmapped operand costs least, its combination included.

    Args:
        graph: the target, and the cost of memory.
        shape: shape of the operand, of at least one element.
        axes: its reduced dimensions, in order.
        dtype: its dtype.
        monoid: key of `REDUCERS`.
    """
    order = tuple(range(len(shape)))
    return even_placement(
        graph, shape, order, _work_of(shape, axes, dtype, monoid, "free"), _CombinationCost(axes, dtype, monoid)
    )


def _work_of(shape: tuple[int, ...], axes: tuple[int, ...], dtype: Any, monoid: str, source: Source) -> Work:
    """Work of the vertices of a reduction on a block of the operand."""
    read = spans(shape, range(len(shape)))
    written = tuple(span for d, span in enumerate(read) if d not in axes)
    return Work(reduce_codelet(monoid, dtype, axes), (FieldUse(read, source), FieldUse(written)))


def _with_joined_dims(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """View of the operand with neighbouring dimensions joined where both are reduced or neither is.

    Fewer and longer dimensions can be cut into more even blocks. An operand that is still unmapped, or is mapped in
    blocks of its dimensions, keeps these: their cuts can serve as they are. Returns the view, and its reduced
    dimensions.
    """
    if source_of(graph, x) == "free":
        return x, axes
    map_linearly(graph, x)
    mapping = mapping_like(graph, x)
    if isinstance(mapping, Blocked):
        return x, axes
    if not x.ndim:
        return x.flatten(), (0,)
    sizes: list[int] = []
    is_reduced: list[bool] = []
    for d, size in enumerate(x.shape):
        if is_reduced and is_reduced[-1] == (d in axes):
            sizes[-1] *= size
        else:
            sizes.append(size)
            is_reduced.append(d in axes)
    return x.reshape(tuple(sizes)), tuple(d for d, reduced in enumerate(is_reduced) if reduced)


@dataclass(frozen=True, slots=True)
class _CombinationCost:
    """Cycles of combining partial results, for each candidate grid of the first stage."""

    axes: tuple[int, ...]
    dtype: Any
    monoid: str

    def __call__(self, grids: Grids, target: Target, cycles_per_byte: float) -> np.ndarray:
        result_dims = [d for d in range(len(grids.shape)) if d not in self.axes]
        slots = np.prod(grids.blocks[list(self.axes)], axis=0, dtype=np.int64)
        shape = [grids.shape[d] for d in result_dims]
        lengths = grids.lengths[result_dims]
        return combining_cost(slots, lengths, shape, self.dtype, self.monoid, target, cycles_per_byte).cycles
