"""Training steps of equinox models with optax's AdamW: arrays partitioned from the rest of the model, and combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.ipujax.models.base import SEED, TrainingStep, images
from tests.ipujax.models.plain import cross_entropy

CLASSES = 10


def equinox_step(model: eqx.Module, batch: Callable[[int], Any], contains: set[str]) -> TrainingStep:
    """The training step of a model called as `model(x, key)` on one example."""
    optimizer = optax.adamw(3e-3)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays: Any, key: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        model = eqx.combine(arrays, static)
        return cross_entropy(jax.vmap(model)(x, jax.random.split(key, x.shape[0])), labels)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        arrays, opt_state, key = state
        key, now = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(arrays, now, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return (optax.apply_updates(arrays, updates), opt_state, key), value

    return TrainingStep(step, (arrays, optimizer.init(arrays), jax.random.key(SEED)), batch, frozenset(contains))


class Convolutional(eqx.Module):
    """A convolution, max pooling and dropout."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 8, 3, key=first)
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.dropout = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(72, CLASSES, key=last)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        x = self.pool(jax.nn.relu(self.conv(jnp.moveaxis(x, -1, 0))))
        return self.out(self.dropout(x.reshape(-1), key=key))


class Recurrent(eqx.Module):
    """An LSTM over the rows of an image."""

    cell: eqx.nn.LSTMCell
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(8, 16, key=first)
        self.out = eqx.nn.Linear(16, CLASSES, key=last)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        del key
        start = (jnp.zeros(16), jnp.zeros(16))
        (h, _), _ = lax.scan(lambda state, row: (self.cell(row, state), None), start, x[..., 0])
        return self.out(h)


def cnn_adamw() -> TrainingStep:
    """The convolutional network."""
    contains = {"conv_general_dilated", "reduce_window_max", "select_and_scatter_add", "random_split", "random_bits"}
    return equinox_step(Convolutional(jax.random.key(1)), images(15, 8), contains)


def lstm_adamw() -> TrainingStep:
    """The LSTM."""
    return equinox_step(Recurrent(jax.random.key(2)), images(13, 8), {"scan", "logistic", "tanh", "split"})
