"""Reductions by a monoid over some dimensions: each tile reduces what it holds, then partial results are combined.

The first stage runs in boxes chosen by the charge of all stages: those in which the data lies, or even ones. Data that
lies nowhere yet is placed in these boxes. Partials are combined in one to three stages, see `partials`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.popops.add_vertices import add_vertices
from ipujax.lowering.popops.blocks import along, place_operand, placed_axes
from ipujax.lowering.popops.choice import choose, source_of
from ipujax.lowering.popops.partials import combined_cycles, reduce_partials_in_place
from ipujax.lowering.popops.reducers import REDUCERS as REDUCERS, neutral, reduce_codelet
from ipujax.lowering.popops.work import Work, spans
from ipujax.lowering.poputil import Grids, map_linearly, mapping_like, memory_order
from ipujax.runtime.graph import (
    Access,
    Axis,
    Dim,
    Graph,
    Sequence as ProgramSequence,
    Term,
    element,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Flat, Tensor, blocked_mapping, even_cuts


def reduce(graph: Graph, x: Tensor, axes: Sequence[int], monoid: str, prog: ProgramSequence, name: str) -> Tensor:
    """Reduces a tensor over some of its dimensions.

    Args:
        graph: graph to add to.
        x: tensor of any shape.
        axes: dimensions to reduce.
        monoid: key of `REDUCERS`.
        prog: program the compute sets are added to.
        name: debug name.

    Returns:
        A new tensor of the shape without `axes`, same dtype.
    """
    axes = tuple(sorted(axes))
    out_shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if not x.size:
        map_linearly(graph, x)
        return graph.add_constant(neutral(monoid, x.dtype), name).broadcast_in_dim(out_shape, ())
    held = memory_order(x)
    if held is not None and not held.is_own:
        own_axes = [number for number, d in enumerate(held.view_dims) if d in axes]
        return held.without(axes).of_view(reduce(graph, held.of_variable(x), own_axes, monoid, prog, name))
    x, axes = _view(graph, x, axes)
    kept = [d for d in range(x.ndim) if d not in axes]
    codelet, read = reduce_codelet(monoid, x.dtype, axes), spans(x.shape, range(x.ndim))
    work = Work(codelet, (read, tuple(read[d] for d in kept)), (source_of(graph, x), "here"))

    def add(graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        place_operand(graph, x, read, placement)
        out = _result(graph, x, axes, placement, monoid, name)
        _add_stage(graph, x, axes, placement, out, monoid, prog, name)
        slots = prod(len(placement.cuts[d]) - 1 for d in axes)
        return reduce_partials_in_place(graph, out, prog, name) if slots > 1 else out

    after = _Combination(axes, x.dtype, monoid)
    placement = choose(graph, x.shape, range(x.ndim), work, [x], add, after=after)
    return add(graph, prog, placement).reshape(out_shape)


def _view(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """The view to reduce, and its reduced dimensions."""
    # Boxes of `x` are boxes of its mapping. Without such a mapping the view is flat, or joins neighbouring dimensions
    # that are reduced alike, for which there are more even grids.
    if source_of(graph, x) == "free":
        return x, axes
    map_linearly(graph, x)
    mapping = mapping_like(graph, x)
    if isinstance(mapping, Blocked):
        return x, axes
    if isinstance(mapping, Flat) and len(axes) == x.ndim:
        return x.flatten(), (0,)
    sizes: list[int] = []
    kinds: list[bool] = []
    for d, size in enumerate(x.shape):
        if kinds and kinds[-1] == (d in axes):
            sizes[-1] *= size
        else:
            sizes.append(size)
            kinds.append(d in axes)
    return x.reshape(tuple(sizes)), tuple(d for d, kind in enumerate(kinds) if kind)


def _result(graph: Graph, x: Tensor, axes: Sequence[int], placement: Blocked, monoid: str, name: str) -> Tensor:
    """The result, or partial results with one slot for each box along what is reduced, where they are computed."""
    kept = [d for d in range(x.ndim) if d not in axes]
    shape, cuts = tuple(x.shape[d] for d in kept), tuple(placement.cuts[d] for d in kept)
    slots = prod(len(placement.cuts[d]) - 1 for d in axes)
    boxes = np.transpose(placement.tile, [*axes, *kept]).reshape([slots, *(len(cut) - 1 for cut in cuts)])
    if slots == 1:
        return graph.add_variable(shape, x.dtype, name, blocked_mapping(cuts, boxes[0]))
    placed = blocked_mapping((even_cuts(slots, slots), *cuts), boxes)
    return graph.add_variable((slots, *shape), x.dtype, f"{name}/partials", placed, monoid)


def _add_stage(
    graph: Graph,
    x: Tensor,
    axes: tuple[int, ...],
    placement: Blocked,
    out: Tensor,
    monoid: str,
    prog: ProgramSequence,
    name: str,
) -> None:
    split = [d for d in axes if len(placement.cuts[d]) > 2]
    grid_axes = [Axis(a.name, a.cuts, "reduce") if d in axes else a for d, a in enumerate(placed_axes(placement))]
    weights = [prod(len(placement.cuts[d]) - 1 for d in split[i + 1 :]) for i in range(len(split))]
    slot = (Dim(tuple(Term(d, w, "block") for d, w in zip(split, weights, strict=True))),) if split else ()
    kept = [element(d) for d in range(x.ndim) if d not in axes]
    accesses = (along(x, range(x.ndim)), Access(out, (*slot, *kept)))
    add_vertices(graph, reduce_codelet(monoid, x.dtype, axes), grid_axes, accesses, placement.tile, prog, name)


@dataclass(frozen=True, slots=True)
class _Combination:
    """Charge of combining partial results, on each candidate grid of the first stage."""

    axes: tuple[int, ...]
    dtype: Any
    monoid: str

    def __call__(self, grids: Grids, target: Target) -> np.ndarray:
        kept = [d for d in range(len(grids.shape)) if d not in self.axes]
        slots = np.prod(grids.blocks[list(self.axes)], axis=0, dtype=np.int64)
        rows = zip(slots.tolist(), grids.lengths[kept].T.tolist(), strict=True)
        cycles = [combined_cycles(n, tuple(longest), self.dtype, self.monoid, target) for n, longest in rows]
        return np.array(cycles, np.float64)
