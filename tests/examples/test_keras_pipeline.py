"""`examples/keras_pipeline.py` on small settings: losses of stock Keras, and printed lines."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.examples.loading import example

keras_pipeline = example("keras_pipeline")


def test_losses_are_those_of_stock_keras(keras_pipeline: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses, stock = keras_pipeline.main(["--tiles", "8", "--width", "24", "--epochs", "1", "--batches", "4"])
    np.testing.assert_allclose(losses, stock, rtol=1e-5)
    text = capsys.readouterr().out
    assert "4 batches of 16 in each of 2 replicas of 2 stages" in text and "idle" in text
