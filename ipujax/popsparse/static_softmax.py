"""Softmax of the rows of a block-sparse matrix of a static pattern, over the elements that have values.

Blocks of a row are put side by side, with −∞ behind rows of fewer blocks than the longest, so that tiles share rows.
Limits: memory is that of rows as long as the longest.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.rules import take_rows
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError


def static_softmax(pattern: BlockPattern, values: jax.Array) -> jax.Array:
    """The softmax of each row of a block-sparse matrix, elements without values left out; differentiable.

    Args:
        pattern: which blocks of the matrix have values.
        values: the blocks, [blocks, block, block], of float32 or float16.

    Returns:
        Blocks of the same shape and dtype; the elements of each row add up to 1. Sums are float32.

    Raises:
        ArgumentTypeError: another dtype, or `pattern` is not a BlockPattern.
        ArgumentValueError: a shape that does not match the pattern.
    """
    if not isinstance(pattern, BlockPattern):
        raise ArgumentTypeError("static_softmax: pattern", expected="a BlockPattern", got=type(pattern).__name__)
    if values.dtype not in (np.float32, np.float16):
        raise ArgumentTypeError("static_softmax: values", expected="float32 or float16", got=values.dtype)
    expected = (pattern.num_blocks, pattern.block, pattern.block)
    if values.shape != expected:
        raise ArgumentValueError("static_softmax: values", expected=expected, got=values.shape)
    if not pattern.num_blocks:
        return values
    rows = _side_by_side(pattern, -np.inf, values).astype(jnp.float32)
    return _in_order(pattern, jax.nn.softmax(rows, (1, 3)).astype(values.dtype))


# Both are linear and each other's transpose, so that gradients of any order are views too.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _side_by_side(pattern: BlockPattern, fill: float, blocks: jax.Array) -> jax.Array:
    """[blocks, b, b] → [rows of blocks with values, most blocks of a row, b, b]."""
    numbers, _ = _places(pattern)
    filled = jnp.concatenate([blocks, jnp.full((1, *blocks.shape[1:]), fill, blocks.dtype)])
    return take_rows(filled, numbers).reshape(*numbers.shape, *blocks.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_order(pattern: BlockPattern, rows: jax.Array) -> jax.Array:
    """The blocks of `_side_by_side` in the order of the pattern."""
    _, places = _places(pattern)
    return take_rows(rows.reshape(-1, *rows.shape[2:]), places)


_side_by_side.defvjp(
    lambda pattern, fill, blocks: (_side_by_side(pattern, fill, blocks), None),
    lambda pattern, fill, _, g: (_in_order(pattern, g),),
)
_in_order.defvjp(
    lambda pattern, rows: (_in_order(pattern, rows), None),
    lambda pattern, _, g: (_side_by_side(pattern, 0.0, g),),
)


@remembered
def _places(pattern: BlockPattern) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the blocks of each row, int[rows, most blocks], and the place of each block in them."""
    # A row with fewer blocks is filled up with the number of blocks, that of the block of `fill`.
    count = pattern.num_blocks
    order = np.lexsort((np.array(pattern.columns), np.array(pattern.rows)))
    _, row, lengths = np.unique(np.array(pattern.rows)[order], return_inverse=True, return_counts=True)
    numbers = np.full((len(lengths), int(lengths.max())), count)
    place = row * numbers.shape[1] + np.arange(count) - (np.cumsum(lengths) - lengths)[row]
    numbers.flat[place] = order
    return numbers, place[np.argsort(order)]
