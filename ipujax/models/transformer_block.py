"""The pre-norm transformer block that GPT and ViT share, and its attention; BERT has parameters of the same shapes.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout; GELU by tanh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import Params, dense, dense_init, layer_norm, norm_init

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
    """The same, weighted over all positions."""
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
