"""Rules for running sums, products, extremes and log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ipujax.lowering.popops import CUMULATIVE, cumulative
from ipujax.lowering.rules.base.composed import composed
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.lowering.rules.base.long_rows import long_cumulative, parts_of
from ipujax.runtime.tensor import Tensor


def cumulative_rule(ctx: Context, x: Tensor, *, axis: int, reverse: bool) -> Tensor | Sequence[Tensor]:
    """Running results along one dimension, in parts where rows are long."""
    if not x.size:
        return fallback(ctx, x)
    parts = parts_of(ctx.graph, x.shape, axis, [x.dtype])
    if parts > 1:
        fun, _ = CUMULATIVE[ctx.primitive.name]
        return composed(ctx, partial(long_cumulative, fun=fun, axis=axis, reverse=reverse, parts=parts), [x])
    return cumulative(ctx.builder, x, axis, ctx.primitive.name, reverse)


RULES: dict[str, Rule] = dict.fromkeys(CUMULATIVE, cumulative_rule)
