"""Rules for contractions and convolutions: views in the canonical order of poplin, and its planner.

A product of ragged groups of rows is one masked copy of the ragged operand for each group, then one product. XLA does
the same on CPU, so that numbers are equal; the rows of other groups are zeros.
Limits of such products: the multiply-adds are those of every group over all rows, because sizes of groups are data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.poplin import convolution, matmul
from ipujax.lowering.rules.base.context import Context, Rule, lower_array_function
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor


def ragged_dot_general_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """`lax.ragged_dot_general` in its three modes: the ragged dimension free, contracted, or a batch dimension."""
    if len(operands) != 3:
        return fallback(ctx, *operands)  # a group offset, which JAX itself does not implement
    product_params = {key: params[key] for key in ("precision", "preferred_element_type")}
    fun = partial(ragged_dot, numbers=params["ragged_dot_dimension_numbers"], **product_params)
    return lower_array_function(ctx, fun, operands)


def ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, numbers: Any, **params: Any) -> jax.Array:
    """`lax.ragged_dot_general` by `lax.dot_general`: a product of operands, one dimension of which is cut into groups.

    Args:
        lhs: the operand whose dimension is ragged: its indices are those of the first group, then of the second, …
        rhs: the other operand.
        sizes: sizes of the groups, [..., groups]; leading dimensions are those of `lhs` before the ragged one.
        numbers: JAX's ragged dimension numbers.
        params: parameters of `lax.dot_general` beside its dimension numbers.
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    product: Callable[..., jax.Array] = partial(lax.dot_general, **params)
    if ragged in lhs_batch:  # each index has its own product, whatever its group
        return product(lhs, rhs, dimension_numbers=numbers.dot_dimension_numbers)
    # Below groups are a new first dimension of copies of the operands; other dimensions are shifted by one.
    if ragged in lhs_contracted:  # a result for each group, in a further dimension
        rhs_ragged = rhs_contracted[list(lhs_contracted).index(ragged)]
        a = _by_group(lhs, sizes, ragged, [*lhs_batch, *_preceding(lhs_contracted, ragged)])
        b = _by_group(rhs, sizes, rhs_ragged, [*rhs_batch, *_preceding(rhs_contracted, rhs_ragged)])
        batch = [0, *_shifted(lhs_batch)], [0, *_shifted(rhs_batch)]
        return product(a, b, dimension_numbers=((_shifted(lhs_contracted), _shifted(rhs_contracted)), batch))
    # Groups are a further contracted dimension: every row of a result is of one group.
    free = [d for d in range(lhs.ndim) if d not in (*lhs_contracted, *lhs_batch)]
    a = _by_group(lhs, sizes, ragged, [*lhs_batch, *_preceding(free, ragged)])
    (group,) = numbers.rhs_group_dimensions
    contracted = [*_shifted(lhs_contracted), 0], [*rhs_contracted, group]
    return product(a, rhs, dimension_numbers=(contracted, (_shifted(lhs_batch), rhs_batch)))


def _by_group(x: jax.Array, sizes: jax.Array, ragged: int, prefix: Sequence[int]) -> jax.Array:
    """Copies of an operand, [groups, *x.shape], each with zeros where the ragged dimension is of another group.

    A product with such copies needs no groups, since zeros add nothing.

    Args:
        x: an operand of a ragged product.
        sizes: sizes of the groups, [*prefix, groups] or [groups]: along the ragged dimension one follows the other.
        ragged: the dimension of `x` that is cut into groups.
        prefix: the dimensions of `x` that the leading dimensions of `sizes` belong to, if it has any.
    """
    group_ends = jnp.moveaxis(jnp.cumsum(sizes, -1, dtype=sizes.dtype), -1, 0)
    starts = jnp.concatenate([jnp.zeros_like(group_ends[:1]), group_ends[:-1]])
    shape = (group_ends.shape[0], *x.shape)
    prefix_dims = (0, *_shifted(prefix)) if sizes.ndim > 1 else (0,)
    position = lax.broadcasted_iota(sizes.dtype, shape, ragged + 1)
    # Dimensions before the ragged one are in the order of the sizes, which need not be rising.
    order = sorted(range(len(prefix_dims)), key=lambda n: prefix_dims[n])
    low, high = (
        lax.broadcast_in_dim(bounds.transpose(order), shape, sorted(prefix_dims)) for bounds in (starts, group_ends)
    )
    return jnp.where((low <= position) & (position < high), x, jnp.zeros((), x.dtype))


