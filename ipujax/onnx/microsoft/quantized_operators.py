"""Quantised arrays: elementwise operators and pools in float32, products in integers up to the last scale, an LSTM.

Products are as ONNX Runtime's kernels. Operands of the LSTM's products are quantised on the way, those of all times at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.microsoft.encoder_attention import MASKED, projected_attention
from ipujax.onnx.microsoft.fused_operators import channels_first, channels_last
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.convolution import by_slice, shifted
from ipujax.onnx.operators.elementwise import leaky_relu
from ipujax.onnx.operators.operand_types import Array, Optional, Value, on_axis
from ipujax.onnx.operators.pools import average_pool
from ipujax.onnx.operators.quantization import (
    centred_levels,
    dequantize_linear,
    dynamic_quantize_linear,
    matmul_integer,
    quantize_linear,
    quantized_convolution,
)
from ipujax.onnx.operators.recurrent_layers import LayerAttributes, lstm_settings, quantized_lstm_step, run_directions
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def real(x: Value, scale: Value, zero_point: Optional) -> Array:
    """Return a quantised array as float32."""
    return dequantize_linear(x, scale, zero_point)


def quantized(y: Array, scale: Value, zero_point: Optional, like: Value) -> Array:
    """Return an array quantised in the type of the zero point, or of another array."""
    dtype = jnp.asarray(like).dtype
    return quantize_linear(y, scale, np.zeros((), dtype) if zero_point is None else zero_point)


@operator("QuantizeLinear", DOMAIN)
def quantize(x: Array, y_scale: Value, y_zero_point: Optional = None, *, axis: int = 1) -> Array:
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@operator("DequantizeLinear", DOMAIN)
def dequantize(x: Value, x_scale: Value, x_zero_point: Optional = None, *, axis: int = 1) -> Array:
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


def _quantized_pair(combine: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Return the operator that combines two quantised arrays."""

    def combined(
        a: Value, a_scale: Value, a_zero: Optional, b: Value, b_scale: Value, b_zero: Optional, scale: Value,
        zero: Optional = None,
    ) -> Array:  # fmt: skip
        return quantized(combine(real(a, a_scale, a_zero), real(b, b_scale, b_zero)), scale, zero, a)

    return combined


operator("QLinearAdd", DOMAIN)(_quantized_pair(jnp.add))
operator("QLinearMul", DOMAIN)(_quantized_pair(jnp.multiply))


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
    axes = axis if opset >= 13 else tuple(range(axis % array.ndim, array.ndim))
    return quantized(jax.nn.softmax(array, axis=axes), y_scale, y_zero, x)


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


@operator("MatMulIntegerToFloat", DOMAIN)
def float_product_of_integers(
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero_point: Optional = None,
    b_zero_point: Optional = None,
    bias: Optional = None,
) -> Array:
    """Product of quantised matrices as floats, and a bias."""
    product = matmul_integer(a, b, a_zero_point, b_zero_point)
    scale = jnp.asarray(a_scale).reshape(()) * by_slice(b_scale, product, -1)
    y = product.astype(scale.dtype) * scale
    return y if bias is None else y + on_axis(bias, y, -1, "the bias")


@operator("DynamicQuantizeMatMul", DOMAIN)
def product_with_quantized_weights(
    a: Value, b: Value, b_scale: Value, b_zero_point: Optional = None, bias: Optional = None
) -> Array:
    """Product with quantised weights of an array that is quantised on the way, to uint8."""
    quantized, scale, zero_point = dynamic_quantize_linear(a)
    return float_product_of_integers(quantized, b, scale, b_scale, zero_point, b_zero_point, bias)


