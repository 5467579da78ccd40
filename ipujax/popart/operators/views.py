"""Operators of ai.graphcore that select, reshape and make tensors.

Offsets of slices may be operands; sequences are copied by lengths and offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.onnx.front_end import OPERATORS
from ipujax.popart.operators.domain import graphcore
from ipujax.popart.tensor_info import of_onnx_number


def _starts(x: jax.Array, offsets: jax.Array, axes: Sequence[int]) -> list[Any]:
    # Offsets are UINT32 in PopART, signed in JAX, which clamps a slice that would leave x.
    flat = jnp.reshape(offsets, -1).astype(jnp.int32)
    starts: list[Any] = [jnp.int32(0)] * x.ndim
    for i, axis in enumerate(axes):
        starts[axis] = flat[i]
    return starts


def _sizes(x: jax.Array, axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    by_axis = dict(zip(axes, sizes, strict=True))
    return [by_axis.get(axis, n) for axis, n in enumerate(x.shape)]


@graphcore("DynamicSlice")
def dynamic_slice(
    x: jax.Array,
    offsets: jax.Array,
    place: Any = None,
    *,
    axes: Sequence[int],
    sizes: Sequence[int],
    noOverlap: int = 0,
) -> jax.Array:
    """Return the part of x at offsets along some axes; in the shape of `place`, which may lack axes of length 1."""
    part = jax.lax.dynamic_slice(x, _starts(x, offsets, axes), _sizes(x, axes, sizes))
    return part if place is None else part.reshape(place.shape)


@graphcore("DynamicUpdate")
def dynamic_update(
    x: jax.Array, offsets: jax.Array, part: jax.Array, *, axes: Sequence[int], sizes: Sequence[int], noOverlap: int = 0
) -> jax.Array:
    """Return x with another part at offsets; the part may lack axes of length 1."""
    update = part.astype(x.dtype).reshape(_sizes(x, axes, sizes))
    return jax.lax.dynamic_update_slice(x, update, _starts(x, offsets, axes))


@graphcore("DynamicAdd")
def dynamic_add(
    x: jax.Array, offsets: jax.Array, part: jax.Array, *, axes: Sequence[int], sizes: Sequence[int]
) -> jax.Array:
    """Return x with a part added at offsets."""
    starts = _starts(x, offsets, axes)
    all_sizes = _sizes(x, axes, sizes)
    before = jax.lax.dynamic_slice(x, starts, all_sizes)
    return jax.lax.dynamic_update_slice(x, before + part.reshape(all_sizes), starts)


@graphcore("DynamicZero")
def dynamic_zero(x: jax.Array, offsets: jax.Array, *, axes: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Return x with zeros at offsets."""
    zeros = jnp.zeros(_sizes(x, axes, sizes), x.dtype)
    return jax.lax.dynamic_update_slice(x, zeros, _starts(x, offsets, axes))


@graphcore("SequenceSlice")
def sequence_slice(
    source: jax.Array,
    target: jax.Array,
    lengths: jax.Array,
    source_offsets: jax.Array,
    target_offsets: jax.Array,
    *,
    zeroUnused: int = 0,
) -> jax.Array:
    """Return rows of the source at the places of the target that lengths and offsets name; later ones count."""
    rows = jnp.arange(target.shape[0])
    result = jnp.zeros_like(target) if zeroUnused else target
    for i in range(lengths.shape[0]):
        shift = rows - target_offsets[i].astype(jnp.int32)
        is_inside = (shift >= 0) & (shift < lengths[i].astype(jnp.int32))
        chosen = source[jnp.clip(source_offsets[i].astype(jnp.int32) + shift, 0, source.shape[0] - 1)]
        result = jnp.where(is_inside.reshape(-1, *[1] * (target.ndim - 1)), chosen, result)
    return result


@graphcore("Reshape")
def reshape(x: jax.Array, *, shape: Sequence[int]) -> jax.Array:
    """Return x with other dimensions: 0 is that of x in its place, −1 all remaining elements."""
    dims = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return jnp.reshape(x, dims)


@graphcore("Slice")
def slice_(x: jax.Array, *, ends: Sequence[int], starts: Sequence[int], axes: Sequence[int] = ()) -> jax.Array:
    """Return a part of x, from `starts` to before `ends` of the axes, of the first ones where none are named."""
    index = [slice(None)] * x.ndim
    for axis, start, stop in zip(axes or range(len(starts)), starts, ends, strict=True):
        index[axis] = slice(start, stop)
    return x[tuple(index)]


@graphcore("Subsample")
def subsample(x: jax.Array, *, strides: Sequence[int]) -> jax.Array:
    """Return every n-th element of each axis."""
    return x[tuple(slice(None, None, n) for n in strides)]


@graphcore("Reverse")
def reverse(x: jax.Array, *, dimensions: Sequence[int] = ()) -> jax.Array:
    """Return x backwards along some axes."""
    return jnp.flip(x, tuple(dimensions))


@graphcore("DepthToSpace")
def depth_to_space(x: jax.Array, *, blocksize: int, mode: str = "DCR") -> jax.Array:
    """Return channels rearranged into blocks of the image."""
    batch, channels, height, width = x.shape
    inner = channels // blocksize**2
    if mode == "DCR":
        blocks = x.reshape(batch, blocksize, blocksize, inner, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(batch, inner, blocksize, blocksize, height, width).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(batch, inner, height * blocksize, width * blocksize)


@graphcore("Init")
def init(*, shape: Sequence[int], data_type: int, init_type: int, batch_axis: int = -1) -> jax.Array:
    """Return zeros, for memory that PopART leaves undefined too."""
    return jnp.zeros(tuple(shape), of_onnx_number(data_type))


@graphcore("ScanSlice")
def scan_slice(x: jax.Array, *, axis: int) -> jax.Array:
    """Return a slice of a scan with the scanned axis, of length 1."""
    return jnp.expand_dims(x, axis)


@graphcore("ScanJoin")
def scan_join(x: jax.Array, *, axis: int) -> jax.Array:
    """Return results of a scan's iterations, [iterations, …], joined along an axis of each."""
    place = axis % (x.ndim - 1)
    shape = list(x.shape[1:])
    shape[place] *= x.shape[0]
    return jnp.moveaxis(x, 0, place).reshape(shape)


@graphcore("Resize")
def resize_of_opset_10(x: jax.Array, scales: Any, *, mode: str = "nearest", nearest_mode: str) -> Any:
    """Return x resized with a mode that opset 10 does not have, at the positions of later opsets."""
    return OPERATORS["", "Resize"](x, None, scales, mode=mode, nearest_mode=nearest_mode)


@graphcore("TensorRemap")
def tensor_remap(x: jax.Array, *, remap_type: int = 0) -> jax.Array:
    """Return x; the compiler chooses layouts."""
    return x


@graphcore("CacheLoad")
def cache_load(x: jax.Array) -> jax.Array:
    """Return x; the compiler loads a value from streaming memory where it is read."""
    return x


@graphcore("CacheStore")
def cache_store(x: jax.Array) -> jax.Array:
    """Return x."""
    return x


@graphcore("CopyVarUpdate")
def copy_var_update(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return y, the new value of x."""
    return y
