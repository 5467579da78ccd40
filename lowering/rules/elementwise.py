"""Rules for elementwise primitives: one rule for all, by the cost table of popops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.jax_compat import Primitive
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.lowering.popops.elementwise_cycles import OP_COSTS
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import element_bytes


def elementwise_rule(ctx: Context, *operands: Tensor, **params: Any) -> Tensor:
    """Any elementwise primitive: its own `bind` on each block."""
    (aval,) = ctx.out_avals
    op = bound_op(ctx.primitive, tuple(sorted(params.items())), aval.dtype)
    return elementwise(ctx.graph, op, operands, ctx.prog, ctx.name, ctx.into_tensor)


@lru_cache(maxsize=4096)
def bound_op(primitive: Primitive, params: tuple[tuple[str, Hashable], ...], out_dtype: np.dtype) -> Op:
    """The operation of a primitive with its parameters."""
    return Op(primitive.name, partial(primitive.bind, **dict(params)), out_dtype, (primitive.name, params))


def convert_element_type_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor:
    """A cast; nothing at all when only weakness of the type changes."""
    return x if params["new_dtype"] == x.dtype else elementwise_rule(ctx, x, **params)


def bitcast_convert_type_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor | Sequence[Tensor]:
    """A reinterpretation of bits; between widths, which adds or drops a dimension, it is no elementwise operation."""
    same_width = element_bytes(params["new_dtype"]) == element_bytes(x.dtype)
    return elementwise_rule(ctx, x, **params) if same_width else fallback(ctx, x)


RULES: dict[str, Rule] = {name: elementwise_rule for name in OP_COSTS if name != "copy"}
RULES["convert_element_type"] = convert_element_type_rule
RULES["bitcast_convert_type"] = bitcast_convert_type_rule
