"""Rules for computed indices: gather and the scatter family; what needs none after all is in `one_place`."""

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

from ipujax.lowering.popops import (
    SCATTERS,
    GatherSpec,
    Mode,
    ScatterSpec,
    freeze,
    gather_as_kept,
    has_few_lookups,
    plan_in_steps,
    plan_scatter,
    scatter_as_kept,
    signed,
    thawed,
)
from ipujax.lowering.rules.arrays.last_updates import can_find_last, scatter_last
from ipujax.lowering.rules.arrays.one_place import combines_in_order, gather_from, known_place, scatter_to
from ipujax.lowering.rules.base.composed import composed
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor, element_bytes, is_key_dtype

_WORDS = np.dtype(np.uint32)  # what keys are made of


def gather_rule(
    ctx: Context,
    table: Tensor,
    indices: Tensor,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    mode: Mode,
    fill_value: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
) -> Tensor | Sequence[Tensor]:
    """Slices of a table at computed places; along dimensions that no index names a slice starts at 0."""
    (aval,) = ctx.out_avals
    indexed = dimension_numbers.start_index_map
    if not table.size or not aval.size or mode is Mode.ONE_HOT:
        return fallback(ctx, table, indices)  # no elements; JAX itself has no gather of that mode
    limits = [n if d in indexed + dimension_numbers.operand_batching_dims else slice_sizes[d]
              for d, n in enumerate(table.shape)]  # fmt: skip
    table = table.slice([0] * table.ndim, limits)
    dtype = _WORDS if is_key_dtype(table.dtype) else table.dtype
    spec = GatherSpec(
        dimension_numbers,
        tuple(slice_sizes),
        mode,
        None if fill_value is None else freeze(np.asarray(fill_value, dtype)),
        indices_are_sorted,
        unique_indices,
        table.shape,
        len(aval.shape),
    )
    place, is_key = known_place(indices), is_key_dtype(table.dtype)
    if place is not None and not (is_key and place):
        return composed(ctx, lambda x: gather_from(x, place, spec, aval.shape), [table])
    if spec.wide_dims() and _is_too_big(ctx.graph, table, spec):
        fun = partial(gather_index_by_index, spec=spec, out_shape=aval.shape)
        return composed(ctx, fun, [table, indices])
    with _price(ctx.graph, indices):
        return gather_as_kept(ctx.graph, table, indices, aval.shape, spec, ctx.prog, ctx.name)


def _price(graph: Graph, indices: Tensor) -> AbstractContextManager[None]:
    """The price of a byte of a table: where look-ups are few, that of an iteration of the loops around."""
    return graph.price_of_iteration() if has_few_lookups(graph, indices) else nullcontext()


