"""Programs of the kinds that Keras' guides and code examples show, on small random data of the same shapes.

Output: `EXAMPLES`, each a function that makes a model, one that uses it and returns the values to compare, and the
arguments of `compile`. Nothing in them knows of IPUs. Functions under "optimizer" and "metrics" are
called for each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import tests.ipujax.keras.keras_examples_steps as steps
from tests.ipujax.keras.keras_examples_steps import BATCH, CLASSES, PICTURES, fitted

RNG = np.random.default_rng(11)


@dataclass(frozen=True)
class Example:
    """A program.

    Args:
        make: makes the model.
        use: trains it, and returns the values to compare.
        compiled: arguments of `compile`.
    """

    make: Callable[[], keras.Model]
    use: Callable[[Any], Any]
    compiled: Mapping[str, Any] = field(default_factory=dict)


def images(count: int, *shape: int) -> np.ndarray:
    return RNG.random((count, *shape), np.float32)


def tokens(count: int, length: int, words: int) -> np.ndarray:
    return RNG.integers(1, words, (count, length))


# --- functional models ------------------------------------------------------------------------------------------------


def tickets() -> keras.Model:
    """Two texts and a row of tags in; an urgency and a class out."""
    title = keras.Input((6,), name="title", dtype="int32")
    body = keras.Input((10,), name="body", dtype="int32")
    tags = keras.Input((4,), name="tags")
    of_title = layers.LSTM(6)(layers.Embedding(20, 5)(title))
    of_body = layers.GlobalAveragePooling1D()(layers.Embedding(20, 5)(body))
    x = layers.concatenate([of_title, of_body, tags])
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(3, name="department")(x)
    return keras.Model([title, body, tags], {"priority": priority, "department": department})


TICKETS = {"title": tokens(24, 6, 20), "body": tokens(24, 10, 20), "tags": images(24, 4).round()}
TICKET_LABELS = {"priority": images(24, 1), "department": RNG.integers(0, 3, 24)}


def token_block(x: Any, heads: int, width: int, rate: float = 0.1) -> Any:
    """A block of a transformer: attention and a network of each token, each with a residual connection."""
    attended = layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(rate)(attended))
    y = layers.Dense(width)(layers.Dense(width, activation="relu")(x))
    return layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(rate)(y))


class TokenAndPosition(layers.Layer):
    """Adds a row of one table for the word to that of another for its place."""

    def __init__(self, length: int, words: int, width: int) -> None:
        super().__init__()
        self.words = layers.Embedding(words, width)
        self.places = layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.places(ops.arange(0, ops.shape(x)[-1], 1))


def text_classifier() -> keras.Model:
    inputs = keras.Input((12,))
    x = token_block(TokenAndPosition(12, 30, 8)(inputs), 2, 8)
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


def autoencoder() -> keras.Model:
    """Two poolings, and back by a transposed convolution and by repeated rows."""
    inputs = keras.Input((12, 12, 1))
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(x)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    return keras.Model(inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))


def segmentation() -> keras.Model:
    """A U-Net: halved twice and doubled twice, with sums of shortcuts and with concatenations of equal sizes."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(inputs)))
    kept = []
    for _ in range(2):
        kept.append(x)
        y = layers.SeparableConv2D(4, 3, padding="same")(layers.Activation("relu")(x))
        y = layers.MaxPooling2D(3, strides=2, padding="same")(layers.BatchNormalization()(y))
        x = layers.add([y, layers.Conv2D(4, 1, strides=2, padding="same")(x)])
    for shortcut in reversed(kept):
        y = layers.Conv2DTranspose(4, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.concatenate([layers.UpSampling2D(2)(y), shortcut])
    return keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))


def sentiment() -> keras.Model:
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(30, 6)(inputs)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(5))(x)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))


