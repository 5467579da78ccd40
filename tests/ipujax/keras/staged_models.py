"""Models whose stages are named in every place there is: around calls of layers, in calls, in functions, at layers.

Output: `MODELS`, functions of whether stages are named that make a model of three classes from rows of ten numbers,
with the number of their stages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras import layers

import ipujax.keras as ipu


def scope(number: int, is_staged: bool) -> AbstractContextManager[Any]:
    return ipu.PipelineStage(number) if is_staged else nullcontext()


def classifier() -> keras.layers.Layer:
    return layers.Dense(3, activation="softmax", name="classifier")


class Blocks(layers.Layer):
    """Layers one behind the other, each in a stage of its own."""

    def __init__(self, is_staged: bool, first: int = 0, count: int = 2) -> None:
        super().__init__(name="blocks")
        self.is_staged = is_staged
        self.first = first
        self.inside = [layers.Dense(6, activation="tanh", name=f"inside_{n}") for n in range(count)]

    def build(self, shape: Any) -> None:
        for layer in self.inside:
            layer.build(shape)
            shape = (*shape[:-1], 6)

    def call(self, x: Any) -> Any:
        for number, layer in enumerate(self.inside, self.first):
            with scope(number, self.is_staged):
                x = layer(x)
        return x


class Subclassed(keras.Model):
    """Graphcore's example of a model with stages in its call: a layer is in two of them."""

    def __init__(self, is_staged: bool, stages: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__(name="subclassed")
        self.is_staged = is_staged
        self.stages = stages
        self.a = layers.Dense(6, name="a")
        self.b = layers.Dense(6, name="b")
        self.c = layers.Concatenate(name="c")
        self.d = classifier()

    def call(self, x: Any) -> Any:
        first, second, third, fourth = self.stages
        with scope(first, self.is_staged):
            x = self.a(x)
        with scope(second, self.is_staged):
            x1 = self.b(x)
            x2 = self.b(x)
        with scope(third, self.is_staged):
            x1 = self.b(x1)
            x2 = self.b(x2)
            x = self.c([x1, x2])
        with scope(fourth, self.is_staged):
            return self.d(x)


class Nested(keras.Model):
    """A layer with stages in its call, and a stage in that of the model."""

    def __init__(self, is_staged: bool) -> None:
        super().__init__(name="nested")
        self.is_staged = is_staged
        self.blocks = Blocks(is_staged)
        self.d = classifier()

    def call(self, x: Any) -> Any:
        x = self.blocks(x)
        with scope(2, self.is_staged):
            return self.d(x)


class MadeInStages(keras.Model):
    """Layers made in stages, and called in none."""

    def __init__(self, is_staged: bool) -> None:
        super().__init__(name="made_in_stages")
        with scope(0, is_staged):
            self.a = Blocks(False)
        with scope(1, is_staged):
            self.b = layers.Dense(5)
            self.d = classifier()

    def call(self, x: Any) -> Any:
        return self.d(self.b(self.a(x)))


def of_a_lambda(is_staged: bool) -> keras.Model:
    def doubled(x: Any) -> Any:
        with scope(1, is_staged):
            return keras.ops.tanh(2 * x)

    return keras.Sequential([keras.Input((10,)), Blocks(is_staged, count=1), layers.Lambda(doubled), classifier()])


def of_both_ways(is_staged: bool) -> keras.Model:
    """Stages around calls of a functional model, and in a layer between them."""
    inputs = keras.Input((10,))
    with scope(0, is_staged):
        x = layers.Dense(6)(inputs)
    x = Blocks(is_staged, first=1)(x)
    with scope(3, is_staged):
        outputs = classifier()(x)
    return keras.Model(inputs, outputs, name="both_ways")


MODELS: dict[str, tuple[Callable[[bool], Any], int]] = {
    "the call of a model": (Subclassed, 4),
    "the call of a layer": (Nested, 3),
    "a sequence, not built": (lambda is_staged: keras.Sequential([Blocks(is_staged), classifier()]), 2),
    "a lambda": (of_a_lambda, 2),
    "both ways": (of_both_ways, 4),
    "where layers are made": (MadeInStages, 2),
}
