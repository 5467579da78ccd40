"""Products with block-sparse matrices of a static pattern: sparse by dense, and blocks of dense by dense.

Blocks are dealt to buckets, one a tile: whole rows of blocks, the longest first to the emptiest bucket, or parts of
rows with equally many blocks where that is uneven. A bucket reads the rows of `x` that its blocks meet, and adds the
products of each row of blocks in a slot; slots of one row in several buckets are added last.
Fewer blocks than tiles: the columns of `x` are divided too.

Limits: each block reads its rows of `x` anew; no bucket has less room than the fullest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.popsparse import block_products, sampled_products
from ipujax.lowering.rules import codelet_call_p, take_rows_p
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

_MOST_BUCKETS = 1472  # tiles of an IPU of Mk2 or Bow; published, see `runtime.target`
_MOST_IMBALANCE = 1.25  # assumed: what the addition of parts of rows may cost, as a share of products
_SUMS = np.dtype(np.float32)
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


def static_matmul(pattern: BlockPattern, values: jax.Array, x: jax.Array, *, buckets: int = _MOST_BUCKETS) -> jax.Array:
    """The product of a block-sparse matrix with a dense one; differentiable in `values` and `x`, any number of times.

    Args:
        pattern: which blocks of the [m, k] matrix have values.
        values: the blocks, [blocks, block, block], of float32 or float16.
        x: dense matrix, [k, n], of the same dtype.
        buckets: most buckets that blocks and columns are cut into, one a tile.

    Returns:
        [m, n], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or a pattern that is none.
        ArgumentValueError: shapes that do not match the pattern, or fewer than one bucket.
    """
    _check("static_matmul", pattern, buckets, values, x)
    blocks = (pattern.num_blocks, pattern.block, pattern.block)
    if values.shape != blocks or x.ndim != 2 or x.shape[0] != pattern.shape[1]:
        expected = f"values {blocks} and x ({pattern.shape[1]}, n)"
        raise ArgumentValueError("static_matmul: shapes", expected=expected, got=f"{values.shape} and {x.shape}")
    if not pattern.num_blocks or not x.shape[1]:
        return jnp.zeros((pattern.shape[0], x.shape[1]), x.dtype)
    return _product(pattern, buckets, values, x)


def static_sampled_matmul(
    pattern: BlockPattern, left: jax.Array, right: jax.Array, *, buckets: int = _MOST_BUCKETS
) -> jax.Array:
    """The blocks of a pattern of the product of two dense matrices; differentiable any number of times.

    Args:
        pattern: which blocks of the [m, k] product are computed.
        left: dense matrix, [m, n], of float32 or float16.
        right: dense matrix, [n, k], of the same dtype.
        buckets: most buckets that blocks are cut into, one a tile.

    Returns:
        The blocks, [blocks, block, block], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or a pattern that is none.
        ArgumentValueError: shapes that do not match the pattern, or fewer than one bucket.
    """
    _check("static_sampled_matmul", pattern, buckets, left, right)
    m, k = pattern.shape
    if left.ndim != 2 or right.ndim != 2 or left.shape != (m, right.shape[0]) or right.shape[1] != k:
        expected = f"({m}, n) and (n, {k})"
        raise ArgumentValueError(
            "static_sampled_matmul: shapes", expected=expected, got=f"{left.shape} and {right.shape}"
        )
    if not pattern.num_blocks or not left.shape[1]:
        return jnp.zeros((pattern.num_blocks, pattern.block, pattern.block), left.dtype)
    return _sampled(pattern, buckets, left, right.T)


def _check(name: str, pattern: Any, buckets: int, a: jax.Array, b: jax.Array) -> None:
    if not isinstance(pattern, BlockPattern):
        raise ArgumentTypeError(f"{name}: pattern", expected="a BlockPattern", got=type(pattern).__name__)
    if a.dtype != b.dtype or a.dtype not in _DTYPES:
        raise ArgumentTypeError(
            f"{name}: operands", expected="both float32, or both float16", got=f"{a.dtype}, {b.dtype}"
        )
    if buckets < 1:
        raise ArgumentValueError(f"{name}: buckets", expected="at least 1", got=buckets)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(pattern: BlockPattern, buckets: int, values: jax.Array, x: jax.Array) -> jax.Array:
    plan = _plan(pattern, buckets, x.shape[1])
    b, num_columns = pattern.block, x.shape[1] // plan.column_parts
    # [column parts, rows of blocks of x, b, columns]
    parts = x.reshape(-1, b, plan.column_parts, num_columns).transpose(2, 0, 1, 3)
    operands = _take(parts.reshape(-1, b, num_columns), _for_parts(plan.columns, plan.column_parts, parts.shape[1]))
    blocks = _take(values, plan.order * plan.column_parts)
    vertices = plan.column_parts * plan.buckets
    is_whole = len(plan.row_slots[0]) == 1  # no row is in several buckets
    sums = _call(
        block_products(values.dtype, plan.slots, values.dtype if is_whole else _SUMS),
        [y.reshape(vertices, plan.size, *y.shape[1:]) for y in (blocks, operands)],
        ((plan.slots, b, num_columns), values.dtype if is_whole else _SUMS),
        np.array(plan.slot * plan.column_parts, np.int32).reshape(vertices, plan.size),
    )
    # A row of blocks is the sum of its slots; those that it lacks are the row of zeros behind all.
    own_slots = vertices * plan.slots
    sums = jnp.concatenate([sums.reshape(own_slots, b, num_columns), jnp.zeros((1, b, num_columns), sums.dtype)])
    numbers = np.array(plan.row_slots)[None] + np.arange(plan.column_parts)[:, None, None] * plan.buckets * plan.slots
    numbers = np.where(np.array(plan.row_slots) < 0, own_slots, numbers)
    rows = _take(sums, tuple(numbers.ravel().tolist())).reshape(*numbers.shape, b, num_columns)
    rows = rows[:, :, 0] if is_whole else rows.sum(2)
    return rows.transpose(1, 2, 0, 3).reshape(pattern.shape[0], x.shape[1]).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sampled(pattern: BlockPattern, buckets: int, left: jax.Array, right: jax.Array) -> jax.Array:
    """The blocks of a pattern of left · rightᵀ: [m, n], [k, n] → [blocks, block, block]."""
    b, n = pattern.block, left.shape[1]
    size = -(-pattern.num_blocks // buckets)
    vertices = -(-pattern.num_blocks // size)
    fill = (0,) * (vertices * size - pattern.num_blocks)  # blocks of the last bucket that are left out
    rows = [
        _take(y.reshape(-1, b, n), numbers + fill).reshape(vertices, size, b, n)
        for y, numbers in ((left, pattern.rows), (right, pattern.columns))
    ]
    blocks = _call(sampled_products(left.dtype), rows, ((size, b, b), left.dtype))
    return blocks.reshape(-1, b, b)[: pattern.num_blocks]


def _product_backward(pattern: BlockPattern, buckets: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, x = saved
    gradient = _product(pattern.transposed(), buckets, values.swapaxes(1, 2), g)
    return _sampled(pattern, buckets, g, x), gradient


def _sampled_backward(pattern: BlockPattern, buckets: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    left, right = saved
    return _product(pattern, buckets, g, right), _product(pattern.transposed(), buckets, g.swapaxes(1, 2), left)


def _saving(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pattern, buckets, a, b: (fun(pattern, buckets, a, b), (a, b))


_product.defvjp(_saving(_product), _product_backward)
_sampled.defvjp(_saving(_sampled), _sampled_backward)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Buckets with room for `size` blocks each; what is left free has no slot."""

    buckets: int
    size: int
    slots: int  # sums that a bucket has room for
    column_parts: int
    order: tuple[int, ...]  # [buckets · size], numbers of blocks
    columns: tuple[int, ...]  # [buckets · size]
    slot: tuple[int, ...]  # [buckets · size]
    row_slots: tuple[tuple[int, ...], ...]  # for each row of blocks its slots in all buckets; −1 for none


