"""Rules for slices whose place is known only when the program runs."""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.popops.dynamic import dynamic_slice, dynamic_update_slice
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.tensor import Tensor


def dynamic_slice_rule(ctx: Context, x: Tensor, *starts: Tensor, slice_sizes: Sequence[int]) -> Tensor:
    """A box of static sizes, read from a dynamic place."""
    sizes = tuple(slice_sizes)
    if 0 in sizes:
        return x.slice([0] * x.ndim, sizes)
    return dynamic_slice(ctx.graph, x, starts, sizes, ctx.prog, ctx.name)


def dynamic_update_slice_rule(ctx: Context, x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    """A copy with a box overwritten at a dynamic place."""
    if not update.size:
        return x
    if update.shape == x.shape:
        return update
    map_linearly(ctx.graph, update)
    return dynamic_update_slice(ctx.graph, x, update, starts, ctx.prog, ctx.name)


RULES: dict[str, Rule] = {
    "dynamic_slice": dynamic_slice_rule,
    "dynamic_update_slice": dynamic_update_slice_rule,
}
