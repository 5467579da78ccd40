"""Training steps of flax.nnx models with optax's AdamW: module and optimizer split in graph and state, and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from tests.ipujax.models.base import SEED, TrainingStep, images, tokens
from tests.ipujax.models.plain import cross_entropy

CLASSES = 10


def nnx_step(model: nnx.Module, batch: Callable[[int], Any], contains: set[str]) -> TrainingStep:
    """The training step of a model that maps inputs to logits, targets being the batch's second array."""
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def loss(model: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(model(x), targets)

    def step(state: Any, x: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss)(model, x, targets)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], value

    return TrainingStep(step, state, batch, frozenset(contains))


class Perceptron(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x.reshape((x.shape[0], -1)))))


class Convolutional(nnx.Module):
    """Two convolutions with batch normalisation, both poolings and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 12, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(48, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape((x.shape[0], -1))))


class Transformer(nnx.Module):
    """A causal transformer of one block."""

    def __init__(self, vocabulary: int, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        settings = {"dropout_rate": 0.1, "deterministic": False, "decode": False, "use_bias": False}
        self.attention = nnx.MultiHeadAttention(2, width, **settings, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.dropout(self.attention(self.norm1(x), mask=nnx.make_causal_mask(ids)))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.embed.attend(x)


def mlp_adamw() -> TrainingStep:
    """The perceptron."""
    return nnx_step(Perceptron(nnx.Rngs(SEED)), images(21, 8), {"dot_general", "is_finite", "gather", "max"})


def cnn_adamw() -> TrainingStep:
    """The convolutional network."""
    contains = {
        "conv_general_dilated",
        "reduce_window_max",
        "reduce_window_sum",
        "random_fold_in",
        "random_bits",
        "pad",
    }
    return nnx_step(Convolutional(nnx.Rngs(SEED)), images(15, 8), contains)


def transformer_adamw() -> TrainingStep:
    """The causal transformer."""
    vocabulary, length = 23, 9
    make = tokens(5, length + 1, vocabulary)

    def batch(number: int) -> Any:
        ids = make(number)[0]
        return ids[:, :-1], ids[:, 1:]

    contains = {"tanh", "gather", "scatter-add", "rsqrt", "ge", "random_fold_in", "select_n"}
    return nnx_step(Transformer(vocabulary, 16, nnx.Rngs(SEED)), batch, contains)
