"""Rules for operations of StableHLO without a counterpart in JAX: one vertex, priced where their work is known."""

from __future__ import annotations

from typing import Any

from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor


def module_operation_rule(
    ctx: Context, *operands: Tensor, work_of: str, flops: int | None, **params: Any
) -> list[Tensor]:
    """Runs the operation as one vertex."""
    return fallback(ctx, *operands, is_priced=bool(work_of) or flops is not None)


def opaque_call_rule(ctx: Context, *operands: Tensor, **params: Any) -> list[Tensor]:
    """Runs a call whose body is unknown as one vertex, without a price; its first operand is what it captured."""
    return fallback(ctx, *operands, is_priced=False)


RULES: dict[str, Rule] = {"module_operation": module_operation_rule, "opaque_call": opaque_call_rule}
