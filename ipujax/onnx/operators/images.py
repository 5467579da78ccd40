"""Images read at positions that are data, by weighted sums of the elements around: GridSample, AffineGrid, RoiAlign.

Layouts are N C spatial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_terms
from ipujax.onnx.element_types import is_floating
from ipujax.onnx.operators.operand_types import (
    MAX_SIZE,
    Array,
    Static,
    Value,
    index_range,
    integers,
    numpy_for,
    refuse_outside,
    refuse_outside_axis,
    size_of,
)
from ipujax.onnx.registry import operator, static


@dataclass(frozen=True, slots=True)
class Taps:
    """Elements of one axis that a sample is a weighted sum of.

    Args:
        index: of each element, integers [N, samples, taps]; may be out of range.
        weight: of each element, [N, samples, taps].
    """

    index: Array
    weight: Array


def linear_taps(position: Array) -> Taps:
    """Two elements around each position [N, samples]."""
    below = jnp.floor(position)
    ratio = position - below
    index = below.astype(jnp.int32)
    return Taps(jnp.stack([index, index + 1], -1), jnp.stack([1 - ratio, ratio], -1))


def nearest_taps(position: Array) -> Taps:
    """The nearest element of each position [N, samples]; of two the even one."""
    index = jnp.round(position).astype(jnp.int32)
    return Taps(index[..., None], jnp.ones((*position.shape, 1), position.dtype))


def cubic_taps(position: Array, coefficient: float = -0.75) -> Taps:
    """Four elements around each position [N, samples], with Keys' kernel."""
    below = jnp.floor(position)
    ratio = position - below
    offsets = np.arange(-1, 3)
    distance = jnp.abs(ratio[..., None] - offsets)
    return Taps(below.astype(jnp.int32)[..., None] + offsets, cubic_kernel(distance, coefficient))


def cubic_kernel(distance: Any, coefficient: float) -> Any:
    """Weight of an element at a distance, static or traced; zero from two elements on."""
    # Source: R. G. Keys, "Cubic convolution interpolation for digital image processing" (1981).
    a = coefficient
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return near * (d <= 1) + far * ((d > 1) & (d < 2))


def reflected(position: Array, low: float, high: float) -> Array:
    """Positions mirrored at both ends of an interval until they are inside."""
    extent = high - low
    if extent <= 0:
        return jnp.full_like(position, low)
    phase = jnp.mod(position - low, 2 * extent)
    return low + jnp.minimum(phase, 2 * extent - phase)


def weighted_samples(x: Array, taps: Sequence[Taps], padding: str = "zeros", align_corners: bool = False) -> Array:
    """Return an array [N, C, spatial] at samples, [N, C, samples]: products of taps, one for each spatial axis."""
    # Out of range are zeros, for "border" the nearest element, for "reflection" elements reflected at the edge or, with
    # `align_corners`, at the centre of the last element.
    batch, channels, *sizes = x.shape
    flat = x.reshape(batch, channels, math.prod(sizes))
    result = jnp.zeros((), x.dtype)
    check_terms(math.prod(each.index.shape[-1] for each in taps), "interpolation")
    for corner in itertools.product(*(range(each.index.shape[-1]) for each in taps)):
        index = jnp.zeros((), jnp.int32)
        weight = jnp.ones((), taps[0].weight.dtype)
        for each, tap, size in zip(taps, corner, sizes, strict=True):
            at = each.index[..., tap]
            inside = (at >= 0) & (at < size)
            factor = each.weight[..., tap]
            weight = weight * (jnp.where(inside, factor, 0) if padding == "zeros" else factor)
            index = index * size + _in_range(at, size, padding, align_corners)
        values = jnp.take_along_axis(flat, index[:, None, :], axis=2)
        result = result + values * weight[:, None, :].astype(x.dtype)
    return result


