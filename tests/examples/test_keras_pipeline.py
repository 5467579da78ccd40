"""`examples/keras_pipeline.py` on small settings: losses of stock Keras, and what is printed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "keras_pipeline.py"


def test_losses_are_those_of_stock_keras(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("keras_pipeline_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    flags = ["--tiles", "8", "--width", "24", "--epochs", "1", "--batches", "4"]
    losses, stock = example.main(flags)
    np.testing.assert_allclose(losses, stock, rtol=1e-5)
    text = capsys.readouterr().out
    assert "4 batches of 16 in each of 2 replicas of 2 stages" in text and "idle" in text
