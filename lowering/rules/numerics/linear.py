"""Rules for contractions and convolutions: views in the canonical order of poplin, and its planner."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.poplin import convolution, matmul
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.tensor import Tensor

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
    """Any contraction, as groups of matrices: batch dimensions joined, then free, then contracted ones."""
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


RULES: dict[str, Rule] = {"dot_general": dot_general_rule, "conv_general_dilated": conv_general_dilated_rule}
