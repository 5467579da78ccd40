"""Residual networks for images, with batch normalisation: basic blocks of two convolutions, or bottlenecks of three.

Source: He et al., "Deep Residual Learning for Image Recognition" (2016), table 1; bottlenecks as in "v1.5", with the
stride in the 3 × 3 kernel. A block whose channels or size change has a convolution as shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import conv_norm, conv_norm_init, dense, dense_init
from ipujax.models.workload import Network, Struct, Tree

_EXPANSION = 4  # channels of a bottleneck's result for each inside, published
ConvSize = tuple[int, int, int]  # side of the kernel, channels in, channels out


@dataclass(frozen=True, slots=True)
class ResnetShape:
    """Sizes of a network.

    Args:
        groups: residual blocks of each group; all but the first group halve height and width.
        is_bottleneck: whether blocks are bottlenecks.
        width: channels inside the blocks of the first group, doubled in each next one.
        side: of the images in pixels.
        classes: of images.
    """

    groups: tuple[int, ...]
    is_bottleneck: bool
    width: int = 64
    side: int = 224
    classes: int = 1000

    def blocks(self) -> list[tuple[int, int, int, int]]:
        """Return of each block: channels in, inside and out, and its stride."""
        rows = []
        channels = self.width
        for group, count in enumerate(self.groups):
            inner = self.width * 2**group
            outputs = inner * _EXPANSION if self.is_bottleneck else inner
            for n in range(count):
                rows.append((channels, inner, outputs, 2 if group and n == 0 else 1))
                channels = outputs
        return rows


def _parts_init(key: jax.Array, sizes: dict[str, ConvSize], dtype: Any) -> tuple[Tree, Tree]:
    """Parameters and running statistics of normalised convolutions, by name."""
    keys = jax.random.split(key, len(sizes))
    parts = {n: conv_norm_init(k, *size, dtype=dtype) for k, (n, size) in zip(keys, sizes.items(), strict=True)}
    return {name: p for name, (p, _) in parts.items()}, {name: s for name, (_, s) in parts.items()}


def basic_block_init(
    key: jax.Array, inputs: int, inner: int, outputs: int, has_shortcut: bool, dtype: Any = jnp.float32
) -> tuple[Tree, Tree]:
    """Parameters and running statistics of `basic_block`."""
    sizes = {"first": (3, inputs, inner), "second": (3, inner, outputs)}
    return _parts_init(key, sizes | ({"shortcut": (1, inputs, outputs)} if has_shortcut else {}), dtype)


def bottleneck_init(
    key: jax.Array, inputs: int, inner: int, outputs: int, has_shortcut: bool, dtype: Any = jnp.float32
) -> tuple[Tree, Tree]:
    """Parameters and running statistics of `bottleneck`."""
    sizes = {"reduce": (1, inputs, inner), "middle": (3, inner, inner), "expand": (1, inner, outputs)}
    return _parts_init(key, sizes | ({"shortcut": (1, inputs, outputs)} if has_shortcut else {}), dtype)


def basic_block(stride: int, p: Tree, stats: Tree, x: jax.Array, is_training: bool = True) -> tuple[jax.Array, Tree]:
    """Two convolutions beside a shortcut."""
    new = {}
    short = x
    if "shortcut" in p:
        short, new["shortcut"] = conv_norm(p["shortcut"], stats["shortcut"], x, stride, is_training)
    x, new["first"] = conv_norm(p["first"], stats["first"], x, stride, is_training)
    x, new["second"] = conv_norm(p["second"], stats["second"], jax.nn.relu(x), 1, is_training)
    return jax.nn.relu(x + short), new


def bottleneck(stride: int, p: Tree, stats: Tree, x: jax.Array, is_training: bool = True) -> tuple[jax.Array, Tree]:
    """A bottleneck of three convolutions beside a shortcut."""
    new = {}
    short = x
    if "shortcut" in p:
        short, new["shortcut"] = conv_norm(p["shortcut"], stats["shortcut"], x, stride, is_training)
    x, new["reduce"] = conv_norm(p["reduce"], stats["reduce"], x, 1, is_training)
    x, new["middle"] = conv_norm(p["middle"], stats["middle"], jax.nn.relu(x), stride, is_training)
    x, new["expand"] = conv_norm(p["expand"], stats["expand"], jax.nn.relu(x), 1, is_training)
    return jax.nn.relu(x + short), new


def resnet(name: str, shape: ResnetShape, dtype: Any, recompute: bool) -> Network:
    """Return the network, from images to logits of their classes; arguments as of `gpt`."""
    block: Callable[..., tuple[jax.Array, Tree]] = bottleneck if shape.is_bottleneck else basic_block
    block_init = bottleneck_init if shape.is_bottleneck else basic_block_init
    rows = shape.blocks()

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        stem, head, *keys = jax.random.split(key, 2 + len(rows))
        first, first_stats = conv_norm_init(stem, 7, 3, shape.width, dtype)
        parts = [
            block_init(k, inputs, inner, outputs, stride > 1 or inputs != outputs, dtype)
            for k, (inputs, inner, outputs, stride) in zip(keys, rows, strict=True)
        ]
        params = {"stem": first, "blocks": [p for p, _ in parts]}
        params |= {"head": dense_init(head, rows[-1][2], shape.classes, dtype)}
        return params, {"stem": first_stats, "blocks": [s for _, s in parts]}

    def apply(params: Tree, statistics: Tree, images: jax.Array, is_training: bool) -> tuple[jax.Array, Tree]:
        x, stem = conv_norm(params["stem"], statistics["stem"], images, 2, is_training)
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        new = []
        for (*_, stride), p, stats in zip(rows, params["blocks"], statistics["blocks"], strict=True):
            each = partial(block, stride, is_training=is_training)
            x, now = (jax.checkpoint(each) if recompute and is_training else each)(p, stats, x)
            new.append(now)
        return dense(params["head"], x.mean((1, 2))), {"stem": stem, "blocks": new}

    return Network(name, init, apply, Struct((shape.side, shape.side, 3), dtype), Struct((), jnp.int32))
