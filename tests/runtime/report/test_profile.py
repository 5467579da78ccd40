"""Profiles of small programs against figures worked out by hand."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError, ProfileError, VerifyError
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Copy, Execute, Sequence
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import grid
from ipujax.runtime.tensor.variable import Origin
from tests.runtime.profile.profile_helpers import (
    F32,
    SIZE,
    SYNC,
    TARGET,
    apply,
    codelet,
    host_cycles,
    inputs,
    looping,
    output,
    two_ipus,
    variables,
)

# --- figures ----------------------------------------------------------------------------------------------------------


def test_cycles_by_hand(trained):
    profile = Profile(trained)
    compute = 10 * (4 * 3 + 4 * 50)
    sync = 10 * 2 * SYNC
    host = host_cycles(4 * SIZE)
    assert profile.phase_cycles == {
        "compute": compute,
        "exchange": 0,
        "global_exchange": 0,
        "host_exchange": host,
        "sync": sync,
        "idle": 0,
    }
    assert profile.cycles == compute + sync + host
    assert profile.seconds == profile.cycles / TARGET.clock_hz
    assert profile.total_worker_cycles == 4 * compute


def test_operations_are_grouped_by_line(trained):
    profile = Profile(trained)
    first, second, third, transfer = profile.operations()
    assert [row.origin.line for row in (first, second, third)] == ["", "model.py:9 (loss)", "model.py:3 (forward)"]
    assert str(first.origin).startswith("latency of host exchanges") and transfer.dominant == "host_exchange"
    assert first.cycles == int(TARGET.host_latency_seconds * TARGET.clock_hz)
    assert second.cycles == 10 * (200 + SYNC) and second.phases == {"compute": 2000, "sync": 10 * SYNC}
    assert (second.dominant, third.dominant, first.dominant) == ("compute", "sync", "host_exchange")
    assert second.share == second.cycles / profile.cycles
    assert sum(row.cycles for row in profile.operations()) == profile.cycles
    assert profile.operations(2) == (first, second)
    assert second.names == ("popops::Dear/compute",)


def test_memory_of_code_and_vertices(trained):
    memory = Profile(trained).memory
    assert memory.by_category["vertexCode"].tolist() == [356] * 4
    assert memory.by_category["vertexInstanceState"].tolist() == [24] * 4
    assert memory.by_category["variable"].tolist() == [32] * 4


def test_cycles_and_bytes_of_an_exchange():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    program = Sequence(*inputs(a), apply(graph, codelet("two tiles", 1), a, b, 2), output(b))
    profile = Profile(compile(graph, program))
    startup = TARGET.exchange_startup_cycles
    # Tile 0 needs elements 0-7 and tile 1 needs 8-15: tiles 0 and 1 each receive 16 and 32 bytes, in 1 and 2 pieces.
    copying = 16 // TARGET.memcpy_bytes_per_cycle + TARGET.copy_fragment_cycles
    phases = profile.phase_cycles
    assert phases["exchange"] == (max(8, 2 * 3) + startup) * 2 and phases["sync"] == 2 * SYNC
    assert profile.memory.by_category["message"].tolist() == [16, 32, 0, 0]
    assert profile.memory.by_category["outputEdge"].tolist() == [16, 32, 0, 0]
    assert profile.memory.by_category["rearrangement"].sum() > 0
    assert phases["compute"] >= 8 + copying


def test_timings_name_the_passes(trained):
    assert set(trained.timings) == {"verify", "cost", "memory", "clocks"}
    assert all(seconds >= 0 for seconds in trained.timings.values())


def test_compile_checks_the_program():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    with pytest.raises(VerifyError):
        compile(graph, Sequence(Copy(a, b), output(b)))


def test_graph_may_grow_after_compile(trained):
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    step = apply(graph, codelet("once", 3), a, b, 4)
    executable = compile(graph, Sequence(*inputs(a), step, output(b)))
    before = json.dumps([Profile(executable).graph(), Profile(executable).execution()])
    graph.groups[step.compute_set].clear()
    variables(graph, "more")
    assert json.dumps([Profile(executable).graph(), Profile(executable).execution()]) == before


def test_profiles_never_change(trained):
    profile = Profile(trained)
    texts = [profile.summary(), json.dumps(profile.graph()), json.dumps(profile.execution())]
    assert [profile.summary(), json.dumps(profile.graph()), json.dumps(profile.execution())] == texts
    with pytest.raises(FrozenInstanceError):
        profile.recording = {}
    for array in (profile.memory.tile_bytes, profile.timeline.clocks, *profile.memory.by_category.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# --- control that is data ---------------------------------------------------------------------------------------------


def test_static_profile_needs_a_trip_count():
    graph, program, _, _ = looping()
    profile = Profile(compile(graph, program))
    with pytest.raises(ProfileError, match=r"model.py:18 \(decode\)"):
        _ = profile.cycles
    assert profile.memory.max_tile_bytes > 0
    text = profile.summary()
    assert "unknown: the trip count of loop 'model.py:18 (decode)' is data" in text and "Memory:" in text


def test_trip_count_given():
    graph, program, _, _ = looping()
    executable = compile(graph, program, options=Options(trip_counts={"while[0]": 6}))
    # Each test and each choice is agreed on in a sync; a static profile takes the heavy branch.
    assert Profile(executable).cycles == SYNC + 6 * (SYNC + (400 + SYNC) + SYNC)


def test_recorded_run():
    graph, program, loop, decide = looping()
    executable = compile(graph, program)
    profile = Profile(executable, {loop: [3], decide: [1, 0, 1]})
    assert profile.cycles == SYNC + 3 * 3 * SYNC + 2 * 4 + 400
    decisions = next(row for row in profile.operations() if row.origin.line == "model.py:20 (pick)")
    assert decisions.cycles == 3 * SYNC and decisions.names == ("decision",)
    json.dumps(profile.execution())


def test_trip_count_of_no_loop_is_refused():
    graph, program, _, _ = looping()
    with pytest.raises(ArgumentError, match=r"names an unknown loop: 'while\[1\]'") as error:
        compile(graph, program, options=Options(trip_counts={"while[1]": 6}))
    assert "while[0]" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("exact_splits", 1, "exact_splits must be a bool"),
        ("allow_out_of_memory", "yes", "allow_out_of_memory must be a bool"),
        ("trip_counts", [3], "trip_counts must be a mapping"),
        ("trip_counts", {"while[0]": -1}, r"trip_counts\['while\[0\]'\] must be a trip count"),
        ("trip_counts", {"while[0]": 2.5}, "must be a trip count"),
        ("trip_counts", {"while[0]": True}, "must be a trip count"),
    ],
)
def test_options_refuse_nonsense(field, value, text):
    with pytest.raises(ArgumentError, match=text):
        Options(**{field: value})


# --- fallbacks --------------------------------------------------------------------------------------------------------


def fallback_program(size):
    """One vertex on tile 2 that needs two variables of `size` floats, spread over all tiles."""
    graph = Graph(TARGET.replace(bytes_per_tile=64 * 1024))
    a, b = (graph.add_variable((size,), F32, name, grid((size,), (4,))) for name in "ab")
    with graph.debug_origin(Origin("model.py:5 (sort)")):
        compute_set = graph.add_compute_set("sort/fallback")
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (a, b))
    axis = Axis("i", np.array([0, size]), "literal")
    graph.add_vertices(compute_set, VertexGroup(codelet("sort", 1), (axis,), accesses, np.array([2], np.int32)))
    graph.notes.fallbacks[compute_set] = "sort"
    return graph, Sequence(*inputs(a), Execute(compute_set), output(b)), compute_set


def test_fallback_is_listed_with_its_cost():
    graph, program, _ = fallback_program(16)
    profile = Profile(compile(graph, program))
    (fallback,) = profile.fallbacks
    assert (fallback.operation, fallback.name, fallback.borrowed_tiles) == ("sort", "sort/fallback", 1)
    assert fallback.origin.line == "model.py:5 (sort)" and fallback.cycles >= 16
    assert not profile.memory.borrowed and "sort (sort/fallback), model.py:5 (sort)" in profile.summary()


def test_large_fallback_borrows_from_its_neighbours():
    size = 8192  # 8 KiB of each variable on each tile
    graph, program, _ = fallback_program(size)
    profile = Profile(compile(graph, program))
    # Received 24 KiB and 8 KiB copied for the operand, 24 KiB of results that leave; half tiles of 32 KiB.
    buffers = 24 * 1024 + 8 * 1024 + 24 * 1024 + profile.memory.by_category["rearrangement"].sum()
    (borrowed,) = profile.memory.borrowed
    half = graph.target.bytes_per_tile // 2
    assert borrowed.tile == 2 and borrowed.num_tiles == -(-borrowed.num_bytes // half) >= 2
    layer = profile.memory.by_category["borrowed"]
    assert layer.sum() == borrowed.num_bytes <= buffers + 8 * 1024
    assert np.flatnonzero(layer).tolist() == sorted((2 + i) % 4 for i in range(borrowed.num_tiles))
    assert layer.max() - layer[layer > 0].min() <= 1
    assert not profile.memory.by_category["message"].any()
    assert profile.fallbacks[0].borrowed_tiles == borrowed.num_tiles
    assert f"memory of {borrowed.num_tiles} tiles" in profile.summary()


def test_two_ipus_add_up():
    profile = Profile(two_ipus())
    for phases in profile.ipu_phase_cycles:
        assert sum(phases.values()) == profile.cycles
    assert profile.busy_cycles == 2 * profile.cycles - sum(phases["idle"] for phases in profile.ipu_phase_cycles)
    ends = profile.timeline.clocks
    assert profile.ipu_phase_cycles[0]["idle"] == 4 * (2000 + SYNC) + profile.cycles - ends[0]


def test_scalars_are_flat_numbers(profile):
    scalars = profile.scalars()
    assert all(type(value) is float for value in scalars.values())
    assert scalars["cycles"] == profile.cycles and scalars["memory/max_tile_bytes"] == profile.memory.max_tile_bytes
    assert sum(value for name, value in scalars.items() if name.startswith("phases/")) == profile.cycles
    assert sum(value for name, value in scalars.items() if name.startswith("layers/")) == profile.busy_cycles