def _is_too_big(graph: Graph, table: Tensor, spec: GatherSpec) -> bool:
    """Whether a tile cannot hold a table whole along indexed dimensions, as much as planners may use."""
    target, indexed = graph.target, prod(table.shape[d] for d in spec.indexed)
    most = target.available_memory_proportion * target.bytes_per_tile
    return -(-table.size // (indexed * target.tiles_per_ipu)) * indexed * element_bytes(table.dtype) > most


def gather_index_by_index(
    table: jax.Array, indices: jax.Array, *, spec: GatherSpec, out_shape: Sequence[int]
) -> jax.Array:
    """A gather of windows as one of single indices, of a table whose rows can be cut then."""
    wide, numbers = spec.wide_dims(), spec.numbers
    at = signed(indices)
    last = np.array([table.shape[d] - spec.slice_sizes[d] for d in spec.indexed], at.dtype)
    inside = jnp.clip(at, 0, last)
    if spec.mode is Mode.FILL_OR_DROP:
        inside = jnp.where((inside == at).all(-1, keepdims=True), inside, -max(table.shape))
    batch, sizes = indices.shape[:-1], [spec.slice_sizes[d] for d, _ in wide]
    shape = (*batch, *sizes, len(spec.indexed))
    every = lax.broadcast_in_dim(inside, shape, (*range(len(batch)), len(shape) - 1))
    for n, (d, _) in enumerate(wide):
        step = lax.broadcasted_iota(at.dtype, shape, len(batch) + n)
        every = every + step * (np.arange(len(spec.indexed)) == spec.indexed.index(d)).astype(at.dtype)
    outs = dict(wide)
    lookups = [out for out in range(len(out_shape)) if out not in numbers.offset_dims] + [out for _, out in wide]
    kept = [out for out in numbers.offset_dims if out not in outs.values()]
    single = lax.GatherDimensionNumbers(
        tuple(range(len(lookups), len(out_shape))),
        tuple(sorted((*numbers.collapsed_slice_dims, *outs))),
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    fill = None if spec.fill is None else thawed(spec.fill)[()]
    slices = [1 if d in outs else n for d, n in enumerate(spec.slice_sizes)]
    found = lax.gather(table, every, single, slices, mode=spec.mode, fill_value=fill)
    return lax.transpose(found, np.argsort([*lookups, *kept]).tolist())


def scatter_rule(
    ctx: Context,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: Mode,
    update_jaxpr: Any,
    update_consts: Sequence[Any],
) -> Tensor | Sequence[Tensor]:
    """A table combined with updates at computed places, by a function of the user's own too."""
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
        return composed(ctx, partial(scatter_keys, numbers=dimension_numbers, **hints), [table, indices, updates])
    if is_key_dtype(table.dtype):
        if update_jaxpr.outvars == update_jaxpr.invars[:1]:  # the only function of keys that JAX can compile here
            return table
        return fallback(ctx, table, indices, updates)
    spec = ScatterSpec(
        kind,
        dimension_numbers,
        mode,
        indices_are_sorted,
        unique_indices,
        table.shape,
        updates.shape,
        table.dtype,
        update_jaxpr if kind == "scatter" else None,
    )
    place, (extents, _) = known_place(indices), spec.windows()
    is_row = bool(spec.indexed) and all(extents[d] == 1 for d in spec.indexed)
    if place is not None and not (is_row and combines_in_order(spec)):
        fun = partial(scatter_to, place=place, spec=spec, primitive=ctx.primitive, params=dict(ctx.params))
        return composed(ctx, fun, [table, updates])
    own, others = ctx.into_tensors[0], {variable for x in (indices, updates) for variable in x.variables()}
    in_place = own is not None and own.node is table.node and others.isdisjoint(table.variables())
    spec, table, updates, of_view = scatter_as_kept(spec, table, updates)
    with _price(ctx.graph, indices):
        plan = plan_scatter(ctx.graph, table, indices, updates, spec, ctx.name, in_place)
        if plan.has_too_many_updates and can_find_last(spec):
            (out,) = composed(ctx, partial(scatter_last, spec=spec), [table, indices, updates])
            return of_view(out)
        if plan.has_too_many_updates:
            plan = plan_in_steps(ctx.graph, table, indices, updates, spec, ctx.name, in_place)
    result = of_view(plan.add(ctx.graph, ctx.prog))
    return own if in_place and own is not None else result


def scatter_keys(
    table: jax.Array, indices: jax.Array, updates: jax.Array, *, numbers: lax.ScatterDimensionNumbers, **hints: Any
) -> jax.Array:
    """Keys written over others, as their words: a last dimension that every update covers whole."""
    words = numbers.__class__(
        (*numbers.update_window_dims, updates.ndim),
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    old, new = jax.random.key_data(table), jax.random.key_data(updates)
    return jax.random.wrap_key_data(lax.scatter(old, indices, new, words, **hints), impl=jax.random.key_impl(table))


RULES: dict[str, Rule] = {"gather": gather_rule, **dict.fromkeys(SCATTERS, scatter_rule)}
