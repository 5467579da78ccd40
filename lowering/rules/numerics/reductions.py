"""Rules for reductions by a monoid or any function, indices of largest elements, and running results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.popops import CUMULATIVE, MONOIDS, cumulative, reduce_by_function
from ipujax.lowering.popops.reductions.arg_reduce import arg_reduce
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, Rule, bound, composed
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.lowering.rules.base.long_rows import long_cumulative, parts_of
from ipujax.runtime.tensor import Tensor


def arg_reduce_rule(ctx: Context, x: Tensor, *, axes: Sequence[int], index_dtype: Any) -> Tensor | Sequence[Tensor]:
    """Lowers `argmax` and `argmin` over one dimension."""
    if not x.size or len(axes) != 1:
        return fallback(ctx, x)
    return arg_reduce(ctx.builder, x, int(axes[0]), ctx.primitive.name, index_dtype)


def cumulative_rule(ctx: Context, x: Tensor, *, axis: int, reverse: bool) -> Tensor | Sequence[Tensor]:
    """Running results along one dimension, in parts where rows are long."""
    if not x.size:
        return fallback(ctx, x)
    parts = parts_of(ctx.graph, x.shape, axis, [x.dtype])
    if parts > 1:
        fun, _ = CUMULATIVE[ctx.primitive.name]
        return composed(ctx, partial(long_cumulative, fun=fun, axis=axis, reverse=reverse, parts=parts), [x])
    return cumulative(ctx.builder, x, axis, ctx.primitive.name, reverse)


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


RULES: dict[str, Rule] = {
    **{name: partial(reduce_rule, monoid=monoid) for name, monoid in MONOIDS.items()},
    "reduce": reduce_by_function_rule,
    "argmax": arg_reduce_rule,
    "argmin": arg_reduce_rule,
    **dict.fromkeys(CUMULATIVE, cumulative_rule),
}
