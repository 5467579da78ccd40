"""Pooling over sliding windows, over whole images, and its partial inverse. Layouts are N C spatial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.element_types import index_dtype, working_dtype
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import MAX_SIZE, Array, Static, Value, index_range, integers, refuse_outside
from ipujax.onnx.operators.window_attributes import PoolWindows, Windows, slide
from ipujax.onnx.registry import is_static, operator


@operator("MaxPool")
def max_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    storage_order: int = 0,
    output_count: int = 1,
    **attributes: Unpack[PoolWindows],
) -> Array | tuple[Array, Array]:
    """Largest element of each window; as second result its index in the array, row- or column-major in the image."""
    windows = _windows(x, kernel_shape, attributes)
    # JAX has no gradient of dilated windows, and no index of the largest element
    dilated = any(dilation > 1 for dilation in windows.dilations)
    if output_count == 1 and not dilated:
        return _reduce(x, windows, lowest(x.dtype), lax.max)
    patches, is_inside = _patches(x, windows)
    # Padding is never the largest, also where no element is above the lowest value: it has no index.
    largest = jnp.max(patches, axis=-1, keepdims=True, initial=lowest(x.dtype), where=is_inside)
    winner = jnp.argmax(is_inside & ((patches == largest) | (patches != patches)), axis=-1)
    y = jnp.take_along_axis(patches, winner[..., None], axis=-1)[..., 0]
    return y if output_count == 1 else (y, _flat_indices(x, windows, winner, storage_order))


def lowest(dtype: Any) -> np.ndarray:
    """Return the value that no element is below: −∞ of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def _windows(x: Array, kernel: Sequence[int], attributes: PoolWindows) -> Windows:
    """Return the windows of a pool, each of which has an element."""
    windows = slide(_image_sizes(x), kernel, **attributes, is_pool=True)
    for elements, dilation, widths in zip(windows.kernel, windows.dilations, windows.padding(), strict=True):
        span = dilation * (elements - 1) + 1
        if max(widths) >= span:
            raise OutsideError("a window is in the padding alone", expected=f"pads below {span}", got=list(widths))
    return windows


def _image_sizes(x: Value) -> tuple[int, ...]:
    """Return the spatial sizes of an image; refuse one without elements, of which a window has no value."""
    refuse_outside(np.asarray(x.shape[2:]), 1, MAX_SIZE, "size of an image")
    return x.shape[2:]


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


def _patches(x: Array, windows: Windows) -> tuple[Array, Array]:
    """Elements of windows, [N, C, windows, elements], the nearest ones in the padding; and whether they are in x."""
    patches = x
    rank = windows.rank
    is_inside = jnp.ones((), bool)
    for axis in range(rank):
        # the windows of the axis replace it, their elements go to the end
        positions = windows.positions(axis)
        rows = jnp.take(patches, positions.clip(0, windows.sizes[axis] - 1), axis=2 + axis)
        patches = jnp.moveaxis(rows, 3 + axis, -1)
        on_axis = (positions >= 0) & (positions < windows.sizes[axis])
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = on_axis.shape
        is_inside = is_inside & on_axis.reshape(shape)
    of_windows = *windows.counts, math.prod(windows.kernel)
    return patches.reshape(*x.shape[:2], *of_windows), is_inside.reshape(of_windows)


def _flat_indices(x: Array, windows: Windows, winner: Array, storage_order: int) -> Array:
    """Return the index in the flat input of each window's largest element, the second result of MaxPool."""
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
    x: Array, *, kernel_shape: Sequence[int], count_include_pad: int = 0, **attributes: Unpack[PoolWindows]
) -> Array:
    """Mean of each window, over the elements of the array, or also over the padding."""
    windows = _windows(x, kernel_shape, attributes)
    sums = _window_sums(x.astype(working_dtype(x.dtype)), windows)
    return (sums / windows.elements(bool(count_include_pad)).astype(sums.dtype)).astype(x.dtype)


def _window_sums(x: Array, windows: Windows) -> Array:
    return _reduce(x, windows, np.zeros((), x.dtype), lax.add)


@operator("LpPool")
def lp_pool(x: Array, *, kernel_shape: Sequence[int], p: int = 2, **attributes: Unpack[PoolWindows]) -> Array:
    """p-norm of each window."""
    windows = _windows(x, kernel_shape, attributes)
    sums = _window_sums(_powers(x, p), windows)
    return (sums ** (1 / p)).astype(x.dtype)


def _powers(x: Value, p: int) -> Array:
    """Return powers of absolute values; those of half precision, whose range they may leave, in single precision."""
    return jnp.abs(x).astype(working_dtype(x.dtype)) ** p


@operator("GlobalAveragePool")
def global_average_pool(x: Value) -> Array:
    return jnp.mean(x, axis=_spatial(x), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Value) -> Array:
    return jnp.max(x, axis=_spatial(x), keepdims=True)


@operator("GlobalLpPool")
def global_lp_pool(x: Value, *, p: int = 2) -> Array:
    return (jnp.sum(_powers(x, p), axis=_spatial(x), keepdims=True) ** (1 / p)).astype(x.dtype)


def _spatial(x: Value) -> tuple[int, ...]:
    _image_sizes(x)
    return tuple(range(2, x.ndim))


@operator("MaxUnpool")
def max_unpool(
    x: Array,
    indices: Value,
    output_shape: Static | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Array of zeros with each element at the index that MaxPool gave it, padded at the end to `output_shape`."""
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
    shape = integers(output_shape)
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
