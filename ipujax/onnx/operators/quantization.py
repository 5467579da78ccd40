"""Quantisation to few bits and back, and products of quantised arrays.

Scales and zero points are scalars, or one for each element of an axis, or one for each block along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.element_types import FLOAT4, cast, element_dtype, is_floating
from ipujax.onnx.operators.convolution import by_slice, integer_convolution, shifted
from ipujax.onnx.operators.operand_types import Array, Optional, Value, along, on_axis
from ipujax.onnx.operators.window_attributes import Kernels
from ipujax.onnx.registry import operator


@operator("QuantizeLinear")
def quantize_linear(
    x: Array,
    y_scale: Value,
    y_zero_point: Optional = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Array:
    """x / scale + zero point, rounded to even and limited to the type of the zero point, or of `output_dtype`."""
    scale = _spread(jnp.asarray(y_scale), x.shape, axis, block_size)
    # Without a zero point and `output_dtype`, ONNX quantises to uint8.
    dtype = element_dtype(output_dtype) if output_dtype else np.dtype(np.uint8)
    zero = None
    if y_zero_point is not None:
        dtype = jnp.asarray(y_zero_point).dtype
        zero = _spread(jnp.asarray(y_zero_point), x.shape, axis, block_size)
    working = element_dtype(precision) if precision else scale.dtype
    quotient = _quotient(x.astype(working), scale.astype(working))
    return _quantized(quotient, zero, dtype, bool(saturate))


def _quotient(x: Array, scale: Array) -> Array:
    """Return x / scale as a division rounds it, by which values that meet a half are known.

    By one number for all elements XLA does not divide: it multiplies by the inverse. Here the divisor of NaN is 1.
    """
    return x / jnp.where(jnp.isnan(x), 1, scale)


def _quantized(quotient: Array, zero: Array | None, dtype: np.dtype, saturate: bool) -> Array:
    """Return an array divided by its scale in a type of fewer bits: rounded, and shifted by the zero point."""
    if jnp.issubdtype(dtype, jnp.floating):
        # Of float8 the zero point says the dtype only; float4 adds it.
        shifted = quotient if zero is None or dtype != FLOAT4 else quotient + zero.astype(quotient.dtype)
        return cast(shifted, dtype, saturate=saturate)
    limits = jnp.iinfo(dtype)
    # half precision cannot hold all integers of 16 bits
    rounded = jnp.round(quotient.astype(jnp.promote_types(quotient.dtype, jnp.float32)))
    shifted = rounded if zero is None else rounded + zero.astype(rounded.dtype)
    return cast(jnp.clip(shifted, float(limits.min), float(limits.max)), dtype)


def _spread(values: Array, shape: Sequence[int], axis: int, block_size: int) -> Array:
    """Scales or zero points in a shape that broadcasts with the array."""
    if values.size == 1 and values.ndim <= 1:
        return values.reshape(())
    if values.ndim == 1 and not block_size:
        return along(values, axis, len(shape))
    # The last block may be shorter than the others.
    repeated = jnp.repeat(values, block_size, axis=axis)
    return jnp.take(repeated, np.arange(shape[axis]), axis=axis)


@operator("DequantizeLinear")
def dequantize_linear(
    x: Value,
    x_scale: Value,
    x_zero_point: Optional = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    """(x − zero point) · scale, computed in float32."""
    x, scale = map(jnp.asarray, (x, x_scale))
    wide = jnp.promote_types(jnp.float32, scale.dtype)
    shifted = x.astype(jnp.int32) if not is_floating(x) else x.astype(wide)
    if x_zero_point is not None:
        shifted = shifted - _spread(jnp.asarray(x_zero_point), x.shape, axis, block_size).astype(shifted.dtype)
    y = shifted.astype(wide) * _spread(scale, x.shape, axis, block_size).astype(wide)
    return y.astype(element_dtype(output_dtype) if output_dtype else scale.dtype)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Value) -> tuple[Array, Array, Array]:
    """Array in uint8, with the scale and zero point that its range, extended to zero, needs."""
    levels, scale, zero_point = _levels_of_bytes(jnp.asarray(x), None)
    return levels.astype(jnp.uint8), scale, zero_point.astype(jnp.uint8)


def _levels_of_bytes(x: Array, axis: int | None) -> tuple[Array, Array, Array]:
    """Levels 0 to 255 as floats, with scale and zero point, of the whole array or of each slice along an axis."""
    low = jnp.minimum(0, jnp.min(x, axis, keepdims=axis is not None))
    high = jnp.maximum(0, jnp.max(x, axis, keepdims=axis is not None))
    # Of an array of zeros any scale is right; onnxruntime has 1, by which models may divide.
    is_flat = (high - low) / 255 == 0
    # By a constant XLA does not divide: it multiplies by the inverse, and other values would meet a half.
    scale = jnp.where(is_flat, 1, high - low) / jnp.where(is_flat, 1, jnp.asarray(255, x.dtype))
    zero_point = jnp.clip(jnp.round(_quotient(-low, scale)), 0, 255)
    return jnp.clip(jnp.round(_quotient(x, scale)) + zero_point, 0, 255), scale, zero_point


def centred_levels(x: Array, axis: int | None = None) -> tuple[Array, Array]:
    """Return whole numbers and a scale whose products are the values that an array has as uint8.

    Args:
        x: the array, quantised as a whole or each slice along an axis.
        axis: of the slices; None for the whole array.
    """
    levels, scale, zero_point = _levels_of_bytes(x, axis)
    return _with_gradient_of(x / scale, levels - zero_point), scale


def rounded_to_signed(x: Array, block_size: int) -> Array:
    """Return an array rounded as a product in int8 rounds its operand: each block of the last axis to 255 levels."""
    length = x.shape[-1]
    blocks = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -length % block_size)])
    blocks = blocks.reshape(*x.shape[:-1], -1, block_size)
    largest = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    levels = jnp.round(blocks * (127 / jnp.where(largest == 0, 1, largest)))
    rounded = (levels * (largest / 127)).reshape(*x.shape[:-1], -1)[..., :length]
    return _with_gradient_of(x, rounded)


def _with_gradient_of(x: Array, rounded: Array) -> Array:
    # That of a step function is zero everywhere, which no training wants. The difference is zero, and nothing rounds.
    return lax.stop_gradient(rounded) + (x - lax.stop_gradient(x))


@operator("MatMulInteger")
def matmul_integer(a: Value, b: Value, a_zero_point: Optional = None, b_zero_point: Optional = None) -> Array:
    """Product in int32 of differences from the zero points, one for each row of a and column of b."""
    return jnp.matmul(shifted(a, a_zero_point, -2), shifted(b, b_zero_point, -1))


@operator("QLinearMatMul")
def quantized_matmul(
    a: Value,
    a_scale: Value,
    a_zero_point: Value,
    b: Value,
    b_scale: Value,
    b_zero_point: Value,
    y_scale: Value,
    y_zero_point: Value,
) -> Array:
    """Quantised product of quantised matrices, in integers up to the last scale."""
    product = matmul_integer(a, b, a_zero_point, b_zero_point)
    # In float32: the product of two scales of half precision underflows.
    a_scales, b_scales, y_scales = (
        by_slice(scale, product, axis).astype(jnp.float32)
        for scale, axis in ((a_scale, -2), (b_scale, -1), (y_scale, -2))
    )
    zero = jnp.asarray(y_zero_point)
    shifted = by_slice(zero, product, -2).astype(jnp.int32)
    return _quantized(
        product.astype(jnp.float32) * (a_scales * b_scales / y_scales), shifted, zero.dtype, saturate=True
    )


@operator("QLinearConv")
def quantized_convolution(
    x: Value,
    x_scale: Value,
    x_zero_point: Value,
    w: Value,
    w_scale: Value,
    w_zero_point: Value,
    y_scale: Value,
    y_zero_point: Value,
    b: Optional = None,
    **attributes: Unpack[Kernels],
) -> Array:
    """Quantised convolution of quantised arrays; the bias is in int32, at the scale of the product."""
    y = integer_convolution(x, w, jnp.ravel(x_zero_point)[0], w_zero_point, **attributes)
    if b is not None:
        y = y + on_axis(b, y, 1, "the bias")
    scale = jnp.asarray(x_scale) * by_slice(w_scale, y, 1) / jnp.asarray(y_scale)
    zero = jnp.asarray(y_zero_point)
    return _quantized(y.astype(jnp.float32) * scale, zero.astype(jnp.int32), zero.dtype, saturate=True)
