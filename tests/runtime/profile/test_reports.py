"""The data of profiles: the guide's names, and figures worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
    Function,
    If,
    Repeat,
    RepeatWhile,
    Sequence,
    Switch,
    Sync,
    WriteUndef,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.host import HostData
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import grid, linear, on_one_tile
from tests.runtime.profile.profile_helpers import (
    BOOL,
    F32,
    SIZE,
    SYNC,
    TARGET,
    apply,
    codelet,
    inputs,
    looping,
    output,
    trained_program,
    two_ipus,
    variables,
)

I32 = np.dtype("int32")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "profile.md"


def everything():
    """A program with one of everything, on two IPUs."""
    graph = Graph(TARGET.replace(num_ipus=2))
    a, b = variables(graph, "a", "b")
    far = graph.add_variable((SIZE,), F32, "far", grid((SIZE,), (4,), 4))
    turned = graph.add_variable((SIZE,), F32, "turned", linear(SIZE, 4, 2))
    one = graph.add_constant(np.float32(1), "one", on_one_tile(1, 0))
    flag = graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
    number = graph.add_variable((), I32, "number", on_one_tile(1, 0))
    step = apply(graph, codelet("step", 2), a, b, 2)
    function = Function(Sequence(step, Copy(b, a)), "layer")
    decide = If(flag, Call(function), Copy(a, b))
    program = Sequence(
        *inputs(flag, number),
        Copy(one.broadcast_in_dim((SIZE,), ()), a),
        WriteUndef(far),
        Repeat(3, Sequence(Call(function), Copy(a, far))),
        Copy(a[::-1], turned, "turn"),
        decide,
        Switch(number, (Sequence(Call(function)), Sequence()), Sync("internal")),
        RepeatWhile(Sequence(), flag, step),
        Sync("external"),
        output(far),
    )
    return compile(graph, program, options=Options(trip_counts={"while[0]": 2}))


def nodes(data, number):
    """A program and all inside it, by walking the ids."""
    entry = data["programs"][number]
    yield entry
    inside = [data["functionPrograms"][entry["target"]]] if entry["type"] == "Call" else entry.get("children", [])
    for child in inside:
        yield from nodes(data, child)


# --- names ------------------------------------------------------------------------------------------------------------


def paths(data, prefix=""):
    """The path of every name, without the numbers of lists."""
    if isinstance(data, dict):
        for name, value in data.items():
            path = f"{prefix}.{name}" if prefix else name
            yield path
            yield from paths(value, path)
    elif isinstance(data, list):
        for value in data:
            yield from paths(value, prefix)


def test_the_page_tells_which_names_are_there():
    profile = Profile(everything()).with_host(HostData(1, 0.5, 0.1))
    there = {*paths(profile.graph()), *paths(profile.execution())}
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (yes|no) \| .*\|$", PAGE.read_text(), re.MULTILINE))
    assert len(rows) > 120
    for name, answer in rows.items():
        assert (name in there) == (answer == "yes"), name
    lists = re.findall(r"^\| `([\w.]+)` \| no \| *\|$", PAGE.read_text(), re.MULTILINE)
    assert not lists, "no reason is given"


def test_every_name_of_the_data_is_on_the_page():
    profile = Profile(everything()).with_host(HostData(1, 0.5, 0.1))
    page = PAGE.read_text()
    known = set(re.findall(r"`([\w.]+)`", page))
    deep = re.compile(r"^(optimizationInfo|memory\.(liveness|byCategory\.\w+))\..*")
    for path in {*paths(profile.graph()), *paths(profile.execution())}:
        is_section = any(name.startswith(path + ".") for name in known)
        assert path in known or is_section or deep.match(path) or path.split(".")[-1] in known, path


def test_data_is_json():
    for executable in (everything(), trained_program(), two_ipus()):
        profile = Profile(executable)
        for data in (profile.graph(), profile.execution()):
            assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_data_is_the_callers_own(trained):
    profile = Profile(trained)
    for make in (profile.graph, profile.execution):
        before = json.dumps(make())
        for value in make().values():
            if isinstance(value, dict | list):
                value.clear()
        make()["programs" if make == profile.graph else "programTrace"].clear()
        assert json.dumps(make()) == before
    profile.graph()["programs"][0]["children"].append(7)
    assert 7 not in profile.graph()["programs"][0]["children"]


# --- programs ---------------------------------------------------------------------------------------------------------


def test_graph_profile_has_the_guides_sections(trained):
    data = json.loads(json.dumps(Profile(trained).graph()))
    assert data["target"]["numTiles"] == 4 and data["target"]["bytesPerTile"] == TARGET.bytes_per_tile
    assert data["graph"] == {"numComputeSets": 2, "numEdges": 16, "numVars": 2, "numVertices": 8}
    types = {"names": ["popops::Cheap", "popops::Dear"], "sizes": [16, 8], "languages": ["assembly", "assembly"]}
    assert data["vertexTypes"] == types
    sets = data["computeSets"]
    assert sets["names"] == ["popops::Cheap/compute", "popops::Dear/compute"]
    assert sets["vertexCounts"] == [[4], [4]] and sets["vertexTypes"] == [[0], [1]]
    assert sets["cycleEstimates"]["cyclesByTile"] == [[12] * 4, [200] * 4]
    assert sets["cycleEstimates"]["activeCyclesByVertexType"] == [[48, 0], [0, 800]]
    # What stays on the device moves no bytes: only the result does.
    assert data["hostExchanges"]["bytesReceivedByTile"] == [[0] * 4]
    assert data["hostExchanges"]["bytesSentByTile"] == [[16] * 4]
    assert set(data["optimizationInfo"]) == {f"{name}Seconds" for name in trained.timings}
    assert all(isinstance(value, float) for value in data["optimizationInfo"].values())


def test_replicas_count_in_the_target_only():
    graph = Graph(TARGET, 8)
    a, b = variables(graph, "a", "b")
    data = Profile(compile(graph, Sequence(*inputs(a), apply(graph, codelet("one", 1), a, b, 4), output(b)))).graph()
    target = data["target"]
    assert (target["numIPUs"], target["numTiles"], target["numReplicas"]) == (8, 32, 8)
    assert target["totalMemory"] == 8 * target["bytesPerIPU"]
    assert len(data["memory"]["byTile"]["total"]) == len(data["hostExchanges"]["bytesSentByTile"][0]) == 4


def test_programs_form_a_tree(trained):
    data = Profile(trained).graph()
    recorded = [entry["type"] for entry in nodes(data, *data["controlPrograms"])]
    assert recorded == ["Sequence", "Repeat", "Sequence", "OnTileExecute", "OnTileExecute", "StreamCopy"]
    assert next(p for p in data["programs"] if p["type"] == "Repeat")["count"] == 10


def test_control_has_the_guides_tags():
    data = Profile(everything()).graph()
    top = [data["programs"][n]["type"] for n in data["programs"][data["controlPrograms"][0]]["children"]]
    assert top == [
        *["DoExchange", "OnTileExecute", "WriteUndef", "Repeat", "DoExchange", "OnTileExecute"],
        *["SetLocalConsensusFromVar", "Sync", "IfElse", "Switch", "RepeatWhile", "Sync", "StreamCopy"],
    ]
    (switch,) = (p for p in data["programs"] if p["type"] == "Switch")
    assert [data["programs"][n]["type"] for n in switch["children"]] == ["Sequence", "Sequence", "Sync"]
    syncs = [p["syncType"] for p in data["programs"] if p["type"] == "Sync"]
    assert sorted(syncs) == ["External", "External", "Internal"]
    assert all("type" in p for p in data["programs"]) and "Call" in {p["type"] for p in data["programs"]}


def test_a_condition_without_an_alternative_is_an_if():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    flag = graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
    decide = If(flag, apply(graph, codelet("once", 1), a, b, 4), Sequence())
    data = Profile(compile(graph, Sequence(*inputs(a, flag), decide))).graph()
    (entry,) = (p for p in data["programs"] if p["type"].startswith("If"))
    assert entry["type"] == "If" and [data["programs"][n]["type"] for n in entry["children"]] == ["OnTileExecute"]


def test_the_control_program_is_the_whole_of_a_single_step():
    graph = Graph(TARGET)
    (b,) = variables(graph, "b")
    constant = graph.add_constant(np.arange(SIZE, dtype=np.float32), "constant", on_one_tile(SIZE, 3))
    data = Profile(compile(graph, apply(graph, codelet("alone", 1), constant, b, 4))).graph()
    recorded = [entry["type"] for entry in nodes(data, *data["controlPrograms"])]
    assert recorded == ["Sequence", "DoExchange", "OnTileExecute"]


def test_functions_are_listed_once():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    function = Function(Sequence(apply(graph, codelet("step", 2), a, b, 4), Copy(b, a)), "layer")
    profile = Profile(compile(graph, Sequence(*inputs(a), Call(function), Repeat(2, Call(function)), output(a))))
    data = profile.graph()
    (body,) = data["functionPrograms"]
    calls = [p for p in data["programs"] if p["type"] == "Call"]
    assert [p["target"] for p in calls] == [0, 0] and data["programs"][body]["type"] == "Sequence"
    steps = profile.execution()["simulation"]["steps"]
    assert {s["repeats"] for s in steps if s["type"] == "OnTileExecute"} == {3}


def test_copies_on_a_tile_are_compute_sets_with_a_vertex_on_each_tile():
    data = Profile(everything()).graph()
    sets = data["computeSets"]
    types = data["vertexTypes"]
    number = sets["names"].index("turn/OnTileCopy")
    (kind,) = sets["vertexTypes"][number]
    assert types["names"][kind] == "poplar_rt::StridedCopy" and types["sizes"][kind] == 0
    cycles = sets["cycleEstimates"]["cyclesByTile"][number]
    assert sets["vertexCounts"][number] == [sum(c > 0 for c in cycles)] and sum(cycles) > 0
    assert sets["cycleEstimates"]["activeCyclesByVertexType"][number][kind] == sum(cycles)
    assert sum(map(sum, sets["vertexCounts"])) == data["graph"]["numVertices"]
    assert len(sets["names"]) == data["graph"]["numComputeSets"]


def test_code_of_exchanges_adds_up():
    executable = everything()
    data = Profile(executable).graph()
    exchanges = [p["memoryByInstruction"] for p in data["programs"] if p["type"] == "DoExchange"]
    assert all(entry["total"] == entry["send"] + entry["other"] > 0 for entry in exchanges)
    total = int(executable.memory.by_category["internalExchangeCode"].sum())
    # Each exchange is one program, but for the two of the step that is executed in two places.
    unique = {p["exchange"]: p["memoryByInstruction"]["total"] for p in data["programs"] if p["type"] == "DoExchange"}
    assert sum(unique.values()) == total


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_by_tile_adds_up():
    executable = everything()
    memory = executable.memory
    section = Profile(executable).graph()["memory"]["byTile"]
    by_tile = {name: np.array(values) for name, values in section.items()}
    for gaps in ("", "IncludingGaps"):
        parts = [by_tile[name + gaps] for name in ("interleaved", "nonInterleaved", "overflowed")]
        np.testing.assert_array_equal(sum(parts), by_tile["total" + gaps])
        assert all((part >= 0).all() for part in parts)
    np.testing.assert_array_equal(by_tile["totalIncludingGaps"], memory.tile_bytes)
    np.testing.assert_array_equal(by_tile["totalIncludingGaps"] - by_tile["total"], memory.gap_bytes)


def test_memory_by_category_adds_up_in_every_region():
    executable = everything()
    section = Profile(executable).graph()["memory"]
    for region in ("interleaved", "nonInterleaved", "overflowed"):
        kinds = [entry[region] for entry in section["byCategory"].values()]
        added = np.sum([np.add(kind["nonOverlapped"], kind["overlapped"]) for kind in kinds], axis=0)
        np.testing.assert_array_equal(added, section["byTile"][region])
    totals = [entry["total"] for entry in section["byCategory"].values()]
    np.testing.assert_array_equal(np.sum(totals, axis=0), section["byTile"]["total"])
    assert not np.any(section["byCategory"]["stack"]["nonInterleaved"]["overlapped"])
    assert not np.any(section["byCategory"]["variable"]["nonInterleaved"]["nonOverlapped"])
    assert np.any(section["byCategory"]["variable"]["nonInterleaved"]["overlapped"])


def test_a_program_that_does_not_fit_overflows():
    graph = Graph(TARGET.replace(bytes_per_tile=4096, interleaved_offset_bytes=4096))
    a = graph.add_variable((4096,), F32, "a", on_one_tile(4096, 1))
    program = Sequence(*inputs(a), output(a))
    profile = Profile(compile(graph, program, options=Options(allow_out_of_memory=True)))
    by_tile = profile.graph()["memory"]["byTile"]
    assert np.flatnonzero(by_tile["overflowedIncludingGaps"]).tolist() == [1]
    assert by_tile["overflowedIncludingGaps"][1] == profile.memory.tile_bytes[1] - 4096
    assert by_tile["nonInterleavedIncludingGaps"][1] == 4096
    assert "Out of memory: 1 of 4 tiles needs more than 4.0 KiB; tile 1 needs most" in profile.summary()


def test_memory_of_vertex_types_and_compute_sets(trained):
    data = Profile(trained).graph()["memory"]
    assert data["byVertexType"]["codeBytes"] == [[256] * 4, [100] * 4]
    assert data["byVertexType"]["vertexDataBytes"] == [[16] * 4, [8] * 4]
    assert data["byComputeSet"]["totalBytes"] == [[272] * 4, [108] * 4]


def test_code_of_vertex_types_is_that_of_the_tiles():
    executable = everything()
    section = Profile(executable).graph()["memory"]["byVertexType"]
    for name, category in (("codeBytes", "vertexCode"), ("vertexDataBytes", "vertexInstanceState")):
        np.testing.assert_array_equal(np.sum(section[name], axis=0), executable.memory.by_category[category])


def live_programs(tree):
    """(type, live bytes, live names) of every node of a liveness tree that is a step."""

    def walk(node):
        if "liveBytes" in node:
            yield node["type"], node["liveBytes"], [names[i] for i in node["liveVariables"]]
        for child in node.get("children", []):
            yield from walk(child)

    names = [item["name"].split(":")[0].removeprefix("Variable(") for item in tree["notAlwaysLiveVariables"]]
    return list(walk(tree["programs"]))


def test_liveness_by_hand():
    graph = Graph(TARGET)
    a, b, c, d = variables(graph, "a", "b", "c", "d")
    first, second = (apply(graph, codelet(n, 1), x, y, 4) for n, x, y in (("first", a, b), ("second", b, c)))
    function = Function(Sequence(apply(graph, codelet("inner", 1), c, d, 4), Copy(d, c)), "layer")
    program = Sequence(*inputs(a), Repeat(2, Sequence(first, second)), Call(function), Call(function), output(c))
    executable = compile(graph, program)
    tree = Profile(executable).graph()["memory"]["liveness"]
    size = 4 * SIZE
    # `a` is read in each iteration; the loop writes `b` and then `c` in full; the function has `d` of its own.
    assert live_programs(tree) == [
        ("OnTileExecute", 2 * size, ["a", "b"]),
        ("OnTileExecute", 3 * size, ["a", "b", "c"]),
        *[
            ("Call", size, ["c"]),
            ("OnTileExecute", 2 * size, ["d"]),
            ("OnTileExecute", 2 * size, ["d"]),
        ]
        * 2,
        ("StreamCopy", size, ["c"]),
    ]
    always = {item["category"]: item["bytes"] for item in tree["alwaysLiveVariables"]}
    memory = executable.memory
    assert always["stack"] == memory.by_category["stack"].sum()
    assert tree["alwaysLiveBytes"] == sum(always.values())
    assert tree["maxLiveBytes"] == tree["alwaysLiveBytes"] + 3 * size
    assert (tree["worstTile"], tree["peakStep"]) == (memory.worst_tile, memory.peak_step)


def test_most_that_lives_is_the_peak_of_a_single_tile():
    graph = Graph(TARGET.replace(tiles_per_ipu=1))
    a, b, c = (graph.add_variable((SIZE,), F32, name, on_one_tile(SIZE, 0)) for name in "abc")
    flag = graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
    function = Function(Sequence(Copy(a, b), apply(graph, codelet("inner", 1), b, c, 1)), "layer")
    program = Sequence(*inputs(a, flag), If(flag, Call(function), Copy(a, c)), Call(function), output(c))
    executable = compile(graph, program)
    tree = Profile(executable).graph()["memory"]["liveness"]
    memory = executable.memory
    assert tree["maxLiveBytes"] == memory.tile_bytes[0] - memory.gap_bytes[0]


def test_liveness_follows_every_kind_of_control():
    tree = Profile(everything()).graph()["memory"]["liveness"]
    types = [kind for kind, _, _ in live_programs(tree)]
    assert {"IfElse", "Switch", "RepeatWhile", "Call", "OnTileExecute", "GlobalExchange", "StreamCopy"} <= set(types)
    assert max(size for _, size, _ in live_programs(tree)) == tree["maxLiveBytes"] - tree["alwaysLiveBytes"]
    assert any(item["name"].startswith("<message:") for item in tree["notAlwaysLiveVariables"])


# --- execution --------------------------------------------------------------------------------------------------------


def test_execution_profile_adds_up(trained):
    profile = Profile(trained)
    data = json.loads(json.dumps(profile.execution()))
    simulation = data["simulation"]
    programs = profile.graph()["programs"]
    assert data["profilerMode"] == "IPU_MODEL" and simulation["cycles"] == profile.cycles
    steps = [step for step in simulation["steps"] if step["type"] != "Sync"]
    cheap, dear, out = (step["program"] for step in steps)
    assert data["programTrace"] == [cheap, dear] * 10 + [out] and data["programTraceLength"] == 21
    assert all(programs[step["program"]]["type"] == step["type"] for step in steps)
    assert steps[-1]["cyclesTo"] == profile.cycles
    first = next(step for step in steps if step["type"] == "OnTileExecute")
    assert (first["cyclesFrom"], first["cyclesTo"], first["repeats"]) == (SYNC, SYNC + 12, 10)
    assert first["tileBalance"] == first["threadBalance"] == 1.0 and first["activeTiles"] == 4
    assert simulation["tileCycles"]["compute"] == 4 * profile.phase_cycles["compute"]
    assert simulation["tileCycles"]["activeCompute"] == profile.total_worker_cycles
    assert simulation["tileCycles"]["sync"] == 4 * profile.phase_cycles["sync"]
    assert sum(step["type"] == "Sync" for step in simulation["steps"]) == 2


def test_threads_of_a_tile_with_one_worker_vertex_are_a_sixth_busy():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    worker = codelet("worker", 1000)
    worker = type(worker)(worker.name, worker.fields, worker.compute, worker.cycles, supervisor=False)
    profile = Profile(compile(graph, Sequence(*inputs(a), apply(graph, worker, a, b, 4))))
    (step,) = (s for s in profile.execution()["simulation"]["steps"] if s["type"] == "OnTileExecute")
    overhead = TARGET.supervisor_overhead_cycles
    assert step["threadBalance"] == pytest.approx(4000 / (6 * 4000 + overhead), rel=1e-12)


def test_execution_profile_of_exchanges():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    program = Sequence(*inputs(a), apply(graph, codelet("two tiles", 1), a, b, 2), output(b))
    profile = Profile(compile(graph, program))
    steps = profile.execution()["simulation"]["steps"]
    assert [s["type"] for s in steps] == ["Sync", "DoExchange", "OnTileExecute", "Sync", "DoExchange", "StreamCopy"]
    before, after = (s for s in steps if s["type"] == "DoExchange")
    exchanges = profile.graph()["exchanges"]
    assert exchanges["bytesReceivedByTile"][before["exchange"]] == [16, 32, 0, 0]
    assert exchanges["bytesSentByTile"][after["exchange"]] == [16, 32, 0, 0]
    assert before["totalData"] == 48
    ends = [s["cyclesTo"] for s in steps if s["type"] != "Sync"]
    assert ends == sorted(ends) and ends[-1] == profile.cycles
    assert after["cyclesTo"] + steps[-1]["cycles"] == profile.cycles


def test_exchanges_between_ipus():
    profile = Profile(two_ipus())
    steps = profile.execution()["simulation"]["steps"]
    assert [s["syncType"] for s in steps if s["type"] == "Sync"] == ["External", "Internal"]
    external = profile.graph()["externalExchanges"]
    assert external["bytesSentByTile"] == [[16] * 4 + [0] * 4]
    (step,) = (s for s in steps if s["type"] == "GlobalExchange")
    assert max(external["estimatedCyclesByTile"][step["externalExchange"]]) == step["cycles"]
    assert step["totalData"] == 4 * SIZE and step["activeTiles"] == 8


def test_buffered_exchanges_have_no_sync():
    graph = Graph(TARGET.replace(num_ipus=2, global_exchange="buffered"))
    (a,) = variables(graph, "a")
    far = graph.add_variable((SIZE,), F32, "far", grid((SIZE,), (4,), 4))
    profile = Profile(compile(graph, Sequence(*inputs(a), Copy(a, far), output(far))))
    assert profile.phase_cycles["sync"] == 0
    assert [s["type"] for s in profile.execution()["simulation"]["steps"]] == ["GlobalExchange", "StreamCopy"]


def test_the_trace_tells_every_decision_that_was_recorded():
    graph, program, loop, decide = looping()
    profile = Profile(compile(graph, program), {loop: [3], decide: [1, 0, 1]})
    data = profile.execution()
    programs = profile.graph()["programs"]
    names = [programs[n].get("name", programs[n]["type"]) for n in data["programTrace"]]
    choice = ["SetLocalConsensusFromVar", "Sync", "IfElse"]
    loops = [[*choice, f"{name}/compute", "RepeatWhile"] for name in ("light", "heavy", "light")]
    assert names == ["RepeatWhile", *loops[0], *loops[1], *loops[2]]
    assert data["programTraceLength"] == len(names)


def test_a_static_trace_takes_the_costlier_branch():
    graph, program, _, _ = looping()
    profile = Profile(compile(graph, program, options=Options(trip_counts={"while[0]": 6})))
    data = profile.execution()
    programs = profile.graph()["programs"]
    names = [programs[n].get("name") for n in data["programTrace"]]
    assert names.count("heavy/compute") == 6 and "light/compute" not in names


@pytest.mark.parametrize("count", [10**6, 2**32 - 1])
def test_a_long_trace_is_cut_off_and_counted(count):
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    step = apply(graph, codelet("step", 1), a, b, 4)
    program = Sequence(*inputs(a), Repeat(count, Sequence()), Repeat(count, step), output(b))
    data = Profile(compile(graph, program)).execution()
    assert data["programTraceLength"] == count + 1
    assert len(data["programTrace"]) == 100_000 and len(set(data["programTrace"])) == 1
    assert data["simulation"]["steps"][1]["repeats"] == count


def test_ids_of_executed_programs_are_those_of_the_graph():
    """A profile of part of an executable, run twice, names the programs of the whole."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    first, second = (apply(graph, codelet(name, 1), a, b, 4) for name in ("first", "second"))
    executable = compile(graph, Sequence(*inputs(a), first, second, output(b)))
    profile = Profile(executable, ran=Repeat(2, second))
    programs = profile.graph()["programs"]
    data = profile.execution()
    assert [programs[n]["name"] for n in data["programTrace"]] == ["second/compute"] * 2
    assert data["simulation"]["cycles"] == profile.cycles == 2 * (SYNC + 4)


def test_execution_of_one_vertex_on_one_tile():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    compute_set = graph.add_compute_set("one")
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (a, b))
    axis = Axis("i", np.array([0, SIZE]), "literal")
    graph.add_vertices(compute_set, VertexGroup(codelet("one", 10), (axis,), accesses, np.array([2], np.int32)))
    data = Profile(compile(graph, Sequence(*inputs(a), Execute(compute_set)))).execution()
    (step,) = (s for s in data["simulation"]["steps"] if s["type"] == "OnTileExecute")
    assert (step["activeTiles"], step["tileBalance"], step["activeTileBalance"]) == (1, 0.25, 1.0)
