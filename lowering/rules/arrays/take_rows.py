"""Rows of an array by constant numbers, as a view: rows are exchanged when tiles read them.

    rows = take_rows(x, np.array([2, 0, 2]))  # [n, …] → [3, …]

A gather takes computed indices, so that its vertices look up each of them. Limits: no differentiation rule; whoever
binds it defines a gradient around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import make_primitive
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.tensor import Tensor, concat


def _compute(x: jax.Array, *, rows: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.take(x, np.array(rows, np.int32), axis=0, mode="clip")]


def _shapes(x: Any, *, rows: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    assert rows and min(rows) >= 0 and max(rows) < x.shape[0]
    return [jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)]


def _batched(operands: Sequence[Any], axes: Sequence[int], *, rows: tuple[int, ...]) -> tuple[list[Any], list[int]]:
    (x,), (axis,) = operands, axes
    return take_rows_p.bind(jnp.moveaxis(x, axis, 1), rows=rows), [1]


take_rows_p = make_primitive("take_rows", _compute, _shapes, _batched)


def take_rows(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """Return the rows with the numbers `rows`, in row-major order of an array of any rank, int: [rows.size, …]."""
    (view,) = take_rows_p.bind(x, rows=tuple(rows.ravel().tolist()))
    return jnp.asarray(view)


def take_rows_rule(ctx: Context, x: Tensor, *, rows: tuple[int, ...]) -> list[Tensor]:
    """Joins slices of consecutive rows."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [concat([x[rows[a] : rows[b - 1] + 1] for a, b in pairwise(starts)], 0)]


RULES: dict[str, Rule] = {"take_rows": take_rows_rule}
