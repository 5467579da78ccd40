"""Causal language models of the GPT family: pre-norm blocks of attention and a GELU layer of four times the width.

The table of tokens embeds and predicts. Source: Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019). Limits: attention is dense in all blocks, where GPT-3 alternates it with locally banded attention; no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import block, block_init, layer_norm, norm_init, stacked, through_layers, weights
from ipujax.models.workload import Network, Struct, Tree


@dataclass(frozen=True, slots=True)
class GptShape:
    """Sizes of a network.

    Args:
        layers: blocks.
        width: features of each token.
        heads: of attention.
        vocabulary: different tokens.
        length: tokens of a sequence.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 50_257
    length: int = 1024


def gpt(name: str, shape: GptShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from token ids to logits of the next tokens.

    Args:
        name: of the network.
        shape: its sizes.
        dtype: of parameters and activations.
        recompute: whether the backward pass computes each block again.
    """

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        tokens, places, blocks = jax.random.split(key, 3)
        params = {
            "tokens": weights(tokens, shape.vocabulary, shape.width, dtype=dtype),
            "places": weights(places, shape.length, shape.width, dtype=dtype),
            "blocks": stacked(lambda k: block_init(k, shape.width, dtype=dtype), blocks, shape.layers),
            "norm": norm_init(shape.width, dtype),
        }
        return params, {}

    def apply(params: Tree, statistics: Tree, ids: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        x = params["tokens"][ids] + params["places"]
        x = through_layers(lambda p, x: block(p, x, shape.heads), params["blocks"], x, recompute and is_training)
        return layer_norm(params["norm"], x) @ params["tokens"].T, statistics

    ids = Struct((shape.length,), jnp.int32)
    return Network(name, init, apply, ids, ids)
