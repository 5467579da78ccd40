"""docs/machine.md: its generated part has the values of the presets, and nothing in it is without a source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target.machine_page import MARKER, generated, main, page_with
from ipujax.runtime.target.presets import PRESETS, preset
from ipujax.runtime.target.target import Target

PAGE = Path(__file__).resolve().parents[3] / "docs" / "machine.md"
SHOWN = [item for item in dataclasses.fields(Target) if item.name not in ("name", "num_ipus", "sources")]


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with(page), "run: python -m ipujax.runtime.target.machine_page docs/machine.md"
    assert "## Where not to trust this" in page.partition(MARKER)[0]


@pytest.mark.parametrize("item", SHOWN, ids=lambda item: item.name)
def test_every_constant_has_a_row_and_every_value_its_source(item):
    table, _, meanings = generated().partition("## Meaning and sources")
    (row,) = [line for line in table.splitlines() if line.startswith(f"| `{item.name}` |")]
    assert len(row.strip("| ").split(" | ")) == 2 + len(PRESETS) and f"| {item.metadata['unit']} |" in row
    (paragraph,) = [part for part in meanings.split("\n\n") if f"**`{item.name}`**" in part]
    assert item.metadata["doc"] in paragraph
    for target in PRESETS.values():
        source = target.sources[item.name]
        assert f"*{source.kind}*: {source.text}" in paragraph


def test_values_are_those_of_the_presets():
    rows = {line.split(" | ")[0].strip("| `"): line for line in generated().splitlines() if line.startswith("| `")}
    assert "| 1,600,000,000 | 1,325,000,000 | 1,850,000,000 |" in rows["clock_hz"]
    assert "| 1e-05 | 1e-05 | 1e-05 |" in rows["host_latency_seconds"]
    assert "| fp16 AMP | 2 flop a MAC | 124,518,400,000,000 flop/s |" in generated()  # 1216 * 1.6e9 * 64


def test_another_machine_has_a_column_of_its_own():
    wide = preset("mk2").replace(exchange_bytes_per_cycle=8)
    text = generated({"mk2": preset("mk2"), "wide": wide})
    assert "| `exchange_bytes_per_cycle` | B/cycle/tile | 4 | 8 |" in text
    assert "  - wide: *user*: replaced; was 4.0 (published)." in text


def test_writes_below_the_marker_or_prints(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n{MARKER}old")
    main([str(page)])
    assert page.read_text(encoding="utf-8") == f"by hand\n{MARKER}\n{generated()}"
    main([])
    assert capsys.readouterr().out == generated()


def test_refuses_a_page_without_a_marker(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("by hand")
    with pytest.raises(ArgumentError, match="must have a marker for the constants"):
        main([str(page)])
    assert page.read_text() == "by hand"
