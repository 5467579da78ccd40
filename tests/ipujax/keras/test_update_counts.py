"""Epochs that are no whole number of updates are refused before any batch is taken, and the others run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from ipujax import ArgumentError
from tests.ipujax.keras.test_strategy import strategy

X = np.ones((40, 6), np.float32)
Y = np.arange(40) % 3


class Rows(keras.utils.PyDataset):
    """All rows, in batches of one size and a last batch of the remainder."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __len__(self) -> int:
        return -(-len(X) // self.size)

    def __getitem__(self, number: int) -> Any:
        rows = slice(number * self.size, (number + 1) * self.size)
        return X[rows], Y[rows]


def model_of(accumulation: int, replicas: int, steps: int = 4) -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.set_gradient_accumulation_options(accumulation)
    model.set_replication_options(replicas)
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    return model


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arrays": ({"x": X, "y": Y, "batch_size": 12}, "the first 24 of 40 examples, or batch_size=10"),
    "arrays in Keras' own batches": ({"x": X[:33], "y": Y[:33]}, "at least 2 batches"),
    "a share of arrays": ({"x": X, "y": Y, "batch_size": 8, "validation_split": 0.25}, "the first 16 of 30 examples"),
    "steps that come to it in a later epoch": (
        {"x": X, "y": Y, "batch_size": 12, "steps_per_epoch": 2, "epochs": 2},
        "the first 24 of 40 examples",
    ),
    "steps that an execution goes on from": (
        {"x": X, "y": Y, "batch_size": 12, "steps_per_epoch": 2},
        "the first 24 of 40 examples",
    ),
    "a dataset": ({"x": Rows(12)}, "a dataset without the last 4 examples"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("accumulation", "replicas"), [(2, 1), (1, 2)])
def test_a_smaller_last_batch_is_refused_before_any(name: str, accumulation: int, replicas: int) -> None:
    data, hint = REFUSED[name]
    with strategy(2).scope():
        model = model_of(accumulation, replicas)
        with pytest.raises(ArgumentError, match="the last batch of an epoch is not a whole update") as refused:
            model.fit(**data, verbose=0)
    assert hint in refused.value.hint and int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "data",
    [
        {"x": X, "y": Y, "batch_size": 12, "steps_per_epoch": 2},
        {"x": Rows(10)},
        {"x": X[:30], "y": Y[:30], "batch_size": 5, "validation_split": 1 / 3},
    ],
)
def test_a_whole_number_of_updates_runs(data: dict[str, Any]) -> None:
    with strategy().scope():
        model = model_of(2, 1, steps=2)
        model.fit(**data, verbose=0)
    assert int(model.optimizer.iterations) in (1, 2)


def test_fewer_batches_than_an_update_takes() -> None:
    with strategy().scope():
        model = model_of(4, 1)
        with pytest.raises(ArgumentError, match=r"a multiple of 4(.|\n)*got: 2\n  try: data of 4 batches"):
            model.fit(X, Y, batch_size=20, verbose=0)
