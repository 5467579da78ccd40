"""Scatter of whole rows with more updates than fit on tiles.

A scatter-max of the updates' numbers, which can be cut over tiles, gives the last update of each row; the row is
then gathered from it, as in `lax`.

Input: a table, index vectors, updates and a `ScatterSpec`, as in the rules of `indexing`.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.popops import Mode, ScatterSpec

_NUMBER = np.dtype(np.int32)


def can_find_last(spec: ScatterSpec) -> bool:
    """True if updates replace whole rows, so that only the last update of a row counts."""
    sizes, of_update = spec.windows()
    lookups = prod(spec.update_shape[u] for _, u in spec.lookup_dims())
    is_whole = all(sizes[d] == n for d, n in enumerate(spec.table_shape) if d not in spec.indexed)
    return (
        spec.kind == "scatter"
        and spec.function is None
        and not spec.numbers.operand_batching_dims
        and bool(spec.indexed)
        and is_whole
        and all(of_update[d] is None for d in spec.indexed)
        and lookups <= np.iinfo(_NUMBER).max
    )


def scatter_last(table: jax.Array, indices: jax.Array, updates: jax.Array, *, spec: ScatterSpec) -> jax.Array:
    """Table with rows replaced, each by the last of its updates; `spec` must satisfy `can_find_last`."""
    numbers = spec.numbers
    indexed = sorted(spec.indexed)
    lookups = [u for _, u in spec.lookup_dims()]
    count = prod(updates.shape[u] for u in lookups)
    single = lax.ScatterDimensionNumbers((), tuple(range(len(indexed))), tuple(indexed.index(d) for d in spec.indexed))
    # For each row the number of its last update, the largest; the least integer if it has none.
    update_numbers = lax.iota(_NUMBER, count).reshape([updates.shape[u] for u in lookups])
    no_update = lax.full([table.shape[d] for d in indexed], np.iinfo(_NUMBER).min, _NUMBER)
    hints = {"unique_indices": spec.unique_indices, "indices_are_sorted": spec.indices_are_sorted}
    last = lax.scatter_max(no_update, indices, update_numbers, single, mode=spec.mode, **hints)
    window = list(numbers.update_window_dims)
    rows = lax.transpose(updates, [*lookups, *window]).reshape([count, *(updates.shape[u] for u in window)])
    offsets = tuple(range(len(indexed), table.ndim))
    new_rows = lax.gather(
        rows,
        jnp.maximum(last, 0)[..., None],
        lax.GatherDimensionNumbers(offsets, (0,), (0,)),
        (1, *rows.shape[1:]),
        mode=Mode.PROMISE_IN_BOUNDS,
    )
    window_dims = [d for d in range(table.ndim) if d not in indexed]
    new_rows = lax.transpose(new_rows, np.argsort([*indexed, *window_dims]).tolist())
    return jnp.where(lax.expand_dims(last >= 0, window_dims), new_rows, table)
