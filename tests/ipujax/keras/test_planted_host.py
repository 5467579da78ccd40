"""A Keras model that is given a batch a call is said to wait for its host."""

from __future__ import annotations

import keras
import numpy as np

import ipujax as ipu
from ipujax.keras import IPUConfig, IPUStrategy
from tests.ipujax.causes.planted_programs import HOST, TILES, Planted, check_planted


def keras_predictions(batch: int) -> ipu.Profile:
    config = IPUConfig()
    config.auto_select_ipus = 1
    config.ipu_model.tiles_per_ipu = TILES
    with IPUStrategy(config).scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, "tanh"), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        model.predict(np.ones((batch, 256), np.float32), batch_size=batch, verbose=0)
        return model.ipu_profile  # type: ignore[no-any-return]


def test_a_batch_a_call_is_named() -> None:
    check_planted(Planted(HOST, lambda: keras_predictions(4), lambda: keras_predictions(64).cycles / 16))