def _in_range(index: Array, size: int, padding: str, align_corners: bool) -> Array:
    if padding == "reflection":
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        index = reflected(index.astype(jnp.float32), low, high).astype(jnp.int32)
    return jnp.clip(index, 0, size - 1)


def linear_samples(x: Array, positions: Array) -> Array:
    """Return an array [N, C, spatial] at `positions` [N, samples, axes] in elements, interpolated, zero outside."""
    return weighted_samples(x, [linear_taps(positions[..., axis]) for axis in range(positions.shape[-1])])


TAPS: Mapping[str, Callable[[Array], Taps]] = {"cubic": cubic_taps, "linear": linear_taps, "nearest": nearest_taps}


@operator("GridSample")
def grid_sample(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    """Array at the positions of a grid, whose coordinates are −1 to 1 over each axis, last axis first."""
    return sampled(x, grid, align_corners, mode, padding_mode, moved_padding=padding_mode)


def sampled(x: Value, grid: Value, align_corners: int, mode: str, padding_mode: str, moved_padding: str) -> Array:
    """Return the array of `grid_sample`; `moved_padding` is the padding mode by which positions outside are moved."""
    x, grid = map(jnp.asarray, (x, grid))
    sizes = x.shape[2:]
    flat = grid.reshape(grid.shape[0], -1, len(sizes))
    taps = []
    for axis, size in enumerate(sizes):
        unit = flat[..., len(sizes) - 1 - axis]
        position = (unit + 1) / 2 * (size - 1) if align_corners else ((unit + 1) * size - 1) / 2
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        placed = jnp.round(position) if mode == "nearest" else position
        taps.append(TAPS[mode](_placed(placed, low, high, size, moved_padding)))
    values = x if is_floating(x) else x.astype(jnp.float32)
    samples = weighted_samples(values, taps, padding_mode, bool(align_corners))
    return samples.reshape(*x.shape[:2], *grid.shape[1:-1]).astype(x.dtype)


def _placed(position: Array, low: float, high: float, size: int, padding: str) -> Array:
    """Return sampling positions, those outside of an image moved inside as its padding says."""
    outside = (position < low) | (position > high)
    if padding == "border":
        return jnp.where(outside, jnp.clip(position, 0, size - 1), position)
    if padding == "reflection":
        return jnp.where(outside, reflected(position, low, high), position)
    return position


@operator("AffineGrid")
def affine_grid(theta: Array, size: Static, *, align_corners: int = 0) -> Array:
    """Grid of positions for GridSample: coordinates of a result's elements, mapped by matrices [N, axes, axes + 1]."""
    sizes = integers(size)[2:]
    refuse_outside(np.asarray(sizes), 1, MAX_SIZE, "size")
    steps = [_unit_positions(n, bool(align_corners)) for n in sizes]
    xp = numpy_for(size_of(sizes))
    mesh = xp.meshgrid(*steps, indexing="ij")
    homogeneous = xp.stack([*reversed(mesh), xp.ones(sizes)], axis=-1)
    return jnp.einsum("...j,nij->n...i", jnp.asarray(homogeneous, theta.dtype), theta)


def _unit_positions(size: int, align_corners: bool) -> Value:
    xp = numpy_for(size)
    if align_corners:
        return xp.linspace(-1, 1, size) if size > 1 else xp.full(1, -1.0)
    return (2 * xp.arange(size) + 1) / size - 1


@operator("RoiAlign")
def roi_align(
    x: Array,
    rois: Value,
    batch_indices: Value,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """Mean or maximum of samples in each bin of each region, [regions, C, output_height, output_width]."""
    # Without a sampling ratio a bin has as many samples as elements, a number that needs static regions.
    half_pixel = coordinate_transformation_mode == "half_pixel"
    counts = [sampling_ratio] * 2
    if not sampling_ratio:
        static_corners = _corners(np.asarray(static(rois, "rois")), spatial_scale, half_pixel, np)
        counts = [
            max(1, int(np.ceil((static_corners[:, 2 + a] / n).max(initial=0))))
            for a, n in ((0, output_height), (1, output_width))
        ]
    start_y, start_x, height, width = _corners(jnp.asarray(rois), spatial_scale, half_pixel, jnp).T
    rows = _axis_samples(start_y, height, output_height, counts[0], sampling_ratio, x.shape[2])
    columns = _axis_samples(start_x, width, output_width, counts[1], sampling_ratio, x.shape[3])
    refuse_outside_axis(batch_indices, x.shape[0], 0)
    images = x[jnp.asarray(batch_indices).astype(jnp.int32)]
    corners = []
    for tap_y in range(2):
        line = jnp.take_along_axis(images, rows.index[..., tap_y][:, None, :, None], axis=2)
        for tap_x in range(2):
            values = jnp.take_along_axis(line, columns.index[..., tap_x][:, None, None, :], axis=3)
            weight = rows.weight[..., tap_y][:, None, :, None] * columns.weight[..., tap_x][:, None, None, :]
            corners.append(values * weight.astype(x.dtype))
    used = rows.used[:, None, :, None] & columns.used[:, None, None, :]

    def by_bin(samples: Array) -> Array:
        return samples.reshape(*samples.shape[:2], output_height, counts[0], output_width, counts[1])

    # A bin of a region without extent has no sample: it is zero.
    samples = by_bin(used).sum(axis=(3, 5))
    if mode == "avg":
        total = jnp.where(used, sum(corners[1:], corners[0]), 0)
        return by_bin(total).sum(axis=(3, 5)) / jnp.maximum(samples, 1).astype(x.dtype)
    # of the weighted corners, not of the samples, as onnx.reference and onnxruntime have it
    largest = jnp.where(used, jnp.max(jnp.stack(corners), axis=0), -jnp.inf)
    return jnp.where(samples > 0, by_bin(largest).max(axis=(3, 5)), 0)


def _corners(rois: Any, scale: float, half_pixel: bool, numpy: Any) -> Any:
    """Begin and extent of each region, [regions, (y, x, height, width)]."""
    scaled = rois * scale - (0.5 if half_pixel else 0.0)
    begin = scaled[:, [1, 0]]
    extent = scaled[:, [3, 2]] - begin
    return numpy.concatenate([begin, extent if half_pixel else numpy.maximum(extent, 1.0)], axis=1)


@dataclass(frozen=True, slots=True)
class _AxisSamples:
    """Samples of regions along one axis.

    Args:
        index: two elements of each sample, [regions, samples, 2].
        weight: of these.
        used: whether a sample is one of the region's, [regions, samples].
    """

    index: Array
    weight: Array
    used: Array


def _axis_samples(start: Array, extent: Array, bins: int, count: int, ratio: int, size: int) -> _AxisSamples:
    """[regions, bins · count] samples, of which a region uses the first ones of each bin."""
    bin_extent = (extent / bins)[:, None, None]
    number = jnp.full_like(bin_extent, ratio) if ratio else jnp.ceil(bin_extent)
    sample = index_range(count)
    spacing = bin_extent / jnp.maximum(number, 1)
    position = start[:, None, None] + index_range(bins)[:, None] * bin_extent + (sample + 0.5) * spacing
    used = jnp.broadcast_to(sample < number, position.shape).reshape(len(start), bins * count)
    flat = position.reshape(len(start), bins * count)
    inside = (flat >= -1) & (flat <= size)
    placed = jnp.clip(flat, 0, size - 1)
    low = jnp.minimum(jnp.floor(placed).astype(jnp.int32), size - 1)
    ratio_high = placed - low
    index = jnp.stack([low, jnp.minimum(low + 1, size - 1)], -1)
    weight = jnp.where(inside[..., None], jnp.stack([1 - ratio_high, ratio_high], -1), 0)
    return _AxisSamples(index, weight, used)
