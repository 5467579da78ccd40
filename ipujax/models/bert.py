"""BERT and its pre-training: masked words and whether the second sentence follows.

Source: Devlin et al., "BERT" (2019), without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import (
    Params,
    block_init,
    cross_entropy,
    dense,
    dense_init,
    layer_norm,
    norm_init,
    queries_keys_values,
    stacked,
    through_layers,
    weights,
)
from ipujax.models.workload import Network, Struct, Tree


@dataclass(frozen=True, slots=True)
class BertShape:
    """Sizes of a network.

    Args:
        layers: of the encoder.
        width: features of each word.
        heads: of attention.
        vocabulary: different words.
        length: words of a sequence.
        masked: words of a sequence that are to be predicted, at most.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 30_522
    length: int = 512
    masked: int = 76  # published: max_predictions_per_seq of sequences of 512, google-research/bert, README


def layer(p: Params, x: jax.Array, bias: jax.Array, heads: int) -> jax.Array:
    """One encoder layer: attention and feed-forward, norms behind; `bias` hides padding."""
    q, k, v = queries_keys_values(p["qkv"], x, heads)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = layer_norm(p["norm1"], x + dense(p["out"], mixed))
    return layer_norm(p["norm2"], x + dense(p["down"], jax.nn.gelu(dense(p["up"], x))))


def embedded(params: Params, words: jax.Array, segments: jax.Array) -> jax.Array:
    """Features of words, [batch, length] to [batch, length, width]."""
    x = params["words"][words] + params["places"] + params["segments"][segments]
    return layer_norm(params["norm"], x)


def padding_bias(is_word: jax.Array, dtype: Any) -> jax.Array:
    """Bias of scores that hides padding, bool[batch, length] to [batch, 1, 1, length]."""
    return jnp.where(is_word, 0.0, -1e4).astype(dtype)[:, None, None]


def heads(params: Params, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of words at some positions, and of whether the second sentence follows."""
    masked = jax.nn.one_hot(positions, x.shape[1], dtype=x.dtype) @ x
    masked = layer_norm(params["transform_norm"], jax.nn.gelu(dense(params["transform"], masked)))
    guesses = masked @ params["words"].T + params["word_bias"]
    return guesses, dense(params["next"], jnp.tanh(dense(params["pooler"], x[:, 0])))


def ends_init(keys: list[jax.Array], shape: BertShape, dtype: Any) -> Params:
    """Parameters of all but the layers, of six keys."""
    d = shape.width
    tables = {"words": shape.vocabulary, "places": shape.length, "segments": 2}
    products = {"pooler": (d, d), "next": (d, 2), "transform": (d, d)}
    return {
        **{name: weights(k, rows, d, dtype=dtype) for k, (name, rows) in zip(keys[:3], tables.items(), strict=True)},
        **{name: dense_init(k, *size, dtype) for k, (name, size) in zip(keys[3:], products.items(), strict=True)},
        "norm": norm_init(d, dtype),
        "transform_norm": norm_init(d, dtype),
        "word_bias": jnp.zeros(shape.vocabulary, dtype),
    }


def bert(name: str, shape: BertShape, dtype: Any, recompute: bool) -> Network:
    """Return the network with the heads of both tasks; arguments as of `gpt`."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        layers, *keys = jax.random.split(key, 7)
        stack = stacked(lambda k: block_init(k, shape.width, dtype=dtype), layers, shape.layers)
        return ends_init(keys, shape, dtype) | {"layers": stack}, {}

    def apply(params: Tree, statistics: Tree, inputs: Tree, is_training: bool) -> tuple[Tree, Tree]:
        bias = padding_bias(inputs["is_word"], dtype)
        x = embedded(params, inputs["words"], inputs["segments"])

        def each(p: Params, x: jax.Array) -> jax.Array:
            return layer(p, x, bias, shape.heads)

        x = through_layers(each, params["layers"], x, recompute and is_training)
        guesses, follows = heads(params, x, inputs["positions"])
        return {"guesses": guesses, "follows": follows}, statistics

    def loss(outputs: Tree, labels: Tree) -> jax.Array:
        guesses, follows = (cross_entropy(outputs[task], labels[task]) for task in ("guesses", "follows"))
        return guesses + follows

    words = Struct((shape.length,), jnp.int32)
    masked = Struct((shape.masked,), jnp.int32)
    is_word = Struct((shape.length,), jnp.bool_)
    inputs = {"words": words, "segments": words, "is_word": is_word, "positions": masked}
    return Network(name, init, apply, inputs, {"guesses": masked, "follows": Struct((), jnp.int32)}, loss)
