"""Rules for computed indices: gather and the scatter family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.popops.elementwise import freeze
from ipujax.lowering.popops.gather import GatherSpec, Mode, gather
from ipujax.lowering.popops.scatter import SCATTERS, ScatterSpec, scatter
from ipujax.lowering.rules.composed import composed
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import is_key_dtype

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
    if not table.size or not aval.size or not indices.size or mode is Mode.ONE_HOT:
        return fallback(ctx, table, indices)
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
    return gather(ctx.graph, table, indices, aval.shape, spec, ctx.prog, ctx.name)


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
    kind = ctx.primitive.name
    if not table.size:
        return table
    if not updates.size:
        return table
    if is_key_dtype(table.dtype) and update_jaxpr is None:
        hints: dict[str, Any] = {
            "indices_are_sorted": indices_are_sorted,
            "unique_indices": unique_indices,
            "mode": mode,
        }
        return composed(ctx, partial(scatter_keys, numbers=dimension_numbers, **hints), [table, indices, updates])
    if update_consts or is_key_dtype(table.dtype) or not indices.size:
        return fallback(ctx, table, indices, updates)
    spec = ScatterSpec(
        kind,
        dimension_numbers,
        mode,
        indices_are_sorted,
        unique_indices,
        table.shape,
        updates.shape,
        update_jaxpr if kind == "scatter" else None,
    )
    return scatter(ctx.graph, table, indices, updates, spec, ctx.prog, ctx.name)


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
