"""Checks that the parts of a profile add up, and that every view of it has the same figures.

`check_sums(profile, folder)` holds, exactly, in cycles:

    phases of an IPU                        = cycles of the run
    operations, lines, layers               = busy cycles of all IPUs
    stages of an IPU                        = cycles of the run
    summary, page, Perfetto trace, scalars  = figures of `Profile`
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from ipujax.runtime.page.anchors import MAX_OPERATIONS, listed_files
from ipujax.runtime.profile import NO_LAYER, LayerCost, Operation, StepCost
from ipujax.runtime.profile.text import size
from ipujax.runtime.report import Profile
from ipujax.runtime.report.perfetto import COMPUTE_TILES
from ipujax.runtime.sources import line_number
from ipujax.runtime.timeline import PHASES
from ipujax.runtime.views import source_view, stage_cells, tree_of
from tests.runtime.page.page_data import table_of

ALL = 1_000_000  # lines of a summary
MAX_LAYERS = 1_000  # of a summary


def check_sums(profile: Profile, folder: Path) -> None:
    """Asserts that figures add up and that all views agree; writes a page and a trace to the folder."""
    _check_figures(profile)
    _check_stages(profile)
    _check_memory(profile)
    _check_scalars(profile)
    _check_summary(profile)
    profile.to_perfetto(folder / "trace.json")
    _check_trace(profile, json.loads((folder / "trace.json").read_text(encoding="utf-8")))
    profile.to_html(folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    _check_page(profile, Page(text))
    _check_tables(profile, text)


# --- figures ----------------------------------------------------------------------------------------------------------


def _check_figures(profile: Profile) -> None:
    cycles = profile.cycles
    ipus = profile.ipu_phase_cycles
    assert len(ipus) == profile.target.num_ipus
    for ipu, phases in enumerate(ipus):
        assert sum(phases.values()) == cycles, f"phases of IPU {ipu}"
        assert min(phases.values()) >= 0
    busy = [cycles - phases["idle"] for phases in ipus]
    assert profile.busy_cycles == sum(busy) and busy.index(max(busy)) == profile.limiting_ipu
    assert profile.phase_cycles == ipus[profile.limiting_ipu]
    for rows in (profile.step_costs, profile.operations(), profile.operations(lines="library"), profile.layers):
        _check_rows(profile, rows)
    simulation = profile.execution()["simulation"]
    assert simulation["cycles"] == cycles


def _check_rows(profile: Profile, rows: Sequence[StepCost] | Sequence[Operation] | Sequence[LayerCost]) -> None:
    """Rows add up to the busy cycles as a whole, on the limiting IPU, and in each phase."""
    assert sum(row.cycles for row in rows) == profile.busy_cycles, type(rows[0]).__name__ if rows else "no rows"
    assert sum(row.limiting_cycles for row in rows) == profile.cycles - profile.phase_cycles["idle"]
    assert all(sum(row.phases.values()) == row.cycles for row in rows)
    sums = Counter(dict.fromkeys(PHASES, 0))
    for row in rows:
        sums.update(row.phases)
    for name in PHASES:
        assert sums[name] == sum(phases[name] for phases in profile.ipu_phase_cycles), name


def _check_stages(profile: Profile) -> None:
    """The stages of an IPU have all its cycles, and all its idle ones."""
    stages = profile.stages
    for ipu in {row.ipu for row in stages}:
        own = [row for row in stages if row.ipu == ipu]
        assert sum(sum(row.phases.values()) for row in own) == profile.cycles, f"stages of IPU {ipu}"
        assert sum(row.phases["idle"] for row in own) == profile.ipu_phase_cycles[ipu]["idle"]
        assert min(cycles for row in own for cycles in row.phases.values()) >= 0


def _check_memory(profile: Profile) -> None:
    memory = profile.memory
    for kinds in (memory.by_role, memory.by_category):
        np.testing.assert_array_equal(sum(kinds.values()), memory.tile_bytes)
    assert memory.max_tile_bytes == memory.tile_bytes[memory.worst_tile] == memory.tile_bytes.max()
    assert sum(item.num_bytes for item in memory.largest) == memory.max_tile_bytes
    rows = memory.breakdown.rows
    assert sum(row.fullest_bytes for row in rows) == memory.max_tile_bytes
    assert sum(row.mean_bytes for row in rows) * len(memory.tile_bytes) == memory.total_bytes


def _check_scalars(profile: Profile) -> None:
    scalars = profile.scalars()
    assert (scalars["cycles"], scalars["busy_cycles"]) == (profile.cycles, profile.busy_cycles)
    assert _starting("phases/", scalars) == profile.phase_cycles
    layers = Counter[str]()
    for row in profile.layers:
        layers[row.layer] += row.cycles
    assert _starting("layers/", scalars) == layers and sum(layers.values()) == profile.busy_cycles
    assert scalars["memory/max_tile_bytes"] == profile.memory.max_tile_bytes


def _starting(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}


# --- text -------------------------------------------------------------------------------------------------------------


def _check_summary(profile: Profile) -> None:
    text = profile.summary(ALL, by="layer")
    execution = dict(re.findall(r"^  ([\w/ ]+): +([\d,]+)", _section(text, "Execution"), re.MULTILINE))
    assert _number(execution["Cycles"]) == profile.cycles
    for name, cycles in profile.phase_cycles.items():
        label = {"global_exchange": "Global exchange", "host_exchange": "Host exchange"}.get(name, name.capitalize())
        assert _number(execution[label]) == cycles, name
    for lines in ("user", "library"):
        listed = _first_numbers(_section(profile.summary(ALL, lines=lines), "Most expensive lines"))
        assert listed == [row.cycles for row in profile.operations(lines=lines)]
    root = tree_of(profile)
    layers = _first_numbers(_section(text, "Layers, those inside them included"))
    if len(layers) < MAX_LAYERS and root.children.keys() != {NO_LAYER}:
        assert layers == [node.cycles for node in root.walk() if node.path]
    assert root.cycles == profile.busy_cycles
    if profile.target.num_ipus > 1:
        shares = [row.split()[2:] for row in _section(text, "Phases by IPU").splitlines() if row.startswith("  IPU ")]
        assert shares == [list(_shares(phases.values(), profile.cycles)) for phases in profile.ipu_phase_cycles]
    assert f"{profile.memory.worst_tile}, {size(profile.memory.max_tile_bytes)} of" in _section(text, "Memory")


def _section(text: str, title: str) -> str:
    """A section of a summary without its heading; "" if there is none."""
    actual = re.search(rf"^{re.escape(title)}[^\n]*:\n((?:  [^\n]*\n)+)", text, re.MULTILINE)
    return actual[1] if actual else ""


def _first_numbers(section: str) -> list[int]:
    return [_number(actual) for actual in re.findall(r"^ +(\d[\d,]*)  ", section, re.MULTILINE)]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _shares(cycles: Iterable[int], total: int) -> Iterator[str]:
    return (f"{value / max(1, total):.1%}" for value in cycles)


# --- trace ------------------------------------------------------------------------------------------------------------


def _check_trace(profile: Profile, data: Mapping[str, Any]) -> None:
    """The slices of each phase on an IPU add up to its cycles of the profile, and lie in the run."""
    sums = [Counter(dict.fromkeys((*PHASES, "idle"), 0)) for _ in profile.ipu_phase_cycles]
    end = 0.0
    for event in data["traceEvents"]:
        on_ipu = event["ph"] == "X" and event["pid"] <= len(sums)
        if on_ipu and event["tid"] == COMPUTE_TILES and event["cat"] in sums[0]:
            sums[event["pid"] - 1][event["cat"]] += event["args"]["cycles"]
            end = max(end, event["ts"] + event["dur"])
    assert sums == list(profile.ipu_phase_cycles)
    assert data["otherData"]["phase_cycles"] == {f"IPU {ipu}": phases for ipu, phases in enumerate(sums)}
    assert data["otherData"]["cycles"] == profile.cycles
    assert abs(end - profile.seconds * 1e6) < 1e-4
    tasks = [event for event in data["traceEvents"] if event.get("cat") == "task"]
    assert sum(event["args"]["busy_cycles"] for event in tasks) == int(profile.tasks.busy.sum())


# --- page -------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The rows of the tables and trees of a page by section; a cell is its text and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[tuple[str, dict[str, str | None]]]]] = {}
        self.ids: dict[str, list[tuple[str, dict[str, str | None]]]] = {}  # rows by the id of their element
        self._section = ""
        self._is_in_row = False
        self._depth = 0  # of elements inside a cell
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inputs = dict(attrs)
        if tag == "section":
            self._section = inputs["id"] or ""
            self.rows[self._section] = []
        if not self._section:
            return
        if tag in ("tr", "summary") or (tag == "div" and inputs.get("class") in ("leaf", "head")):
            self.rows[self._section].append([])
            if inputs.get("id"):
                self.ids[str(inputs["id"])] = self.rows[self._section][-1]
            self._depth = 0
            self._is_in_row = True
        elif self._depth:
            self._depth += tag not in ("input", "br", "img")
        elif tag in ("td", "th", "span") and self._is_in_row:
            self.rows[self._section][-1].append(("", inputs))
            self._depth = 1

    def handle_endtag(self, tag: str) -> None:
        if not self._depth and tag in ("tr", "summary", "div"):
            self._is_in_row = False
        self._depth = max(0, self._depth - 1)
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._depth:
            row = self.rows[self._section][-1]
            text, inputs = row[-1]
            row[-1] = text + data, inputs

    def texts(self, section: str) -> list[list[str]]:
        return [[text.strip() for text, _ in row] for row in self.rows.get(section, [])]


def _check_page(profile: Profile, page: Page) -> None:
    figures = page.texts("summary")
    assert ["Cycles", f"{profile.cycles:,}"] in figures
    for name, cycles in profile.phase_cycles.items():
        share = cycles / max(1, profile.cycles)
        assert [name.replace("_", " ").capitalize(), f"{cycles:,} ({share:.1%})"] in figures, name
    if profile.target.num_ipus > 1:
        for ipu, phases in enumerate(profile.ipu_phase_cycles):
            assert [f"IPU {ipu}", *_shares(phases.values(), profile.cycles)] in figures
    _check_layers(profile, page)
    _check_source(profile, page)
    if profile.stages:
        several = len(profile.pipelines) > 1
        expected = [list(stage_cells(row, profile.cycles, several)) for row in profile.stages]
        rows = [[row[0].removesuffix("trace").strip(), *row[1:]] for row in page.texts("stages") if row]
        assert [row for row in rows if row in expected] == expected


def _check_tables(profile: Profile, text: str) -> None:
    """Tables of data: what is in memory at the peak, operations, layers and lines."""
    *parts, total = table_of(text, "breakdown-table")
    assert total["Name"] == "all" and len(parts) == len(profile.memory.breakdown.rows)
    on_fullest = f"On tile {profile.memory.worst_tile:,}"
    assert sum(row[on_fullest] for row in parts) == total[on_fullest] == profile.memory.max_tile_bytes
    assert sum(row["Items"] for row in parts) == total["Items"] == len(profile.memory.breakdown.items)
    operations = table_of(text, "operations-table")
    assert len(operations) == min(MAX_OPERATIONS, len(profile.step_costs))
    for row in operations:
        assert row["Cycles"] == profile.step_costs[int(row["id"].removeprefix("op-"))].cycles
    if len(operations) == len(profile.step_costs):
        assert sum(row["Cycles"] for row in operations) == profile.busy_cycles
    layers = table_of(text, "layers-table")
    if len(layers) == len(list(tree_of(profile).walk())) - 1:
        assert sum(row["Own cycles"] for row in layers) == profile.busy_cycles
    lines = [row for row in profile.operations() if line_number(row.origin.line) is not None]
    assert sum(row["Cycles"] for row in table_of(text, "lines-table")) == sum(row.cycles for row in lines)


def _check_layers(profile: Profile, page: Page) -> None:
    root = tree_of(profile)
    nodes = {node.path: node for node in root.walk()}
    listed = {
        str(row[0][1]["title"]): row
        for row in page.rows["layers"]
        if row and row[0][1].get("class") == "name" and "title" in row[0][1]
    }
    for path, row in listed.items():
        assert _number(row[2][0]) == nodes[path].cycles, path
    if listed.keys() == nodes.keys() - {""}:
        assert sum(_number(listed[name][2][0]) for name in root.children) == profile.busy_cycles
    else:
        assert len(listed) >= 300


def _check_source(profile: Profile, page: Page) -> None:
    files = source_view(profile)
    of_lines = sum(row.cycles for row in profile.operations() if line_number(row.origin.line) is not None)
    assert sum(file.cycles for file in files) == of_lines
    cells = [row[0] for row in page.texts("source") if len(row) == 8 and row[0] != "Cycles"]
    assert sum(_number(cell) for cell in cells if cell) == sum(
        cost.cycles
        for file in listed_files(files)
        for number, cost in file.costs.items()
        if number in file.listed_lines()
    )
