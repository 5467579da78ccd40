"""Windows that slide over the spatial axes of an array, shared by convolutions, pooling and their transposes.

Source: ONNX operators Conv, MaxPool and AveragePool for the formulas of padding and of result sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ipujax.onnx.budget import check_indices
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import MAX_SIZE, Value, ceil_div, numpy_for, refuse_outside, size_of


class Spacing(TypedDict, total=False):
    """Attributes of windows, one entry an axis, `pads` first those before all axes."""

    dilations: Sequence[int] | None
    pads: Sequence[int] | None
    strides: Sequence[int] | None


class PaddedWindows(Spacing, total=False):
    """Attributes of windows whose padding has a name, "NOTSET" for `pads`."""

    auto_pad: str


class PoolWindows(PaddedWindows, total=False):
    """Attributes of windows of which the last may pass the end."""

    ceil_mode: int


class Kernels(PaddedWindows, total=False):
    """Attributes of a convolution."""

    group: int
    kernel_shape: Sequence[int] | None


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

    def positions(self, axis: int) -> Value:
        """Return the element of an axis at [window, element of the window]; negative or too large in the padding."""
        shape = self.counts[axis], self.kernel[axis]
        check_indices(max(1, shape[0]) * shape[1], f"the table of windows on spatial axis {axis}")
        xp = numpy_for(size_of(shape))
        starts = xp.arange(shape[0]) * self.strides[axis] - self.before[axis]
        return starts[:, None] + xp.arange(shape[1]) * self.dilations[axis]

    def elements(self, include_padding: bool) -> Value:
        """Return how many elements each window has, shape `counts`; those of the node's padding on request."""
        result: Value = np.ones(())
        for axis in range(self.rank):
            positions = self.positions(axis)
            low = -self.before[axis] if include_padding else 0
            high = self.sizes[axis] + (self.after[axis] if include_padding else 0)
            result = result[..., None] * ((positions >= low) & (positions < high)).sum(axis=1)
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
    is_pool: bool = False,
) -> Windows:
    """Return the windows that a node's attributes describe; only in a pool there may be none along an axis."""
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
        _window_count(size + low + high - span, size + low, step, ceil_mode, is_pool)
        for size, low, high, span, step in zip(sizes, before, after, spans, steps, strict=True)
    )
    refuse_outside(np.asarray(counts), 0 if is_pool else 1, MAX_SIZE, "the number of windows along an axis,")
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


def _window_count(room: int, end: int, stride: int, ceil_mode: int, is_pool: bool) -> int:
    """Number of windows that begin in `room`, each a stride on; with `ceil_mode` the last may pass the end."""
    if not ceil_mode:
        # Pooling rounds toward zero: it has one window that is larger than the image by less than a stride.
        return (math.trunc(room / stride) if is_pool else room // stride) + 1
    count = math.ceil(room / stride) + 1
    # A window that would start in the padding behind the last element is left out.
    return count - 1 if (count - 1) * stride >= end else count
