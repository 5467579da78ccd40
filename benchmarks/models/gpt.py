"""A causal language model over bytes: pre-norm blocks of attention and a GELU layer of four times the width, by Adam.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from ipujax.models.network_layers import Params, block, block_init, cross_entropy, layer_norm, norm_init, weights

from .model import Model, Struct, trained

Run = Callable[[list[Params], jax.Array], jax.Array]


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
