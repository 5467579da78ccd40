"""Rules for computed indices: gather and the scatter family; those with constant indices are in `constant_indices`.

Of a scatter of whole rows with more updates than fit on tiles, a scatter-max of the updates' numbers, which can be cut
over tiles, gives the last update of each row; the row is then gathered from it, as in `lax`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering import popops
from ipujax.lowering.rules.arrays.constant_indices import combines_in_order, constant_position, gather_from, scatter_to
from ipujax.lowering.rules.base.context import Context, Rule, lower_array_function
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor, element_bytes, is_key_dtype

_NUMBER = np.dtype(np.int32)


def can_find_last(spec: popops.ScatterSpec) -> bool:
    """True if updates replace whole rows of the table, so that `scatter_last` may compute the scatter.

    Of several updates of a row only the last counts then. A row is what one index vector points to.
    """
    sizes = spec.update_sizes()  # of one update along each dimension of the table
    update_dims = spec.update_dims()  # for each dimension of the table that of the updates; None for one of size 1
    lookups = prod(spec.update_shape[dim.of_updates] for dim in spec.lookup_dims())
    is_whole = all(sizes[d] == n for d, n in enumerate(spec.table_shape) if d not in spec.indexed)
    return (
        spec.kind == "scatter"
        and spec.function is None
        and not spec.numbers.operand_batching_dims
        and bool(spec.indexed)
        and is_whole
        and all(update_dims[d] is None for d in spec.indexed)
        and lookups <= np.iinfo(_NUMBER).max  # updates are numbered
    )


def scatter_last(table: jax.Array, indices: jax.Array, updates: jax.Array, *, spec: popops.ScatterSpec) -> jax.Array:
    """Table with rows replaced, each by the last of its updates.

    A scatter-max of the updates' numbers finds the last of each row; the new rows are gathered from the updates. So
    tiles exchange numbers, and one row for each of the table, instead of all updates.

    Args:
        table: the array that is updated.
        indices: index vector of each update, [look-ups …, indexed dimensions].
        updates: the new rows.
        spec: parameters of the scatter, for which `can_find_last` is true.
    """
    numbers = spec.numbers
    indexed = sorted(spec.indexed)
    lookups = [dim.of_updates for dim in spec.lookup_dims()]  # dimensions of the updates
    count = prod(updates.shape[u] for u in lookups)  # number of updates
    of_numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=tuple(range(len(indexed))),
        scatter_dims_to_operand_dims=tuple(indexed.index(d) for d in spec.indexed),
    )
    # For each row the number of its last update, the largest; the least integer if it has none.
    update_numbers = lax.iota(_NUMBER, count).reshape([updates.shape[u] for u in lookups])
    no_update = lax.full([table.shape[d] for d in indexed], np.iinfo(_NUMBER).min, _NUMBER)
    hints = {"unique_indices": spec.unique_indices, "indices_are_sorted": spec.indices_are_sorted}
    last = lax.scatter_max(no_update, indices, update_numbers, of_numbers, mode=spec.mode, **hints)
    window = list(numbers.update_window_dims)
    rows = lax.transpose(updates, [*lookups, *window]).reshape([count, *(updates.shape[u] for u in window)])
    offsets = tuple(range(len(indexed), table.ndim))
    new_rows = lax.gather(
        rows,
        jnp.maximum(last, 0)[..., None],
        lax.GatherDimensionNumbers(offset_dims=offsets, collapsed_slice_dims=(0,), start_index_map=(0,)),
        slice_sizes=(1, *rows.shape[1:]),
        mode=popops.Mode.PROMISE_IN_BOUNDS,
    )
    window_dims = [d for d in range(table.ndim) if d not in indexed]
    new_rows = lax.transpose(new_rows, np.argsort([*indexed, *window_dims]).tolist())
    return jnp.where(lax.expand_dims(last >= 0, window_dims), new_rows, table)


_WORDS = np.dtype(np.uint32)  # words of keys


def gather_rule(
    ctx: Context,
    table: Tensor,
    indices: Tensor,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: popops.Mode,
    fill_value: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
) -> Tensor | Sequence[Tensor]:
    """Slices of a table at indices, looked up on tiles; a view of the table where all are one constant.

    Operands and parameters are those of `lax.gather`.
    """
    (aval,) = ctx.out_avals
    indexed = dimension_numbers.start_index_map
    if not table.size or not aval.size or mode is popops.Mode.ONE_HOT:
        return fallback(ctx, table, indices)  # no elements; JAX itself has no gather of that mode
    # Along other dimensions every slice starts at 0: the rest of the table is never read.
    limits = [n if d in indexed + dimension_numbers.operand_batching_dims else slice_sizes[d]
              for d, n in enumerate(table.shape)]  # fmt: skip
    table = table.slice([0] * table.ndim, limits)
    dtype = _WORDS if is_key_dtype(table.dtype) else table.dtype  # keys are gathered as words
    spec = popops.GatherSpec(
        numbers=dimension_numbers,
        slice_sizes=tuple(slice_sizes),
        mode=mode,
        fill=popops.frozen_fill(fill_value, dtype),
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique_indices,
        table_shape=table.shape,
        out_rank=len(aval.shape),
    )
    position = constant_position(indices)
    # Keys have no fill value, which a position beyond the table may need.
    if position is not None and not (is_key_dtype(table.dtype) and position):
        return lower_array_function(ctx, lambda x: gather_from(x, position, spec, aval.shape), [table])
    if spec.wide_dims() and _exceeds_tile(ctx.graph, table, spec):
        # Windows along indexed dimensions need these uncut on a tile, single indices do not.
        fun = partial(gather_index_by_index, spec=spec, out_shape=aval.shape)
        return lower_array_function(ctx, fun, [table, indices])
    with _byte_cost(ctx.graph, indices):
        return popops.gather_in_memory_order(ctx.builder, table, indices, aval.shape, spec)


def _byte_cost(graph: Graph, indices: Tensor) -> AbstractContextManager[None]:
    """Sets the cost per byte of a table: for few look-ups that of an iteration of the loops around them.

    That is divided by their trip counts, because memory is used once and cycles are spent in each iteration.
    """
    return graph.byte_cost_of_iteration() if popops.has_few_lookups(graph, indices) else nullcontext()


def _exceeds_tile(graph: Graph, table: Tensor, spec: popops.GatherSpec) -> bool:
    """True if a table with uncut indexed dimensions exceeds a planner's share of a tile."""
    target = graph.target
    indexed = prod(table.shape[d] for d in spec.indexed)
    return (
        -(-table.size // (indexed * target.tiles_per_ipu)) * indexed * element_bytes(table.dtype)
        > target.operation_bytes
    )


def gather_index_by_index(
    table: jax.Array, indices: jax.Array, *, spec: popops.GatherSpec, out_shape: Sequence[int]
) -> jax.Array:
    """Gather of windows as gather of single indices, whose table can be cut in the windows' dimensions.

    The elements of a window along indexed dimensions are look-ups of their own, then transposed to their positions in
    the result.

    Args:
        table: the array that is looked up.
        indices: index vector of each look-up, [look-ups …, indexed dimensions]: where its window starts.
        spec: parameters of the gather.
        out_shape: shape of the result.
    """
    wide = spec.wide_dims()  # indexed dimensions along which a window has several elements
    numbers = spec.numbers
    starts = popops.signed(indices)
    largest_starts = np.array([table.shape[d] - spec.slice_sizes[d] for d in spec.indexed], starts.dtype)
    clamped = jnp.clip(starts, 0, largest_starts)
    if spec.mode is popops.Mode.FILL_OR_DROP:
        # A window that is not inside is filled as a whole: send all its indices outside.
        clamped = jnp.where((clamped == starts).all(-1, keepdims=True), clamped, -max(table.shape))
    batch = indices.shape[:-1]
    sizes = [spec.slice_sizes[dim.of_table] for dim in wide]
    shape = (*batch, *sizes, len(spec.indexed))
    # The index vector of each element of a window is that of its start plus its offset along each wide dimension.
    positions = lax.broadcast_in_dim(clamped, shape, (*range(len(batch)), len(shape) - 1))
    for n, dim in enumerate(wide):
        step = lax.broadcasted_iota(starts.dtype, shape, len(batch) + n)
        is_of_dim = np.arange(len(spec.indexed)) == spec.indexed.index(dim.of_table)
        positions = positions + step * is_of_dim.astype(starts.dtype)
    wide_dims = [dim.of_table for dim in wide]
    wide_outs = [dim.of_result for dim in wide]
    lookups = [out for out in range(len(out_shape)) if out not in numbers.offset_dims] + wide_outs
    other_dims = [out for out in numbers.offset_dims if out not in wide_outs]
    of_single_indices = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(len(lookups), len(out_shape))),
        collapsed_slice_dims=tuple(sorted((*numbers.collapsed_slice_dims, *wide_dims))),
        start_index_map=numbers.start_index_map,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.start_indices_batching_dims,
    )
    fill = None if spec.fill is None else popops.thawed(spec.fill)[()]
    slices = [1 if d in wide_dims else n for d, n in enumerate(spec.slice_sizes)]
    gathered = lax.gather(table, positions, of_single_indices, slices, mode=spec.mode, fill_value=fill)
    return lax.transpose(gathered, np.argsort([*lookups, *other_dims]).tolist())