class Patches(layers.Layer):
    """An image as rows of its squares."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def call(self, x: Any) -> Any:
        cut = ops.image.extract_patches(x, size=self.size)
        return ops.reshape(cut, (-1, cut.shape[1] * cut.shape[2], cut.shape[3]))


def vision_transformer() -> keras.Model:
    inputs = keras.Input((12, 12, 3))
    x = layers.RandomFlip("horizontal")(layers.Normalization(mean=0.5, variance=0.1)(inputs))
    x = layers.Dense(8)(Patches(4)(x))
    x = x + layers.Embedding(9, 8)(ops.expand_dims(ops.arange(9), 0))
    x = token_block(x, 2, 8)
    x = layers.Dropout(0.3)(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(5)(layers.Dense(8, activation="gelu")(x)))


# --- losses and metrics -----------------------------------------------------------------------------------------------


def distance(vectors: Any) -> Any:
    one, other = vectors
    return ops.sqrt(ops.maximum(ops.sum(ops.square(one - other), axis=1, keepdims=True), keras.backend.epsilon()))


def contrastive(margin: float) -> Callable[[Any, Any], Any]:
    """Pairs of one kind (0) are drawn together; others (1) are pushed apart up to a margin."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        y_true = ops.cast(y_true, y_pred.dtype)
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(margin - y_pred, 0.0)))

    return loss


def siamese() -> keras.Model:
    """One network looks at both images of a pair."""
    inputs = keras.Input((10, 10, 1))
    x = layers.BatchNormalization()(inputs)
    x = layers.AveragePooling2D(2)(layers.Conv2D(4, 3, activation="tanh")(x))
    tower = keras.Model(inputs, layers.Dense(6, activation="tanh")(layers.BatchNormalization()(layers.Flatten()(x))))
    one = keras.Input((10, 10, 1))
    other = keras.Input((10, 10, 1))
    apart = layers.Lambda(distance, output_shape=(1,))([tower(one), tower(other)])
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization()(apart))
    return keras.Model([one, other], outputs)


class Sparsity(layers.Layer):
    """Adds a loss of its input."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def call(self, x: Any) -> Any:
        self.add_loss(self.rate * ops.mean(ops.abs(x)))
        return x


class TruePositives(keras.metrics.Metric):
    """Number of true positives of a class."""

    def __init__(self, name: str = "true_positives", **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self.found = self.add_weight(shape=(), initializer="zeros", name="found")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hit = ops.cast(ops.cast(y_true, "int32") == ops.cast(ops.argmax(y_pred, 1), "int32"), "float32")
        self.found.assign_add(ops.sum(hit if sample_weight is None else hit * ops.cast(sample_weight, "float32")))

    def result(self) -> Any:
        return self.found.value


class Sharp(keras.losses.Loss):
    """Cross-entropy, and a term for answers near one half."""

    def __init__(self, rate: float = 0.1, name: str = "sharp") -> None:
        super().__init__(name=name)
        self.rate = rate

    def call(self, y_true: Any, y_pred: Any) -> Any:
        term = ops.mean(ops.square(0.5 - y_pred), axis=-1)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred) - self.rate * term


class Confident(keras.Model):
    """Has a metric beside those that it is compiled with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.confidence = keras.metrics.Mean(name="confidence")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.confidence.update_state(ops.max(y_pred, axis=-1), sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def own_losses() -> keras.Model:
    inputs = keras.Input((12,))
    x = layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2))(inputs)
    x = Sparsity(1e-2)(x)
    x = layers.Dense(8, activation="relu", activity_regularizer=keras.regularizers.L2(1e-3))(x)
    return Confident(inputs, layers.Dense(3, activation="softmax")(x))


# --- the table --------------------------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """Data whose batches are made when they are asked for."""

    def __init__(self, x: np.ndarray, y: np.ndarray, **settings: Any) -> None:
        super().__init__(**settings)
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return self.x[rows] / 2 + 0.25, self.y[rows]


