"""Non-linearities that its fused operators call by name, and GELU in its forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.elementwise import hard_sigmoid, leaky_relu
from ipujax.onnx.operators.operand_types import Array, Optional, Value, axis_of, on_axis
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
def quick_gelu(x: Value, *, alpha: float = 1.702) -> Array:
    """x σ(α x)."""
    x = jnp.asarray(x)
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
def bias_softmax(data: Value, bias: Value, *, axis: int = 1, is_inner_broadcast: int) -> Array:
    """Softmax over all dimensions from an axis on of data + bias, which is repeated within rows or over them."""
    data = jnp.asarray(data)
    axis = axis_of(axis, data.ndim)
    rows = jnp.asarray(bias)
    if is_inner_broadcast and rows.ndim < data.ndim:
        missing = data.ndim - rows.ndim
        rows = rows.reshape(*rows.shape[:1], *(1,) * missing, *rows.shape[1:])
    shifted = data + rows
    flat = shifted.reshape(*shifted.shape[:axis], -1)
    return jax.nn.softmax(flat, axis=-1).reshape(shifted.shape)
