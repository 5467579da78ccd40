"""Reports show the figures, in bounded size."""

from __future__ import annotations

import linecache
from dataclasses import replace

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Repeat, Sequence
from ipujax.runtime.profile import TRACE_PHASES, StepCost
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import liveness_view, memory_view, operation_rows, source_view, trace_view
from ipujax.runtime.views.operation_view import exchange_bandwidth, peaks, share_of_peak
from tests.runtime.profile.profile_helpers import TARGET, apply, codelet, inputs, trained_program, two_ipus, variables
from tests.runtime.profile.test_reports import everything

PROGRAMS = [trained_program, two_ipus, everything]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("most", [20, 30_000])
def test_slices_add_up_also_where_time_is_cut(program, most):
    profile = Profile(program())
    view = trace_view(profile, most)
    assert len(view.ipu) <= max(most, len(TRACE_PHASES) * view.num_ipus) and (view.end >= view.start).all()
    for ipu in range(view.num_ipus):
        for number, name in enumerate(TRACE_PHASES):
            mine = (view.ipu == ipu) & (view.phase == number)
            spent = int((view.end - view.start)[mine].sum())
            exact = profile.timeline.phase_cycles(ipu)[name]
            ended = profile.cycles - int(profile.timeline.clocks[ipu]) if name == "idle" else 0
            assert view.phase_cycles[ipu, number] == exact
            # A part of time begins and ends at whole cycles; none is drawn where an IPU has ended.
            drawn = exact - ended
            assert spent == drawn if not view.is_cut else abs(spent - drawn) <= 2 * mine.sum() + 1
    assert view.is_cut == (most == 20)


@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_is_that_of_the_report(program):
    memory = program().memory
    view = memory_view(Profile(program()))
    numbers, sizes = zip(*(view.chip(ipu) for ipu in range(view.num_ipus)), strict=True)
    there = np.concatenate([each.ravel() for each in numbers])
    actual = np.concatenate([each.ravel() for each in sizes])
    assert sorted(there[there >= 0].tolist()) == list(range(len(memory.tile_bytes)))
    np.testing.assert_array_equal(actual[there >= 0], memory.tile_bytes[there[there >= 0]])
    assert np.isnan(actual[there < 0]).all()
    np.testing.assert_array_equal(view.by_category.sum(0), memory.tile_bytes[view.listed])
    assert sum(row.fullest for row in view.categories) == memory.max_tile_bytes
    assert sum(row.total for row in view.categories) == memory.total_bytes


@pytest.mark.parametrize("program", PROGRAMS)
def test_liveness_is_that_of_the_report(program):
    profile = Profile(program())
    view = liveness_view(profile)
    live = profile.liveness
    assert view.live_bytes.max() == live["maxLiveBytes"] and view.always_bytes == live["alwaysLiveBytes"]
    assert len(view.names) == len(view.largest) == len(view.live_bytes) <= view.num_steps
    for numbers, total in zip(view.largest, view.live_bytes.tolist(), strict=True):
        sizes = [view.variables[n][1] for n in numbers]
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= total


def test_operations_have_rates():
    profile = Profile(trained_program())
    rows = {row.name: row for row in operation_rows(profile)}
    dear = rows["popops::Dear/compute"]
    seconds = dear.cycles / TARGET.clock_hz
    assert dear.flops == 160 and dear.flops_per_second == pytest.approx(160 / seconds)
    assert dear.peak_share == pytest.approx(160 / seconds / TARGET.peak_fp32_flops) and dear.intensity is None
    cycles = [row.cycles for row in operation_rows(profile)]
    assert cycles == sorted(cycles, reverse=True) and sum(cycles) == profile.cycles


@pytest.mark.parametrize("num_ipus", [2, 4])
def test_the_share_of_the_peak_does_not_depend_on_ipus_that_run_something_else(num_ipus):
    def profile(target):
        graph = Graph(target)
        a, b = variables(graph, "a", "b")
        return Profile(compile(graph, Sequence(*inputs(a), apply(graph, codelet("product", 500), a, b, 4))))

    alone = profile(TARGET)
    many = profile(TARGET.replace(num_ipus=num_ipus))
    (row,), (same,) = ([r for r in operation_rows(p) if r.flops] for p in (alone, many))
    assert same.peak_share == row.peak_share > 0 and same.flops_per_second == row.flops_per_second
    assert peaks(many.target) == peaks(alone.target)
    assert exchange_bandwidth(many.target) == exchange_bandwidth(alone.target)


