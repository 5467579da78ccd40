"""A small convolutional network for images of 28 × 28: two convolutions, each pooled, and a dense layer, by Adam."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ipujax.models.network_layers import cross_entropy, dense, dense_init, weights

from .model import Model, Struct, trained

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def cnn(side: int = 28, channels: tuple[int, int] = (16, 32), classes: int = 10, batch: int = 64) -> Model:
    """The training step.

    Args:
        side: of an image, a multiple of 4.
        channels: of each convolution.
        classes: of images.
        batch: images a step.
    """
    first, second = channels

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        kernels = [weights(keys[0], 3, 3, 1, first), weights(keys[1], 3, 3, first, second)]
        return {"kernels": kernels, "out": dense_init(keys[2], (side // 4) ** 2 * second, classes)}

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = images
        for kernel in params["kernels"]:
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_LAYOUT))
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(dense(params["out"], x.reshape(batch, -1)), labels)

    images = Struct((batch, side, side, 1), np.float32)
    labels = Struct((batch,), np.int32)
    return trained("cnn", loss, init, optax.adam(1e-3), images, labels)
