"""Arrays read at positions between their elements, by weighted sums of the elements around."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_terms
from ipujax.onnx.operators.operand_types import Array


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


def cubic_kernel(distance: Array, coefficient: float) -> Array:
    """Weight of an element at a distance of at most two elements."""
    # Source: R. G. Keys, "Cubic convolution interpolation for digital image processing" (1981).
    a = coefficient
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return jnp.where(d <= 1, near, jnp.where(d < 2, far, jnp.zeros_like(d)))


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
