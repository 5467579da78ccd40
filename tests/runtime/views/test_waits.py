"""Waits of IPUs: each has its cycles, its cause, and the IPU that comes last."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.profile import TRACE_PHASES
from ipujax.runtime.report import Profile
from ipujax.runtime.views.time_view import DRAINING, FILLING, NO_IPU, STEADY, wait_view
from tests.runtime.profile.profile_helpers import trained_program, two_ipus
from tests.runtime.profile.test_reports import everything


@pytest.mark.parametrize("program", [trained_program, two_ipus, everything])
def test_waits_of_an_ipu_add_up_to_its_idle_cycles(program):
    profile = Profile(program())
    waits = wait_view(profile)
    assert (waits.cycles > 0).all()
    for ipu, phases in enumerate(profile.ipu_phase_cycles):
        assert waits.cycles[waits.ipu == ipu].sum() == phases["idle"]


def test_an_ipu_waits_for_the_one_that_computes():
    """IPU 0 sends five times to IPU 1, which computes for a while after each copy but the last: then it sends on."""
    profile = Profile(two_ipus())
    trace = profile.execution_trace
    waits = wait_view(profile)
    of_first = np.flatnonzero(waits.ipu == 0)
    between = [row for row in of_first if waits.cause[row] in (FILLING, STEADY, DRAINING) and waits.awaited[row] == 1]
    assert len(between) >= 4
    computing = trace.work[:, TRACE_PHASES.index("compute")] > 0
    for row in between[:4]:
        (span,) = np.flatnonzero((trace.ipu == 1) & computing & (trace.end == waits.end[row]))
        assert waits.step[row] == trace.step[span] and trace.label(int(waits.step[row])) == "second"
    assert set(waits.awaited.tolist()) <= {NO_IPU, 0, 1} and (waits.awaited != waits.ipu).all()


def test_the_longest_waits_stay_in_order():
    waits = wait_view(Profile(two_ipus()))
    longest = waits.longest(2)
    assert len(longest) == 2 and longest.cycles.sum() == np.sort(waits.cycles)[-2:].sum()
    assert (np.diff(longest.ipu) >= 0).all()


def test_one_ipu_waits_for_no_other():
    waits = wait_view(Profile(trained_program()))
    assert (waits.awaited == NO_IPU).all()
