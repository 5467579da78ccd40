"""`examples/recomputing.py` on small settings: its table, its curve, its losses, its picture."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ipujax as ipu
from tests.examples.loading import example

ROW = re.compile(r"^(.+?)  +([\d.]+) KiB +([\d,]+) cycles$", re.MULTILINE)
SMALL = ["--tiles", "4", "--width", "16", "--batch", "512"]


recomputing = example("recomputing")


def test_less_memory_for_more_cycles(
    recomputing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "drawn.png"
    curve = recomputing.main([*SMALL, "--points", "1", "--steps", "2", "--picture", str(picture)])
    text = capsys.readouterr().out
    rows = {name: (float(kib), int(cycles.replace(",", ""))) for name, kib, cycles in ROW.findall(text)}
    nothing, by_hand, standard, everything, *auto = rows.values()
    assert [name.split()[0] for name in rows] == ["nothing", "by", 'recompute="standard"', 'recompute="all"', "auto,"]
    assert by_hand[0] < nothing[0] and standard[0] < nothing[0] and by_hand[1] > nothing[1] < everything[1]
    assert [(round(kib, 1), cycles) for kib, cycles in curve] == [nothing, *auto]
    (fitted,) = auto
    assert fitted[0] <= nothing[0] / 2 and fitted[1] > nothing[1]
    assert fitted[0] < by_hand[0] and fitted[1] < by_hand[1]
    ((first, last, difference),) = re.findall(r"loss ([\d.]+) to ([\d.]+) in 2 steps; .* (\S+)$", text, re.MULTILINE)
    assert float(last) < float(first) and float(difference) < 1e-5
    assert f"drawn: {picture}" in text and picture.read_bytes().startswith(b"\x89PNG")


def test_ends_at_a_chip_that_is_too_small(
    recomputing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a chip that is too small; if there is none before it, there is nothing to train with."""

    def compiled(step: object, shapes: object, tiles: int, kib: float | None, recompute: str) -> object:
        if recompute == "auto":
            error = ipu.TileMemoryError("too small")
            error.needed_bytes = 3 * 1024
            raise error
        return SimpleNamespace(profile=SimpleNamespace(memory=SimpleNamespace(max_tile_bytes=4096), cycles=1000))

    monkeypatch.setattr(recomputing, "compiled", compiled)
    assert recomputing.main([*SMALL, "--points", "3"]) == [(4.0, 1000)]
    text = capsys.readouterr().out
    assert len(ROW.findall(text)) == 4
    assert text.endswith("auto, 3 KiB a tile            does not fit: it needs 3.0 KiB\n")


def test_default_settings(recomputing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    curve = recomputing.main(["--steps", "5"])
    assert len(curve) == 5 and curve[-1][0] < 0.55 * curve[0][0]
    difference = re.search(r"plain JAX differs by (\S+)", capsys.readouterr().out)
    assert difference is not None and float(difference[1]) < 1e-5
