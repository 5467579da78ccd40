"""Products with block-sparse matrices of a static pattern: sparse by dense, and blocks of dense by dense.

Blocks are dealt to buckets, one a tile, by a grid whose cells have about equally many (`static_plan`). A bucket reads
its rows of `x`, and has the sums of its rows of blocks; sums of several bands of columns are added last, in the dtype
of the operands, as PopLibs does.

Limits: no bucket has less room than the fullest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.rules import take_rows
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.popsparse.bucket_products import bucket_product, bucket_samples
from ipujax.popsparse.plan_costs import MOST_CELLS
from ipujax.popsparse.static_plan import static_plan
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


def static_matmul(pattern: BlockPattern, values: jax.Array, x: jax.Array, *, buckets: int = MOST_CELLS) -> jax.Array:
    """The product of a block-sparse matrix with a dense one; differentiable in `values` and `x`, any number of times.

    Args:
        pattern: which blocks of the [m, k] matrix have values.
        values: the blocks, [blocks, block, block], of float32 or float16.
        x: dense matrix, [k, n], of the same dtype.
        buckets: most buckets that blocks and columns are cut into, one a tile.

    Returns:
        [m, n], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or `pattern` is not a BlockPattern.
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
    pattern: BlockPattern, left: jax.Array, right: jax.Array, *, buckets: int = MOST_CELLS
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
        ArgumentTypeError: other dtypes, or `pattern` is not a BlockPattern.
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
    plan = static_plan(pattern, buckets, x.shape[1], values.dtype)
    return bucket_product(plan.grid, take_rows(values, plan.order), x, plan.row, plan.slot, values.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sampled(pattern: BlockPattern, buckets: int, left: jax.Array, right: jax.Array) -> jax.Array:
    """The blocks of a pattern of left · rightᵀ: [m, n], [k, n] → [blocks, block, block]."""
    plan = static_plan(pattern, buckets, left.shape[1], left.dtype)
    blocks = bucket_samples(plan.grid, pattern.block, left, right, plan.row, plan.slot)
    return take_rows(blocks, plan.place)


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
