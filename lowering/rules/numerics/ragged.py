"""Rule for products of ragged groups of rows: one masked copy of the ragged operand for each group, then one product.

That is what XLA does on CPU, so that numbers are alike; a group's rows outside of it are zeros.
Limits: the multiply-adds are those of every group over all rows, as sizes of groups are data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.rules.base.composed import composed
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor


def ragged_dot_general_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """`lax.ragged_dot_general` in its three modes: the ragged dimension free, contracted, or one of the batch."""
    if len(operands) != 3:
        return fallback(ctx, *operands)  # a group offset, of which JAX itself has no implementation
    numbers, rest = params["ragged_dot_dimension_numbers"], ("precision", "preferred_element_type")
    return composed(ctx, partial(ragged_dot, numbers=numbers, **{key: params[key] for key in rest}), operands)


def ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, numbers: Any, **params: Any) -> jax.Array:
    """The product of operands one of whose dimensions is cut into groups of computed sizes.

    Args:
        lhs: ragged operand.
        rhs: other operand, with a dimension of groups where the ragged dimension is free.
        sizes: sizes of the groups, whole numbers; in its last dimension, after those of dimensions before the ragged.
        numbers: `lax.RaggedDotDimensionNumbers`.
        params: precision and dtype of the product.
    """
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    product: Callable[..., jax.Array] = partial(lax.dot_general, **params)
    if ragged in left_batch:
        return product(lhs, rhs, dimension_numbers=numbers.dot_dimension_numbers)
    if ragged in left:
        other = right[list(left).index(ragged)]
        a = _by_group(lhs, sizes, ragged, [*left_batch, *_before(left, ragged)])
        b = _by_group(rhs, sizes, other, [*right_batch, *_before(right, other)])
        batch = [0, *_behind(left_batch)], [0, *_behind(right_batch)]
        return product(a, b, dimension_numbers=((_behind(left), _behind(right)), batch))
    free = [d for d in range(lhs.ndim) if d not in (*left, *left_batch)]
    a = _by_group(lhs, sizes, ragged, [*left_batch, *_before(free, ragged)])
    (group,) = numbers.rhs_group_dimensions
    contracted = [*_behind(left), 0], [*right, group]
    return product(a, rhs, dimension_numbers=(contracted, (_behind(left_batch), right_batch)))


def _by_group(x: jax.Array, sizes: jax.Array, ragged: int, prefix: Sequence[int]) -> jax.Array:
    """`x` once for each group, the first dimension, with zeros outside of the group."""
    ends = jnp.moveaxis(jnp.cumsum(sizes, -1, dtype=sizes.dtype), -1, 0)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    shape = (ends.shape[0], *x.shape)
    at = (0, *_behind(prefix)) if sizes.ndim > 1 else (0,)
    place = lax.broadcasted_iota(sizes.dtype, shape, ragged + 1)
    # Dimensions before the ragged one are in the order of the sizes, which need not be rising.
    order = sorted(range(len(at)), key=lambda n: at[n])
    low, high = (lax.broadcast_in_dim(e.transpose(order), shape, sorted(at)) for e in (starts, ends))
    return jnp.where((low <= place) & (place < high), x, jnp.zeros((), x.dtype))


def _before(dims: Sequence[int], dim: int) -> Sequence[int]:
    return list(dims)[: list(dims).index(dim)]


def _behind(dims: Sequence[int]) -> list[int]:
    """Dimensions of an operand, where the groups' dimension has been put before them."""
    return [d + 1 for d in dims]


RULES: dict[str, Rule] = {"ragged_dot_general": ragged_dot_general_rule}
