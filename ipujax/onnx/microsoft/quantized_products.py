"""Products of quantised matrices and arrays: in integers up to the last scale, as ONNX Runtime's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.microsoft.encoder_attention import MASKED, projected_attention
from ipujax.onnx.microsoft.fused_products import channels_first, channels_last
from ipujax.onnx.microsoft.quantized_arithmetic import real
from ipujax.onnx.operators.operand_types import Array, Optional, Value, along, on_axis
from ipujax.onnx.operators.quantization import (
    dynamic_quantize_linear,
    matmul_integer,
    quantize_linear,
    quantized_convolution,
)
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def _columns(values: Value, product: Array) -> Array:
    """Return scales, one or one for each column, so that they broadcast with a product."""
    vector = jnp.asarray(values)
    return along(vector, -1, product.ndim) if vector.ndim == 1 and vector.size > 1 else vector


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
    scale = jnp.asarray(a_scale).reshape(()) * _columns(b_scale, product)
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
    scale = np.float32(alpha) * jnp.asarray(a_scale).reshape(()) * _columns(b_scale, product)
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
    matrix = jnp.asarray(weights).astype(jnp.int32)
    shifted = matrix if weight_zero_point is None else matrix - jnp.asarray(weight_zero_point).astype(jnp.int32)
    return projected_attention(
        real(x, x_scale, x_zero_point),
        shifted.astype(jnp.float32) * jnp.asarray(weight_scale),
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
