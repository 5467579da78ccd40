"""A perceptron for images of 28 × 28: two hidden layers of 512, batches of 128, by Adam."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from ipujax.models.network_layers import Params, cross_entropy, dense, dense_init

from .model import Model, Struct, trained


def perceptron_init(key: jax.Array, *widths: int) -> list[Params]:
    """Parameters of `perceptron`, from the inputs' width to the outputs'."""
    keys = jax.random.split(key, len(widths) - 1)
    return [dense_init(k, n, m) for k, n, m in zip(keys, widths[:-1], widths[1:], strict=True)]


def perceptron(params: list[Params], x: jax.Array) -> jax.Array:
    """Dense layers with ReLU between them."""
    for p in params[:-1]:
        x = jax.nn.relu(dense(p, x))
    return dense(params[-1], x)


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
