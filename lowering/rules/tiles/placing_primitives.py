"""Primitives that place arrays on tiles, order steps, and read the cycle counter.

    (y,) = tile_put_p.bind(x, rows=…, tiles=…)      # row i of y is row rows[i] of x, on tile tiles[i]
    results = tile_barrier_p.bind(*arrays)          # the arrays, after all steps before it on all tiles
    *results, count = cycle_count_p.bind(*arrays, num_tiles=…)   # the arrays, and the counter of the tile of each row

In plain JAX there is no machine: the counter reads 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import define_jvp, define_transpose, make_primitive

COUNT_WORDS = 2  # of 32 bits, the low one first: the counter of a tile has 64 bits


def _put(x: jax.Array, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[jax.Array]:
    in_place = rows == tuple(range(x.shape[0]))
    return [x if in_place else jnp.take(x, np.array(rows, np.int32), axis=0, mode="clip")]


def _shapes_put(x: Any, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)]


def _batched_put(operands: Sequence[Any], axes: Sequence[int], **params: Any) -> tuple[list[Any], list[int]]:
    (x,) = operands
    (axis,) = axes
    return tile_put_p.bind(jnp.moveaxis(x, axis, 1), **params), [1]


def _jvp_put(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (tangent,) = tangents
    return tile_put_p.bind(*primals, **params), [None if tangent is None else tile_put_p.bind(tangent, **params)[0]]


def _transposed_put(
    cotangents: Sequence[Any], operands: Sequence[Any], is_linear: Sequence[bool], *, rows: tuple[int, ...], **_: Any
) -> list[Any]:
    """Cotangent of the rows: one that was put on several tiles gets the sum of theirs."""
    (cotangent,) = cotangents
    (x,) = operands
    if cotangent is None:
        return [jnp.zeros(x.shape, x.dtype)]
    if rows == tuple(range(x.shape[0])):
        return [cotangent]
    if x.shape[0] == 1:
        return [jnp.sum(cotangent, 0, keepdims=True, dtype=x.dtype)]
    return [jnp.zeros(x.shape, x.dtype).at[np.array(rows, np.int32)].add(cotangent)]


tile_put_p = make_primitive("tile_put", _put, _shapes_put, _batched_put)
define_jvp(tile_put_p, _jvp_put)
define_transpose(tile_put_p, _transposed_put)


def _same(*arrays: Any) -> list[Any]:
    return list(arrays)


def _batched_barrier(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return tile_barrier_p.bind(*operands), list(axes)


def _jvp_barrier(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return tile_barrier_p.bind(*primals), list(tangents)


tile_barrier_p = make_primitive("tile_barrier", _same, _same, _batched_barrier)
define_jvp(tile_barrier_p, _jvp_barrier)


def _count(*arrays: Any, num_tiles: int) -> list[Any]:
    return [*arrays, jnp.zeros((num_tiles, COUNT_WORDS), jnp.uint32)]


def _shapes_count(*arrays: Any, num_tiles: int) -> list[Any]:
    return [*arrays, jax.ShapeDtypeStruct((num_tiles, COUNT_WORDS), np.dtype(np.uint32))]


def _batched_count(operands: Sequence[Any], axes: Sequence[Any], *, num_tiles: int) -> tuple[list[Any], list[Any]]:
    # One counter for the batch, whose indices run at the same time.
    return cycle_count_p.bind(*operands, num_tiles=num_tiles), [*axes, None]


def _jvp_count(primals: Sequence[Any], tangents: Sequence[Any], *, num_tiles: int) -> tuple[Any, Any]:
    return cycle_count_p.bind(*primals, num_tiles=num_tiles), [*tangents, None]


cycle_count_p = make_primitive("cycle_count", _count, _shapes_count, _batched_count)
define_jvp(cycle_count_p, _jvp_count)
