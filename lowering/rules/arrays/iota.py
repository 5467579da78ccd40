"""Rule for rising numbers: one vector, broadcast to the shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ipujax.lowering.popops.maps.constants import iota
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor


def iota_rule(
    ctx: Context, *, dtype: Any, shape: Sequence[int], dimension: int, sharding: Any
) -> Tensor | Sequence[Tensor]:
    """Index along one dimension."""
    if not prod(shape):
        return fallback(ctx)
    numbers = iota(ctx.builder, dtype, shape[dimension])
    return numbers.broadcast_in_dim(tuple(shape), (dimension,))


RULES: dict[str, Rule] = {"iota": iota_rule}
