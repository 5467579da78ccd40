"""Rule for padding; a crop is a view, and so are padded keys, for which there is no codelet."""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.popops.maps.pad import pad
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.tensor import Tensor, concat, is_key_dtype

Config = Sequence[tuple[int, int, int]]


def pad_rule(
    ctx: Context, x: Tensor, value: Tensor, *, padding_config: Sequence[tuple[int, int, int]]
) -> Tensor | Sequence[Tensor]:
    """Padding around and between the elements of a tensor."""
    (aval,) = ctx.out_avals
    config = [(low, high, interior) for low, high, interior in padding_config]
    if not x.size or not aval.size:
        return value.broadcast_in_dim(aval.shape, ())
    if all(low <= 0 and high <= 0 and not interior for low, high, interior in config):
        starts = [-low for low, _, _ in config]
        limits = [n + high for n, (_, high, _) in zip(x.shape, config, strict=True)]
        return x.slice(starts, limits)
    if is_key_dtype(x.dtype):
        return _padded_view(x, value, config)
    return pad(ctx.builder, x, value, config, aval.shape)


def _padded_view(x: Tensor, value: Tensor, config: Config) -> Tensor:
    """Padded tensor as a view, which is costly to read where there are gaps."""
    # Along each dimension: gaps behind the elements but the last, then edges, then those that are negative cut off.
    for d, (low, high, interior) in enumerate(config):
        outer = x.shape[:d]
        n = x.shape[d]
        inner = x.shape[d + 1 :]
        gaps = value.broadcast_in_dim((*outer, n, interior, *inner), ())
        x = concat([x.expand_dims(d + 1), gaps], d + 1).reshape((*outer, n * (interior + 1), *inner))
        x = x[(slice(None),) * d + (slice(0, n * (interior + 1) - interior),)]
        edges = [value.broadcast_in_dim((*outer, max(0, width), *inner), ()) for width in (low, high)]
        x = concat([edges[0], x, edges[1]], d)
        x = x[(slice(None),) * d + (slice(max(0, -low), x.shape[d] - max(0, -high)),)]
    return x


RULES: dict[str, Rule] = {"pad": pad_rule}
