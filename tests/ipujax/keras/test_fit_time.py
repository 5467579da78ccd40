"""The bound of a fit, host or device: in the profile, the logs and the log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import IPUModel
from tests.ipujax.keras.test_strategy import strategy

SECONDS = 0.005
STEPS = 4
EPOCHS = 2


def batches(seconds: float) -> Iterator[Any]:
    while True:
        time.sleep(seconds)
        yield np.ones((4, 6), np.float32), np.zeros(4, np.int32)


def fitted(seconds: float, depth: int = 0, steps: int = 1) -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.set_infeed_queue_options(prefetch_depth=depth)
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    loop = {"steps_per_epoch": STEPS, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return model, model.fit(batches(seconds), callbacks=[ipu.ProfileLogger()], **loop).history


@pytest.mark.parametrize(("depth", "steps"), [(0, 1), (2, 2)])
def test_a_slow_host_shows(depth: int, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    with strategy().scope(), caplog.at_level(logging.INFO, "ipujax.keras"):
        model, history = fitted(SECONDS, depth, steps)
    profile = model.ipu_profile
    host = profile.host
    assert profile is model.ipu_profiles["train"] and profile.is_host_bound
    assert "Bound by:         host" in profile.summary()
    assert (host.batches, host.batches_per_call, host.is_ahead) == (STEPS * EPOCHS, steps, depth > 0)
    assert history["host_data_seconds"][-1] >= STEPS * SECONDS  # Keras looks at batches before the first epoch
    assert sum(history["host_data_seconds"]) == pytest.approx(host.prepared_seconds)
    assert sum(history["host_wait_seconds"]) == pytest.approx(host.waited_seconds)
    np.testing.assert_allclose(history["ipu_seconds"], STEPS // steps * profile.seconds, rtol=1e-6)
    lines = [line for line in caplog.messages if "epoch" in line]
    assert len(lines) == EPOCHS and all("bound by the host" in line for line in lines)


def test_a_fast_host_shows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With IPUs of a kilohertz."""
    monkeypatch.setattr(ipu.IPUConfig, "device", property(lambda _: IPUModel(tiles_per_ipu=8, clock_hz=1e3)))
    with strategy().scope(), caplog.at_level(logging.INFO, "ipujax.keras"):
        model, _ = fitted(0.0)
    assert not model.ipu_profile.is_host_bound and "bound by the device" in caplog.messages[-1]


def test_each_fit_is_measured_anew_and_single_batches_are_not() -> None:
    with strategy().scope():
        model, _ = fitted(0.0)
        x, y = next(batches(0.0))
        before = model.ipu_profile.host
        model.train_on_batch(x, y)
        assert model.ipu_profile.host is before
        model.fit(x, y, verbose=0)
    assert (before.batches, model.ipu_profile.host.batches) == (STEPS * EPOCHS, 1)
