"""Pooling over sliding windows, over whole images, and its partial inverse. Layouts are N C spatial.

Convolutions share the windows that slide over the spatial axes of an array.
Source: ONNX operators Conv, MaxPool and AveragePool for the formulas of padding and of result sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.element_types import index_dtype
from ipujax.onnx.onnx_errors import OutsideError, check_table
from ipujax.onnx.operators.operand_types import (
    MAX_SIZE,
    Array,
    Optional,
    Value,
    ceil_div,
    index_range,
    integers,
    numpy_for,
    refuse_outside,
    size_of,
)
from ipujax.onnx.registry import is_static, operator, static


@dataclass(frozen=True, slots=True)
class Windows:
    """Positions of windows over spatial axes; one entry an axis in each tuple.

    Args:
        sizes: extents of the axes, without padding.
        kernel: elements of a window.
        strides: elements between two windows.
        dilations: elements between two elements of a window.
        before: padding before the first element.
        after: padding after the last one, as the node gives it.
        counts: windows.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.sizes)

    def padding(self) -> list[tuple[int, int]]:
        """Padding of each axis so that exactly `counts` windows fit; negative where elements are left over."""
        return [
            (before, (count - 1) * stride + dilation * (kernel - 1) + 1 - size - before)
            for size, kernel, stride, dilation, before, count in zip(
                self.sizes, self.kernel, self.strides, self.dilations, self.before, self.counts, strict=True
            )
        ]

    def positions(self, axis: int) -> np.ndarray:
        """Return the element of an axis at [window, element of the window]; negative or too large in the padding."""
        check_table(max(1, self.counts[axis]) * self.kernel[axis], f"windows on spatial axis {axis}")
        starts = np.arange(self.counts[axis]) * self.strides[axis] - self.before[axis]
        return starts[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]

    def elements(self, include_padding: bool) -> Value:
        """Return how many elements each window has, shape `counts`; those of the node's padding on request."""
        xp = numpy_for(size_of(self.counts))
        result: Value = np.ones(())
        for axis in range(self.rank):
            positions = self.positions(axis)
            low = -self.before[axis] if include_padding else 0
            high = self.sizes[axis] + (self.after[axis] if include_padding else 0)
            inside = np.sum((positions >= low) & (positions < high), axis=1)
            result = xp.multiply(result[..., None], inside)
        return result


def refuse_long(*extents: int) -> None:
    """Refuse extents and pads beyond 32 bits: JAX computes shapes with 64, which wrap around."""
    refuse_outside(np.asarray(extents, object), -MAX_SIZE, MAX_SIZE, "extent or padding")


