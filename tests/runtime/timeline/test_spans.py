"""Spans and their phases add up to the timeline, whatever is shown of loops."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.files.figure_records import data_of, field_type
from ipujax.runtime.files.kinds import FieldError, Lengths
from ipujax.runtime.options import Options
from ipujax.runtime.profile.execution_trace import ExecutionTrace, execution_trace, phase_cycles_of_ipus, slices
from ipujax.runtime.report import Profile
from tests.runtime.profile.profile_helpers import looping, trained_program, two_ipus
from tests.runtime.profile.test_reports import everything


def recorded():
    graph, program, loop, decide = looping()
    return Profile(compile(graph, program), {loop: [3], decide: [1, 0, 1]})


def counted():
    graph, program, _, _ = looping()
    return Profile(compile(graph, program, options=Options(trip_counts={"while[0]": 60})))


PROFILES = {
    "trained": lambda: Profile(trained_program()),
    "two IPUs": lambda: Profile(two_ipus()),
    "everything": lambda: Profile(everything()),
    "recorded": recorded,
    "counted": counted,
}


@pytest.mark.parametrize("most_steps", [1, 3, 8, 4000])
@pytest.mark.parametrize("name", PROFILES)
def test_phases_add_up_to_the_cycle(name, most_steps):
    profile = PROFILES[name]()
    spans = profile.executable.spans_of(profile.recording, most_steps)
    trace = execution_trace(profile.executable, spans, profile.timeline.clocks)
    assert trace.work.sum() == profile.timeline.work.sum()
    assert phase_cycles_of_ipus(trace) == profile.ipu_phase_cycles


@pytest.mark.parametrize("name", PROFILES)
def test_slices_of_an_ipu_follow_each_other(name):
    profile = PROFILES[name]()
    cut = slices(profile.execution_trace)
    assert (cut.cycles > 0).all()
    for ipu in range(profile.target.num_ipus):
        mine = cut.ipu == ipu
        np.testing.assert_array_equal(cut.start[mine][1:], (cut.start + cut.cycles)[mine][:-1])
        assert cut.start[mine][0] == 0
        assert (cut.start + cut.cycles)[mine][-1] == profile.timeline.clocks[ipu]


def test_iterations_are_shown_where_they_fit_and_folded_elsewhere():
    executable = trained_program()
    clocks = Profile(executable).timeline.clocks
    full = execution_trace(executable, executable.spans_of(None), clocks)
    assert len(full.name) == 2 * 10 + 1 and not full.is_folded.any()
    few = execution_trace(executable, executable.spans_of(None, 8), clocks)
    labels = [few.label(step) for step in range(len(few.name))]
    assert labels[:2] == ["popops::Cheap/compute", "popops::Dear/compute"]
    assert labels[-2] == "loop, 7 iterations, folded" and few.is_folded.sum() == 1
    # Those that are shown are where they are when all are shown.
    np.testing.assert_array_equal(few.start[:6], full.start[:6])
    np.testing.assert_array_equal(few.end[-1:], full.end[-1:])


@pytest.mark.parametrize("most_steps", range(4, 22))
def test_a_limit_folds_iterations_and_joins_no_steps(most_steps):
    spans = trained_program().spans_of(None, most_steps)
    assert most_steps - 2 < len(spans.nodes) <= most_steps  # an iteration has two steps
    assert (spans.merged_steps == 1).all() and spans.iterations.max() == 10 - (len(spans.nodes) - 2) // 2


def test_long_programs_have_steps_joined():
    executable = trained_program()
    trace = execution_trace(executable, executable.spans_of(None, 2), Profile(executable).timeline.clocks)
    assert len(trace.name) == 2 and trace.joined.tolist() == [2, 9 + 1]  # nine iterations are behind the first
    assert trace.label(0) == "popops::Dear/compute, most of 2 steps, folded"


def test_execution_trace_survives_serialisation():
    trace = Profile(two_ipus()).execution_trace
    of_files = field_type(ExecutionTrace)
    repeated = of_files.from_data(data_of(trace))
    assert data_of(repeated) == data_of(trace) and repeated.work.shape == trace.work.shape
    with pytest.raises(FieldError, match="elements, as"):
        of_files.kind.check(data_of(trace) | {"ipu": [0]}, "", Lengths())


def test_live_bytes_are_those_of_the_liveness_report():
    profile = Profile(trained_program())
    live = profile.liveness
    always = profile.liveness["alwaysLiveBytes"]
    assert profile.execution_trace.live_bytes.max() <= live["maxLiveBytes"]
    assert profile.execution_trace.live_bytes.min() >= always
