"""`benchmarks/speed.py`: its figures, its tables, and the block it writes into a page."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import speed  # noqa: E402
from models import MODELS  # noqa: E402

sys.path.remove(BENCHMARKS)


def test_figures_of_a_small_model(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(speed.ALL, "mlp", partial(MODELS["mlp"], widths=(6, 8, 10), batch=4))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{speed.BEGIN}old\n{speed.END}\nafter\n")
    file = tmp_path / "speed.json"
    assert speed.main(["--only", "mlp", "--runs", "2", "--json", str(file), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{speed.BEGIN}") and text.endswith(f"{speed.END}\nafter\n") and "old" not in text
    assert all(line in text for line in capsys.readouterr().out.splitlines())
    assert "20/2/2" in text and '"first"' in file.read_text()


def test_parts_hold_all_time() -> None:
    timings = {"trace": 1.0, "fuse": 2.0, "outline": 3.0, "lower": 4.0, "clocks": 5.0}
    parts = speed.by_part(timings)
    assert sum(parts.values()) == sum(timings.values()) and parts["passes"] == 5.0
    assert set(parts) == {*speed.PARTS, "passes"}


def test_a_page_without_a_block_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="has no block"):
        speed.write_between(page, speed.BEGIN, speed.END, ["line"])


def test_the_page_has_the_tables_of_a_run() -> None:
    page = (Path(BENCHMARKS).parent / "docs" / "speed.md").read_text(encoding="utf-8")
    written = page.split(speed.BEGIN)[1].split(speed.END)[0].splitlines()
    assert speed.header() in written and any(line.startswith("mlp ") for line in written)
