"""The U-Net, which labels each pixel of an image: levels of two convolutions downwards, and upwards beside them.

Convolutions are not padded, so labels are those of the middle of the image, as published. Source: Ronneberger et al.,
"U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015), figure 1, without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.models.network_layers import Params, conv, weights
from ipujax.models.workload import Network, Struct, Tree


@dataclass(frozen=True, slots=True)
class UNetShape:
    """Sizes of a network.

    Args:
        channels: of each level, the outermost first.
        side: of the images in pixels.
        colours: of the images.
        classes: of pixels.
    """

    channels: tuple[int, ...]
    side: int = 572
    colours: int = 1
    classes: int = 2

    def label_side(self) -> int:
        """Return the side of the labelled middle."""
        side = self.side
        for _ in self.channels[:-1]:
            side = (side - 4) // 2
        side -= 4
        for _ in self.channels[:-1]:
            side = 2 * side - 4
        return side


def _conv_init(key: jax.Array, side: int, inputs: int, outputs: int, dtype: Any) -> Params:
    return {"kernel": weights(key, side, side, inputs, outputs, dtype=dtype), "b": jnp.zeros(outputs, dtype)}


def _pair_init(key: jax.Array, inputs: int, outputs: int, dtype: Any) -> list[Params]:
    keys = jax.random.split(key)
    return [_conv_init(k, 3, n, outputs, dtype) for k, n in zip(keys, (inputs, outputs), strict=True)]


def level(pair: list[Params], x: jax.Array) -> jax.Array:
    """Two convolutions of 3 × 3, each followed by ReLU."""
    for p in pair:
        x = jax.nn.relu(conv(p["kernel"], x, padding="VALID") + p["b"])
    return x


def up(p: Params, x: jax.Array) -> jax.Array:
    """Doubles height and width by a transposed convolution of 2 × 2."""
    return lax.conv_transpose(x, p["kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p["b"]


def middle(x: jax.Array, side: int) -> jax.Array:
    """The middle of images, as the paper crops them."""
    edge = (x.shape[1] - side) // 2
    return x[:, edge : edge + side, edge : edge + side]


def u_net(name: str, shape: UNetShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from images to logits of the classes of their pixels; arguments as of `gpt`."""
    widths = shape.channels

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        down, ups, up_levels, head = jax.random.split(key, 4)
        down_sizes = list(pairwise((shape.colours, *widths)))
        up_sizes = list(pairwise(reversed(widths)))
        params = {
            "down": [
                _pair_init(k, *size, dtype)
                for k, size in zip(jax.random.split(down, len(down_sizes)), down_sizes, strict=True)
            ],
            "ups": [
                _conv_init(k, 2, *size, dtype)
                for k, size in zip(jax.random.split(ups, len(up_sizes)), up_sizes, strict=True)
            ],
            "up_levels": [
                _pair_init(k, *size, dtype)
                for k, size in zip(jax.random.split(up_levels, len(up_sizes)), up_sizes, strict=True)
            ],
            "head": _conv_init(head, 1, widths[0], shape.classes, dtype),
        }
        return params, {}

    def apply(params: Tree, statistics: Tree, images: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        each = jax.checkpoint(level) if recompute and is_training else level
        x = each(params["down"][0], images)
        beside = []
        for pair in params["down"][1:]:
            beside.append(x)
            x = each(pair, lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
        for p, pair, other in zip(params["ups"], params["up_levels"], reversed(beside), strict=True):
            x = up(p, x)
            x = each(pair, jnp.concatenate([middle(other, x.shape[1]), x], -1))
        return conv(params["head"]["kernel"], x) + params["head"]["b"], statistics

    image = Struct((shape.side, shape.side, shape.colours), dtype)
    return Network(name, init, apply, image, Struct((shape.label_side(),) * 2, jnp.int32))
