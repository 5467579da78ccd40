"""Vision transformers: patches of an image as tokens, pre-norm blocks, a class from a token of its own.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), fine-tuned form: one dense layer as head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import (
    attend_all,
    block,
    block_init,
    dense,
    dense_init,
    layer_norm,
    norm_init,
    stacked,
    through_layers,
    weights,
)
from ipujax.models.workload import Network, Struct, Tree


@dataclass(frozen=True, slots=True)
class VitShape:
    """Sizes of a network.

    Args:
        layers: blocks.
        width: features of each patch.
        heads: of attention.
        patch: side of a patch in pixels, a divisor of `side`.
        side: of the images in pixels.
        classes: of images.
    """

    layers: int
    width: int
    heads: int
    patch: int
    side: int = 224
    classes: int = 1000


def patches(images: jax.Array, patch: int) -> jax.Array:
    """Pixels of each patch, [batch, side, side, 3] to [batch, patches, pixels of a patch]."""
    rows, side, _, colours = images.shape
    along = side // patch
    parts = images.reshape(rows, along, patch, along, patch, colours).transpose(0, 1, 3, 2, 4, 5)
    return parts.reshape(rows, along * along, patch * patch * colours)


def vit(name: str, shape: VitShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from images to logits of their classes; arguments as of `gpt`."""
    tokens = (shape.side // shape.patch) ** 2 + 1

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        embedding, place, head, blocks = jax.random.split(key, 4)
        params = {
            "patches": dense_init(embedding, 3 * shape.patch**2, shape.width, dtype),
            "class": jnp.zeros(shape.width, dtype),
            "places": weights(place, tokens, shape.width, dtype=dtype),
            "blocks": stacked(lambda k: block_init(k, shape.width, dtype=dtype), blocks, shape.layers),
            "norm": norm_init(shape.width, dtype),
            "head": dense_init(head, shape.width, shape.classes, dtype),
        }
        return params, {}

    def apply(params: Tree, statistics: Tree, images: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        x = dense(params["patches"], patches(images, shape.patch))
        first = jnp.broadcast_to(params["class"], (len(x), 1, shape.width))
        x = jnp.concatenate([first, x], 1) + params["places"]
        x = through_layers(
            lambda p, x: block(p, x, shape.heads, attend_all), params["blocks"], x, recompute and is_training
        )
        return dense(params["head"], layer_norm(params["norm"], x[:, 0])), statistics

    return Network(name, init, apply, Struct((shape.side, shape.side, 3), dtype), Struct((), jnp.int32))
