"""Rules for reductions by a monoid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.popops.reduce import reduce
from ipujax.runtime.tensor import Tensor


def reduce_rule(ctx: Context, x: Tensor, *, monoid: str, axes: Sequence[int], **params: Any) -> Tensor:
    """A reduction; `out_sharding`, the only other parameter, means nothing on one device."""
    del params
    return reduce(ctx.graph, x, tuple(axes), monoid, ctx.prog, ctx.name)


RULES: dict[str, Rule] = {
    f"reduce_{name}": partial(reduce_rule, monoid=monoid)
    for name, monoid in (
        ("sum", "add"),
        ("prod", "mul"),
        ("max", "max"),
        ("min", "min"),
        ("and", "and"),
        ("or", "or"),
        ("xor", "xor"),
    )
}