def slide(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Windows:
    """Return the windows that a node's attributes describe."""
    rank = len(sizes)
    steps = tuple(strides or (1,) * rank)
    spacing = tuple(dilations or (1,) * rank)
    for name, values in (("kernel_shape", kernel), ("strides", steps), ("dilations", spacing)):
        refuse_outside(np.asarray(values), 1, MAX_SIZE, name)
    refuse_two_paddings(pads, auto_pad)
    spans = [d * (k - 1) + 1 for d, k in zip(spacing, kernel, strict=True)]
    refuse_long(*sizes, *spans, *(pads or ()))
    if auto_pad.startswith("SAME"):
        counts = tuple(map(ceil_div, sizes, steps))
        needed = [
            max(0, (count - 1) * step + span - size)
            for count, step, span, size in zip(counts, steps, spans, sizes, strict=True)
        ]
        smaller = tuple(total // 2 for total in needed)
        larger = tuple(total - total // 2 for total in needed)
        before, after = (smaller, larger) if auto_pad == "SAME_UPPER" else (larger, smaller)
        return Windows(tuple(sizes), tuple(kernel), steps, spacing, before, after, counts)
    padding = tuple(pads or (0,) * (2 * rank)) if auto_pad == "NOTSET" else (0,) * (2 * rank)
    before = padding[:rank]
    after = padding[rank:]
    counts = tuple(
        _window_count(size, low, high, span, step, ceil_mode)
        for size, low, high, span, step in zip(sizes, before, after, spans, steps, strict=True)
    )
    refuse_outside(np.asarray(counts), 1, MAX_SIZE, "the number of windows along an axis,")
    return Windows(tuple(sizes), tuple(kernel), steps, spacing, before, after, counts)


def refuse_two_paddings(pads: Sequence[int] | None, auto_pad: str) -> None:
    """Refuse padding that a node gives in numbers and by a name: ONNX allows one of them."""
    if auto_pad != "NOTSET" and any(pads or ()):
        raise OutsideError(
            f"pads and auto_pad {auto_pad} cannot both be met", expected="one of them", got=list(pads or ())
        )


def kernel_of(kernel_shape: Sequence[int] | None, w: Any) -> tuple[int, ...]:
    """Return the extents of kernels [.., .., kernel]; refuse an attribute that says something else."""
    extents = tuple(w.shape[2:])
    if kernel_shape is not None and tuple(kernel_shape) != extents:
        message = "kernel_shape is not the shape of the weights"
        raise OutsideError(message, expected=list(extents), got=list(kernel_shape))
    return extents


def _window_count(size: int, before: int, after: int, span: int, stride: int, ceil_mode: int) -> int:
    """Number of windows along an axis with padding; with `ceil_mode` the last may pass the end."""
    room = size + before + after - span
    if not ceil_mode:
        return room // stride + 1
    count = math.ceil(room / stride) + 1
    # A window that would start in the padding behind the last element is left out.
    return count - 1 if (count - 1) * stride >= size + before else count


@operator("MaxPool")
def max_pool(
    x: Value,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    output_count: int = 1,
) -> Array | tuple[Array, Array]:
    """Largest element of each window; as second result its index in the array, row- or column-major in the image."""
    x = jnp.asarray(x)
    windows = _windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    # JAX has no gradient of dilated windows, and no index of the largest element
    dilated = any(dilation > 1 for dilation in windows.dilations)
    if output_count == 1 and not dilated:
        return _reduce(x, windows, lowest(x.dtype), lax.max)
    patches = _patches(x, windows, lowest(x.dtype))
    winner = jnp.argmax(patches, axis=-1)
    largest = jnp.take_along_axis(patches, winner[..., None], axis=-1)[..., 0]
    return largest if output_count == 1 else (largest, _flat_indices(x, windows, winner, storage_order))


def lowest(dtype: Any) -> np.ndarray:
    """Return the value that no element is below: −∞ of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def _windows(x: Array, kernel: Sequence[int], strides: Any, dilations: Any, pads: Any, auto: str, ceil: int) -> Windows:
    return slide(x.shape[2:], kernel, strides=strides, dilations=dilations, pads=pads, auto_pad=auto, ceil_mode=ceil)


def _reduce(x: Array, windows: Windows, initial: Any, combine: Any) -> Array:
    return lax.reduce_window(
        x,
        initial,
        combine,
        (1, 1, *windows.kernel),
        (1, 1, *windows.strides),
        [(0, 0), (0, 0), *_positive_padding(windows)],
        window_dilation=(1, 1, *windows.dilations),
    )


def _positive_padding(windows: Windows) -> list[tuple[int, int]]:
    """Elements behind the last window are not cut off: reduce_window ignores them, and takes no negative padding."""
    return [(before, max(0, after)) for before, after in windows.padding()]


def _patches(x: Array, windows: Windows, fill: Any) -> Array:
    """Elements of each window, [N, C, windows, elements], `fill` in the padding."""
    patches = x
    rank = windows.rank
    for axis in range(rank):
        # the windows of the axis replace it, their elements go to the end
        positions = windows.positions(axis)
        patches = jnp.moveaxis(
            jnp.take(patches, np.clip(positions, 0, windows.sizes[axis] - 1), axis=2 + axis), 3 + axis, -1
        )
        inside = (positions >= 0) & (positions < windows.sizes[axis])
        shape = [1] * patches.ndim
        shape[2 + axis], shape[-1] = inside.shape
        patches = jnp.where(inside.reshape(shape), patches, fill)
    return patches.reshape(*x.shape[:2], *windows.counts, math.prod(windows.kernel))


def _flat_indices(x: Array, windows: Windows, winner: Array, storage_order: int) -> Array:
    taps = jnp.unravel_index(winner, windows.kernel)
    sizes = windows.sizes
    # `storage_order` 1 counts column-major inside an image; channels are outermost in both.
    weights = [math.prod(sizes[:axis] if storage_order else sizes[axis + 1 :]) for axis in range(windows.rank)]
    image = math.prod(sizes)
    channel = index_range(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * windows.rank)
    index = jnp.asarray(channel * image, index_dtype())
    for axis, (tap, weight) in enumerate(zip(taps, weights, strict=True)):
        shape = [1] * winner.ndim
        shape[2 + axis] = -1
        # Indices count in the array without padding, so a window may start before 0.
        start = index_range(windows.counts[axis]) * windows.strides[axis] - windows.before[axis]
        position = start.reshape(shape) + tap * windows.dilations[axis]
        index = index + (position * weight).astype(index_dtype())
    return index


@operator("AveragePool")
def average_pool(
    x: Value,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Mean of each window, over the elements of the array, or also over the padding."""
    x = jnp.asarray(x)
    windows = _windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    sums = _reduce(x, windows, np.zeros((), x.dtype), lax.add)
    return sums / windows.elements(bool(count_include_pad)).astype(x.dtype)


@operator("LpPool")
def lp_pool(
    x: Value,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """p-norm of each window."""
    x = jnp.asarray(x)
    windows = _windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    sums = _reduce(jnp.abs(x) ** p, windows, np.zeros((), x.dtype), lax.add)
    return sums ** (1 / p)


@operator("GlobalAveragePool")
def global_average_pool(x: Value) -> Array:
    return jnp.mean(x, axis=_spatial(x), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Value) -> Array:
    return jnp.max(x, axis=_spatial(x), keepdims=True)


@operator("GlobalLpPool")
def global_lp_pool(x: Value, *, p: int = 2) -> Array:
    return jnp.sum(jnp.abs(x) ** p, axis=_spatial(x), keepdims=True) ** (1 / p)


def _spatial(x: Value) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@operator("MaxUnpool")
def max_unpool(
    x: Value,
    indices: Value,
    output_shape: Optional = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Array of zeros with each element at the index that MaxPool gave it, padded at the end to `output_shape`."""
    x = jnp.asarray(x)
    rank = x.ndim - 2
    steps = tuple(strides or (1,) * rank)
    padding = tuple(pads or (0,) * (2 * rank))
    inferred = (
        *x.shape[:2],
        *(
            (size - 1) * step + kernel - low - high
            for size, step, kernel, low, high in zip(
                x.shape[2:], steps, kernel_shape, padding[:rank], padding[rank:], strict=True
            )
        ),
    )
    refuse_outside(indices, 0, math.prod(inferred) - 1, f"the result has {math.prod(inferred)} elements: index")
    spread = jnp.zeros(math.prod(inferred), x.dtype).at[jnp.ravel(indices)].set(jnp.ravel(x)).reshape(inferred)
    if output_shape is None:
        return spread
    shape = integers(static(output_shape, "output_shape"))
    return lax.pad(
        spread, np.zeros((), x.dtype), [(0, want - have, 0) for want, have in zip(shape, inferred, strict=True)]
    )


@operator("MaxRoiPool")
def max_roi_pool(x: Value, rois: Value, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Array:
    """Largest element of each bin of each region, [regions, C, *pooled_shape]; zero where a bin is empty."""
    # A region is (batch, x1, y1, x2, y2), inclusive corners; `spatial_scale` makes them elements of `x`, [N, C, H, W].
    if is_static(rois):
        refuse_outside(np.asarray(rois)[:, 0], 0, np.shape(x)[0] - 1, "batch index of a region")
    x, rois = map(jnp.asarray, (x, rois))
    batch = rois[:, 0].astype(jnp.int32)
    corners = _half_away(rois[:, 1:] * spatial_scale)
    columns = _bin_mask(corners[:, 0], corners[:, 2], pooled_shape[1], x.shape[3])
    rows = _bin_mask(corners[:, 1], corners[:, 3], pooled_shape[0], x.shape[2])
    low = lowest(x.dtype)
    images = x[batch]
    by_row = jnp.max(jnp.where(rows[:, None, :, :, None], images[:, :, None], low), axis=3)  # [R, C, bins, W]
    largest = jnp.max(jnp.where(columns[:, None, None], by_row[:, :, :, None], low), axis=-1)
    empty = ~(jnp.any(rows, -1)[:, None, :, None] & jnp.any(columns, -1)[:, None, None, :])
    return jnp.where(empty, jnp.zeros_like(largest), largest)


def _half_away(x: Array) -> Array:
    return jnp.where(x >= 0, jnp.floor(x + 0.5), jnp.ceil(x - 0.5))


def _bin_mask(start: Array, end: Array, bins: int, size: int) -> Array:
    """Mask of the elements in each bin of a region, bool [regions, bins, size]."""
    extent = jnp.maximum(end - start + 1, 1) / bins
    bin_index = index_range(bins)
    low = jnp.floor(bin_index * extent[:, None]) + start[:, None]
    high = jnp.ceil((bin_index + 1) * extent[:, None]) + start[:, None]
    element = jnp.arange(size)
    return (element >= low[..., None]) & (element < high[..., None])
