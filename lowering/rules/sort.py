"""Rules for sorting rows and for their largest elements."""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.popops.rows import sort, top_k
from ipujax.runtime.tensor import Tensor


def sort_rule(ctx: Context, *operands: Tensor, dimension: int, is_stable: bool, num_keys: int) -> Sequence[Tensor]:
    """Several tensors sorted together along one dimension."""
    if not operands[0].size:
        return fallback(ctx, *operands)
    return sort(ctx.graph, operands, dimension, num_keys, is_stable, ctx.prog, ctx.name)


def top_k_rule(ctx: Context, x: Tensor, *, k: int, axis: int) -> Sequence[Tensor]:
    """The largest elements along one dimension, and where they are."""
    if not x.size or not k:
        return fallback(ctx, x)
    return top_k(ctx.graph, x, k, axis, ctx.prog, ctx.name)


RULES: dict[str, Rule] = {"sort": sort_rule, "top_k": top_k_rule}
