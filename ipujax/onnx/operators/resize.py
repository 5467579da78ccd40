"""Resize, and the older Upsample: interpolation one axis after another, with weights known while tracing.

Source: ONNX operator Resize, opset 19.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_table, check_terms
from ipujax.onnx.element_types import is_floating
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.images import cubic_kernel
from ipujax.onnx.operators.operand_types import MAX_SIZE, Array, Static, axes_of, integers, refuse_outside
from ipujax.onnx.registry import operator

Floats = np.ndarray


@dataclass(frozen=True, slots=True)
class Line:
    """One axis to be resized.

    Args:
        size: elements of the input.
        result: elements of the output.
        scale: as given, or result / size.
        roi: begin and end of the part that is read, as fractions of the axis.
    """

    size: int
    result: int
    scale: float
    roi: tuple[float, float]

    @property
    def exact(self) -> float:
        """Size of the output before it is rounded down."""
        return float(np.float32(self.scale) * np.float32(self.size))


def _align_corners(line: Line, x: Floats) -> Floats:
    return np.zeros_like(x) if line.exact == 1 else x * (line.size - 1) / (line.exact - 1)


def _half_pixel(line: Line, x: Floats) -> Floats:
    return (x + 0.5) / line.scale - 0.5


def _half_pixel_symmetric(line: Line, x: Floats) -> Floats:
    return line.size / 2 * (1 - line.result / line.exact) + _half_pixel(line, x)


def _pytorch_half_pixel(line: Line, x: Floats) -> Floats:
    return np.zeros_like(x) if line.exact == 1 else _half_pixel(line, x)


def _crop(line: Line, x: Floats) -> Floats:
    begin, end = line.roi
    last = line.size - 1
    if line.exact == 1:
        # A single element is taken from the middle of the region.
        return np.full_like(x, (begin + end) * last / 2)
    return begin * last + x * (end - begin) * last / (line.exact - 1)


# Position in the input of each element of the output, in float32 as onnxruntime: a double of a float32 scale may be
# just below the whole number that is meant.
POSITIONS: Mapping[str, Callable[[Line, Floats], Floats]] = {
    "align_corners": _align_corners,
    "asymmetric": lambda line, x: x / line.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "tf_crop_and_resize": _crop,
    "tf_half_pixel_for_nn": lambda line, x: (x + 0.5) / line.scale,
}
# Which of two neighbours is nearest.
NEAREST: Mapping[str, Callable[[Floats], Floats]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
}


@operator("Resize")
def resize(
    x: Array,
    roi: Static | None = None,
    scales: Static | None = None,
    sizes: Static | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Array:
    """Array with other sizes along some axes, interpolated; sizes, scales and region must be static."""
    chosen = axes_of(range(x.ndim) if axes is None else axes, x.ndim)
    if not any(each is not None and np.size(each) for each in (scales, sizes)):
        raise OutsideError("neither scales nor sizes are given", expected="one of them", got="none")
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    region = roi if cropped else None
    result = x if is_floating(x) else x.astype(jnp.float32)
    for axis, line in _lines(x.shape, chosen, scales, sizes, region, keep_aspect_ratio_policy).items():
        # An axis that stays needs no product, which would round.
        if line.scale == 1 and line.size == line.result and line.roi == (0.0, 1.0):
            continue
        check_table(line.result, f"positions on axis {axis} of a Resize")
        position = POSITIONS[coordinate_transformation_mode](line, np.arange(line.result, dtype=np.float32))
        index, weight = _weights(position, line, mode, nearest_mode, bool(antialias), cubic_coeff_a)
        if exclude_outside:
            weight = np.where((index >= 0) & (index < line.size), weight, 0)
            # Weights of the elements inside add up to 1 again.
            weight = weight / weight.sum(axis=1, keepdims=True)
        result = _combined(result, axis, np.clip(index, 0, line.size - 1), weight)
        if cropped:
            outside = ((position < 0) | (position > line.size - 1)).reshape(-1, *(1,) * (x.ndim - axis - 1))
            result = jnp.where(outside, jnp.asarray(extrapolation_value, result.dtype), result)
    return _restored(result, x)


def _lines(
    shape: Sequence[int],
    axes: Sequence[int],
    scales: Static | None,
    sizes: Static | None,
    roi: Static | None,
    policy: str,
) -> dict[int, Line]:
    """Return each resized axis with sizes, scale and region, from the operands of Resize: either scales or sizes."""
    regions = [(0.0, 1.0)] * len(axes)
    if roi is not None and roi.size:
        begins, ends = np.asarray(roi, float).reshape(2, len(axes))
        regions = list(zip(begins.tolist(), ends.tolist(), strict=True))
    inputs = [shape[axis] for axis in axes]
    if sizes is not None and np.size(sizes):
        results = integers(sizes)
        for result, size in zip(results, inputs, strict=True):
            least, most = (1, MAX_SIZE) if size else (0, 0)
            refuse_outside(np.asarray(result), least, most, f"an axis has length {size}: new size")
        factors = [result / size if size else 1.0 for result, size in zip(results, inputs, strict=True)]
        if policy != "stretch":
            # One factor for all axes, so that the aspect ratio stays.
            factor = min(factors) if policy == "not_larger" else max(factors)
            factors = [factor] * len(axes)
            results = tuple(int(factor * size + 0.5) for size in inputs)
    else:
        factors = np.asarray(scales, float).tolist()
        refuse_outside(np.asarray(factors), float(np.finfo(np.float32).tiny), MAX_SIZE, "scale")
        # a float32 scale times a size, as ONNX says; without rounding 0.6 · 5 is 3
        results = tuple(int(np.floor(np.float32(f) * np.float32(n))) for f, n in zip(factors, inputs, strict=True))
    lines = map(Line, inputs, results, factors, regions)
    return dict(zip(axes, lines, strict=True))


def _weights(
    position: Floats, line: Line, mode: str, nearest_mode: str, antialias: bool, coefficient: float
) -> tuple[np.ndarray, Floats]:
    """Elements of the input, and their weights, [results, taps]."""
    if mode == "nearest":
        return NEAREST[nearest_mode](position)[:, None].astype(int), np.ones((line.result, 1))
    # a kernel is stretched where the result is smaller, so that each element has a part in it
    stretch = max(1.0, 1 / line.scale) if antialias else 1.0
    radius = {"linear": 1, "cubic": 2}[mode] * stretch
    # the window is open on the left: at an element's own position it reaches back to the one before
    first = np.ceil(position).astype(int) - int(np.ceil(radius))
    check_table(line.result * 2 * int(np.ceil(radius)), "weights of a Resize")
    index = first[:, None] + np.arange(2 * int(np.ceil(radius)))
    distance = np.abs(index - position[:, None]) / stretch
    weight = np.maximum(1 - distance, 0) if mode == "linear" else cubic_kernel(distance, coefficient)
    return index, weight / weight.sum(axis=1, keepdims=True) if antialias else weight


def _combined(x: Array, axis: int, index: np.ndarray, weight: Floats) -> Array:
    """Weighted sums of elements along an axis: `index` and `weight` are [results, taps]."""
    if index.shape[1] == 1:
        return jnp.take(x, index[:, 0], axis=axis)
    check_terms(index.shape[1], "Resize")
    after = (1,) * (x.ndim - axis - 1)
    terms = (
        jnp.take(x, index[:, tap], axis=axis) * jnp.asarray(weight[:, tap].reshape(-1, *after), x.dtype)
        for tap in range(index.shape[1])
    )
    return sum(terms, jnp.zeros((), x.dtype))


def _restored(result: Array, x: Array) -> Array:
    """The result in the dtype of the input: integers rounded and limited."""
    if is_floating(x):
        return result
    limits = jnp.iinfo(x.dtype)
    return jnp.clip(jnp.round(result), limits.min, limits.max).astype(x.dtype)


@operator("Upsample")
def upsample(x: Array, scales: Static, *, mode: str = "nearest") -> Array:
    """Resize of opset 9 and earlier: positions are not at the middle of elements."""
    return resize(x, None, scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
