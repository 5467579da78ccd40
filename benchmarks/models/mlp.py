"""A perceptron for images of 28 × 28: two hidden layers of 512, batches of 128, by Adam."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from .layers import cross_entropy, perceptron, perceptron_init
from .model import Model, Struct, trained


def mlp(widths: tuple[int, ...] = (784, 512, 512, 10), batch: int = 128) -> Model:
    """The training step.

    Args:
        widths: of the inputs, of each hidden layer and of the outputs.
        batch: images a step.
    """

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(perceptron(params, images), labels)

    images = Struct((batch, widths[0]), np.float32)
    labels = Struct((batch,), np.int32)
    return trained("mlp", loss, lambda key: perceptron_init(key, *widths), optax.adam(1e-3), images, labels)
