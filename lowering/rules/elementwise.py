"""Rules for elementwise primitives: one rule for all, by the cost table of popops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Literal, Primitive
from ipujax.lowering.popops import OP_COSTS, Op, RowFunction, each_row
from ipujax.lowering.popops.elementwise import elementwise
from ipujax.lowering.rules.context import Context, Rule
from ipujax.lowering.rules.fallback import fallback
from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor import Tensor


def elementwise_rule(ctx: Context, *operands: Tensor, **params: Any) -> Tensor:
    """Any elementwise primitive: its own `bind` on each block."""
    (aval,) = ctx.out_avals
    op = bound_op(ctx.primitive, tuple(sorted(params.items())), aval.dtype)
    return elementwise(ctx.graph, op, operands, ctx.prog, ctx.name, ctx.into_tensor)


@remembered
def bound_op(primitive: Primitive, params: tuple[tuple[str, Hashable], ...], out_dtype: np.dtype) -> Op:
    """The operation of a primitive with its parameters."""
    return Op(primitive.name, partial(primitive.bind, **dict(params)), out_dtype, (primitive.name, params))


def convert_element_type_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor:
    """A cast; nothing at all when only weakness of the type changes."""
    return x if params["new_dtype"] == x.dtype else elementwise_rule(ctx, x, **params)


def quotient_rule(ctx: Context, x: Tensor, y: Tensor, **params: Any) -> Tensor:
    """A division; nothing at all by the literal 1, as in the mean over one replica."""
    return x if _is_one(ctx, 1, x) else elementwise_rule(ctx, x, y, **params)


def product_rule(ctx: Context, x: Tensor, y: Tensor, **params: Any) -> Tensor:
    """A multiplication; nothing at all by the literal 1."""
    return x if _is_one(ctx, 1, x) else y if _is_one(ctx, 0, y) else elementwise_rule(ctx, x, y, **params)


def integer_pow_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor:
    """A power; nothing at all when it is the first, as in the first moment of Optax's Adam."""
    return x if params["y"] == 1 else elementwise_rule(ctx, x, **params)


def _is_one(ctx: Context, operand: int, other: Tensor) -> bool:
    """Whether an operand is the literal 1, and the other one is the result."""
    atom, (aval,) = ctx.equation.invars[operand], ctx.out_avals
    return isinstance(atom, Literal) and bool(np.all(atom.val == 1)) and other.shape == aval.shape


def bitcast_convert_type_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor | Sequence[Tensor]:
    """A reinterpretation of bits; between widths, which adds or drops a dimension, it is no elementwise operation."""
    (aval,) = ctx.out_avals
    if aval.shape == x.shape:
        return elementwise_rule(ctx, x, **params)
    if not aval.size:
        return fallback(ctx, x)
    parts = aval.shape[-1] if aval.ndim > x.ndim else 1
    rows = x.reshape((*x.shape, 1)) if aval.ndim > x.ndim else x
    fun = _bitcast_of_rows(aval.dtype, aval.ndim > x.ndim)
    (out,) = each_row(ctx.graph, "Bitcast", rows, rows.ndim - 1, fun, [(parts, aval.dtype)], ctx.prog, ctx.name)
    return out.reshape(aval.shape)


@remembered
def _bitcast_of_rows(dtype: Any, splits: bool) -> RowFunction:
    """From rows of one element to rows of its parts, or back."""
    if splits:
        return lambda x: (lax.bitcast_convert_type(lax.squeeze(x, (x.ndim - 1,)), dtype),)
    return lambda x: (lax.expand_dims(lax.bitcast_convert_type(x, dtype), (x.ndim - 1,)),)


RULES: dict[str, Rule] = {name: elementwise_rule for name in OP_COSTS if name != "copy"}
RULES |= {"div": quotient_rule, "mul": product_rule, "integer_pow": integer_pow_rule}
RULES["convert_element_type"] = convert_element_type_rule
RULES["bitcast_convert_type"] = bitcast_convert_type_rule
