"""Causal language models of the Llama family: rotary positions, RMS norms, gated layers, shared key and value heads.

Source: Touvron et al., "LLaMA" (arXiv 2302.13971), "Llama 2" (arXiv 2307.09288); Grattafiori et al., "The Llama 3 Herd
of Models" (arXiv 2407.21783). Limits: rotary frequencies of Llama 3.1 and later are not scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import Params, dense, dense_init, stacked, through_layers, weights
from ipujax.models.workload import Network, Struct, Tree


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a network.

    Args:
        layers: decoder layers.
        width: features of each token.
        heads: of queries.
        key_heads: of keys and values, a divisor of `heads`.
        hidden: features inside the gated layer.
        vocabulary: different tokens.
        length: tokens of a sequence.
        rotary_base: base of the wavelengths of rotary positions.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 32_000
    length: int = 2048
    rotary_base: float = 10_000.0


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divides the last dimension by its root mean square, in single precision."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotated(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions of [batch, length, heads, width of a head]: feature i turns with feature i + half the width."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(p: Params, x: jax.Array, shape: LlamaShape) -> jax.Array:
    """Causal self-attention in which groups of query heads share a head of keys and values."""
    rows, length, _ = x.shape
    head_width = shape.width // shape.heads
    q = rotated(dense(p["q"], x).reshape(rows, length, shape.heads, head_width), shape.rotary_base)
    k = rotated(dense(p["k"], x).reshape(rows, length, shape.key_heads, head_width), shape.rotary_base)
    v = dense(p["v"], x).reshape(rows, length, shape.key_heads, head_width)
    groups = q.reshape(rows, length, shape.key_heads, -1, head_width)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", groups, k) / math.sqrt(head_width)
    causal = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
    return dense(p["out"], jnp.einsum("bhgqk,bkhd->bqhgd", shares, v).reshape(rows, length, shape.width))


def layer(p: Params, x: jax.Array, shape: LlamaShape) -> jax.Array:
    """Attention and a gated layer, each on normalised inputs and added to them."""
    x = x + attention(p, rms_norm(p["norm1"], x), shape)
    normal = rms_norm(p["norm2"], x)
    return x + dense(p["down"], jax.nn.silu(dense(p["gate"], normal)) * dense(p["up"], normal))


def layer_init(key: jax.Array, shape: LlamaShape, dtype: Any) -> Params:
    """Parameters of `layer`."""
    d, keys_width = shape.width, shape.key_heads * (shape.width // shape.heads)
    sizes = {
        "q": (d, d),
        "k": (d, keys_width),
        "v": (d, keys_width),
        "out": (d, d),
        "gate": (d, shape.hidden),
        "up": (d, shape.hidden),
        "down": (shape.hidden, d),
    }
    keys = jax.random.split(key, len(sizes))
    products = {
        name: dense_init(k, *size, dtype, has_bias=False) for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    return products | {"norm1": jnp.ones(d, dtype), "norm2": jnp.ones(d, dtype)}


def llama(name: str, shape: LlamaShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from token ids to logits of the next tokens; arguments as of `gpt`."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        tokens, head, layers = jax.random.split(key, 3)
        params = {
            "tokens": weights(tokens, shape.vocabulary, shape.width, dtype=dtype),
            "layers": stacked(lambda k: layer_init(k, shape, dtype), layers, shape.layers),
            "norm": jnp.ones(shape.width, dtype),
            "head": weights(head, shape.width, shape.vocabulary, dtype=dtype),
        }
        return params, {}

    def apply(params: Tree, statistics: Tree, ids: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        x = params["tokens"][ids]
        x = through_layers(lambda p, x: layer(p, x, shape), params["layers"], x, recompute and is_training)
        return rms_norm(params["norm"], x) @ params["head"], statistics

    ids = Struct((shape.length,), jnp.int32)
    return Network(name, init, apply, ids, ids)