@remembered
def _plan(pattern: BlockPattern, most_buckets: int, num_columns: int) -> _Plan:
    count = pattern.num_blocks
    bucket = _bucket_of_blocks(pattern, most_buckets)
    order = np.lexsort((np.array(pattern.columns), np.array(pattern.rows), bucket))
    rows, bucket = np.array(pattern.rows)[order], bucket[order]
    buckets, size = int(bucket[-1]) + 1, int(np.bincount(bucket).max())
    room = max(1, most_buckets // buckets)
    column_parts = max(n for n in range(1, min(room, num_columns) + 1) if num_columns % n == 0)
    # Blocks are in order, so that a slot starts where the row or the bucket changes.
    is_first = (np.diff(rows, prepend=-1) != 0) | (np.diff(bucket, prepend=-1) != 0)
    firsts = np.cumsum(is_first) - 1
    starts = np.searchsorted(bucket, bucket)
    slot = firsts - firsts[starts]
    slots = int(slot.max()) + 1
    by_row: list[list[int]] = [[] for _ in range(pattern.shape[0] // pattern.block)]
    for row, number in zip(rows[is_first].tolist(), (bucket * slots + slot)[is_first].tolist(), strict=True):
        by_row[row].append(number)
    most = max(map(len, by_row))
    place = bucket * size + np.arange(count) - starts

    def placed(values: np.ndarray, fill: int) -> tuple[int, ...]:
        every = np.full(buckets * size, fill)
        every[place] = values
        return tuple(every.tolist())

    return _Plan(
        buckets, size, slots, column_parts,
        order=placed(order, 0),
        columns=placed(np.array(pattern.columns)[order], 0),
        slot=placed(slot, slots),
        row_slots=tuple((*numbers, *[-1] * (most - len(numbers))) for numbers in by_row),
    )  # fmt: skip


def _bucket_of_blocks(pattern: BlockPattern, most_buckets: int) -> np.ndarray:
    """Number of the bucket of each block: whole rows of blocks, if they are nearly as even as parts of rows."""
    rows = np.array(pattern.rows)
    size = -(-len(rows) // most_buckets)
    blocks_of_row = np.bincount(rows)
    bucket_of_row = np.zeros(len(blocks_of_row), int)
    num_rows = len(set(pattern.rows))
    loads = [(0, n) for n in range(min(most_buckets, num_rows))]
    for row in np.argsort(-blocks_of_row, kind="stable")[:num_rows].tolist():
        load, bucket_of_row[row] = loads[0]
        heapreplace(loads, (load + int(blocks_of_row[row]), int(bucket_of_row[row])))
    if max(loads)[0] <= _MOST_IMBALANCE * size:
        return bucket_of_row[rows]
    in_order = np.empty(len(rows), int)
    in_order[np.lexsort((np.array(pattern.columns), rows))] = np.arange(len(rows)) // size
    return in_order


def _for_parts(numbers: Sequence[int], parts: int, rows: int) -> tuple[int, ...]:
    return tuple((np.array(numbers) + np.arange(parts)[:, None] * rows).ravel().tolist())


def _take(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    (taken,) = take_rows_p.bind(x, rows=rows)
    return taken


def _call(codelet: Any, operands: list[jax.Array], out: tuple[Any, Any], *meta: np.ndarray) -> jax.Array:
    arrays = [*operands, *map(jnp.asarray, meta)]
    params = {"codelet": codelet, "stacked": (True,) * len(arrays), "num_vertices": arrays[0].shape[0], "tiles": None}
    (result,) = codelet_call_p.bind(*arrays, outs=(out,), **params)
    return result
