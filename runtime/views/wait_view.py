"""Waits of each IPU: when, why, and for which other IPU.

Input: `Figures`. Output: `WaitView`, columns of idle times in order of IPU and time; those of an IPU add up to its idle
cycles. An IPU waits for the one that comes last to the step with which it goes on.
Limits: those of the execution trace; waits inside folded iterations are one, and for an unknown IPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import TRACE_PHASES, ExecutionTrace, Figures, slices

FILLING, STEADY, OF_HOST, DRAINING = range(4)
WAIT_CAUSES = ("filling", "another IPU", "the host", "draining")
NO_IPU = -1
NO_STEP = -1
# Computation begins when an IPU has done a fiftieth of it, and ends when it has done all but a fiftieth: setting a
# counter to zero does not end the filling of a pipeline.
_BEGUN = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class WaitView:
    """Waits of all IPUs; arrays are int64[waits].

    Args:
        ipu: that waits.
        start: cycle at which it begins to.
        end: cycle at which it goes on, or the run ends.
        cause: position in `WAIT_CAUSES`: before its first computation, between computations, after its last.
        awaited: the other IPU, `NO_IPU` for none or an unknown one.
        step: last step of the other IPU before it comes, a step of the trace, or `NO_STEP`.
    """

    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cause: np.ndarray
    awaited: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.ipu)

    @property
    def cycles(self) -> np.ndarray:
        """Length of each wait, int64[waits]."""
        return self.end - self.start

    def longest(self, max_waits: int) -> WaitView:
        """Return the longest waits, in the same order."""
        rows = np.sort(np.argsort(-self.cycles, kind="stable")[:max_waits])
        columns = (self.ipu, self.start, self.end, self.cause, self.awaited, self.step)
        return WaitView(*(column[rows] for column in columns))


def wait_view(profile: Figures) -> WaitView:
    """Return the waits of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    trace = profile.execution_trace
    cut = slices(trace)
    idle = np.flatnonzero(cut.phase == TRACE_PHASES.index("idle"))
    ipu, start, span = cut.ipu[idle], cut.start[idle], cut.span[idle]
    end = start + cut.cycles[idle]
    awaited, step = _awaited(trace, span)
    is_inside = start >= trace.start[span]  # of a folded span: no other IPU is known
    awaited, step = (np.where(is_inside, -1, column) for column in (awaited, step))
    work = trace.work[span]
    is_for_host = (work[:, TRACE_PHASES.index("host_exchange")] > 0) & (awaited == NO_IPU)
    cause = np.where(is_for_host & ~is_inside, OF_HOST, STEADY)
    first, last = _busy_periods(profile)
    cause = np.where(start < first[ipu], FILLING, np.where(start > last[ipu], DRAINING, cause))
    rows = np.stack([ipu, start, end, cause, awaited, step], 1)
    rows = np.concatenate([rows, _after_the_last_step(profile)])
    return WaitView(*rows[np.lexsort((rows[:, 1], rows[:, 0]))].T)


def _awaited(trace: ExecutionTrace, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the IPU that comes last to the step of each span, other than the span's, and its step before that."""
    busy = np.flatnonzero(trace.work.any(1))
    has_before = np.append(-1, trace.ipu[busy][:-1]) == trace.ipu[busy]  # spans are sorted by IPU, then by time
    free = np.where(has_before, np.append(0, trace.end[busy][:-1]), 0)
    before = np.where(has_before, np.append(NO_STEP, trace.step[busy][:-1]), NO_STEP)
    # By step and time of arrival: the last span of a step is the latest, that before it counts for the latest itself.
    order = np.lexsort((free, trace.step[busy]))
    step, ipu, before = trace.step[busy][order], trace.ipu[busy][order], before[order]
    of_span = trace.step[span]
    latest = np.searchsorted(step, of_span, "right") - 1
    other = np.where(ipu[latest] == trace.ipu[span], latest - 1, latest)
    is_known = (other >= 0) & (step[other] == of_span)
    return np.where(is_known, ipu[other], NO_IPU), np.where(is_known, before[other], NO_STEP)


def _after_the_last_step(profile: Figures) -> np.ndarray:
    """Return the waits of IPUs that end before the run, as rows of the columns of `WaitView`."""
    trace = profile.execution_trace
    early = np.flatnonzero(trace.clocks < profile.cycles)
    last = int(trace.clocks.argmax())
    spans = np.flatnonzero((trace.ipu == last) & trace.work.any(1))
    step = int(trace.step[spans[-1]]) if len(spans) else NO_STEP
    columns = [early, trace.clocks[early], np.full(len(early), profile.cycles)]
    return np.stack([*columns, *(np.full(len(early), value) for value in (DRAINING, last, step))], 1)


def _busy_periods(profile: Figures) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of the slices with which the computation of each IPU begins and ends, int64[ipus] each."""
    cut = slices(profile.execution_trace)
    is_compute = cut.phase == TRACE_PHASES.index("compute")
    ipus = range(len(profile.execution_trace.clocks))
    periods = [_busy_period(cut.start[mask], cut.cycles[mask]) for mask in (is_compute & (cut.ipu == n) for n in ipus)]
    first, last = np.array(periods, np.int64).reshape(-1, 2).T
    return first, last


def _busy_period(start: np.ndarray, cycles: np.ndarray) -> tuple[int, int]:
    """Return the starts of the slices with which computation begins and ends."""
    if not len(start):
        return np.iinfo(np.int64).max, 0  # an IPU without computation: all its waiting is filling
    elapsed = cycles.cumsum()
    first, last = np.searchsorted(elapsed, [elapsed[-1] * _BEGUN, elapsed[-1] * (1 - _BEGUN)])
    return int(start[first]), int(start[last])
