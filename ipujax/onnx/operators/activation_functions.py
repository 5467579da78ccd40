"""Activation functions, and the softmax family."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator


@operator("Relu")
def relu(x: Value) -> Array:
    return jax.nn.relu(x)


@operator("LeakyRelu")
def leaky_relu(x: Value, *, alpha: float = 0.01) -> Array:
    return jnp.where(x >= 0, x, alpha * x)


@operator("PRelu")
def parametric_relu(x: Value, slope: Value) -> Array:
    return jnp.where(x >= 0, x, jnp.multiply(slope, x))


@operator("ThresholdedRelu")
def thresholded_relu(x: Value, *, alpha: float = 1.0) -> Array:
    return jnp.where(x > alpha, x, jnp.zeros_like(x))


@operator("Elu")
def elu(x: Value, *, alpha: float = 1.0) -> Array:
    return _exponential_linear(x, alpha)


@operator("Selu")
def selu(x: Value, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Array:
    return gamma * _exponential_linear(x, alpha)


@operator("Celu")
def celu(x: Value, *, alpha: float = 1.0) -> Array:
    return jnp.maximum(x, 0) + jnp.minimum(0, alpha * jnp.expm1(_negative_part(x) / alpha))


def _exponential_linear(x: Value, alpha: float) -> Array:
    return jnp.where(x >= 0, x, alpha * jnp.expm1(_negative_part(x)))


def _negative_part(x: Value) -> Array:
    """The branch that is not taken must not overflow: its gradient would be 0 · ∞."""
    return jnp.where(x >= 0, jnp.zeros_like(x), x)


@operator("Sigmoid")
def sigmoid(x: Value) -> Array:
    return jax.nn.sigmoid(x)


@operator("HardSigmoid")
def hard_sigmoid(x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return jnp.clip(alpha * jnp.asarray(x) + beta, 0, 1)


@operator("HardSwish")
def hard_swish(x: Value) -> Array:
    return jnp.multiply(x, hard_sigmoid(x, alpha=1 / 6, beta=0.5))


@operator("Swish")
def swish(x: Value, *, alpha: float = 1.0) -> Array:
    x = jnp.asarray(x)
    return x * jax.nn.sigmoid(x if alpha == 1 else alpha * x)


@operator("SwiGLU")
def swish_gate(a: Value, b: Value, *, alpha: float = 1.0) -> Array:
    return swish(a, alpha=alpha) * b


@operator("Mish")
def mish(x: Value) -> Array:
    return jnp.multiply(x, jnp.tanh(jax.nn.softplus(x)))


@operator("Gelu")
def gelu(x: Value, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(jnp.asarray(x), approximate=approximate == "tanh")


@operator("Softplus")
def softplus(x: Value) -> Array:
    return jax.nn.softplus(x)


@operator("Softsign")
def softsign(x: Value) -> Array:
    return jnp.divide(x, 1 + jnp.abs(x))


@operator("Shrink")
def shrink(x: Value, *, lambd: float = 0.5, bias: float = 0.0) -> Array:
    x = jnp.asarray(x)
    low = (x + bias).astype(x.dtype)
    high = (x - bias).astype(x.dtype)
    return jnp.where(x < -lambd, low, jnp.where(x > lambd, high, jnp.zeros_like(x)))


@operator("Softmax")
def softmax(x: Value, *, axis: int = -1) -> Array:
    return jax.nn.softmax(x, axis=axis)


@operator("LogSoftmax")
def log_softmax(x: Value, *, axis: int = -1) -> Array:
    return jax.nn.log_softmax(x, axis=axis)


@operator("Hardmax")
def hardmax(x: Value, *, axis: int = -1) -> Array:
    """One at the first largest element along an axis, zero elsewhere."""
    x = jnp.asarray(x)
    if not x.size:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], axis=axis, dtype=x.dtype)
