"""`benchmarks/sharded_pipelines.py`: its bars, and the figures of `docs/pipelines.md`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sharded_pipelines import Row, main, measure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"
ONE = Row("buffered", 4, 1, 16, 0.17, 1000)


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (ONE, []),
        (replace(ONE, shards=2, cycles=900), []),
        (replace(ONE, shards=2), ["cycles of one shard"]),
        (replace(ONE, shards=2, cycles=900, bubble=0.1), ["closed form"]),  # 3 / 19 is 15.8 %
        (replace(ONE, shards=2, cycles=900, bubble=0.21), ["bubble of one shard", "closed form"]),
        (replace(ONE, exchange="lockstep", shards=2, cycles=900, bubble=0.1), []),
    ],
)
def test_bars_compare_with_one_shard_and_the_closed_form(row: Row, missed: list[str]) -> None:
    assert row.missed(ONE) == missed


def test_the_page_has_the_figures_of_two_stages(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^\| 2 \| 5.9% \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    cells = [[float(text.strip(" %")) for text in cell.split(",")] for cell in line.split("|")]
    for exchange, (bubbles, millions) in zip(("lockstep", "buffered"), (cells[:2], cells[2:]), strict=True):
        rows = [measure(exchange, 2, shards, 16) for shards in (1, 2, 4)]
        assert [round(100 * row.bubble, 1) for row in rows] == bubbles
        assert [round(row.cycles / 1e6, 2) for row in rows] == millions
    assert main(["--stages", "2", "--shards", "2"]) == 0
    assert capsys.readouterr().out.endswith("0 bars missed\n")