@operator("QGemm", DOMAIN)
def quantized_gemm(
    a: Value,
    a_scale: Value,
    a_zero_point: Value,
    b: Value,
    b_scale: Value,
    b_zero_point: Value,
    c: Optional = None,
    y_scale: Optional = None,
    y_zero_point: Optional = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """α A B + C, C at the scale of the product; quantised, or float32 without a scale of the result."""
    # Zero points are of whole matrices, or of columns of the product: turning comes first.
    left, right = (jnp.asarray(x).T if is_turned else x for x, is_turned in ((a, transA), (b, transB)))
    product = matmul_integer(left, right, a_zero_point, b_zero_point)
    product = product if c is None else product + c
    scale = np.float32(alpha) * jnp.asarray(a_scale).reshape(()) * by_slice(b_scale, product, -1)
    y = product.astype(jnp.float32) * scale
    if y_scale is None:
        return y
    zero = np.zeros((), jnp.asarray(a).dtype) if y_zero_point is None else y_zero_point
    return quantize_linear(y, y_scale, zero)


@operator("QLinearConv", DOMAIN)
def quantized_convolution_of_last_channels(
    x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value, y_scale: Value, y_zero: Value,
    b: Optional = None, **windows: Any,
) -> Array:  # fmt: skip
    """As ONNX's QLinearConv, of arrays with channels first or last."""
    is_last = windows.pop("channels_last", 0)
    first = channels_first(x) if is_last else x
    y = quantized_convolution(first, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b, **windows)
    return channels_last(y) if is_last else y


@operator("QAttention", DOMAIN)
def quantized_attention(
    x: Value,
    weights: Value,
    bias: Value,
    x_scale: Value,
    weight_scale: Value,
    mask_index: Optional = None,
    x_zero_point: Optional = None,
    weight_zero_point: Optional = None,
    past: Optional = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """As Attention, with quantised operand and weights; weights have a scale each column or one."""
    return projected_attention(
        real(x, x_scale, x_zero_point),
        shifted(weights, weight_zero_point, -1).astype(jnp.float32) * jnp.asarray(weight_scale),
        bias,
        mask_index,
        past,
        do_rotary=do_rotary,
        mask_filter_value=mask_filter_value,
        num_heads=num_heads,
        past_present_share_buffer=past_present_share_buffer,
        qkv_hidden_sizes=qkv_hidden_sizes,
        scale=scale,
        unidirectional=unidirectional,
        output_count=output_count,
    )


def _whole_weights(x: Value, zero_point: Value) -> Array:
    """Return quantised weights [directions, rows, units] as whole numbers in float32, [directions, units, rows]."""
    # Zero points are subtracted in integers, where 8 bits less 8 bits do not overflow.
    array = jnp.asarray(x).astype(jnp.int32)
    zero = jnp.asarray(zero_point).reshape(array.shape[0], 1, -1).astype(jnp.int32)
    return jnp.swapaxes((array - zero).astype(jnp.float32), 1, 2)


@operator("DynamicQuantizeLSTM", DOMAIN)
def lstm_with_quantized_weights(
    x: Value,
    w: Value,
    r: Value,
    b: Optional,
    sequence_lens: Optional,
    initial_h: Optional,
    initial_c: Optional,
    p: Optional,
    w_scale: Value,
    w_zero_point: Value,
    r_scale: Value,
    r_zero_point: Value,
    *,
    input_forget: int = 0,
    output_count: int = 1,
    **attributes: Unpack[LayerAttributes],
) -> tuple[Array, ...]:
    """As LSTM, with weights [directions, rows, 4 · hidden]; the other operands of its products are rounded to uint8.

    The inputs of all times have one scale; outputs have one each time and sequence, as onnxruntime's of one sequence,
    or of no more sequences than threads: it divides longer batches among threads, and each part has one scale.
    """
    array = jnp.asarray(x)
    if sequence_lens is not None:
        # What follows the longest sequence is not quantised, and is no part of the range.
        is_read = np.arange(len(array)) < jnp.max(jnp.asarray(sequence_lens))
        array = jnp.where(is_read[:, None, None], array, 0)
    levels, x_scale = centred_levels(array)
    outputs = _whole_weights(r, r_zero_point)
    count, _, hidden = outputs.shape
    shape = count, 4, -1
    units = jnp.ones((count, 4, hidden), jnp.float32)
    input_scales, output_scales = (
        jnp.asarray(each).reshape(shape if np.size(each) > count else (count, 1, 1)) * units
        for each in (w_scale, r_scale)
    )
    biases = 0 * units if b is None else jnp.asarray(b).reshape(count, 2, 4, hidden).sum(1)
    of_directions = zip(x_scale * input_scales, output_scales, biases, strict=True)
    plain = lstm_settings(p, attributes.get("direction", "forward"), bool(input_forget))
    settings = [{**each, "scales": scales} for each, scales in zip(plain, of_directions, strict=False)]
    results = run_directions(
        "lstm",
        (levels, _whole_weights(w, w_zero_point), outputs, None, sequence_lens),
        [initial_h, initial_c],
        settings,
        quantized_lstm_step,
        **attributes,
    )
    return results[:output_count]
