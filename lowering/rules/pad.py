"""Rule for padding; a crop is a view."""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.popops.pad import pad
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import is_key_dtype


def pad_rule(
    ctx: Context, x: Tensor, value: Tensor, *, padding_config: Sequence[tuple[int, int, int]]
) -> Tensor | Sequence[Tensor]:
    """Elements around and between those of a tensor."""
    (aval,) = ctx.out_avals
    config = [(low, high, interior) for low, high, interior in padding_config]
    if not x.size and not is_key_dtype(x.dtype):
        return value.broadcast_in_dim(aval.shape, ())
    if not aval.size or is_key_dtype(x.dtype):
        return fallback(ctx, x, value)
    if all(low <= 0 and high <= 0 and not interior for low, high, interior in config):
        starts, limits = [-low for low, _, _ in config], [n + c[1] for n, c in zip(x.shape, config, strict=True)]
        return x.slice(starts, limits)
    return pad(ctx.graph, x, value, config, aval.shape, ctx.prog, ctx.name)


RULES: dict[str, Rule] = {"pad": pad_rule}
