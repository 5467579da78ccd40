"""Non-linearities that fused operators call by name, GELU in its forms; products with transpositions, factors and
non-linearities; convolutions with a sum; channels-last forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.convolution import convolution
from ipujax.onnx.operators.elementwise import hard_sigmoid, leaky_relu
from ipujax.onnx.operators.operand_types import Array, Optional, Value, axis_of, on_axis
from ipujax.onnx.operators.pools import max_pool
from ipujax.onnx.operators.reduction import gemm
from ipujax.onnx.operators.window_attributes import Kernels
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator

_FUSED: Mapping[str, tuple[int, Callable[..., Array]]] = {  # number of parameters, function
    "Relu": (0, jax.nn.relu),
    "Sigmoid": (0, jax.nn.sigmoid),
    "Tanh": (0, jnp.tanh),
    "LeakyRelu": (1, lambda x, alpha=0.01: leaky_relu(x, alpha=alpha)),
    "Clip": (2, lambda x, low, high: jnp.clip(x, low, high)),
    "HardSigmoid": (2, lambda x, alpha=0.2, beta=0.5: hard_sigmoid(x, alpha=alpha, beta=beta)),
    "HardSwish": (0, lambda x: x * hard_sigmoid(x, alpha=1 / 6, beta=0.5)),
    "Gelu": (0, lambda x: jax.nn.gelu(x, approximate=False)),
}


def activated(x: Array, name: str, parameters: Sequence[float]) -> Array:
    """Return a fused non-linearity of an array; refuse an unknown one."""
    if not name:
        return x
    if name not in _FUSED:
        raise OnnxError("the attribute 'activation' is unknown", expected=f"one of {', '.join(_FUSED)}", got=name)
    count, function = _FUSED[name]
    return function(x, *parameters[:count]).astype(x.dtype)


@operator("Gelu", DOMAIN)
def gelu(x: Value) -> Array:
    return jax.nn.gelu(jnp.asarray(x), approximate=False)


@operator("BiasGelu", DOMAIN)
def bias_gelu(a: Value, b: Value) -> Array:
    return jax.nn.gelu(jnp.asarray(a) + on_axis(b, a, -1, "the bias"), approximate=False)


@operator("FastGelu", DOMAIN)
def fast_gelu(x: Value, bias: Optional = None) -> Array:
    """The approximation of GELU by a hyperbolic tangent."""
    shifted = jnp.asarray(x) if bias is None else jnp.asarray(x) + on_axis(bias, x, -1, "the bias")
    return jax.nn.gelu(shifted, approximate=True)


@operator("QuickGelu", DOMAIN)
def quick_gelu(x: Array, *, alpha: float = 1.702) -> Array:
    """x σ(α x)."""
    return x * jax.nn.sigmoid(alpha * x)


@operator("BiasSplitGelu", DOMAIN)
def bias_split_gelu(x: Value, bias: Value) -> Array:
    """The first half of x + bias, gated by GELU of the second."""
    value, gate = jnp.split(jnp.asarray(x) + bias, 2, axis=-1)
    return value * jax.nn.gelu(gate, approximate=False)


@operator("BiasAdd", DOMAIN)
def bias_add(x: Value, bias: Value, skip: Value) -> Array:
    return jnp.asarray(x) + bias + skip


@operator("BiasSoftmax", DOMAIN)
def bias_softmax(data: Array, bias: Value, *, axis: int = 1, is_inner_broadcast: int) -> Array:
    """Softmax over all dimensions from an axis on of data + bias, which is repeated within rows or over them."""
    axis = axis_of(axis, data.ndim)
    rows = jnp.asarray(bias)
    if is_inner_broadcast and rows.ndim < data.ndim:
        missing = data.ndim - rows.ndim
        rows = rows.reshape(*rows.shape[:1], *(1,) * missing, *rows.shape[1:])
    return jax.nn.softmax(data + rows, axis=tuple(range(axis, data.ndim)))


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
    x: Array,
    w: Array,
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
def convolution_of_last_channels(x: Value, w: Array, b: Optional = None, **attributes: Unpack[Kernels]) -> Array:
    """A convolution of an array with channels last; weights have their channels first."""
    return channels_last(convolution(channels_first(x), w, b, **attributes))


@operator("NhwcFusedConv", DOMAIN)
def fused_convolution_of_last_channels(
    x: Value, w: Array, b: Optional = None, z: Optional = None, **attributes: Any
) -> Array:
    """As FusedConv, of arrays with channels last."""
    other = None if z is None else channels_first(z)
    return channels_last(fused_convolution(channels_first(x), w, b, other, **attributes))


@operator("NhwcMaxPool", DOMAIN)
def max_pool_of_last_channels(x: Value, **windows: Any) -> Array:
    """Largest elements of windows of an array with channels last."""
    (y, *_) = (pooled,) if not isinstance(pooled := max_pool(channels_first(x), **windows), tuple) else pooled
    return channels_last(y)
