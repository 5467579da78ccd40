"""`examples/keras_digits.py` on a small IPU: it learns, and its history has the machine's time."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.examples.loading import example

keras_digits = example("keras_digits")


def test_learns_and_logs_cycles(keras_digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    history = keras_digits.main(["--epochs", "2", "--batch", "50", "--steps", "10", "--tiles", "16"])
    text = capsys.readouterr().out
    assert history["loss"][1] < history["loss"][0] and history["val_accuracy"][1] > 0.6
    cycles, repeated = history["ipu_cycles"]
    assert cycles == repeated and f"10 batches of 50: {cycles:,} cycles" in text
    assert re.search(r"^this host prepares them in [\d,]+ µs: the (host|IPU) is slower$", text, re.MULTILINE)
    losses = re.findall(r"^epoch \d: loss ([\d.]+), test accuracy", text, re.MULTILINE)
    assert losses == [f"{loss:.4f}" for loss in history["loss"]]
    without = re.search(r"^without the strategy: test accuracy ([\d.]+)$", text, re.MULTILINE)
    assert without is not None and float(without[1]) == pytest.approx(history["val_accuracy"][1], abs=0.005)


def test_default_settings(keras_digits: ModuleType) -> None:
    history = keras_digits.main([])
    assert len(history["loss"]) == 20 and history["val_accuracy"][-1] > 0.85
