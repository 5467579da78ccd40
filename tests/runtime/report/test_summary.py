"""Profiles as text: the guide's sections in its order, the options, and colours."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence
from ipujax.runtime.options import Options
from ipujax.runtime.profile.text import coloured, wants_colours
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import on_one_tile
from tests.runtime.profile.profile_helpers import (
    F32,
    SIZE,
    SYNC,
    TARGET,
    apply,
    codelet,
    inputs,
    looping,
    output,
    two_ipus,
    variables,
)

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def no_colour_settings(monkeypatch):
    for name in ("CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


def headings(text):
    return [line.split(":")[0].split(",")[0] for line in text.splitlines() if line and not line.startswith(" ")]


def test_cycles_on_the_device_are_apart_from_the_host(profile):
    host = profile.phase_cycles["host_exchange"]
    assert 0 < host < profile.cycles and profile.device_cycles == profile.cycles - host
    assert re.search(rf"On the device: +{profile.device_cycles:,} cycles, .*without host exchange", profile.summary())


def test_sections_come_in_the_guides_order(profile):
    everything = dict.fromkeys(
        ("show_execution_steps", "show_var_storage", "show_optimizations", "show_per_ipu_memory_usage"), True
    )
    assert headings(profile.summary(**everything)) == [
        "Target",
        "Graph",
        "Compilation",
        "Memory",
        "Memory by role",
        "Memory by category",
        "Memory by vertex type",
        "Memory by tile",
        "Memory at the peak",
        "Memory by IPU",
        "Variable storage liveness",
        "Execution",
        "Cycles of all tiles",
        "Active cycles by vertex type",
        "Active cycles by language",
        "Most expensive lines",
        "Steps",
    ]


@pytest.mark.parametrize(
    ("option", "heading"),
    [
        ("show_execution_steps", "Steps"),
        ("show_var_storage", "Variable storage liveness"),
        ("show_optimizations", "Compilation"),
        ("show_per_ipu_memory_usage", "Memory by IPU"),
    ],
)
def test_each_option_adds_its_section(profile, option, heading):
    plain = headings(profile.summary())
    settings = headings(profile.summary(**{option: True}))
    assert [name for name in settings if name != heading] == plain and heading in settings
    assert profile.summary(**{option: False}) == profile.summary()


def test_summary_lists_time_and_memory(profile):
    text = profile.summary()
    for phrase in (
        f"{profile.cycles:,}",
        "Vertices:      8\n",
        "Compute sets:  2\n",
        "Compute:",
        "Host exchange:",
        "Fullest tile:",
        "Mean:",
        "Free on it:",
        "100% of tile cycles of compute phases",
        "model.py:9 (loss)  [popops::Dear/compute]",
        "B  stack\n",
    ):
        assert phrase in text, phrase
    assert text.index("model.py:9") < text.index("model.py:3")


def test_totals_are_those_of_the_data(profile):
    text = profile.summary()
    spent = profile.execution()["simulation"]["tileCycles"]
    for label, name in (("idle threads included", "compute"), ("Host exchange", "streamCopy"), ("Sync", "sync")):
        actual = re.findall(rf"{label}: +([\d,]+)$", text, re.MULTILINE)
        assert f"{spent[name]:,}" in actual, label
    for code, (count, cycles) in {"Cheap": (40, 480), "Dear": (40, 8000)}.items():
        assert re.search(rf"popops::{code} +\({count} instances, assembly\) +{cycles:,} cycles", text)


def test_many_vertex_types_are_cut_to_the_dearest_and_still_add_up():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    program = Sequence(*inputs(a), *(apply(graph, codelet(f"Op{n:02}", n), a, b, 4) for n in range(1, 15)), output(b))
    text = Profile(compile(graph, program)).summary()
    section = text[text.index("Active cycles by vertex type") :].split("\n\n")[0]
    figures = [int(actual.replace(",", "")) for actual in re.findall(r"([\d,]+) cycles", section)]
    assert len(figures) == 11 and figures[:10] == sorted(figures[:10], reverse=True)
    assert sum(figures) == sum(16 * n for n in range(1, 15)) and "4 other types" in section
    assert "Op14" in section and "Op01" not in section


def test_steps_tell_cycles_balances_and_vertices(profile):
    text = profile.summary(show_execution_steps=True)
    steps = text[text.index("Steps:") :].splitlines()
    assert steps[1:10] == [
        "  --- Internal Sync ---",
        f"  OnTileExecute (cycles {SYNC} - {SYNC + 12}, 10 times): popops::Cheap/compute",
        "    Cycles:               12 (0 overlapped with previous)",
        "    Active Tiles:         4 / 4",
        "    Thread Balance:       100.0%",
        "    Tile Balance:         100.0%",
        "    Active Tile Balance:  100.0%",
        "    By vertex type:",
        "      popops::Cheap  (4 instances):            48",
    ]
    assert "    Data Balance (mean / max data per tile): 100.0%" in steps


def test_variable_storage_follows_the_program(profile):
    text = profile.summary(show_var_storage=True)
    section = text[text.index("Variable storage liveness") : text.index("\n\nExecution:")]
    order = ["Always-live bytes", "stack", "Maximum live bytes", "Sequence", "Repeat", "popops::Cheap", "popops::Dear"]
    places = [section.index(phrase) for phrase in order]
    assert places == sorted(places)
    cheap = section[section.index("OnTileExecute: popops::Cheap/compute") :].splitlines()
    assert cheap[1].strip() == f"Live Bytes (excluding always-live): {4 * SIZE}"
    assert re.search(r"^ +Variable\(b: float32\[16\]\) +64$", cheap[3])
    # The loop carries `a` from the first step to the last.
    assert re.search(r"Always-live variables:\n(.*\n)*? +Variable\(a: float32\[16\]\) +64\n", section)


def test_memory_of_each_ipu():
    text = Profile(two_ipus()).summary(show_per_ipu_memory_usage=True)
    totals = Profile(two_ipus()).memory.tile_bytes.reshape(2, -1)
    for number, tiles in enumerate(totals):
        assert f"IPU {number}:  {tiles.sum():,} B in all, {tiles.max():,} B on its fullest tile" in text
    assert "Phases of:" in text and "Phases by IPU:" in text and "Tiles:            8\n" in text


def test_tiles_out_of_memory_are_named():
    graph = Graph(TARGET.replace(bytes_per_tile=8192))
    large = [graph.add_variable((n,), F32, "large", on_one_tile(n, tile)) for tile, n in ((1, 4096), (3, 8192))]
    program = Sequence(*inputs(*large), *map(output, large))
    profile = Profile(compile(graph, program, options=Options(allow_out_of_memory=True)))
    over = profile.memory.tile_bytes - 8192
    assert over[3] > over[1] > 0 > over[0]
    row = re.search(r"Out of memory: +2 tiles, worst tile 3 by ([\d.]+) KiB, tile 1 by ([\d.]+) KiB", profile.summary())
    assert row and [float(x) for x in row.groups()] == [round(over[t] / 1024, 1) for t in (3, 1)]


def test_unknown_figures_have_their_reason():
    graph, program, _, _ = looping()
    profile = Profile(compile(graph, program))
    text = profile.summary(show_execution_steps=True, show_var_storage=True)
    assert "unknown: the trip count of loop 'model.py:18 (decode)' is data" in text
    assert "Memory:" in text and "RepeatWhile" in text and "Steps:" not in text


# --- colours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "is_terminal", "environment", "expected"),
    [
        (None, False, {}, False),
        (None, True, {}, True),
        (None, True, {"TERM": "dumb"}, False),
        (False, True, {}, False),
        (True, False, {}, True),
        (True, True, {"CLICOLOR": "0"}, False),
        (None, False, {"CLICOLOR": "1"}, False),
        (False, False, {"CLICOLOR_FORCE": "1"}, True),
        (False, False, {"CLICOLOR_FORCE": "1", "CLICOLOR": "0"}, True),
        (None, True, {"CLICOLOR_FORCE": "0", "CLICOLOR": "0"}, False),
        (None, True, {"CLICOLOR_FORCE": ""}, True),
        (True, True, {"NO_COLOR": "1"}, False),
        (None, True, {"NO_COLOR": "1", "CLICOLOR_FORCE": "1"}, False),
        (None, True, {"NO_COLOR": ""}, True),
        (None, False, {"CLICOLOR_FORCE": ""}, False),
    ],
)
def test_the_environment_goes_before_the_option(asked, is_terminal, environment, expected):
    assert wants_colours(asked, is_terminal=is_terminal, environment=environment) is expected


def test_colours_change_nothing_but_colours(profile, monkeypatch):
    plain = profile.summary(show_execution_steps=True)
    bright = profile.summary(show_execution_steps=True, colours=True)
    assert "\x1b[" not in plain and ESCAPE.sub("", bright) == plain
    assert all(line.startswith("\x1b[1;36m") for line in bright.splitlines() if ESCAPE.sub("", line)[:1].strip())
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert profile.summary(show_execution_steps=True) == bright
    monkeypatch.delenv("CLICOLOR_FORCE")
    monkeypatch.setenv("CLICOLOR", "0")
    assert profile.summary(show_execution_steps=True, colours=True) == plain


def test_alarms_are_red_and_bars_green():
    assert coloured("  Out of memory:  2 tiles") == "\x1b[31m  Out of memory:  2 tiles\x1b[0m"
    assert coloured("  1 to 2 B  **  3") == "  1 to 2 B  \x1b[32m**\x1b[0m  3"
    assert coloured("  Cycles:  7") == "  \x1b[1mCycles:\x1b[0m  7"


def test_a_misspelt_option_names_the_nearest(profile):
    with pytest.raises(
        ArgumentTypeError, match=r"profile.summary cannot.*'show_steps'(.|\n)*summary\(operations=…, \*"
    ):
        profile.summary(show_steps=True)
    with pytest.raises(ArgumentTypeError, match=r"'show_var_storag'(.|\n)*try: 'show_var_storage'"):
        profile.summary(show_var_storag=True)


@pytest.mark.parametrize("number", [-1, "a", True, 1.5])
def test_a_number_of_lines_is_a_whole_number(profile, number):
    for ask in (profile.operations, profile.summary):
        with pytest.raises(ArgumentValueError, match=rf"number of operations(.|\n)*from 0, or None\n  got: {number!r}"):
            ask(number)
    assert profile.operations(0) == () and profile.operations(np.int64(1)) == profile.operations()[:1]
