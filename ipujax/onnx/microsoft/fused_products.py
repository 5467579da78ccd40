"""Products with transpositions, factors and non-linearities; convolutions with a sum; channels-last forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp

from ipujax.onnx.microsoft.fused_functions import activated
from ipujax.onnx.operators.convolution import convolution
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.pools import max_pool
from ipujax.onnx.operators.reduction import gemm
from ipujax.onnx.operators.window_attributes import Kernels
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def _turned(x: Value, is_batch_turned: int, is_turned: int) -> Array:
    """Return a factor as a matrix of each batch: its first dimension behind the batch, its last two swapped."""
    array = jnp.asarray(x)
    if is_batch_turned and array.ndim > 2:
        array = jnp.moveaxis(array, 0, -2)
    return jnp.swapaxes(array, -1, -2) if is_turned and array.ndim > 1 else array


@operator("FusedMatMul", DOMAIN)
def fused_matmul(
    a: Value,
    b: Value,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    """α A B, either matrix transposed or not."""
    product = jnp.matmul(_turned(a, transBatchA, transA), _turned(b, transBatchB, transB))
    return product if alpha == 1 else (alpha * product).astype(product.dtype)


@operator("TransposeMatMul", DOMAIN)
def transpose_matmul(a: Value, b: Value, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Array:
    return fused_matmul(a, b, alpha=alpha, transA=transA, transB=transB)


@operator("FusedMatMulActivation", DOMAIN)
def fused_matmul_activation(
    a: Value,
    b: Value,
    *,
    activation: str,
    activation_alpha: float = 0.01,
    activation_axis: int = -1,
    activation_beta: float = 0.0,
    activation_gamma: float = 0.0,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Array:
    """A product and a non-linearity; of these none reads the axis or the third parameter."""
    product = fused_matmul(
        a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB
    )
    return activated(product, activation, (activation_alpha, activation_beta))


@operator("FusedGemm", DOMAIN)
def fused_gemm(
    a: Value,
    b: Value,
    c: Optional = None,
    *,
    activation: str = "",
    activation_alpha: float = 0.01,
    activation_beta: float = 0.0,
    activation_gamma: float = 0.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """α A B + β C, and a non-linearity."""
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(y, activation, (activation_alpha, activation_beta))


@operator("FusedConv", DOMAIN)
def fused_convolution(
    x: Value,
    w: Value,
    b: Optional = None,
    z: Optional = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    **attributes: Unpack[Kernels],
) -> Array:
    """A convolution, the sum with another array, and a non-linearity."""
    y = convolution(x, w, b, **attributes)
    return activated(y if z is None else y + z, activation, activation_params)


def channels_first(x: Value) -> Array:
    """Return an array of channels last as one of channels first."""
    return jnp.moveaxis(jnp.asarray(x), -1, 1)


def channels_last(x: Array) -> Array:
    """Return an array of channels first as one of channels last."""
    return jnp.moveaxis(x, 1, -1)


@operator("NhwcConv", DOMAIN)
def convolution_of_last_channels(x: Value, w: Value, b: Optional = None, **attributes: Unpack[Kernels]) -> Array:
    """A convolution of an array with channels last; weights have their channels first."""
    return channels_last(convolution(channels_first(x), w, b, **attributes))


@operator("NhwcFusedConv", DOMAIN)
def fused_convolution_of_last_channels(
    x: Value, w: Value, b: Optional = None, z: Optional = None, **attributes: Any
) -> Array:
    """As FusedConv, of arrays with channels last."""
    other = None if z is None else channels_first(z)
    return channels_last(fused_convolution(channels_first(x), w, b, other, **attributes))


@operator("NhwcMaxPool", DOMAIN)
def max_pool_of_last_channels(x: Value, **windows: Any) -> Array:
    """Largest elements of windows of an array with channels last."""
    (y, *_) = (pooled,) if not isinstance(pooled := max_pool(channels_first(x), **windows), tuple) else pooled
    return channels_last(y)
