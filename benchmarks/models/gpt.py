"""A causal language model over bytes: pre-norm blocks of attention and a GELU layer of four times the width, by Adam.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .layers import Params, cross_entropy, dense, dense_init, layer_norm, norm_init, weights
from .model import Model, Struct, trained

Run = Callable[[list[Params], jax.Array], jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches.

    Args:
        layers: blocks.
        width: features of each token.
        heads: of attention.
        length: tokens of a sequence.
        batch: sequences.
        vocabulary: different tokens.
        has_biases: whether dense layers have them.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    batch: int = 8
    vocabulary: int = 256
    has_biases: bool = True


def block_init(key: jax.Array, width: int, has_biases: bool = True) -> Params:
    """Parameters of `block`."""
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = jax.random.split(key, len(shapes))
    layers = {
        name: dense_init(k, *shape, has_bias=has_biases) for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return layers | {"norm1": norm_init(width), "norm2": norm_init(width)}


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Values of the positions up to each, weighted by attention; all are [batch, length, heads, width of a head]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def attention(p: Params, x: jax.Array, heads: int, attend: Attend = attend) -> jax.Array:
    """Causal self-attention, [batch, length, width] to the same."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(dense(p["qkv"], x), 3, -1))
    return dense(p["out"], attend(q, k, v).reshape(x.shape))


def block(p: Params, x: jax.Array, heads: int, attend: Attend = attend) -> jax.Array:
    """Attention and a dense layer, each on normalised inputs and added to them."""
    x = x + attention(p, layer_norm(p["norm1"], x), heads, attend)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x))))


def language_model(name: str, sizes: Sizes, run: Run, arrange: Callable[[list[Params]], Any] = list) -> Model:
    """A training step of the blocks between an embedding and a classifier of the next token.

    Args:
        name: of the model.
        sizes: of the model and its batches.
        run: applies all blocks, as they are arranged, to [batch, length, width].
        arrange: from a list of the parameters of each block to the argument of `run`.
    """

    def init(key: jax.Array) -> Params:
        tokens, places, head, *blocks = jax.random.split(key, 3 + sizes.layers)
        return {
            "tokens": weights(tokens, sizes.vocabulary, sizes.width),
            "places": weights(places, sizes.length, sizes.width),
            "blocks": arrange([block_init(k, sizes.width, sizes.has_biases) for k in blocks]),
            "norm": norm_init(sizes.width),
            "head": weights(head, sizes.width, sizes.vocabulary),
        }

    def loss(params: Params, ids: jax.Array, labels: jax.Array) -> jax.Array:
        x = run(params["blocks"], params["tokens"][ids] + params["places"])
        return cross_entropy(layer_norm(params["norm"], x) @ params["head"], labels)

    ids = Struct((sizes.batch, sizes.length), np.int32)
    return trained(name, loss, init, optax.adam(1e-3), ids, ids)


def gpt(layers: int = 4, **sizes: int) -> Model:
    """The training step of a small model, its blocks a Python loop.

    Args:
        layers: blocks.
        sizes: other fields of `Sizes`.
    """
    all_sizes = Sizes(layers, **sizes)

    def run(blocks: list[Params], x: jax.Array) -> jax.Array:
        for p in blocks:
            x = block(p, x, all_sizes.heads)
        return x

    return language_model("gpt", all_sizes, run)
