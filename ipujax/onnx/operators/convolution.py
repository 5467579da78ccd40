"""Convolutions, their transposes, and images from columns. Layouts are N C spatial, and C_out C_in spatial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_indices
from ipujax.onnx.operators.images import linear_samples
from ipujax.onnx.operators.operand_types import (
    MAX_SIZE,
    Array,
    Optional,
    Static,
    Value,
    along,
    integers,
    numpy_for,
    on_axis,
    refuse_outside,
    size_of,
)
from ipujax.onnx.operators.window_attributes import (
    Kernels,
    PaddedWindows,
    Spacing,
    Windows,
    kernel_of,
    refuse_long,
    refuse_two_paddings,
    slide,
)
from ipujax.onnx.registry import operator


@operator("Conv")
def convolution(
    x: Array,
    w: Array,
    b: Optional = None,
    *,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    **attributes: Unpack[PaddedWindows],
) -> Array:
    windows = slide(x.shape[2:], kernel_of(kernel_shape, w), **attributes)
    return _with_bias(convolve(x, w, windows, group), b)


def convolve(x: Array, w: Array, windows: Windows, group: int) -> Array:
    """Return the correlation of an array [N, C, spatial] with kernels [M, C / group, kernel]."""
    return jax.lax.conv_general_dilated(
        x, w, windows.strides, windows.padding(), rhs_dilation=windows.dilations, feature_group_count=group
    )


def _with_bias(y: Array, b: Optional) -> Array:
    return y if b is None else y + on_axis(b, y, 1, "the bias")


@operator("ConvInteger")
def integer_convolution(
    x: Value,
    w: Value,
    x_zero_point: Optional = None,
    w_zero_point: Optional = None,
    **attributes: Unpack[Kernels],
) -> Array:
    """Convolution in int32 of differences from the zero points; padding is the zero point."""
    return convolution(shifted(x, x_zero_point, 0), shifted(w, w_zero_point, 0), **attributes)


def shifted(x: Value, zero_point: Optional, axis: int) -> Array:
    """Return differences from a zero point, or from one for each slice along an axis, in int32."""
    wide = jnp.asarray(x).astype(jnp.int32)
    return wide if zero_point is None else wide - by_slice(zero_point, wide, axis).astype(jnp.int32)


def by_slice(values: Value, x: Array, axis: int) -> Array:
    """Return one value, or one for each slice of an array along an axis, so that they broadcast with it."""
    vector = jnp.asarray(values)
    return along(vector, axis, x.ndim) if vector.ndim == 1 and vector.size > 1 else vector


@operator("ConvTranspose")
def transposed_convolution(
    x: Array,
    w: Array,
    b: Optional = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Transpose of a convolution: of the input, spread by the strides, with the mirrored kernel."""
    rank = x.ndim - 2
    refuse_two_paddings(pads, auto_pad)
    kernel = kernel_of(kernel_shape, w)
    steps = tuple(strides or (1,) * rank)
    spacing = tuple(dilations or (1,) * rank)
    for name, values in (("strides", steps), ("dilations", spacing)):
        refuse_outside(np.asarray(values), 1, MAX_SIZE, name)
    spans = [d * (k - 1) + 1 for d, k in zip(spacing, kernel, strict=True)]
    # `output_padding` extends the result at its end; it is no padding of zeros.
    extra = tuple(output_padding or (0,) * rank)
    for elements, step, space in zip(extra, steps, spacing, strict=True):
        refuse_outside(np.asarray(elements), 0, max(step, space) - 1, "output_padding")
    # result without padding, and the padding that is cut off it
    full = [s * (n - 1) + e + span for s, n, e, span in zip(steps, x.shape[2:], extra, spans, strict=True)]
    refuse_long(*full, *spans, *(pads or ()), *(output_shape or ()))
    before, sizes = _cut(full, x.shape[2:], steps, auto_pad, output_shape, pads)
    padding = [
        (span - 1 - low, size - (s * (n - 1) + 1) + low)
        for span, low, size, s, n in zip(spans, before, sizes, steps, x.shape[2:], strict=True)
    ]
    y = jax.lax.conv_general_dilated(
        x,
        _mirrored(w, group),
        (1,) * rank,
        padding,
        lhs_dilation=steps,
        rhs_dilation=spacing,
        feature_group_count=group,
    )
    return _with_bias(y, b)


