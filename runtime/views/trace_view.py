"""Phases of each IPU over time, for a chart of bounded size.

Input: `Figures`. Output: `TraceView`: slices of phases with the labels of their steps. Where there are too many slices,
time is cut into equal parts, and each part shows the share of each phase.
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
