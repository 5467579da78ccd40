"""`examples/studies/sram_and_exchange.py` on small settings: fronts that nothing beats, costs that are kept."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.loading import example

sram_and_exchange = example("studies/sram_and_exchange")


def test_fronts(sram_and_exchange: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "perceptron", "recurrence", "--memory", "1", "624", "--exchange", "2", "8", "--tiles", "8"]
    fronts = sram_and_exchange.main([*small, "--folder", str(tmp_path)])
    text = capsys.readouterr().out
    for model, front in fronts.items():
        assert f"{model}: 2 of 4 machines fit" in text
        assert [row["exchange_bytes_per_cycle"] for row in front] == [8, 2]
        assert front[0]["cycles"] < front[1]["cycles"]
        assert (tmp_path / f"{model}.jsonl").exists()
    assert sram_and_exchange.main([*small, "--folder", str(tmp_path)]) == fronts


def test_every_model_compiles(sram_and_exchange: ModuleType) -> None:
    fronts = sram_and_exchange.main(["--memory", "624", "--exchange", "4", "--tiles", "4"])
    assert list(fronts) == list(sram_and_exchange.MODELS)
    assert all(len(front) == 1 for front in fronts.values())