def test_an_operation_on_several_ipus_is_compared_with_the_peak_of_each():
    """Two IPUs of which each does half of the arithmetic in as many cycles have the rate of one that does half."""
    half = StepCost(Origin(), "half", cycles=1_000, flops=6_000, precision="float16")
    full = replace(half, cycles=2_000, flops=12_000)
    share = share_of_peak(half, TARGET)
    assert share_of_peak(full, TARGET.replace(num_ipus=2)) == share
    assert share == pytest.approx(6_000 / (1_000 * TARGET.num_tiles * 2 * TARGET.fp16_amp_macs_per_cycle))
    assert share_of_peak(replace(half, precision="float32"), TARGET) > share


def profile_of_file(path, lines):
    """Steps that come from lines 2 and 4 of a file."""
    path.write_text("".join(f"line {n}\n" for n in range(1, lines + 1)), encoding="utf-8")
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    actual = [apply(graph, codelet(f"line{n}", n), a, b, 4, f"model.py:{n} (loss)", path) for n in (20, 40)]
    return Profile(compile(graph, Sequence(*inputs(a), *actual)))


def test_source_lines_have_their_costs(tmp_path):
    profile = profile_of_file(tmp_path / "model.py", 50)
    profile.save(tmp_path / "saved")
    (tmp_path / "model.py").unlink()
    for each in (profile, Profile.load(tmp_path / "saved")):
        (file,) = source_view(each)
        assert file.path == str(tmp_path / "model.py") and file.lines[19] == "line 20" and len(file.lines) == 50
        sync = TARGET.internal_sync_cycles
        assert {n: cost.cycles for n, cost in file.costs.items() if cost.cycles} == {20: 80 + sync, 40: 160 + sync}
        assert file.cycles == profile.cycles and sum(c.share for c in file.costs.values()) == pytest.approx(1)
        assert file.listed_lines() == list(range(1, 51))


def test_long_files_list_the_lines_near_a_cost(tmp_path):
    (file,) = source_view(profile_of_file(tmp_path / "model.py", 2_000))
    assert file.listed_lines() == [*range(14, 27), None, *range(34, 47)]


def test_deleted_source_file_is_listed_with_line_numbers(tmp_path):
    profile = profile_of_file(tmp_path / "model.py", 50)
    (tmp_path / "model.py").unlink()
    linecache.clearcache()
    (file,) = source_view(profile)
    assert file.lines == () and file.listed_lines() == [20, 40]


def test_folded_iterations_are_shown_as_a_pattern_that_repeats():
    profile = profile_of_iterations(3_000)
    view = trace_view(profile)
    assert view.is_folded and not view.is_cut
    folded = np.flatnonzero(["folded" in label for label in view.labels])
    (here,) = np.nonzero(np.isin(view.label, folded))
    assert 100 < len(here) < 400
    np.testing.assert_array_equal(view.start[1:], view.end[:-1])  # one IPU, which never waits
    assert view.end[-1] == view.phase_cycles.sum() == profile.cycles


def profile_of_iterations(count):
    """A loop of two steps."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    body = Sequence(apply(graph, codelet("one", 7), a, b, 4), apply(graph, codelet("two", 5), b, a, 4))
    return Profile(compile(graph, Sequence(*inputs(a), Repeat(count, body))))


@pytest.mark.parametrize("program", PROGRAMS)
def test_tiles_of_variables_are_those_of_their_mappings(program, tmp_path):
    executable = program()
    profile = Profile(executable)
    rows = profile.memory.variables.variables
    layouts = profile.memory.variables.layouts
    graph = executable.graph
    assert sorted(row.name for row in rows) == sorted(map(repr, graph.variables))  # there are few
    by_name = {repr(variable): variable for variable in graph.variables}
    for row in rows:
        variable = by_name[row.name]
        counts = graph.mappings[variable].elements_per_tile(executable.target.num_tiles)
        np.testing.assert_array_equal(layouts[row.layout] > 0, counts > 0)
        assert layouts[row.layout].sum() == row.num_bytes >= variable.num_bytes
    profile.save(tmp_path / "saved")
    saved = Profile.load(tmp_path / "saved").memory.variables
    assert saved.variables == rows and all(map(np.array_equal, saved.layouts, layouts))


def test_live_ranges_are_those_of_the_steps():
    profile = Profile(everything())
    view = liveness_view(profile)
    assert sum(row.is_always for row in view.ranges) == len(view.always)
    ranges = {row.item: (row.first, row.last) for row in view.ranges if not row.is_always}
    for step, largest in enumerate(view.largest):  # the program is short: its steps are those of the view
        for number in largest:
            first, last = ranges[view.variables[number]]
            assert first <= step <= last
