"""ResNet-20 for images of 32 × 32: batches of 32, batch normalisation, by Adam.

Source: He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2, with projections as shortcuts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipujax.models.network_layers import conv_norm, conv_norm_init, cross_entropy, dense, dense_init
from ipujax.models.resnet import basic_block, basic_block_init

from .model import Model, Struct

Tree = dict[str, Any]


def resnet20(blocks: int = 3, width: int = 16, side: int = 32, batch: int = 32) -> Model:
    """The training step; running statistics are part of its state.

    Args:
        blocks: in each of the three groups.
        width: channels in the first group, doubled in the next ones.
        side: of the images.
        batch: images a step.
    """
    optimizer = optax.adam(1e-3)
    widths = [width, *(width * 2**group for group in range(3) for _ in range(blocks))]

    def init(key: jax.Array) -> Any:
        stem, head, *keys = jax.random.split(key, 2 + 3 * blocks)
        parts = [
            basic_block_init(k, inputs, outputs, outputs, inputs != outputs)
            for k, inputs, outputs in zip(keys, widths[:-1], widths[1:], strict=True)
        ]
        first, first_stats = conv_norm_init(stem, 3, 3, width)
        params = {"stem": first, "blocks": [p for p, _ in parts], "head": dense_init(head, widths[-1], 10)}
        return params, {"stem": first_stats, "blocks": [s for _, s in parts]}, optimizer.init(params)

    def loss(params: Tree, stats: Tree, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Tree]:
        x, stem = conv_norm(params["stem"], stats["stem"], images)
        x = jax.nn.relu(x)
        new = []
        for p, old in zip(params["blocks"], stats["blocks"], strict=True):
            x, now = basic_block(2 if "shortcut" in p else 1, p, old, x)
            new.append(now)
        return cross_entropy(dense(params["head"], x.mean((1, 2))), labels), {"stem": stem, "blocks": new}

    def step(params: Tree, stats: Tree, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, value

    return Model("resnet-20", step, init, (Struct((batch, side, side, 3), jnp.float32), Struct((batch,), np.int32)))
