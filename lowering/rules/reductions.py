"""Rules for reductions by a monoid, and for collectives over an axis that `vmap` has made a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.popops.reduce import reduce
from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import Tensor


def reduce_rule(ctx: Context, x: Tensor, *, monoid: str, axes: Sequence[int], **params: Any) -> Tensor:
    """A reduction; `out_sharding`, the only other parameter, means nothing on one device."""
    del params
    return reduce(ctx.graph, x, tuple(axes), monoid, ctx.prog, ctx.name)


def collective_rule(ctx: Context, x: Tensor, *, monoid: str, axes: Sequence[int | str], **params: Any) -> Tensor:
    """`psum` and its like under `vmap(axis_name=...)`: a reduction over dimensions, or none at all.

    Raises:
        GraphError: for an axis that is no dimension, as those of replicas are.
    """
    del params  # vmap refuses `axis_index_groups`
    names = [axis for axis in axes if isinstance(axis, str)]
    if names:
        what = f"{ctx.primitive.name} over the axis {names[0]!r}, which is no dimension of this program"
        raise GraphError(what, where=ctx.graph.origin, hint=f"jax.vmap(..., axis_name={names[0]!r})")
    dims = tuple(axis for axis in axes if not isinstance(axis, str))
    return reduce(ctx.graph, x, dims, monoid, ctx.prog, ctx.name) if dims else x


_COLLECTIVES: dict[str, Rule] = {
    f"p{name}": partial(collective_rule, monoid=monoid)
    for name, monoid in (("sum", "add"), ("max", "max"), ("min", "min"))
}

RULES: dict[str, Rule] = _COLLECTIVES | {
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
