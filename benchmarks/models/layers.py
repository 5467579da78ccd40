"""Parts that several models share: initial weights, dense layers, normalisations, the loss of a classifier."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Params = dict[str, Any]


def weights(key: jax.Array, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Normal weights of He's variance; all dimensions but the last are inputs."""
    return jax.nn.initializers.he_normal()(key, shape, dtype)


def dense_init(key: jax.Array, inputs: int, outputs: int, dtype: Any = jnp.float32, *, has_bias: bool = True) -> Params:
    """Parameters of `dense`."""
    bias = {"b": jnp.zeros(outputs, dtype)} if has_bias else {}
    return {"w": weights(key, inputs, outputs, dtype=dtype), **bias}


def dense(p: Params, x: jax.Array) -> jax.Array:
    """A dense layer on the last dimension."""
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def perceptron_init(key: jax.Array, *widths: int) -> list[Params]:
    """Parameters of `perceptron`, from the inputs' width to the outputs'."""
    keys = jax.random.split(key, len(widths) - 1)
    return [dense_init(k, n, m) for k, n, m in zip(keys, widths[:-1], widths[1:], strict=True)]


def perceptron(params: list[Params], x: jax.Array) -> jax.Array:
    """Dense layers with ReLU between them."""
    for p in params[:-1]:
        x = jax.nn.relu(dense(p, x))
    return dense(params[-1], x)


def norm_init(width: int, dtype: Any = jnp.float32) -> Params:
    """Parameters of a normalisation."""
    return {"scale": jnp.ones(width, dtype), "bias": jnp.zeros(width, dtype)}


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Normalises the last dimension, in single precision."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normal.astype(x.dtype) * p["scale"] + p["bias"]


def conv_norm_init(key: jax.Array, size: int, inputs: int, outputs: int, dtype: Any = jnp.float32) -> Any:
    """Parameters and running statistics of `conv_norm`."""
    params = {"kernel": weights(key, size, size, inputs, outputs, dtype=dtype), **norm_init(outputs, dtype)}
    return params, {"mean": jnp.zeros(outputs), "variance": jnp.ones(outputs)}


def conv_norm(p: Params, stats: Params, x: jax.Array, stride: int = 1) -> tuple[jax.Array, Params]:
    """Convolution and batch normalisation, its statistics in single precision.

    Args:
        p: parameters.
        stats: running mean and variance of each channel.
        x: images, [batch, height, width, channels].
        stride: of the convolution.

    Returns:
        Images, and the running statistics with this batch's.
    """
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, p["kernel"], (stride, stride), "SAME", dimension_numbers=layout)
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = jnp.maximum((wide**2).mean((0, 1, 2)) - mean**2, 0)
    normal = (wide - mean) * (lax.rsqrt(variance + 1e-5) * p["scale"]) + p["bias"]
    now = {"mean": mean, "variance": variance}
    return normal.astype(x.dtype), jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, now)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels, in single precision."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