def scatter_rule(
    ctx: Context,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: popops.Mode,
    update_jaxpr: Any,
    update_consts: Sequence[Any],
) -> Tensor | Sequence[Tensor]:
    """Table combined with updates at indices, by addition or another function; operands and parameters are JAX's.

    Keys are scattered as words; updates at one constant position are combined with a slice of the table; all others are
    scattered by a plan of `popops`, in place where nothing reads the table later.
    """
    assert not update_consts, "JAX refuses functions that close over arrays"
    kind = ctx.primitive.name
    if not table.size or not updates.size:
        return table
    if is_key_dtype(table.dtype) and update_jaxpr is None:
        hints: dict[str, Any] = {
            "indices_are_sorted": indices_are_sorted,
            "unique_indices": unique_indices,
            "mode": mode,
        }
        return lower_array_function(
            ctx, partial(scatter_keys, numbers=dimension_numbers, **hints), [table, indices, updates]
        )
    if is_key_dtype(table.dtype):
        if update_jaxpr.outvars == update_jaxpr.invars[:1]:  # the only function of keys that JAX can compile here
            return table
        return fallback(ctx, table, indices, updates)
    spec = popops.ScatterSpec(
        kind=kind,
        numbers=dimension_numbers,
        mode=mode,
        indices_are_sorted=indices_are_sorted,
        unique_indices=unique_indices,
        table_shape=table.shape,
        update_shape=updates.shape,
        dtype=table.dtype,
        function=update_jaxpr if kind == "scatter" else None,
    )
    position = constant_position(indices)
    extents = spec.update_sizes()
    # Updates of one row that have to be combined in their order: of those `scatter_to` makes this very scatter again.
    is_row = bool(spec.indexed) and all(extents[d] == 1 for d in spec.indexed)
    if position is not None and not (is_row and combines_in_order(spec)):
        fun = partial(scatter_to, position=position, spec=spec, primitive=ctx.primitive, params=dict(ctx.params))
        return lower_array_function(ctx, fun, [table, updates])
    return _scatter_by_plan(ctx, spec, table, indices, updates)


