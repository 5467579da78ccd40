"""Training steps of Keras models: `Model.train_step` of Keras' JAX backend, a pure function of all their variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import layers, ops

from tests.ipujax.models.base import SEED, TrainingStep, images, tokens

CLASSES = 10


def keras_step(model: Any, optimizer: Any, batch: Any, contains: set[str]) -> TrainingStep:
    """The training step of a model, from the state after one batch: that builds optimizer and metrics.

    The loss is the metric of that name, the mean over the steps run.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    model.train_on_batch(*batch(0))
    model.reset_metrics()
    weights = model.trainable_variables, model.non_trainable_variables
    parts = (*weights, model.optimizer.variables, model.metrics_variables)
    state = tuple([jnp.array(variable.value) for variable in part] for part in parts)

    def step(state: Any, *data: jax.Array) -> tuple[Any, jax.Array]:
        logs, state = model.train_step(state, data)
        return state, logs["loss"]

    return TrainingStep(step, state, batch, frozenset(contains))


def next_tokens(batch: int, length: int, vocabulary: int) -> Any:
    """Batches of sequences with the tokens that follow each of theirs."""
    make = tokens(batch, length + 1, vocabulary)
    return lambda number: (make(number)[0][:, :-1], make(number)[0][:, 1:])


def cnn_adam() -> TrainingStep:
    """Two convolutions with batch normalisation, max pooling and dropout, by Adam."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(12, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )
    contains = {"conv_general_dilated", "reduce_window_max", "select_and_scatter_add", "argmax", "random_bits", "pow"}
    return keras_step(model, keras.optimizers.Adam(2e-3), images(15, 8), contains)


class Block(layers.Layer):
    """A causal transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = layers.LayerNormalization()
        self.norm2 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1, use_bias=False)
        self.up = layers.Dense(4 * width)
        self.down = layers.Dense(width)
        self.dropout = layers.Dropout(0.1)

    def build(self, shape: Any) -> None:
        self.norm1.build(shape)
        self.norm2.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * shape[-1]))

    def call(self, x: Any, training: bool | None = None) -> Any:
        h = self.norm1(x)
        x = x + self.dropout(self.attention(h, h, use_causal_mask=True, training=training), training=training)
        return x + self.down(ops.gelu(self.up(self.norm2(x)), approximate=False))


def transformer_adamw() -> TrainingStep:
    """A causal transformer of one block, by AdamW."""
    keras.utils.set_random_seed(SEED)
    vocabulary = 23
    length = 9
    width = 16
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(ids)
    x = Block(width, 2)(x)
    model = keras.Model(ids, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))
    contains = {"erfc", "cumsum", "gather", "scatter-add", "rsqrt", "dot_general", "argmax"}
    return keras_step(model, keras.optimizers.AdamW(2e-3), next_tokens(5, length, vocabulary), contains)


def recurrent(layer: Any, optimizer: Any) -> TrainingStep:
    """An embedding, a recurrent layer and a classifier of the last token's class."""
    vocabulary, length = 19, 7
    make = tokens(11, length, vocabulary)
    model = keras.Sequential(
        [keras.Input((length,), dtype="int32"), layers.Embedding(vocabulary, 12), layer, layers.Dense(CLASSES)]
    )
    return keras_step(
        model,
        optimizer,
        lambda number: (make(number)[0], make(number)[0][:, -1] % CLASSES),
        {"scan", "logistic", "tanh", "split", "gather", "scatter-add", "pad"},
    )


def lstm_rmsprop() -> TrainingStep:
    """An LSTM by RMSProp."""
    keras.utils.set_random_seed(SEED)
    return recurrent(layers.LSTM(14), keras.optimizers.RMSprop(2e-3))


def gru_momentum() -> TrainingStep:
    """A GRU by gradient descent with momentum."""
    keras.utils.set_random_seed(SEED)
    return recurrent(layers.GRU(14), keras.optimizers.SGD(0.05, momentum=0.9))
