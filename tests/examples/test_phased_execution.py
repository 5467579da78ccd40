"""The example of phased execution, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import phased_execution


def test_phases_train_a_network_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "trade-off.png"
    settings = ["--tiles", "6", "--layers", "6", "--width", "96", "--batch", "8", "--io-tiles", "2", "--steps", "2"]
    curve = phased_execution.main([*settings, "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert len(curve) == 3 and picture.stat().st_size > 1000
    assert "two IPUs" in printed and "2 I/O tiles" in printed and "in 2 steps" in printed
