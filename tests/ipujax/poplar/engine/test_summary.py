"""Profiles by Poplar's names: the options of the summary, output streams, and files."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar.program import Copy, If, Repeat, Sequence
from ipujax.runtime.errors import ArgumentError
from tests.ipujax.poplar.engine_helpers import DEVICE, constant, new_graph, variable


@pytest.fixture(autouse=True)
def no_colour_settings(monkeypatch):
    for name in ("CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def engine():
    """Adds 1 to a total by program 0, doubles it by program 1; has run 0, 0 and 1."""
    graph = new_graph()
    total = variable(graph, [3], name="total", value=[0, 0, 0])
    graph.create_host_read("total", total)
    add = Sequence()
    double = Sequence()
    popops.add_in_place(graph, total, constant(graph, [1, 1, 1]), add, "add")
    popops.add_in_place(graph, total, total, double, "double")
    engine = poplar.Engine(graph, [add, double])
    engine.load(DEVICE)
    for index in (0, 0, 1):
        engine.run(index)
    return engine


def printed(engine, options=None, stream=None):
    stream = io.StringIO() if stream is None else stream
    engine.print_profile_summary(stream, options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("option", "heading"),
    [
        ("showExecutionSteps", "Steps:"),
        ("showVarStorage", "Variable storage liveness, all tiles:"),
        ("showOptimizations", "Compilation:"),
        ("showPerIpuMemoryUsage", "Memory by IPU:"),
    ],
)
def test_each_option_adds_its_section(engine, option, heading):
    for on in ("true", "True", True):
        assert heading in printed(engine, {option: on})
    for off in ("false", False):
        assert printed(engine, {option: off}) == printed(engine)
    assert heading not in printed(engine)


def test_options_are_checked(engine):
    for options, words in (
        ({"showExecutionStep": "true"}, r"showExecutionStep'(.|\n)*try: .*showExecutionSteps"),
        ({"showVarStorage": "yes"}, r"showVarStorage(.|\n)*\"true\" or \"false\"(.|\n)*yes"),
        ({"colours": 1}, r"colours(.|\n)*got: 1"),
    ):
        stream = io.StringIO()
        with pytest.raises(ArgumentError, match=words):
            engine.print_profile_summary(stream, options)
        assert stream.getvalue() == ""


def test_colours_are_for_terminals(engine, monkeypatch):
    plain = printed(engine)
    bright = printed(engine, {"colours": "true"})
    assert "\x1b[" not in plain and re.sub(r"\x1b\[[0-9;]*m", "", bright) == plain != bright
    assert printed(engine, stream=Terminal()) == bright
    assert printed(engine, {"colours": "false"}, Terminal()) == plain
    monkeypatch.setenv("CLICOLOR", "0")
    assert printed(engine, {"colours": "true"}, Terminal()) == plain
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert printed(engine, {"colours": "false"}) == bright


def test_prints_to_the_standard_output(engine, capsys):
    engine.print_profile_summary()
    assert capsys.readouterr().out == printed(engine)


def test_the_execution_profile_uses_the_ids_of_the_graph(engine):
    programs = engine.get_graph_profile()["programs"]
    ran = engine.get_execution_profile()
    names = [programs[n]["name"].split("/")[0] for n in ran["programTrace"] if programs[n]["type"] == "OnTileExecute"]
    assert names == ["add", "add", "double"]
    assert ran["simulation"]["cycles"] == engine.execution.cycles


def test_an_instrumented_run_lists_its_branches():
    graph = new_graph()
    x = variable(graph, [4], name="x", value=np.ones(4))
    flag = variable(graph, [], poplar.BOOL, "flag")
    graph.create_host_write("flag", flag)
    slow = Sequence()
    fast = Sequence()
    popops.sin(graph, x, slow, "slow")
    popops.neg(graph, x, fast, "fast")
    engine = poplar.Engine(graph, Repeat(2, If(flag, slow, fast)), {"debug.instrument": "true"})
    engine.load(DEVICE)
    for value in (True, False):
        engine.write_tensor("flag", value)
        engine.run()
    programs = engine.get_graph_profile()["programs"]
    trace = engine.get_execution_profile()["programTrace"]
    names = [programs[n]["name"].split("/")[0] for n in trace if programs[n]["type"] == "OnTileExecute"]
    assert names == ["slow", "slow", "fast", "fast"]


def test_variables_that_outlive_runs_are_live_through_them():
    graph = new_graph()
    x, y, persistent = (variable(graph, [64], name=name, value=np.ones(64)) for name in ("x", "y", "kept"))
    graph.create_host_read("kept", persistent)
    engine = poplar.Engine(graph, [Copy(x, y), Copy(persistent, y)])
    tree = engine.get_graph_profile()["memory"]["liveness"]
    always = {item["name"]: item["bytes"] for item in tree["alwaysLiveVariables"]}
    assert always["Variable(kept: float32[64])"] == 256


def test_profiles_are_written_as_json_and_cbor(engine, tmp_path):
    cbor2 = pytest.importorskip("cbor2")
    for profile in (engine.get_graph_profile(), engine.get_execution_profile()):
        text = io.StringIO()
        raw = io.BytesIO()
        poplar.serialize_to_json(text, profile, True)
        poplar.serialize_to_cbor(raw, profile)
        assert json.loads(text.getvalue()) == cbor2.loads(raw.getvalue()) == profile
        poplar.serialize_to_json(tmp_path / "profile.json", profile)
        assert json.loads((tmp_path / "profile.json").read_bytes()) == profile
        assert len(text.getvalue()) > (tmp_path / "profile.json").stat().st_size
