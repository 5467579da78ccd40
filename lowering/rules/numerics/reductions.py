"""Rules for reductions by a monoid or any function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.popops import MONOIDS, reduce_by_function
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, Rule, bound
from ipujax.runtime.tensor import Tensor


def reduce_rule(ctx: Context, x: Tensor, *, monoid: str, axes: Sequence[int], **params: Any) -> Tensor:
    """Reduction by a monoid; a view over single elements, as at the end of the gradient of a broadcast bias."""
    out_shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if all(x.shape[d] == 1 for d in axes):
        return x.reshape(out_shape)
    return reduce(ctx.builder, x, tuple(axes), monoid)


def reduce_by_function_rule(
    ctx: Context, *operands: Tensor, dimensions: Sequence[int], jaxpr: ClosedJaxpr, **params: Any
) -> Sequence[Tensor]:
    """`lax.reduce` by a user's function, on one tensor or several together."""
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    if not arrays[0].size:
        return [start.broadcast_in_dim(aval.shape, ()) for start, aval in zip(starts, ctx.out_avals, strict=True)]
    last = arrays[0].ndim - len(dimensions)  # the reduced dimensions of a block are joined at its end
    fun = bound(ctx.primitive, dimensions=(last,), jaxpr=jaxpr, **params)
    axes = tuple(sorted(int(d) for d in dimensions))
    return reduce_by_function(ctx.builder, arrays, starts, axes, fun, len(jaxpr.eqns))


RULES: dict[str, Rule] = {name: partial(reduce_rule, monoid=monoid) for name, monoid in MONOIDS.items()}
RULES["reduce"] = reduce_by_function_rule
