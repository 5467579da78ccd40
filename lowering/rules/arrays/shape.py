"""Rules for primitives that only rearrange elements: views, without cost until they are used.

Rising numbers are one vector, broadcast to the shape. Padding copies; a crop is a view, and so are padded keys, for
which there is no codelet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.popops.maps.constants import iota
from ipujax.lowering.popops.maps.pad import pad
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor, concat, is_key_dtype


def iota_rule(
    ctx: Context, *, dtype: Any, shape: Sequence[int], dimension: int, sharding: Any
) -> Tensor | Sequence[Tensor]:
    """Adds the numbers 0, 1, … along one dimension, as `lax.iota`; a view repeats them along the others."""
    if not prod(shape):
        return fallback(ctx)
    numbers = iota(ctx.builder, dtype, shape[dimension])
    return numbers.broadcast_in_dim(tuple(shape), (dimension,))


Config = Sequence[tuple[int, int, int]]


def pad_rule(
    ctx: Context, x: Tensor, value: Tensor, *, padding_config: Sequence[tuple[int, int, int]]
) -> Tensor | Sequence[Tensor]:
    """Padding around and between the elements of a tensor; where it only removes elements, a view of the others.

    Args:
        ctx: the equation.
        x: the tensor.
        value: value of the padding, a scalar.
        padding_config: along each dimension the elements before, after and between each two; < 0 cuts off.
    """
    (aval,) = ctx.out_avals
    config = [(low, high, interior) for low, high, interior in padding_config]
    if not x.size or not aval.size:  # padding alone
        return value.broadcast_in_dim(aval.shape, ())
    if all(low <= 0 and high <= 0 and not interior for low, high, interior in config):
        starts = [-low for low, _, _ in config]
        limits = [n + high for n, (_, high, _) in zip(x.shape, config, strict=True)]
        return x.slice(starts, limits)
    if is_key_dtype(x.dtype):
        return _padded_view(x, value, config)
    return pad(ctx.builder, x, value, config, aval.shape)


def _padded_view(x: Tensor, value: Tensor, config: Config) -> Tensor:
    """Padded tensor as a view of it and of the padding, for dtypes without a codelet; costly to read if it has gaps.

    Args:
        x: the tensor.
        value: value of the padding, a scalar.
        config: along each dimension the elements before, after, and between each two.
    """
    # Along each dimension: gaps behind the elements but the last, then edges; negative ones are cut off.
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


def identity_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """The operands themselves: values are never overwritten, so a copy is as good."""
    return operands


def reshape_rule(
    ctx: Context, x: Tensor, *, new_sizes: Sequence[int], dimensions: Sequence[int] | None, sharding: None
) -> Tensor:
    x = x if dimensions is None else x.transpose(dimensions)  # set by the gradient of a depthwise convolution
    return x.reshape(tuple(new_sizes))


def broadcast_in_dim_rule(
    ctx: Context, x: Tensor, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: None
) -> Tensor:
    return x.broadcast_in_dim(tuple(shape), tuple(int(d) for d in broadcast_dimensions))


def transpose_rule(ctx: Context, x: Tensor, *, permutation: Sequence[int]) -> Tensor:
    return x.transpose(tuple(permutation))


def squeeze_rule(ctx: Context, x: Tensor, *, dimensions: Sequence[int]) -> Tensor:
    return x.reshape(tuple(n for d, n in enumerate(x.shape) if d not in dimensions))


def rev_rule(ctx: Context, x: Tensor, *, dimensions: Sequence[int]) -> Tensor:
    return x.reverse(tuple(dimensions))


def slice_rule(
    ctx: Context,
    x: Tensor,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> Tensor:
    """View of a part at fixed positions; strides are 1 where None."""
    return x.slice(tuple(start_indices), tuple(limit_indices), None if strides is None else tuple(strides))


def concatenate_rule(ctx: Context, *operands: Tensor, dimension: int) -> Tensor:
    return concat(operands, dimension)


def stack_rule(ctx: Context, *operands: Tensor, axis: int) -> Tensor:
    return concat([x.expand_dims(axis) for x in operands], axis)


def unstack_rule(ctx: Context, x: Tensor, *, axis: int) -> Sequence[Tensor]:
    return [x[(slice(None),) * axis + (i,)] for i in range(x.shape[axis])]


def split_rule(ctx: Context, x: Tensor, *, sizes: Sequence[int], axis: int) -> Sequence[Tensor]:
    bounds = np.cumsum([0, *sizes]).tolist()
    return [x[(slice(None),) * axis + (slice(a, b),)] for a, b in pairwise(bounds)]


def tile_rule(ctx: Context, x: Tensor, *, reps: Sequence[int]) -> Tensor:
    """View of an array repeated `reps` times along each dimension, as `jnp.tile`."""
    (aval,) = ctx.out_avals
    shape = (1,) * (len(reps) - x.ndim) + x.shape
    # A dimension of repetitions before each of elements, joined with it at last.
    tiled = [n for pair in zip(reps, shape, strict=True) for n in pair]
    element_dims = tuple(2 * d + 1 for d in range(len(shape)))
    assert prod(tiled) == prod(aval.shape)
    return x.reshape(shape).broadcast_in_dim(tuple(tiled), element_dims).reshape(aval.shape)


def empty2_rule(ctx: Context, *, dtype: Any, memory_space: Any) -> Tensor | Sequence[Tensor]:
    """Scalar without a defined value, for residuals of branches not taken: zero, as in XLA."""
    return fallback(ctx) if is_key_dtype(dtype) else ctx.graph.add_constant(np.zeros((), dtype), ctx.name)


def dce_sink_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """Keeps an operand from being dropped as dead code, and does nothing with it."""
    return ()


RULES: dict[str, Rule] = {
    "iota": iota_rule,
    "pad": pad_rule,
    "dce_sink": dce_sink_rule,
    "reshape": reshape_rule,
    "broadcast_in_dim": broadcast_in_dim_rule,
    "transpose": transpose_rule,
    "squeeze": squeeze_rule,
    "rev": rev_rule,
    "slice": slice_rule,
    "concatenate": concatenate_rule,
    "stack": stack_rule,
    "unstack": unstack_rule,
    "split": split_rule,
    "tile": tile_rule,
    "empty2": empty2_rule,
    "copy": identity_rule,
    "stop_gradient": identity_rule,
    "optimization_barrier": identity_rule,
    "name": identity_rule,
    "device_put": identity_rule,
    "sharding_constraint": identity_rule,
    "shard_alike": identity_rule,
    "layout_constraint": identity_rule,
    "xla_metadata_value": identity_rule,
    "reshard": identity_rule,
}
