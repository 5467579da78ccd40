"""Layers that networks share: dense layers, normalisations, convolutions, the pre-norm transformer block, and the loss.

Each layer is a function of its parameters and its inputs, and has another that makes its initial parameters.
Source of the block, which GPT and ViT share: Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019), without dropout; GELU by tanh. BERT has parameters of the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]


def stacked(init: Callable[[jax.Array], Params], key: jax.Array, layers: int) -> Params:
    """Parameters of equal layers, each leaf with a new leading axis."""
    return jax.vmap(init)(jax.random.split(key, layers))


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


def conv(kernel: jax.Array, x: jax.Array, stride: int = 1, padding: str = "SAME", groups: int = 1) -> jax.Array:
    """Convolution of [batch, height, width, channels] with a kernel [height, width, channels, channels]."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=layout, feature_group_count=groups
    )


def batch_norm(p: Params, stats: Params, x: jax.Array, is_training: bool = True) -> tuple[jax.Array, Params]:
    """Batch normalisation of the last dimension, its statistics in single precision.

    Args:
        p: parameters, see `norm_init`.
        stats: running mean and variance of each channel.
        x: values, [batch, …, channels].
        is_training: normalise by the statistics of this batch, else by the running ones.

    Returns:
        Values, and the running statistics with this batch's.
    """
    wide = x.astype(jnp.float32)
    now = _statistics(wide) if is_training else stats
    normal = (wide - now["mean"]) * (lax.rsqrt(now["variance"] + 1e-5) * p["scale"]) + p["bias"]
    y = normal.astype(x.dtype)
    return y, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, now) if is_training else stats


def _statistics(x: jax.Array) -> Params:
    """Mean and variance of the last dimension's channels."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    return {"mean": mean, "variance": jnp.maximum((x**2).mean(axes) - mean**2, 0)}


def conv_norm(
    p: Params, stats: Params, x: jax.Array, stride: int = 1, is_training: bool = True
) -> tuple[jax.Array, Params]:
    """Convolution, then `batch_norm`, of images [batch, height, width, channels]."""
    return batch_norm(p, stats, conv(p["kernel"], x, stride), is_training)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def block_init(key: jax.Array, width: int, has_biases: bool = True, dtype: Any = jnp.float32) -> Params:
    """Parameters of `block`."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = jax.random.split(key, len(shapes))
    layers = {
        name: dense_init(k, *shape, dtype, has_bias=has_biases)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return layers | {"norm1": norm_init(width, dtype), "norm2": norm_init(width, dtype)}


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Values of the positions up to each, weighted by attention; all are [batch, length, heads, width of a head]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def attend_all(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention that is weighted over all positions."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def queries_keys_values(p: Params, x: jax.Array, heads: int) -> list[jax.Array]:
    """Queries, keys and values of all heads, each [batch, length, heads, width of a head], by one dense layer."""
    # Those of a head are side by side: IPUs among which the outputs of the layer are split have whole heads.
    return jnp.split(dense(p, x).reshape(*x.shape[:2], heads, -1), 3, -1)


def attention(p: Params, x: jax.Array, heads: int, attend: Attend = attend) -> jax.Array:
    """Self-attention, causal by default, [batch, length, width] to the same."""
    q, k, v = queries_keys_values(p["qkv"], x, heads)
    return dense(p["out"], attend(q, k, v).reshape(x.shape))


def block(p: Params, x: jax.Array, heads: int, attend: Attend = attend) -> jax.Array:
    """Attention and a dense layer, each on normalised inputs and added to them."""
    x = x + attention(p, layer_norm(p["norm1"], x), heads, attend)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x))))


def through_layers(
    layer: Callable[[Params, jax.Array], jax.Array], stack: Params, x: jax.Array, recompute: bool
) -> jax.Array:
    """Apply equal layers in order, as one loop, which a pipeline cuts between any two of them.

    Args:
        layer: of the parameters of one layer and its inputs.
        stack: parameters of all layers, on a new leading axis.
        x: inputs of the first layer.
        recompute: whether the backward pass computes each layer again, and keeps its inputs alone.
    """
    each = jax.checkpoint(layer) if recompute else layer
    return lax.scan(lambda x, p: (each(p, x), None), x, stack)[0]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels, in single precision."""
    wide = logits.astype(jnp.float32)
    of_labels = jnp.take_along_axis(wide, labels[..., None], axis=-1).take(0, axis=-1)
    return (jax.nn.logsumexp(wide, axis=-1) - of_labels).mean()
