"""Conformer encoders of speech with a head for connectionist temporal classification.

Two strided convolutions, then blocks: half a feed-forward layer, attention with relative positions, a convolution over
time, half a feed-forward layer, a norm. Source: Gulati et al., "Conformer" (arXiv 2005.08100), table 1; relative
positions as in Dai et al., "Transformer-XL" (arXiv 1901.02860), appendix B.
Limits: the paper's decoder, one LSTM layer trained as a transducer, is replaced by a dense layer and this loss;
no dropout, and all sequences have the full length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import (
    Params,
    batch_norm,
    conv,
    dense,
    dense_init,
    layer_norm,
    norm_init,
    stacked,
    weights,
)
from ipujax.models.workload import Network, Struct, Tree
from ipujax.popnn.ctc_loss import loss_of_paths


@dataclass(frozen=True, slots=True)
class ConformerShape:
    """Sizes of a network.

    Args:
        layers: blocks.
        width: features of a frame.
        heads: of attention.
        kernel: frames of the convolution over time.
        frames: of a sequence, a multiple of 4.
        bands: of the spectrum of a frame.
        vocabulary: different tokens, without the blank.
        tokens: of a label.
    """

    layers: int
    width: int
    heads: int
    kernel: int = 32
    frames: int = 1600  # assumed: 16 s of frames each 10 ms, which nearly all of LibriSpeech's sentences fit
    bands: int = 80
    vocabulary: int = 1024
    tokens: int = 80


def block_init(key: jax.Array, shape: ConformerShape, dtype: Any) -> Params:
    """Parameters of `block`."""
    d = shape.width
    sizes = {
        **{f"{half}_up": (d, 4 * d) for half in ("first", "second")},
        **{f"{half}_down": (4 * d, d) for half in ("first", "second")},
        **{name: (d, d) for name in ("q", "k", "v", "out")},
        "spread": (d, 2 * d),
        "gather": (d, d),
    }
    keys = iter(jax.random.split(key, len(sizes) + 2))
    products = {name: dense_init(next(keys), *size, dtype) for name, size in sizes.items()}
    norms = ("first_norm", "attention_norm", "conv_norm", "batch_norm", "second_norm", "norm")
    return {
        **products,
        **{name: norm_init(d, dtype) for name in norms},
        "places": weights(next(keys), d, d, dtype=dtype),
        "content_bias": jnp.zeros(d, dtype),
        "place_bias": jnp.zeros(d, dtype),
        "depthwise": {"kernel": weights(next(keys), shape.kernel, 1, 1, d, dtype=dtype), "b": jnp.zeros(d, dtype)},
    }


def distances(length: int, width: int) -> jax.Array:
    """Sinusoids of the distances length − 1 to 1 − length, [2 length − 1, width]."""
    rates = 10_000 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(length - 1, -length, -1, dtype=jnp.float32)[:, None] * rates
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(-1, width)


def shifted(scores: jax.Array) -> jax.Array:
    """Scores by distance to scores by key, [batch, heads, length, 2 length − 1] to [batch, heads, length, length].

    Row q of the result begins at distance q: with a zero before each row, rows of one element less begin there.
    """
    rows, heads, length, _ = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(rows, heads, 2 * length, length)
    return padded[:, :, 1:].reshape(rows, heads, length, 2 * length - 1)[..., :length]


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """Self-attention with relative positions, [batch, length, width] to the same."""
    rows, length, width = x.shape
    q, k, v = (dense(p[name], x).reshape(rows, length, heads, -1) for name in ("q", "k", "v"))
    places = (distances(length, width).astype(x.dtype) @ p["places"]).reshape(2 * length - 1, heads, -1)
    by_content = jnp.einsum("bqhd,bkhd->bhqk", q + p["content_bias"].reshape(heads, -1), k)
    by_distance = jnp.einsum("bqhd,khd->bhqk", q + p["place_bias"].reshape(heads, -1), places)
    shares = jax.nn.softmax((by_content + shifted(by_distance)) / math.sqrt(width // heads))
    return dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape))


def block(p: Params, stats: Params, x: jax.Array, heads: int, is_training: bool) -> tuple[jax.Array, Params]:
    """One block, and its running statistics."""

    def feed_forward(half: str, x: jax.Array) -> jax.Array:
        up = jax.nn.silu(dense(p[f"{half}_up"], layer_norm(p[f"{half}_norm"], x)))
        return x + 0.5 * dense(p[f"{half}_down"], up)

    x = feed_forward("first", x)
    x = x + attention(p, layer_norm(p["attention_norm"], x), heads)
    value, gate = jnp.split(dense(p["spread"], layer_norm(p["conv_norm"], x)), 2, -1)
    gated = (value * jax.nn.sigmoid(gate))[:, :, None]
    over_time = conv(p["depthwise"]["kernel"], gated, groups=x.shape[-1])[:, :, 0] + p["depthwise"]["b"]
    normal, stats = batch_norm(p["batch_norm"], stats, over_time, is_training)
    x = x + dense(p["gather"], jax.nn.silu(normal))
    return layer_norm(p["norm"], feed_forward("second", x)), stats


def conformer(name: str, shape: ConformerShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from spectra to logits of the tokens and the blank at each fourth frame.

    Arguments as of `gpt`.
    """
    d, bands = shape.width, -(-shape.bands // 4)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        first, second, entry, head, blocks = jax.random.split(key, 5)
        params = {
            "first": {"kernel": weights(first, 3, 3, 1, d, dtype=dtype), "b": jnp.zeros(d, dtype)},
            "second": {"kernel": weights(second, 3, 3, d, d, dtype=dtype), "b": jnp.zeros(d, dtype)},
            "entry": dense_init(entry, bands * d, d, dtype),
            "blocks": stacked(lambda k: block_init(k, shape, dtype), blocks, shape.layers),
            "head": dense_init(head, d, shape.vocabulary + 1, dtype),
        }
        return params, {"mean": jnp.zeros((shape.layers, d)), "variance": jnp.ones((shape.layers, d))}

    def apply(params: Tree, statistics: Tree, spectra: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        x = spectra[..., None]
        for part in ("first", "second"):
            x = jax.nn.relu(conv(params[part]["kernel"], x, 2) + params[part]["b"])
        x = dense(params["entry"], x.reshape(*x.shape[:2], -1))

        def each(x: jax.Array, layer: tuple[Params, Params]) -> tuple[jax.Array, Params]:
            return block(*layer, x, shape.heads, is_training)

        body = jax.checkpoint(each) if recompute and is_training else each
        x, running = jax.lax.scan(body, x, (params["blocks"], statistics))
        return dense(params["head"], x), running

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).transpose(1, 0, 2)
        frames, batch, classes = log_probs.shape
        lengths = jnp.full(batch, frames), jnp.full(batch, labels.shape[1])
        return loss_of_paths(log_probs, labels, *lengths, blank=classes - 1).mean() / labels.shape[1]

    return Network(
        name, init, apply, Struct((shape.frames, shape.bands), dtype), Struct((shape.tokens,), jnp.int32), loss
    )