TEXTS = tokens(24, 12, 30)
RATED = RNG.integers(0, 2, 24)
COLOURED = images(24, 12, 12, 3)
LABELS = RNG.integers(0, 5, 24)
MASKS = RNG.integers(0, 3, (16, 8, 8, 1))
PAIRS = [images(16, 10, 10, 1), images(16, 10, 10, 1)]
UNLIKE = RNG.integers(0, 2, (16, 1)).astype(np.float32)
ROWS = images(24, 16)
TARGETS = images(24, 1)
WEIGHTS = np.linspace(0.5, 1.5, 24, dtype=np.float32)


def momentum() -> Any:
    """For weights that have no gradient, as a bias ahead of a normalisation: Adam makes whole steps of rounding."""
    return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


def patient_adam() -> Any:
    """Rounding is small beside epsilon."""
    return keras.optimizers.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-2)


def from_logits() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


EXAMPLES: dict[str, Example] = {
    "several inputs and outputs": Example(
        tickets,
        fitted(TICKETS, TICKET_LABELS),
        {
            "loss": {"priority": keras.losses.BinaryCrossentropy(from_logits=True), "department": from_logits()},
            "loss_weights": {"priority": 1.0, "department": 0.2},
            "metrics": {"department": "accuracy"},
        },
    ),
    "a training step of its own": Example(steps.own_step, fitted(ROWS, TARGETS, sample_weight=WEIGHTS), {"loss": None}),
    "text by a transformer": Example(
        text_classifier,
        fitted(TEXTS, RATED, validation_split=1 / 3),
        {"optimizer": momentum, "metrics": ["accuracy"]},
    ),
    "a convolutional autoencoder": Example(autoencoder, fitted(PICTURES, PICTURES), {"loss": "binary_crossentropy"}),
    "pairs with a contrastive loss": Example(
        siamese,
        fitted(PAIRS, UNLIKE),
        {"optimizer": lambda: keras.optimizers.RMSprop(1e-3), "loss": contrastive(1.0), "metrics": ["accuracy"]},
    ),
    "a conditional GAN with two optimizers": Example(
        steps.ConditionalGAN,
        steps.gan_used,
        {
            "optimizer": lambda: keras.optimizers.Adam(3e-4),
            "g_optimizer": lambda: keras.optimizers.Adam(1e-3, beta_1=0.5),
        },
    ),
    "two networks in turns": Example(
        steps.gan_in_turns, steps.turns_used, {"loss": keras.losses.BinaryCrossentropy(from_logits=True)}
    ),
    "a variational autoencoder": Example(steps.VAE, steps.vae_used, {"loss": None}),
    "losses and metrics of its own": Example(
        own_losses,
        fitted(TEXTS / 30, TEXTS[:, 0] % 3, class_weight={0: 1.0, 1: 0.5, 2: 2.0}),
        {"loss": Sharp(), "metrics": lambda: [TruePositives(), keras.metrics.SparseTopKCategoricalAccuracy(2)]},
    ),
    "recurrence both ways": Example(
        sentiment, fitted(TEXTS, RATED), {"loss": "binary_crossentropy", "metrics": ["accuracy"]}
    ),
    "distillation": Example(
        steps.distiller,
        fitted(PICTURES, CLASSES),
        {
            "student_loss": from_logits(),
            "distillation_loss": keras.losses.KLDivergence(),
            "metrics": ["sparse_categorical_accuracy"],
        },
    ),
    "a U-Net": Example(segmentation, fitted(COLOURED[:16, :8, :8], MASKS), {"optimizer": momentum}),
    "images as patches": Example(
        vision_transformer,
        fitted(COLOURED, LABELS),
        {
            "optimizer": patient_adam,
            "loss": from_logits(),
            "metrics": lambda: [keras.metrics.SparseTopKCategoricalAccuracy(3, name="top_3")],
        },
    ),
    "a data set of batches": Example(
        lambda: steps.small_cnn(4),
        fitted(Batches(COLOURED[:20, ..., :1], LABELS[:20] % 4, workers=2, max_queue_size=3)),
        {"loss": from_logits(), "metrics": ["accuracy"]},
    ),
}
