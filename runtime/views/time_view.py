"""Time of each IPU: its phases, for a chart of bounded size, and its waits: when, why, and for which other IPU.

Input: `Figures`. Output: `TraceView`, slices of phases with the labels of their steps. Where there are too many slices,
time is cut into equal parts, and each part shows the share of each phase. `WaitView`, columns of idle times in order of
IPU and time; those of an IPU add up to its idle cycles. An IPU waits for the one that comes last to the step with which
it goes on.
Limits: those of the execution trace; waits inside folded iterations are one, and for an unknown IPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import TRACE_PHASES, ExecutionTrace, Figures, Slices, slices

MAX_SLICES = 30_000  # about: a browser draws more too slowly
_MAX_REPEATS = 60  # of the pattern of a folded loop
_MAX_FOLDED = 2_000
_MAX_SPANS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class TraceView:
    """Slices of all IPUs; arrays are int64[slices].

    Args:
        num_ipus: IPUs of one replica.
        cycles: length of the run.
        ipu: of each slice.
        start: cycle at which it begins.
        end: cycle at which it ends.
        phase: position in `TRACE_PHASES`.
        label: position in `labels`.
        labels: names of the steps.
        phase_cycles: exact cycles of each phase of each IPU, idle up to the end of the run, int64[ipus, phases].
        transfers: (IPU, start, end, label) of transfers of I/O tiles, int64[transfers, 4].
        folded: (IPU, start, end, label) of the longest steps with several iterations, int64[spans, 4].
        is_joined: some neighbouring steps are one slice.
        is_cut: slices are shares of equal parts of time.
        row_sets: as in `ExecutionTrace`.
        rows: position in `row_sets` of the rows of operations of each label, int64[steps].
        spans: (IPU, start, end, label) of the longest steps of each IPU in order of time, int64[spans, 4].
    """

    num_ipus: int
    cycles: int
    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    phase: np.ndarray
    label: np.ndarray
    labels: tuple[str, ...]
    phase_cycles: np.ndarray
    transfers: np.ndarray
    folded: np.ndarray
    is_joined: bool
    is_cut: bool
    row_sets: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    spans: np.ndarray

    @property
    def is_folded(self) -> bool:
        """Some iterations of loops are one slice."""
        return bool(len(self.folded))


def trace_view(profile: Figures, max_slices: int = MAX_SLICES) -> TraceView:
    """Return the trace of a run with about `max_slices` slices.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    trace = profile.execution_trace
    num_ipus = profile.target.num_ipus
    cut = slices(trace)
    rows = np.flatnonzero(trace.moved)
    end = np.minimum(trace.end[rows], trace.start[rows] + trace.moved[rows])
    transfers = np.stack([trace.ipu[rows], trace.start[rows], end, trace.step[rows]], 1)[:max_slices]
    labels = trace.labels
    columns = _repeat_folded(trace, cut, _MAX_REPEATS)
    if len(columns[0]) > max_slices:
        columns = _repeat_folded(trace, cut, 1)
    phase_cycles = np.zeros((num_ipus, len(TRACE_PHASES)), np.int64)
    np.add.at(phase_cycles, (cut.ipu, cut.phase), cut.cycles)
    phase_cycles[:, -1] += profile.cycles - phase_cycles.sum(1)  # idle, the last phase: an IPU may end before the run
    is_cut = len(columns[0]) > max_slices
    if is_cut:
        num_bins = max(1, max_slices // (num_ipus * len(TRACE_PHASES)))
        columns = _phase_shares(columns, num_ipus, profile.cycles, num_bins, len(labels))
        labels = (*labels, "several steps")
    ipu, start, end, phase, label = columns
    folded = _longest_spans(trace, (trace.iterations > 1)[trace.step] & (trace.end > trace.start), _MAX_FOLDED)
    spans = _longest_spans(trace, trace.work.any(1) & (trace.end > trace.start), _MAX_SPANS)
    return TraceView(
        num_ipus=num_ipus,
        cycles=profile.cycles,
        ipu=ipu,
        start=start,
        end=end,
        phase=phase,
        label=label,
        labels=labels,
        phase_cycles=phase_cycles,
        transfers=transfers,
        folded=folded,
        is_joined=bool((trace.joined > 1).any()),
        is_cut=is_cut,
        row_sets=trace.row_sets,
        rows=trace.rows,
        spans=spans,
    )


def _longest_spans(trace: ExecutionTrace, mask: np.ndarray, max_spans: int) -> np.ndarray:
    """Return (IPU, start, end, step) of the longest spans of a mask, in the order of the trace."""
    rows = np.flatnonzero(mask)
    rows = np.sort(rows[np.argsort(trace.start[rows] - trace.end[rows], kind="stable")[:max_spans]])
    return np.stack([trace.ipu[rows], trace.start[rows], trace.end[rows], trace.step[rows]], 1)


def _repeat_folded(trace: ExecutionTrace, cut: Slices, max_repeats: int) -> tuple[np.ndarray, ...]:
    """Return IPU, start, end, phase and step of slices, int64[slices] each, with folded iterations as a pattern."""
    # The pattern repeats, since one long slice a phase would mislead.
    step = trace.step[cut.span]
    span_start, span_end = trace.start[cut.span], trace.end[cut.span]
    # A slice before its span is the wait for it, which does not repeat.
    times = np.maximum(trace.iterations, trace.joined)[step]
    times = np.where(cut.start >= span_start, np.minimum(times, max_repeats), 1)
    row = np.repeat(np.arange(len(step)), times)
    repeat = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)  # 0 to times - 1, for each slice
    # The pattern is the span itself, shortened to 1/times of its length.
    origin = np.where(times > 1, span_start, cut.start)[row]
    period = np.where(times > 1, span_end - span_start, 0)[row]
    offset = cut.start[row] - origin + repeat * period
    start, end = (origin + each // times[row] for each in (offset, offset + cut.cycles[row]))
    order = np.lexsort((start, cut.ipu[row]))
    row = row[order]
    return cut.ipu[row], start[order], end[order], cut.phase[row], step[row]


def _phase_shares(
    columns: tuple[np.ndarray, ...], num_ipus: int, cycles: int, num_bins: int, label: int
) -> tuple[np.ndarray, ...]:
    """Cut time into bins, and draw the cycles of each phase in a bin as one slice, one phase after the other."""
    ipu, start, end, phase, _ = columns
    edges = np.linspace(0, cycles, num_bins + 1).astype(np.int64)
    bins: list[np.ndarray] = []
    for i in range(num_ipus):
        for n in range(len(TRACE_PHASES)):
            mask = (ipu == i) & (phase == n)
            # The sum of a phase's cycles up to a time is piecewise linear: it grows inside slices only.
            times = np.stack([start[mask], end[mask]], 1).ravel()
            elapsed = np.stack([np.zeros(mask.sum(), np.int64), end[mask] - start[mask]], 1).ravel().cumsum()
            bins.append(np.diff(np.interp(edges, times, elapsed) if len(times) else np.zeros(num_bins + 1)))
    phase_cycles = np.stack(bins).reshape(num_ipus, len(TRACE_PHASES), num_bins).transpose(0, 2, 1)
    nonzero = np.nonzero(phase_cycles > 0)
    stop = (edges[:-1, None] + phase_cycles.cumsum(2))[nonzero]
    start = stop - phase_cycles[nonzero]
    return nonzero[0], start.astype(np.int64), stop.astype(np.int64), nonzero[2], np.full(len(stop), label)


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
