"""Primitives that are other operations one after the other: traced, inlined and lowered like the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import trace
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.rules.base.context import Context
from ipujax.runtime.tensor import Tensor


def composed(ctx: Context, fun: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Lowers what a function of arrays does.

    Args:
        ctx: the surroundings of the equation that stands for it.
        fun: function of as many arrays as there are operands, with the equation's results.
        operands: tensors.

    Returns:
        One tensor for each result.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return ctx.lower_jaxpr(inline(trace(fun, shapes, {}, ()).jaxpr), operands, ctx.prog)
