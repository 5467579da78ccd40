"""Lowering of primitives that are a sequence of other operations: traced and inlined like the user's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import trace
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.rules.base.context import Context
from ipujax.runtime.tensor import Tensor


def composed(ctx: Context, fun: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Lowers a function of arrays with the equation's results on the operands; one tensor for each result."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return ctx.lower_jaxpr(inline(trace(fun, shapes, {}, ()).jaxpr), operands, ctx.prog)
