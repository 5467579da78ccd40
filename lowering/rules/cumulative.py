"""Rules for running sums, products, extremes and log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.popops.rows import CUMULATIVE, cumulative
from ipujax.runtime.tensor import Tensor


def cumulative_rule(ctx: Context, x: Tensor, *, axis: int, reverse: bool) -> Tensor | Sequence[Tensor]:
    """Running results along one dimension."""
    if not x.size:
        return fallback(ctx, x)
    return cumulative(ctx.graph, x, axis, ctx.primitive.name, reverse, ctx.prog, ctx.name)


RULES: dict[str, Rule] = dict.fromkeys(CUMULATIVE, cumulative_rule)
