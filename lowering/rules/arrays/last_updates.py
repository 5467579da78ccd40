"""Updates that replace whole rows of a table, too many for tiles to have room for all of them.

The largest number of an update of each row, which is a scatter whose updates can be cut over tiles, tells which one is
looked up for it: the last, as in `lax`.

Input: a table, index vectors, updates and a `ScatterSpec`, as the rules of `indexing` have them.
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
    """Whether updates replace whole rows, so that the last one of a row is all that matters."""
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
    """A table with rows replaced, each by the last of its updates.

    Args:
        table: array of shape `spec.table_shape`.
        indices: index vectors in the last dimension.
        updates: array of shape `spec.update_shape`.
        spec: one that `can_find_last`.
    """
    numbers, kept = spec.numbers, sorted(spec.indexed)
    lookups = [u for _, u in spec.lookup_dims()]
    count = prod(updates.shape[u] for u in lookups)
    single = lax.ScatterDimensionNumbers((), tuple(range(len(kept))), tuple(kept.index(d) for d in spec.indexed))
    number = lax.iota(_NUMBER, count).reshape([updates.shape[u] for u in lookups])
    none = lax.full([table.shape[d] for d in kept], np.iinfo(_NUMBER).min, _NUMBER)
    hints = {"unique_indices": spec.unique_indices, "indices_are_sorted": spec.indices_are_sorted}
    last = lax.scatter_max(none, indices, number, single, mode=spec.mode, **hints)
    window = list(numbers.update_window_dims)
    rows = lax.transpose(updates, [*lookups, *window]).reshape([count, *(updates.shape[u] for u in window)])
    offsets = tuple(range(len(kept), table.ndim))
    found = lax.gather(
        rows,
        jnp.maximum(last, 0)[..., None],
        lax.GatherDimensionNumbers(offsets, (0,), (0,)),
        (1, *rows.shape[1:]),
        mode=Mode.PROMISE_IN_BOUNDS,
    )
    rest = [d for d in range(table.ndim) if d not in kept]
    found = lax.transpose(found, np.argsort([*kept, *rest]).tolist())
    return jnp.where(lax.expand_dims(last >= 0, rest), found, table)
