"""Operators that move elements without looking at them: reshape, transpose, slice, pad, split, join."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import (
    MAX_SIZE,
    Array,
    Optional,
    Static,
    Value,
    axes_of,
    axis_of,
    ceil_div,
    index_range,
    integers,
    refuse_outside,
    size_of,
)
from ipujax.onnx.registry import operator


@operator("Reshape")
def reshape(x: Value, shape: Static, *, allowzero: int = 0) -> Array:
    """Array in a static shape; 0 keeps an axis, unless `allowzero`, −1 is inferred."""
    sizes = integers(shape)
    # A 0 copies the size of the operand at the same position.
    full = sizes if allowzero else tuple(size or np.shape(x)[axis] for axis, size in enumerate(sizes))
    return jnp.reshape(x, full)


@operator("Flatten")
def flatten(x: Array, *, axis: int = 1) -> Array:
    """Matrix of the axes before one and those from it on."""
    # An axis behind the last one makes rows of one element.
    split = axis_of(axis, x.ndim) if axis < 0 else axis_of(axis, x.ndim + 1)
    return x.reshape(size_of(x.shape[:split]), size_of(x.shape[split:]))


@operator("Squeeze")
def squeeze(x: Value, axes: Static | None = None) -> Array:
    return jnp.squeeze(x, None if axes is None else integers(axes))


@operator("Unsqueeze")
def unsqueeze(x: Value, axes: Static) -> Array:
    return jnp.expand_dims(x, integers(axes))


@operator("Transpose")
def transpose(x: Value, *, perm: Sequence[int] | None = None) -> Array:
    return jnp.transpose(x, perm)


@operator("Concat")
def concatenate(*inputs: Value, axis: int) -> Array:
    return jnp.concatenate(list(map(jnp.asarray, inputs)), axis)


@operator("Split")
def split(
    x: Array, split: Static | None = None, *, axis: int = 0, num_outputs: int | None = None, output_count: int = 1
) -> tuple[Array, ...]:
    """Parts of an array along one axis, of static sizes or of equal ones, of which the last may be smaller."""
    along = axis_of(axis, x.ndim)
    extent = x.shape[along]
    parts = output_count if num_outputs is None else num_outputs
    refuse_outside(np.asarray(parts), output_count, output_count, "the number of parts,")
    if split is not None:
        return tuple(jnp.split(x, stops_of(integers(split), extent, along), along))
    if num_outputs is None and extent % parts:
        raise OutsideError(f"axis {along} has no equal parts", expected=f"a multiple of {parts}", got=extent)
    each = ceil_div(extent, parts)
    return tuple(jnp.split(x, [min(each * part, extent) for part in range(1, parts)], along))


def stops_of(sizes: Sequence[int], extent: int, axis: int) -> list[int]:
    """Return the ends of all parts of an axis but the last; refuse sizes that do not add up to the axis."""
    if sum(sizes) != extent or min(sizes, default=0) < 0:
        raise OutsideError(f"sizes of parts do not add up to axis {axis}", expected=extent, got=list(sizes))
    return [int(stop) for stop in np.cumsum(sizes)[:-1]]


@operator("Slice")
def slice_array(
    x: Array, starts: Static, ends: Static, axes: Static | None = None, steps: Static | None = None
) -> Array:
    """Part of an array between static bounds, which count from the end where negative, and are limited to the axis."""
    begins = integers(starts)
    stops = integers(ends)
    chosen = range(len(begins)) if axes is None else axes_of(integers(axes), x.ndim)
    strides = (1,) * len(begins) if steps is None else integers(steps)
    slices = [slice(None)] * x.ndim
    for axis, begin, stop, stride in zip(chosen, begins, stops, strides, strict=True):
        size = x.shape[axis]
        longest = max(1, size)  # a longer stride takes one element too, and XLA adds it to the start
        # Backward, a start before the first element is the first one; Python has no elements there.
        first = -size if stride < 0 and begin < -size else begin
        slices[axis] = slice(first, stop, min(max(stride, -longest), longest))
    return x[tuple(slices)]


@operator("Expand")
def expand(x: Value, shape: Static) -> Array:
    """Array broadcast with a static shape; both may have axes of size one."""
    return jnp.broadcast_to(x, np.broadcast_shapes(np.shape(x), integers(shape)))


@operator("Tile")
def tile(x: Value, repeats: Static) -> Array:
    counts = integers(repeats)
    refuse_outside(np.asarray(counts), 0, MAX_SIZE, "repeat")
    return jnp.tile(x, counts)


@operator("Pad")
def pad(
    x: Array, pads: Static, constant_value: Optional = None, axes: Static | None = None, *, mode: str = "constant"
) -> Array:
    """Array with elements added at the ends of axes, or cut off where a static pad is negative."""
    amounts = integers(pads)
    chosen = range(x.ndim) if axes is None else axes_of(integers(axes), x.ndim)
    widths = [(0, 0)] * x.ndim
    for axis, before, after in zip(chosen, amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :], strict=True):
        widths[axis] = (before, after)
    if mode == "constant":
        fill = 0 if constant_value is None else jnp.ravel(constant_value)[0]
        return lax.pad(x, jnp.asarray(fill, x.dtype), [(before, after, 0) for before, after in widths])
    cropped = x[
        tuple(slice(max(0, -low), size - max(0, -high)) for size, (low, high) in zip(x.shape, widths, strict=True))
    ]
    return jnp.pad(cropped, [(max(0, low), max(0, high)) for low, high in widths], mode=mode)


@operator("CenterCropPad")
def center_crop_pad(x: Array, shape: Static, *, axes: Sequence[int] | None = None) -> Array:
    """Middle of an array, or the array in the middle of zeros, in a static shape."""
    chosen = axes_of(range(x.ndim) if axes is None else axes, x.ndim)
    configuration = [(0, 0, 0)] * x.ndim
    for axis, size in zip(chosen, integers(shape), strict=True):
        extra = size - x.shape[axis]
        # an odd element is cut off at the end, or added there
        before = extra // 2 if extra >= 0 else -(-extra // 2)
        configuration[axis] = (before, extra - before, 0)
    return lax.pad(x, np.zeros((), x.dtype), configuration)


@operator("DepthToSpace")
def depth_to_space(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """[N, C, H, W] with channels by_batch into blocks of the image."""
    batch, channels, height, width = x.shape
    depth = channels // blocksize**2
    if mode == "DCR":
        parts = x.reshape(batch, blocksize, blocksize, depth, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(batch, depth, blocksize, blocksize, height, width).transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(batch, depth, height * blocksize, width * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """[N, C, H, W] with blocks of the image by_batch into channels."""
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.transpose(order).reshape(batch, channels * blocksize**2, height // blocksize, width // blocksize)


@operator("ReverseSequence")
def reverse_sequence(x: Array, sequence_lens: Value, *, batch_axis: int = 1, time_axis: int = 0) -> Array:
    """Array with the first elements of each sequence reversed in time."""
    by_batch = jnp.moveaxis(x, (batch_axis, time_axis), (0, 1))
    lengths = checked_lengths(sequence_lens, by_batch.shape[1])
    return jnp.moveaxis(reversed_in_time(by_batch, lengths), (0, 1), (batch_axis, time_axis))


def checked_lengths(lengths: Value, time: int) -> Array:
    """Return lengths of sequences; refuse static ones beyond the time that there is."""
    refuse_outside(lengths, 0, time, "length")
    return jnp.asarray(lengths)


def reversed_in_time(x: Array, lengths: Array) -> Array:
    """Return [N, time, …] with the first `lengths` elements of each sequence reversed."""
    time = index_range(x.shape[1])
    # Elements behind the length of a sequence keep their places.
    index = jnp.where(time < lengths[:, None], lengths[:, None] - 1 - time, time)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
