"""Rules for slices whose place is known only when the program runs.

Where the place is known along a dimension after all, a slice is a view there. Along the others there are several ways,
and the one that costs least for where the array is, is taken. All at once or one dimension after the other, with the
sliced dimension whole on every tile, so that a slice along all dimensions at once has the array on one. Or index by
index, as a gather or scatter, where the array is however it is cut; so is what is too long for one tile.

What a tile gets of an array that is mapped here first counts at the price of a byte. Inside a loop that is divided by
the iterations: memory is taken once, cycles in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import charged_price, map_linearly
from ipujax.lowering.popops import (
    dynamic_slice,
    dynamic_update_slice,
    dynamic_update_slice_in_place,
    immediate_of,
    is_sliced_in_place,
    look_up_slice,
    signed,
    write_slice,
    write_slice_in_place,
)
from ipujax.lowering.rules.base.composed import composed
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, concat, element_bytes, is_key_dtype

_MOST_LOOKUPS = 1024  # assumed: what takes more is not looked up index by index where it can be sliced
_SMALL_BYTES = 512  # derived: received in 128 cycles, less than the launch of another superstep takes
_EVEN = 2  # assumed: an array is evenly spread if no tile has more than so many times its share

Dims = tuple[int, ...]
Starts = Mapping[int, Tensor]  # by dimension


@dataclass(frozen=True, slots=True)
class _Part:
    """Dimensions that are sliced at once: whole on every tile, or looked up index by index wherever they are."""

    dims: Dims
    by_index: bool = False


Way = Sequence[_Part]  # one part after the other


def dynamic_slice_rule(ctx: Context, x: Tensor, *starts: Tensor, slice_sizes: Sequence[int]) -> Tensor:
    """A box of static sizes, read from a dynamic place."""
    sizes = tuple(slice_sizes)
    if 0 in sizes:
        return x.slice([0] * x.ndim, sizes)
    known, moving = _places(x.shape, sizes, starts)
    x = _within(x, known, sizes)
    while moving and not (ways := _ways(ctx.graph, x, sizes, moving)):
        dim = _too_long(ctx.graph, x, sizes, moving)[0]
        x = composed(ctx, partial(_looked_up, dim=dim, size=sizes[dim]), [x, moving[dim]])[0]
        del moving[dim]
    if not moving:
        return x
    return _cheapest(ctx, ways, x, lambda graph, prog, way: _sliced(graph, prog, ctx.name, way, x, sizes, moving))


def dynamic_update_slice_rule(ctx: Context, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """A copy with a box overwritten at a dynamic place; the array itself, where nothing reads the old one any more."""
    if not update.size:
        return x
    map_linearly(ctx.graph, update)
    known, moving = _places(x.shape, update.shape, starts)
    place = ctx.into_tensors[0]
    if place is not None and place.node is x.node and moving and _ways(ctx.graph, x, update.shape, moving):
        _update(ctx, _within(place, known, update.shape), update, moving, in_place=True)
        return place
    return _around(x, _update(ctx, _within(x, known, update.shape), update, moving), known)


def _update(ctx: Context, x: Tensor, update: Tensor, moving: Starts, in_place: bool = False) -> Tensor:
    if not moving:
        return update
    if ways := _ways(ctx.graph, x, update.shape, moving):
        return _cheapest(
            ctx, ways, x, lambda graph, prog, way: _updated(graph, prog, ctx.name, way, x, update, moving, in_place)
        )
    dim = _too_long(ctx.graph, x, update.shape, moving)[0]
    rest, size = {d: start for d, start in moving.items() if d != dim}, update.shape[dim]
    part = composed(ctx, partial(_looked_up, dim=dim, size=size), [x, moving[dim]])[0] if rest else x
    update = _update(ctx, part, update, rest) if rest else update
    return composed(ctx, partial(_written, dim=dim, size=size), [x, update, moving[dim]])[0]


def _places(
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Tensor]
) -> tuple[dict[int, int], dict[int, Tensor]]:
    """Starts of a box: constants by dimension, and tensors by dimension."""
    known, moving = dict[int, int](), dict[int, Tensor]()
    for d, (n, size, start) in enumerate(zip(shape, sizes, starts, strict=True)):
        value = np.zeros((), np.int32) if n == size else immediate_of(start)
        if value is None:
            moving[d] = start
        else:
            known[d] = min(max(int(value), 0), n - size)
    return known, moving


def _within(x: Tensor, known: Mapping[int, int], sizes: Sequence[int]) -> Tensor:
    """`x` sliced to the box along dimensions of known start, whole along the others."""
    ends = [known[d] + sizes[d] if d in known else n for d, n in enumerate(x.shape)]
    return x.slice([known.get(d, 0) for d in range(x.ndim)], ends)


def _around(x: Tensor, part: Tensor, known: Mapping[int, int]) -> Tensor:
    """`x` with a part of it in the place of its own, which begins at indices that are known."""
    for d, start in known.items():
        stop = start + part.shape[d]
        # Dimensions before this one are whole by now; the others are still the part's.
        low = [known.get(e, 0) if e > d else 0 for e in range(x.ndim)]
        high = [n if e <= d else low[e] + part.shape[e] for e, n in enumerate(x.shape)]
        before = x.slice(low, [start if e == d else n for e, n in enumerate(high)])
        behind = x.slice([stop if e == d else n for e, n in enumerate(low)], high)
        part = concat([t for t in (before, part, behind) if t.shape[d]], d)
    return part


# --- along dimensions that move ---------------------------------------------------------------------------------------


def _cheapest(
    ctx: Context, ways: Sequence[Way], x: Tensor, add: Callable[[Graph, ProgramSequence, Way], Tensor]
) -> Tensor:
    """Adds an operation in that of its ways which costs least for where the tensor is, or is going to be."""
    graph = ctx.graph

    def price(way: Way) -> int:
        return charged_price(graph, lambda scratch, prog: add(scratch, prog, way), [x])

    with graph.price_of_iteration():
        return add(graph, ctx.prog, min(ways, key=price) if len(ways) > 1 else ways[0])


def _ways(graph: Graph, x: Tensor, sizes: Sequence[int], moving: Starts) -> list[Way]:
    """All moving dimensions at once, or one after the other, what shrinks most first; none where all take too much."""
    order, long = sorted(moving, key=lambda d: sizes[d] / x.shape[d]), _too_long(graph, x, sizes, moving)
    ways: list[Way] = [] if long else [[_Part(tuple(moving))]]
    if len(order) > 1 and not long:
        ways.append([_Part((d,)) for d in order])
    first = tuple(sorted(long or order[:1]))
    rest = tuple(d for d in moving if d not in first)
    if ways and (_moves_little(graph, x, tuple(moving)) or is_sliced_in_place(graph, x, tuple(moving))):
        return ways
    if _takes_few_lookups(x, sizes, moving):
        ways.append([_Part(tuple(moving), by_index=True)])
    if rest and _takes_few_lookups(x, sizes, first):
        ways.append([_Part(first, by_index=True), _Part(rest)])
    return ways


def _takes_few_lookups(x: Tensor, sizes: Sequence[int], dims: Iterable[int]) -> bool:
    return not is_key_dtype(x.dtype) and prod(sizes[d] for d in dims) <= _MOST_LOOKUPS


def _moves_little(graph: Graph, x: Tensor, dims: Dims) -> bool:
    """Whether `dims` may be whole on each tile: less to move than a superstep costs, or an even share to place."""
    most, even = _most_bytes(graph, x.shape, dims, x.dtype), _most_bytes(graph, x.shape, (), x.dtype)
    return most <= _SMALL_BYTES or (not graph.is_mapped(x) and most <= _EVEN * even)


def _sliced(
    graph: Graph, prog: ProgramSequence, name: str, way: Way, x: Tensor, sizes: Sequence[int], moving: Starts
) -> Tensor:
    for part in way:
        box = [sizes[d] if d in part.dims else n for d, n in enumerate(x.shape)]
        read = look_up_slice if part.by_index else dynamic_slice
        x = read(graph, x, [moving[d] for d in part.dims], box, prog, name, part.dims)
    return x


def _updated(
    graph: Graph,
    prog: ProgramSequence,
    name: str,
    way: Way,
    x: Tensor,
    update: Tensor,
    moving: Starts,
    in_place: bool,
) -> Tensor:
    first, *rest = way
    if rest:
        part = _sliced(graph, prog, name, [first], x, update.shape, moving)
        update = _updated(graph, prog, name, rest, part, update, moving, True)
    starts = [moving[d] for d in first.dims]
    if first.by_index:
        write = write_slice_in_place if in_place else write_slice
        return write(graph, x, update, starts, prog, name, first.dims)
    if not in_place:
        return dynamic_update_slice(graph, x, update, starts, prog, name, first.dims)
    dynamic_update_slice_in_place(graph, x, update, starts, prog, name, first.dims)
    return x


# --- what is too long for one tile ------------------------------------------------------------------------------------


def _too_long(graph: Graph, x: Tensor, sizes: Sequence[int], moving: Starts) -> list[int]:
    """The moving dimensions with rows that exceed what planners may use of a tile."""
    target, long, shape = graph.target, list[int](), list(x.shape)
    for d in sorted(moving, key=lambda d: sizes[d] / x.shape[d]):
        if _most_bytes(graph, shape, (d,), x.dtype) > target.available_memory_proportion * target.bytes_per_tile:
            long.append(d)
        shape[d] = sizes[d]
    return long


def _most_bytes(graph: Graph, shape: Sequence[int], dims: Dims, dtype: Any) -> int:
    """Bytes of the fullest tile if an array is spread over all tiles with `dims` whole on each."""
    whole = prod(shape[d] for d in dims)
    return -(-prod(shape) // (whole * graph.target.tiles_per_ipu)) * whole * element_bytes(dtype)


def _rows(start: jax.Array, extent: int, size: int) -> jax.Array:
    """The index vectors of `size` neighbours that lie within `extent`."""
    start = signed(start)
    start = lax.clamp(np.zeros((), start.dtype), start, np.asarray(extent - size, start.dtype))
    return (start + lax.iota(start.dtype, size))[:, None]


def _looked_up(x: jax.Array, start: jax.Array, *, dim: int, size: int) -> jax.Array:
    """The slice as look-ups of single indices of a dimension."""
    others = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(others, (dim,), (dim,))
    sizes = [1 if d == dim else n for d, n in enumerate(x.shape)]
    rows = _rows(start, x.shape[dim], size)
    return lax.gather(x, rows, numbers, sizes, indices_are_sorted=True, unique_indices=True, mode="clip")


def _written(x: jax.Array, update: jax.Array, start: jax.Array, *, dim: int, size: int) -> jax.Array:
    """The update of a slice as updates of single indices of a dimension."""
    others = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.ScatterDimensionNumbers(others, (dim,), (dim,))
    rows = _rows(start, x.shape[dim], size)
    return lax.scatter(x, rows, update, numbers, indices_are_sorted=True, unique_indices=True, mode="clip")


RULES: dict[str, Rule] = {
    "dynamic_slice": dynamic_slice_rule,
    "dynamic_update_slice": dynamic_update_slice_rule,
}