def _preceding(dims: Sequence[int], dim: int) -> Sequence[int]:
    """Those of some dimensions that are before one of them."""
    return list(dims)[: list(dims).index(dim)]


def _shifted(dims: Sequence[int]) -> list[int]:
    """Dimensions of an operand with a dimension of groups put first."""
    return [d + 1 for d in dims]


DotDims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general_rule(
    ctx: Context,
    lhs: Tensor,
    rhs: Tensor,
    *,
    dimension_numbers: DotDims,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Tensor:
    """Any contraction of JAX, as a product of groups of matrices [batch, free, contracted] · [batch, contracted, free].

    Dimensions of one kind are joined, and separated again in the result; parameters are those of `lax.dot_general`.
    """
    # `preferred_element_type` equals the result's dtype; shardings have no meaning on one IPU.
    (aval,) = ctx.out_avals
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    a, lhs_free = _matrices(lhs, lhs_batch, lhs_contract, contracted_last=True)
    b, rhs_free = _matrices(rhs, rhs_batch, rhs_contract, contracted_last=False)
    out = matmul(
        ctx.builder, a, b, out_dtype=aval.dtype, partials_dtype=_partials_dtype(ctx, lhs, rhs), precision=precision
    )
    return out.reshape((*(lhs.shape[d] for d in lhs_batch), *lhs_free, *rhs_free)) if aval.shape else out.reshape(())


def _matrices(
    x: Tensor, batch: Sequence[int], contract: Sequence[int], *, contracted_last: bool
) -> tuple[Tensor, tuple[int, ...]]:
    """View [groups, rows, contracted] (or [groups, contracted, columns]) of an operand, and its free sizes."""
    free = [d for d in range(x.ndim) if d not in batch and d not in contract]
    order = (*batch, *free, *contract) if contracted_last else (*batch, *contract, *free)
    sizes = [prod(x.shape[d] for d in dims) for dims in (batch, free, contract)]
    groups, rows, depth = sizes
    shape = (groups, rows, depth) if contracted_last else (groups, depth, rows)
    return x.transpose(order).reshape(shape), tuple(x.shape[d] for d in free)


def conv_general_dilated_rule(
    ctx: Context, x: Tensor, w: Tensor, *, preferred_element_type: Any, out_sharding: Any, **params: Any
) -> Tensor:
    """Any convolution, with the parameters of `lax.conv_general_dilated`."""
    # `preferred_element_type` equals the result's dtype; shardings have no meaning on one IPU.
    dtypes = {"out_dtype": ctx.out_avals[0].dtype, "partials_dtype": _partials_dtype(ctx, x, w)}
    return convolution(ctx.builder, x, w, **dtypes, **params)


def _partials_dtype(ctx: Context, *operands: Tensor) -> str | None:
    """Dtype of partials that the user chose for products in half precision; None for other products."""
    # A result wider than its operands (`preferred_element_type`) asks for wide partials.
    is_half = all(dtype == np.float16 for dtype in (ctx.out_avals[0].dtype, *(x.dtype for x in operands)))
    return ctx.options.partials if is_half else None


RULES: dict[str, Rule] = {
    "ragged_dot_general": ragged_dot_general_rule,
    "dot_general": dot_general_rule,
    "conv_general_dilated": conv_general_dilated_rule,
}
