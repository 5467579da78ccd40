"""Rules for slices at starts that are known only when the program runs.

Along a dimension whose start is a constant, a slice is a view. Along the dynamic dimensions the cheapest plan for
the array's mapping is used: all at once or one by one, with the sliced dimension uncut on every tile, or index by
index as a gather or scatter, with any mapping; the latter also where a row is too long for one tile.
Bytes on the fullest tile of an array that is mapped here count at the cost per byte; in a loop divided by the trip
count, because memory is used once, and cycles are spent in each iteration.
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

from ipujax.lowering import popops
from ipujax.lowering.layout import map_linearly, weighted_cost
from ipujax.lowering.rules.base.context import Context, Rule, lower_array_function
from ipujax.runtime.graph import Builder, Graph
from ipujax.runtime.tensor import Tensor, concat, element_bytes, is_key_dtype

_MOST_LOOKUPS = 1024  # assumed: a slice of more indices is not looked up index by index where it can be sliced
_SMALL_BYTES = 512  # derived: received in 128 cycles, less than the launch of another superstep takes
_EVEN = 2  # assumed: an array is evenly spread if no tile has more than twice its share

Dims = tuple[int, ...]
Starts = Mapping[int, Tensor]  # dynamic start by dimension, in the order of dimensions


@dataclass(frozen=True, slots=True)
class _Part:
    """Dimensions that are sliced at once: uncut on every tile, or with `by_index` looked up, with any mapping."""

    dims: Dims
    by_index: bool = False


Plan = Sequence[_Part]  # one part after the other


def dynamic_slice_rule(ctx: Context, x: Tensor, *starts: Tensor, slice_sizes: Sequence[int]) -> Tensor:
    """Block of static sizes at a dynamic start, by the cheapest plan; a view where all starts are constants.

    Args:
        ctx: the equation.
        x: the array.
        starts: start of the block along each dimension, int[] each.
        slice_sizes: size of the block along each dimension.
    """
    sizes = tuple(slice_sizes)
    if 0 in sizes:
        return x.slice([0] * x.ndim, sizes)
    constants, dynamic = _split_starts(x.shape, sizes, starts)
    x = _within(x, constants, sizes)
    # A row too long for every plan is looked up by index, until the remaining array is small enough.
    while dynamic and not (plans := _plans(ctx.graph, x, sizes, dynamic)):
        dim = _too_long_dims(ctx.graph, x, sizes, dynamic)[0]
        x = lower_array_function(ctx, partial(_looked_up, dim=dim, size=sizes[dim]), [x, dynamic[dim]])[0]
        del dynamic[dim]
    if not dynamic:
        return x
    return _add_by_cheapest(ctx, plans, x, lambda builder, plan: _add_slices(builder, plan, x, sizes, dynamic))


def dynamic_update_slice_rule(ctx: Context, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """Copy of an array with a block overwritten at a dynamic start; the array itself where nothing reads it later.

    Args:
        ctx: the equation.
        x: the array.
        update: the block's new elements.
        starts: start of the block along each dimension, int[] each.
    """
    if not update.size:
        return x
    map_linearly(ctx.graph, update)
    constants, dynamic = _split_starts(x.shape, update.shape, starts)
    place = ctx.into_tensors[0]  # the array itself, if nothing reads it later
    if place is not None and place.node is x.node and dynamic and _plans(ctx.graph, x, update.shape, dynamic):
        _overwrite(ctx, _within(place, constants, update.shape), update, dynamic, in_place=True)
        return place
    part = _overwrite(ctx, _within(x, constants, update.shape), update, dynamic, in_place=False)
    return _with_part(x, part, constants)


def _overwrite(ctx: Context, x: Tensor, update: Tensor, dynamic: Starts, *, in_place: bool) -> Tensor:
    """`x` itself if `in_place`, else a copy, with a block overwritten by the cheapest plan.

    There is no plan if rows along some dimension are too long for a tile, and too few tiles have look-ups: then a copy
    is updated by index along that dimension, as a scatter, never in place.

    Args:
        ctx: the equation.
        x: the array, cut to the block along dimensions whose start is a constant.
        update: the block's new elements.
        dynamic: start of the block, int[], by dimension; along other dimensions the block is all of `x`.
        in_place: whether to write to `x`; there must be a plan then.
    """
    if not dynamic:
        return update
    if plans := _plans(ctx.graph, x, update.shape, dynamic):
        return _add_by_cheapest(
            ctx, plans, x, lambda builder, plan: _add_update(builder, plan, x, update, dynamic, in_place=in_place)
        )
    # Where other dimensions are dynamic too, the block is looked up, updated along those, and then written.
    dim = _too_long_dims(ctx.graph, x, update.shape, dynamic)[0]
    other_starts = {d: start for d, start in dynamic.items() if d != dim}
    size = update.shape[dim]
    if other_starts:
        (block,) = lower_array_function(ctx, partial(_looked_up, dim=dim, size=size), [x, dynamic[dim]])
        update = _overwrite(ctx, block, update, other_starts, in_place=False)
    return lower_array_function(ctx, partial(_written, dim=dim, size=size), [x, update, dynamic[dim]])[0]


def _split_starts(
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Tensor]
) -> tuple[dict[int, int], dict[int, Tensor]]:
    """Starts of a block by dimension: constants, clamped so that the block fits, and tensors of dynamic dimensions."""
    constants: dict[int, int] = {}
    dynamic: dict[int, Tensor] = {}
    for d, (n, size, start) in enumerate(zip(shape, sizes, starts, strict=True)):
        # A block of all elements starts at 0, whatever its start.
        value = np.zeros((), np.int32) if n == size else popops.immediate_of(start)
        if value is None:
            dynamic[d] = start
        else:
            constants[d] = min(max(int(value), 0), n - size)
    return constants, dynamic


def _within(x: Tensor, constants: Mapping[int, int], sizes: Sequence[int]) -> Tensor:
    """Slice of `x` along dimensions of constant start, complete along the others."""
    stops = [constants[d] + sizes[d] if d in constants else n for d, n in enumerate(x.shape)]
    return x.slice([constants.get(d, 0) for d in range(x.ndim)], stops)


def _with_part(x: Tensor, part: Tensor, constants: Mapping[int, int]) -> Tensor:
    """View of `x` with a block of it replaced: the parts of `x` around the block, joined with `part`, nothing copied.

    Args:
        x: the array.
        part: the block; along dimensions without a constant start it is as large as `x`.
        constants: start of the block by dimension.
    """
    # Along one dimension after the other the part is extended to the size of `x`.
    for d, start in constants.items():
        stop = start + part.shape[d]
        # The part already has the full extent of earlier dimensions, its own of later ones.
        low = [constants.get(e, 0) if e > d else 0 for e in range(x.ndim)]
        high = [n if e <= d else low[e] + part.shape[e] for e, n in enumerate(x.shape)]
        low_side = x.slice(low, [start if e == d else n for e, n in enumerate(high)])
        high_side = x.slice([stop if e == d else n for e, n in enumerate(low)], high)
        part = concat([t for t in (low_side, part, high_side) if t.shape[d]], d)
    return part


def _add_by_cheapest(ctx: Context, plans: Sequence[Plan], x: Tensor, add: Callable[[Builder, Plan], Tensor]) -> Tensor:
    """Adds an operation by the plan with the lowest cost; returns its result.

    The cost is in cycles, of which a byte has its cost, divided by the iterations of the loops around: these need
    memory once, and cycles each time. The plan decides by the same cost between forms of its vertices.

    Args:
        ctx: the equation.
        plans: candidate plans, one at least.
        x: the operand whose tile mapping decides: the one that it has, or that a plan gives it.
        add: adds the operation by a plan; called with scratch graphs too, which tell the cost of each of several plans.
    """
    graph = ctx.graph

    def add_named(builder: Builder, plan: Plan) -> Tensor:
        return add(Builder(builder.graph, builder.prog, ctx.name), plan)

    def cost(plan: Plan) -> int:
        return weighted_cost(graph, lambda builder: add_named(builder, plan), [x])

    with graph.byte_cost_of_iteration():
        return add_named(ctx.builder, min(plans, key=cost) if len(plans) > 1 else plans[0])


def _plans(graph: Graph, x: Tensor, sizes: Sequence[int], dynamic: Starts) -> list[Plan]:
    """Candidate plans of slicing: all dynamic dimensions at once, one by one, or by index.

    Empty if a tile is too small for rows along some dimension and for look-ups. Plans by index are left out where an
    array moves little or not at all without them.

    Args:
        graph: graph of the operation.
        x: the array.
        sizes: size of the slice along each dimension of `x`.
        dynamic: start of the slice, int[], by dimension; along other dimensions the slice is all of `x`.
    """
    # The slice that shortens the array most comes first.
    order = sorted(dynamic, key=lambda d: sizes[d] / x.shape[d])
    long_dims = _too_long_dims(graph, x, sizes, dynamic)
    plans: list[Plan] = [] if long_dims else [[_Part(tuple(dynamic))]]
    if len(order) > 1 and not long_dims:
        plans.append([_Part((d,)) for d in order])
    first = tuple(sorted(long_dims or order[:1]))
    later = tuple(d for d in dynamic if d not in first)
    if plans and (_moves_little(graph, x, tuple(dynamic)) or popops.is_sliced_in_place(graph, x, tuple(dynamic))):
        return plans
    if _takes_few_lookups(x, sizes, dynamic):
        plans.append([_Part(tuple(dynamic), by_index=True)])
    if later and _takes_few_lookups(x, sizes, first):
        plans.append([_Part(first, by_index=True), _Part(later)])
    return plans


def _takes_few_lookups(x: Tensor, sizes: Sequence[int], dims: Iterable[int]) -> bool:
    return not is_key_dtype(x.dtype) and prod(sizes[d] for d in dims) <= _MOST_LOOKUPS


def _moves_little(graph: Graph, x: Tensor, dims: Dims) -> bool:
    """True if `dims` may be uncut on each tile: it moves less than a superstep costs, or is evenly spread."""
    uncut_bytes = _most_bytes(graph, x.shape, dims, x.dtype)
    even_bytes = _most_bytes(graph, x.shape, (), x.dtype)
    return uncut_bytes <= _SMALL_BYTES or (not graph.is_mapped(x) and uncut_bytes <= _EVEN * even_bytes)


def _add_slices(builder: Builder, plan: Plan, x: Tensor, sizes: Sequence[int], dynamic: Starts) -> Tensor:
    """Slice of `x` of `sizes` along the dimensions of a plan."""
    for part in plan:
        part_sizes = [sizes[d] if d in part.dims else n for d, n in enumerate(x.shape)]
        read = popops.look_up_slice if part.by_index else popops.dynamic_slice
        x = read(builder, x, [dynamic[d] for d in part.dims], part_sizes, part.dims)
    return x


def _add_update(builder: Builder, plan: Plan, x: Tensor, update: Tensor, dynamic: Starts, *, in_place: bool) -> Tensor:
    """Overwrites a block of `x` by a plan, or of a copy if not `in_place`; returns the array with the new block.

    The block along the dimensions of the plan's first part is read, updated by the later parts, and written back.

    Args:
        builder: where to add it.
        plan: parts, each the dimensions that are sliced at once.
        x: the array.
        update: the block's new elements.
        dynamic: start of the block, int[], by dimension.
        in_place: whether to write to `x`.
    """
    first, *later_parts = plan
    if later_parts:
        block = _add_slices(builder, [first], x, update.shape, dynamic)
        update = _add_update(builder, later_parts, block, update, dynamic, in_place=True)
    starts = [dynamic[d] for d in first.dims]
    if first.by_index:
        write = popops.write_slice_in_place if in_place else popops.write_slice
        return write(builder, x, update, starts, first.dims)
    if not in_place:
        return popops.dynamic_update_slice(builder, x, update, starts, first.dims)
    popops.dynamic_update_slice_in_place(builder, x, update, starts, first.dims)
    return x


def _too_long_dims(graph: Graph, x: Tensor, sizes: Sequence[int], dynamic: Starts) -> list[int]:
    """Dynamic dimensions whose rows are too long for a tile: a slice along one needs entire rows on each tile.

    Args:
        graph: graph of the operation.
        x: the array.
        sizes: size of the slice along each dimension of `x`.
        dynamic: start of the slice by dimension.
    """
    target = graph.target
    long_dims: list[int] = []
    shape = list(x.shape)
    # In the order of slicing: each slice shortens the rows of the next.
    for d in sorted(dynamic, key=lambda d: sizes[d] / x.shape[d]):
        if _most_bytes(graph, shape, (d,), x.dtype) > target.operation_bytes:
            long_dims.append(d)
        shape[d] = sizes[d]
    return long_dims


def _most_bytes(graph: Graph, shape: Sequence[int], dims: Dims, dtype: Any) -> int:
    """Bytes of the fullest tile if an array is spread over all tiles with `dims` uncut."""
    uncut = prod(shape[d] for d in dims)
    return -(-prod(shape) // (uncut * graph.target.tiles_per_ipu)) * uncut * element_bytes(dtype)


def _index_vectors(start: jax.Array, extent: int, size: int) -> jax.Array:
    """The indices of a slice, [size, 1]; its start is clamped so that it is within `extent`."""
    start = popops.signed(start)
    start = lax.clamp(np.zeros((), start.dtype), start, np.asarray(extent - size, start.dtype))
    return (start + lax.iota(start.dtype, size))[:, None]


def _looked_up(x: jax.Array, start: jax.Array, *, dim: int, size: int) -> jax.Array:
    """The slice as look-ups of single indices of a dimension."""
    window_dims = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(window_dims, (dim,), (dim,))
    sizes = [1 if d == dim else n for d, n in enumerate(x.shape)]
    indices = _index_vectors(start, x.shape[dim], size)
    return lax.gather(x, indices, numbers, sizes, indices_are_sorted=True, unique_indices=True, mode="clip")


def _written(x: jax.Array, update: jax.Array, start: jax.Array, *, dim: int, size: int) -> jax.Array:
    """The update of a slice as updates of single indices of a dimension."""
    window_dims = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.ScatterDimensionNumbers(window_dims, (dim,), (dim,))
    indices = _index_vectors(start, x.shape[dim], size)
    return lax.scatter(x, indices, update, numbers, indices_are_sorted=True, unique_indices=True, mode="clip")


RULES: dict[str, Rule] = {
    "dynamic_slice": dynamic_slice_rule,
    "dynamic_update_slice": dynamic_update_slice_rule,
}