def _cut(
    full: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    auto_pad: str,
    output_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Elements cut off at the beginning of each axis, and the sizes that are left."""
    rank = len(full)
    same = auto_pad.startswith("SAME")
    if output_shape is None and not same:
        padding = (0,) * (2 * rank) if pads is None or auto_pad == "VALID" else tuple(pads)
        return padding[:rank], [
            n - low - high for n, low, high in zip(full, padding[:rank], padding[rank:], strict=True)
        ]
    results = tuple(output_shape[-rank:]) if output_shape else tuple(n * s for n, s in zip(sizes, strides, strict=True))
    total = [n - result for n, result in zip(full, results, strict=True)]
    # SAME_UPPER has the larger half of an odd padding at the end, SAME_LOWER at the beginning.
    upper = auto_pad == "SAME_UPPER"
    return [each // 2 if upper else each - each // 2 for each in total], results


def _mirrored(w: Array, group: int) -> Array:
    """[C, M / group, kernel] as kernels of a convolution, [M, C / group, mirrored kernel]."""
    channels, outputs, *kernel = w.shape
    grouped = w.reshape(group, channels // group, outputs, *kernel)
    swapped = jnp.swapaxes(grouped, 1, 2).reshape(group * outputs, channels // group, *kernel)
    return jnp.flip(swapped, range(2, w.ndim))


@operator("DeformConv")
def deformable_convolution(
    x: Array,
    w: Array,
    offset: Array,
    b: Optional = None,
    mask: Optional = None,
    *,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    **attributes: Unpack[Spacing],
) -> Array:
    """Convolution whose windows are sampled at positions shifted by `offset`, linearly interpolated."""
    batch, channels, *sizes = x.shape
    windows = slide(sizes, kernel_of(kernel_shape, w), **attributes)
    rank = windows.rank
    taps = math.prod(windows.kernel)
    places = math.prod(windows.counts)
    shifts = offset.reshape(batch, offset_group, taps, rank, places)
    positions = jnp.moveaxis(shifts + _grid(windows).astype(x.dtype), 3, -1)
    grouped = x.reshape(batch * offset_group, channels // offset_group, *sizes)
    samples = linear_samples(grouped, positions.reshape(batch * offset_group, taps * places, rank))
    patches = samples.reshape(batch, offset_group, channels // offset_group, taps, places)
    if mask is not None:
        patches = patches * jnp.asarray(mask).reshape(batch, offset_group, 1, taps, places)
    outputs = w.shape[0]
    y = jnp.einsum(
        "bgctp,goct->bgop",
        patches.reshape(batch, group, channels // group, taps, places),
        w.reshape(group, outputs // group, channels // group, taps),
    )
    return _with_bias(y.reshape(batch, outputs, *windows.counts), b)


def _grid(windows: Windows) -> Value:
    """Position of each element of each window, [kernel, spatial axis, windows]."""
    rank = windows.rank
    table = rank, math.prod(windows.kernel), math.prod(windows.counts)
    check_indices(size_of(table), "the table of all windows")
    xp = numpy_for(size_of(table))
    axes = []
    for axis in range(rank):
        positions = windows.positions(axis)  # [window, element]
        shape = [1] * (2 * rank)
        shape[axis] = windows.kernel[axis]
        shape[rank + axis] = windows.counts[axis]
        full = xp.broadcast_to(positions.T.reshape(shape), windows.kernel + windows.counts)
        axes.append(full.reshape(table[1:]))
    return xp.stack(axes, 1)


@operator("Col2Im")
def image_of_columns(x: Array, image_shape: Static, block_shape: Static, **attributes: Unpack[Spacing]) -> Array:
    """Image [N, C, spatial] in which blocks [N, C · elements, blocks] are added up where they overlap."""
    sizes = integers(image_shape)
    block = integers(block_shape)
    windows = slide(sizes, block, **attributes)
    batch, rows, columns = x.shape
    taps = math.prod(block)
    grid = _grid(windows)
    inside = ((grid >= 0) & (grid < np.array(sizes)[:, None])).all(axis=1)
    flat = sum(grid[:, axis] * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    # Values in the padding are added to one more element, which is cut off.
    targets = numpy_for(grid.size).where(inside, flat, math.prod(sizes)).ravel()
    image = jnp.zeros((batch, rows // taps, math.prod(sizes) + 1), x.dtype)
    added = image.at[:, :, targets].add(x.reshape(batch, rows // taps, taps * columns))
    return added[:, :, :-1].reshape(batch, rows // taps, *sizes)


@operator("CausalConvWithState")
def causal_convolution(
    x: Array, weight: Array, bias: Optional = None, past_state: Optional = None, *, activation: str = "none"
) -> tuple[Array, Array]:
    """Depthwise convolution over past and present elements in time; also the last elements for the next call."""
    length = weight.shape[-1] - 1
    past = jnp.zeros((*x.shape[:2], length), x.dtype) if past_state is None else jnp.asarray(past_state)
    series = jnp.concatenate([past, x], axis=2)
    windows = slide(series.shape[2:], weight.shape[2:])
    y = _with_bias(convolve(series, weight, windows, x.shape[1]), bias)
    activated = y if activation == "none" else jax.nn.silu(y)
    return activated, series[:, :, series.shape[2] - length :]
