"""`examples/pipelining.py` on small settings in the fast tests, and as users run it in the slow ones."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.loading import example

SMALL = ["--tiles", "4", "--batch", "8", "--micro-batches", "4", "--schedules", "gpipe", "1f1b", "grouped"]


pipelining = example("pipelining")


def read_png(path: Path) -> np.ndarray:
    """The pixels of a picture whose rows are not filtered."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place = 8
    chunks = {}
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        name = data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (zlib.crc32(name + body),)
        chunks[name] = body
        place = place + 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_draws_schedules(pipelining: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipelining.main([*SMALL, "--steps", "0", "--pictures", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "needs at least 7 micro-batches" in printed  # grouped
    assert "training with" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"gpipe-4.png", "1f1b-4.png"}
    for path in tmp_path.iterdir():
        pixels = read_png(path)
        assert pixels.shape == (120, 1200, 3)
        share = (pixels[15] != 255).any(-1).mean()  # of the first IPU's time in which it works
        assert 0.2 < share < 0.95


def test_trains_with_a_given_schedule(pipelining: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    loss = pipelining.main([*SMALL[:-4], "--schedules", "sequential", "--steps", "2"])
    assert 1.5 < loss < 4
    assert f"step   2  loss {loss:.4f}" in capsys.readouterr().out


def test_fifty_steps_learn_to_read_digits(pipelining: ModuleType) -> None:
    assert pipelining.main([]) < 0.5