def _scatter_by_plan(ctx: Context, spec: popops.ScatterSpec, table: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Adds a scatter by its cheapest plan; returns the new table, the old one itself where that may be overwritten.

    Args:
        ctx: the equation.
        spec: parameters of the scatter.
        table: the array that is updated.
        indices: index vector of each update.
        updates: the updates.
    """
    destination = ctx.into_tensors[0]  # where the result may be written; the table itself if nothing reads it later
    is_free = {variable for x in (indices, updates) for variable in x.variables()}.isdisjoint(table.variables())
    in_place = destination is not None and destination.node is table.node and is_free
    # On tiles the scatter goes in the order in which memory has the table; `view_result` undoes the transposition.
    spec, table, updates, view_result = popops.scatter_in_memory_order(spec, table, updates)
    with _byte_cost(ctx.graph, indices):
        plan = popops.plan_scatter(ctx.graph, table, indices, updates, spec, ctx.name, in_place=in_place)
        # Each tile would need all updates at once, more than it can hold: find the last update of each row first, so
        # that at most one a row remains, or go through the updates in steps.
        if plan.has_too_many_updates and can_find_last(spec):
            (out,) = lower_array_function(ctx, partial(scatter_last, spec=spec), [table, indices, updates])
            return view_result(out)
        if plan.has_too_many_updates:
            plan = popops.plan_in_steps(ctx.graph, table, indices, updates, spec, ctx.name, in_place=in_place)
    result = view_result(plan.add(ctx.builder))
    return destination if in_place and destination is not None else result


def scatter_keys(
    table: jax.Array, indices: jax.Array, updates: jax.Array, *, numbers: lax.ScatterDimensionNumbers, **hints: Any
) -> jax.Array:
    """Table of keys with some overwritten: a scatter of their words, which every update has in a last dimension.

    Args:
        table: keys of random numbers.
        indices: index vector of each update.
        updates: the new keys.
        numbers: dimension numbers of the scatter of keys.
        hints: other parameters of `lax.scatter`.
    """
    of_words = lax.ScatterDimensionNumbers(
        update_window_dims=(*numbers.update_window_dims, updates.ndim),
        inserted_window_dims=numbers.inserted_window_dims,
        scatter_dims_to_operand_dims=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    old = jax.random.key_data(table)
    new = jax.random.key_data(updates)
    return jax.random.wrap_key_data(lax.scatter(old, indices, new, of_words, **hints), impl=jax.random.key_impl(table))


RULES: dict[str, Rule] = {"gather": gather_rule, **dict.fromkeys(popops.SCATTERS, scatter_rule)}
