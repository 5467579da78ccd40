"""Rules for the index of the largest and smallest element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.popops.reductions.arg_reduce import arg_reduce
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor


def arg_reduce_rule(ctx: Context, x: Tensor, *, axes: Sequence[int], index_dtype: Any) -> Tensor | Sequence[Tensor]:
    """Lowers `argmax` and `argmin` over one dimension."""
    if not x.size or len(axes) != 1:
        return fallback(ctx, x)
    return arg_reduce(ctx.builder, x, int(axes[0]), ctx.primitive.name, index_dtype)


RULES: dict[str, Rule] = {"argmax": arg_reduce_rule, "argmin": arg_reduce_rule}
