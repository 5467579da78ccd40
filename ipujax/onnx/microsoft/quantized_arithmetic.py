"""Elementwise operators and pools on quantised arrays: dequantised, computed in float32, quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.microsoft.fused_products import channels_first, channels_last
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.elementwise import leaky_relu
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.pools import average_pool
from ipujax.onnx.operators.quantization import dequantize_linear, quantize_linear
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def real(x: Value, scale: Value, zero_point: Optional) -> Array:
    """Return a quantised array as float32."""
    return dequantize_linear(x, scale, zero_point)


def quantized(y: Array, scale: Value, zero_point: Optional, like: Value) -> Array:
    """Return an array quantised in the type of the zero point, or of another array."""
    dtype = jnp.asarray(like).dtype
    return quantize_linear(y, scale, np.zeros((), dtype) if zero_point is None else zero_point)


@operator("QuantizeLinear", DOMAIN)
def quantize(x: Value, y_scale: Value, y_zero_point: Optional = None, *, axis: int = 1) -> Array:
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@operator("DequantizeLinear", DOMAIN)
def dequantize(x: Value, x_scale: Value, x_zero_point: Optional = None, *, axis: int = 1) -> Array:
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


@operator("QLinearAdd", DOMAIN)
def quantized_sum(
    a: Value, a_scale: Value, a_zero: Optional, b: Value, b_scale: Value, b_zero: Optional, scale: Value,
    zero: Optional = None,
) -> Array:  # fmt: skip
    return quantized(real(a, a_scale, a_zero) + real(b, b_scale, b_zero), scale, zero, a)


@operator("QLinearMul", DOMAIN)
def quantized_product(
    a: Value, a_scale: Value, a_zero: Optional, b: Value, b_scale: Value, b_zero: Optional, scale: Value,
    zero: Optional = None,
) -> Array:  # fmt: skip
    return quantized(real(a, a_scale, a_zero) * real(b, b_scale, b_zero), scale, zero, a)


@operator("QLinearSigmoid", DOMAIN)
def quantized_sigmoid(x: Value, x_scale: Value, x_zero: Optional, y_scale: Value, y_zero: Optional = None) -> Array:
    return quantized(jax.nn.sigmoid(real(x, x_scale, x_zero)), y_scale, y_zero, x)


@operator("QLinearLeakyRelu", DOMAIN)
def quantized_leaky_relu(
    x: Value, x_scale: Value, x_zero: Optional, y_scale: Value, y_zero: Optional = None, *, alpha: float = 0.01
) -> Array:
    return quantized(leaky_relu(real(x, x_scale, x_zero), alpha=alpha), y_scale, y_zero, x)


@operator("QLinearSoftmax", DOMAIN)
def quantized_softmax(
    x: Value, x_scale: Value, x_zero: Optional, y_scale: Value, y_zero: Value, *, axis: int = -1, opset: int
) -> Array:
    """Softmax along an axis; before opset 13 over all dimensions from it on."""
    array = real(x, x_scale, x_zero)
    if opset >= 13:
        return quantized(jax.nn.softmax(array, axis=axis), y_scale, y_zero, x)
    flat = array.reshape(*array.shape[: axis % array.ndim], -1)
    return quantized(jax.nn.softmax(flat, axis=-1).reshape(array.shape), y_scale, y_zero, x)


@operator("QLinearConcat", DOMAIN)
def quantized_concatenation(y_scale: Value, y_zero: Value, *inputs: Value, axis: int) -> Array:
    """Arrays side by side, each with a scale and a zero point of its own behind it."""
    if len(inputs) % 3:
        raise OnnxError("each array needs a scale and a zero point", expected="a multiple of 3", got=len(inputs))
    arrays = [real(*inputs[n : n + 3]) for n in range(0, len(inputs), 3)]
    return quantized(jnp.concatenate(arrays, axis=axis), y_scale, y_zero, inputs[0])


@operator("QLinearWhere", DOMAIN)
def quantized_choice(
    condition: Value, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value, y_zero: Value, z_scale: Value,
    z_zero: Value,
) -> Array:  # fmt: skip
    chosen = jnp.where(condition, real(x, x_scale, x_zero), real(y, y_scale, y_zero))
    return quantized(chosen, z_scale, z_zero, x)


@operator("QLinearReduceMean", DOMAIN)
def quantized_mean(
    x: Value, x_scale: Value, x_zero: Optional, y_scale: Value, y_zero: Optional = None, *, axes: Sequence[int],
    keepdims: int = 1,
) -> Array:  # fmt: skip
    mean = jnp.mean(real(x, x_scale, x_zero), tuple(axes), keepdims=bool(keepdims))
    return quantized(mean, y_scale, y_zero, x)


@operator("QLinearGlobalAveragePool", DOMAIN)
def quantized_global_mean(
    x: Value, x_scale: Value, x_zero: Value, y_scale: Value, y_zero: Value, *, channels_last: int = 0
) -> Array:
    """Means of channels."""
    array = real(x, x_scale, x_zero)
    first = 1 if channels_last else 2
    axes = tuple(range(first, first + array.ndim - 2))
    return quantized(jnp.mean(array, axes, keepdims=True), y_scale, y_zero, x)


@operator("QLinearAveragePool", DOMAIN)
def quantized_average_pool(
    x: Value, x_scale: Value, x_zero: Optional, y_scale: Value, y_zero: Optional = None, **windows: Any
) -> Array:
    """Means of windows, of arrays with channels first or last."""
    is_last = windows.pop("channels_last", 0)
    array = real(x, x_scale, x_zero)
    pooled = average_pool(channels_first(array) if is_last else array, **windows)
    return quantized(channels_last(pooled) if is_last else pooled, y_scale, y_zero, x)
