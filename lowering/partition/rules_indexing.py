"""Partition rules of gather and scatter, by batch dimensions, by windows, and by the rows that are looked up.

Factors: 0, 1, … are the dimensions of the operand, 100, 101, … those of the indices but the last. A dimension of the
operand that is indexed one row at a time may be split: each device reads its own rows, 0 for others, and devices add
up; it writes its own rows, and drops others. Updates that are added may be split too: devices then have terms of the
sum, the operand being a term of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.factors import Factors
from ipujax.lowering.partition.resharding import index_along
from ipujax.lowering.partition.rules_base import Blocks, Rule, aligned, shapes

_INDEX = 100
_CLIPS = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _gather(eqn: JaxprEqn) -> Factors:
    numbers = eqn.params["dimension_numbers"]
    operand, indices = shapes(eqn.invars)
    dims = _operand_dims(operand, eqn.params["slice_sizes"], numbers.start_index_map)
    batches = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim in numbers.operand_batching_dims:
        dims[dim] = dim
    index_dims = [batches.get(d, _INDEX + d) for d in range(len(indices) - 1)]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([d for d in range(len(operand)) if d not in dropped])
    is_window = [d in numbers.offset_dims for d in range(len(shapes(eqn.outvars)[0]))]
    rows = iter(index_dims)
    # A row that is looked up stays as a window of one element unless it is collapsed.
    indexed = set(numbers.start_index_map)
    result = [_window_label(next(windows), dims, indexed) if window else next(rows) for window in is_window]
    factors = aligned(eqn, [dims, [*index_dims, None]], [result])
    return replace(factors, reductions={d: "add" for d in _rows(dims, indexed)})


def _operand_dims(shape: Sequence[int], sizes: Sequence[int], indexed: Sequence[int]) -> list[int | None]:
    """Dimensions that are read whole, and those of which one row at a time is."""
    return [
        d if (n == size and d not in indexed) or (size == 1 and d in indexed) else None
        for d, (n, size) in enumerate(zip(shape, sizes, strict=True))
    ]


def _window_label(dim: int, dims: Sequence[int | None], indexed: set[int]) -> int | None:
    return None if dim in indexed else dims[dim]


def _rows(dims: Sequence[int | None], indexed: set[int]) -> list[int]:
    return [d for d in dims if d is not None and d in indexed]


def _gather_block(blocks: Blocks) -> list[Any]:
    operand, indices = blocks.operands
    eqn = blocks.eqn
    numbers = eqn.params["dimension_numbers"]
    (whole_operand, _) = shapes(eqn.invars)
    batching = set(numbers.operand_batching_dims)
    sizes = [
        1 if d in batching else local if size == n else size
        for d, (size, n, local) in enumerate(zip(eqn.params["slice_sizes"], whole_operand, operand.shape, strict=True))
    ]
    rows = [d for d in numbers.start_index_map if blocks.axes.get(d)]
    if not rows:
        return blocks.bind(slice_sizes=tuple(sizes))
    local, here, outside = _local_rows(blocks, indices, numbers.start_index_map, rows, eqn.params["mode"])
    changes: dict[str, Any] = {"slice_sizes": tuple(1 if d in rows else n for d, n in enumerate(sizes))}
    changes |= {"mode": lax.GatherScatterMode.CLIP, "indices_are_sorted": False, "unique_indices": False}
    (found,) = blocks.bind(operand, local, **changes)
    axes = tuple(axis for d in rows for axis in blocks.axes[d])
    lookups = [d for d in range(found.ndim) if d not in numbers.offset_dims]

    def spread(flags: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(flags, found.shape, lookups)

    zero = jnp.zeros((), found.dtype)
    missing = jnp.full(found.shape, _fill_value(eqn, found.dtype))
    # One device has the value of rows outside of the table, so that the sum has it once.
    first = spread(outside & (index_along(axes, blocks.mesh) == 0))
    return [jnp.where(spread(here), found, jnp.where(first, missing, zero))]


def _fill_value(eqn: JaxprEqn, dtype: Any) -> Any:
    """Value of rows outside of the table: the default of `lax.gather`."""
    value = eqn.params["fill_value"]
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max, dtype)


def _local_rows(
    blocks: Blocks, indices: jax.Array, places: Sequence[int], rows: Sequence[int], mode: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Indices into the device's rows; flags of lookups of its own rows, and of rows outside of the table."""
    whole_operand = shapes(blocks.eqn.invars)[0]
    columns = [indices[..., n] for n in range(len(places))]
    shape = indices.shape[:-1]
    here = jnp.ones(shape, bool)
    outside = jnp.zeros(shape, bool)
    for dim in rows:
        column = places.index(dim)
        row = columns[column]
        size = whole_operand[dim]
        if mode in _CLIPS:
            row = jnp.clip(row, 0, size - 1)
        outside |= (row < 0) | (row >= size)
        local_size = size // blocks.mesh.size(blocks.axes[dim])
        row = row - (index_along(blocks.axes[dim], blocks.mesh) * local_size).astype(row.dtype)
        here &= (row >= 0) & (row < local_size)
        columns[column] = row
    return jnp.stack(columns, -1), here & ~outside, outside


def _scatter(eqn: JaxprEqn) -> Factors:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shapes(eqn.invars)
    indexed = set(numbers.scatter_dims_to_operand_dims)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(operand)) if d not in dropped]
    size_of = dict(zip(windows, (updates[d] for d in numbers.update_window_dims), strict=True))
    sizes = [size_of.get(d, 1) for d in range(len(operand))]
    dims = _operand_dims(operand, sizes, tuple(indexed))
    batches = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim in numbers.operand_batching_dims:
        dims[dim] = dim
    adds = eqn.primitive.name in ("scatter-add", "scatter_add", "scatter-sub", "scatter_sub")
    index_dims = [batches.get(d, _INDEX + d if adds else None) for d in range(len(indices) - 1)]
    rows = iter(index_dims)
    window = iter(windows)
    is_window = [d in numbers.update_window_dims for d in range(len(updates))]
    update = [_window_label(next(window), dims, indexed) if flag else next(rows) for flag in is_window]
    factors = aligned(eqn, [dims, [*index_dims, None], update], [dims])
    return replace(factors, reductions={f: "add" for f in index_dims if f is not None and f >= _INDEX})


def _scatter_block(blocks: Blocks) -> list[Any]:
    operand, indices, updates = blocks.operands
    eqn = blocks.eqn
    places = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    rows = [d for d in places if blocks.axes.get(d)]
    changes: dict[str, Any] = {}
    if rows:
        local, here, _ = _local_rows(blocks, indices, places, rows, eqn.params["mode"])
        # Negative indices are dropped, as those past the end.
        indices = jnp.where(here[..., None], local, -1)
        changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    terms = tuple(axis for f, axes in blocks.axes.items() if f >= _INDEX for axis in axes)
    if terms:
        operand = jnp.where(index_along(terms, blocks.mesh) == 0, operand, jnp.zeros((), operand.dtype))
    return blocks.bind(operand, indices, updates, **changes)


RULES: dict[str, Rule] = {
    "gather": Rule(_gather, _gather_block),
    **{
        name: Rule(_scatter, _scatter_block)
        for name in ("scatter", "scatter-add", "scatter-min", "scatter-max", "scatter-mul", "scatter_sub")
    },
}
