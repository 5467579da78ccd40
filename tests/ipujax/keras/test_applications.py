"""Networks of `keras.applications` and an encoder as BERT's, in a scope: stock Keras' numbers; which fit a Mk2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import Options

APPLICATIONS = keras.applications
CLASSES = 10
EXAMPLES = 4


def application(name: str, size: int = 32, **settings: Any) -> Callable[[], tuple[Any, np.ndarray]]:
    """A network with random weights for small images, and such images."""

    def made() -> tuple[Any, np.ndarray]:
        shape = size, size, 3
        model = getattr(APPLICATIONS, name)(input_shape=shape, weights=None, classes=CLASSES, **settings)
        return model, np.random.default_rng(0).random((EXAMPLES, *shape), np.float32)

    return made


NETWORKS = {
    "MobileNetV2": application("MobileNetV2", alpha=0.35),
    "MobileNet": application("MobileNet", alpha=0.25),
    "MobileNetV3Small": application("MobileNetV3Small", alpha=0.75, minimalistic=True),
    "DenseNet121": application("DenseNet121"),  # joins the channels of all layers before
    "ResNet50": application("ResNet50"),
    "ResNet50V2": application("ResNet50V2"),
    "EfficientNetB0": application("EfficientNetB0"),
    "ConvNeXtTiny": application("ConvNeXtTiny"),
    "VGG16": application("VGG16"),
    "Xception": application("Xception", 71),
}

TOO_LARGE = {"DenseNet121"}  # its training step, for one Mk2: exchange code of the fullest tiles


def joining() -> tuple[Any, np.ndarray]:
    """A small one as DenseNet: the channels of each layer are joined to all before, and halved behind a block."""
    layers = keras.layers
    growth = 8

    def activated(x: Any) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(x))

    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(2 * growth, 3, strides=2, padding="same", use_bias=False)(inputs)
    for number in (2, 1):
        for _ in range(number):
            x = layers.Concatenate()([x, layers.Conv2D(growth, 3, padding="same", use_bias=False)(activated(x))])
        x = layers.AveragePooling2D(2)(layers.Conv2D(x.shape[-1] // 2, 1, use_bias=False)(x))
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.GlobalAveragePooling2D()(activated(x)))
    return keras.Model(inputs, outputs), np.random.default_rng(0).random((EXAMPLES, 16, 16, 3), np.float32)


def encoder(length: int = 32, width: int = 64, words: int = 200) -> tuple[Any, np.ndarray]:
    """Two layers as BERT's, and the classes of sequences."""
    layers = keras.layers
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(ids) + layers.Embedding(length, width)(keras.ops.arange(length))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(4, width // 4)(x, x)))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(width)(hidden)))
    outputs = layers.Dense(CLASSES, activation="softmax")(x[:, 0])
    return keras.Model(ids, outputs), np.random.default_rng(1).integers(0, words, (EXAMPLES, length))


def used(make: Callable[[], tuple[Any, np.ndarray]], scope: Any) -> tuple[Any, list[Any]]:
    """The model, its predictions before and after a training step, and the loss of the step."""
    with scope:
        keras.utils.set_random_seed(0)
        model, x = make()
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        before = model.predict(x, batch_size=EXAMPLES, verbose=0)
        loss = model.train_on_batch(x, np.arange(EXAMPLES) % CLASSES)
        return model, [before, loss]


def assert_as_stock(make: Callable[[], tuple[Any, np.ndarray]], options: Options | None = None) -> Any:
    _, expected = used(make, nullcontext())
    model, got = used(make, ipu.IPUStrategy(ipu.IPUConfig(), options).scope())  # refused if it did not fit
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-6)
    return model


def test_a_network_predicts_as_stock_keras() -> None:
    model, x = NETWORKS["MobileNetV2"]()
    expected = model.predict(x, batch_size=EXAMPLES, verbose=0)
    with ipu.IPUStrategy(ipu.IPUConfig()).scope():
        got = model.predict(x, batch_size=EXAMPLES, verbose=0)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)
    assert not model.ipu_profile.memory.lacking() and not model.ipu_profile.fallbacks


def test_a_training_step_with_joined_channels_is_that_of_stock_keras() -> None:
    model = assert_as_stock(joining)
    assert not model.ipu_profile.memory.lacking() and not model.ipu_profile.fallbacks


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - TOO_LARGE))
def test_a_training_step_is_that_of_stock_keras_and_fits_one_mk2(name: str) -> None:
    model = assert_as_stock(NETWORKS[name])
    assert model.ipu_profile.cycles > 0 and not model.ipu_profile.memory.lacking()


@pytest.mark.parametrize("name", sorted(TOO_LARGE))
def test_a_training_step_is_that_of_stock_keras_where_one_mk2_is_too_small(name: str) -> None:
    model = assert_as_stock(NETWORKS[name], Options(allow_out_of_memory=True))
    assert "memory for code" in model.ipu_profile.memory.lacking()


def test_an_encoder_of_keras_layers_fits_one_mk2() -> None:
    model = assert_as_stock(encoder)
    assert not model.ipu_profile.memory.lacking() and not model.ipu_profile.fallbacks
