"""What each IPU does when, as a chart of bounded size.

Input: `Figures`. Output: `TraceView`: slices of phases, with what they belong to. Where there are too many slices, time
is cut into equal parts, and each part shows how much of it each phase takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import TRACE_PHASES, ExecutionTrace, Figures, Slices, slices

MOST_SLICES = 30_000
_MOST_REPEATS = 60
_MOST_FOLDED = 2_000
_MOST_SPANS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class TraceView:
    """Slices of all IPUs; arrays are int64[slices].

    Args:
        num_ipus: IPUs of one replica.
        cycles: length of the run.
        ipu: whose slice.
        start: cycle at which it begins.
        end: cycle at which it ends.
        phase: number of its phase in `TRACE_PHASES`.
        label: number of what it belongs to in `labels`.
        labels: texts.
        spent: cycles of each phase of each IPU, to the cycle; idle time up to the end of the run. int64[ipus, phases].
        moved: (IPU, start, end, label) of what I/O tiles move meanwhile, int64[transfers, 4].
        folded: (IPU, start, end, label) of what holds several iterations, int64[spans, 4]; the longest.
        is_joined: whether neighbouring steps are one slice.
        is_cut: whether slices are shares of equal parts of time.
        row_sets: as of `ExecutionTrace`.
        rows: the number in `row_sets` of the rows of operations of each label, int64[steps].
        spans: (IPU, start, end, label) of the steps of each IPU in order of time, int64[spans, 4]; the longest.
    """

    num_ipus: int
    cycles: int
    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    phase: np.ndarray
    label: np.ndarray
    labels: tuple[str, ...]
    spent: np.ndarray
    moved: np.ndarray
    folded: np.ndarray
    is_joined: bool
    is_cut: bool
    row_sets: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    spans: np.ndarray

    @property
    def is_folded(self) -> bool:
        """Whether some iterations of loops are one slice."""
        return bool(len(self.folded))


def trace_view(profile: Figures, most_slices: int = MOST_SLICES) -> TraceView:
    """The trace of a profile.

    Args:
        profile: of a run.
        most_slices: about how many slices to make.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that kept no timeline.
    """
    trace, num_ipus = profile.execution_trace, profile.target.num_ipus
    cut = slices(trace)
    rows = np.flatnonzero(trace.moved)
    length = np.minimum(trace.end[rows], trace.start[rows] + trace.moved[rows])
    moved = np.stack([trace.ipu[rows], trace.start[rows], length, trace.step[rows]], 1)[:most_slices]
    labels = tuple(trace.label(step) for step in range(len(trace.name)))
    columns = _repeated(trace, cut, _MOST_REPEATS)
    if len(columns[0]) > most_slices:
        columns = _repeated(trace, cut, 1)
    spent = np.zeros((num_ipus, len(TRACE_PHASES)), np.int64)
    np.add.at(spent, (cut.ipu, cut.phase), cut.cycles)
    spent[:, -1] += profile.cycles - spent.sum(1)
    is_cut = len(columns[0]) > most_slices
    if is_cut:
        bins = max(1, most_slices // (num_ipus * len(TRACE_PHASES)))
        columns = _shares(columns, num_ipus, profile.cycles, bins, len(labels))
        labels = (*labels, "several steps")
    ipu, start, end, phase, label = columns
    folded = _longest(trace, (trace.iterations > 1)[trace.step] & (trace.end > trace.start), _MOST_FOLDED)
    spans = _longest(trace, trace.work.any(1) & (trace.end > trace.start), _MOST_SPANS)
    return TraceView(
        num_ipus=num_ipus,
        cycles=profile.cycles,
        ipu=ipu,
        start=start,
        end=end,
        phase=phase,
        label=label,
        labels=labels,
        spent=spent,
        moved=moved,
        folded=folded,
        is_joined=bool((trace.joined > 1).any()),
        is_cut=is_cut,
        row_sets=trace.row_sets,
        rows=trace.rows,
        spans=spans,
    )


def _longest(trace: ExecutionTrace, is_chosen: np.ndarray, most: int) -> np.ndarray:
    """(IPU, start, end, step) of the longest of some spans, in their order."""
    rows = np.flatnonzero(is_chosen)
    longest = np.argsort(trace.start[rows] - trace.end[rows], kind="stable")[:most]
    rows = np.sort(rows[longest])
    return np.stack([trace.ipu[rows], trace.start[rows], trace.end[rows], trace.step[rows]], 1)


def _repeated(trace: ExecutionTrace, cut: Slices, most_repeats: int) -> tuple[np.ndarray, ...]:
    """Slices, those of folded iterations as a pattern that repeats, so that they do not look like long phases."""
    step = trace.step[cut.span]
    times = np.maximum(trace.iterations, trace.joined)[step]
    first, last = trace.start[cut.span], trace.end[cut.span]
    times = np.where(cut.start >= first, np.minimum(times, most_repeats), 1)  # what is before is the wait for it
    row = np.repeat(np.arange(len(step)), times)
    number = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    origin, period = np.where(times > 1, first, cut.start)[row], np.where(times > 1, last - first, 0)[row]
    offset = cut.start[row] - origin + number * period
    start, end = (origin + each // times[row] for each in (offset, offset + cut.cycles[row]))
    order = np.lexsort((start, cut.ipu[row]))
    row, start, end = row[order], start[order], end[order]
    return cut.ipu[row], start, end, cut.phase[row], step[row]


def _shares(
    columns: tuple[np.ndarray, ...], num_ipus: int, cycles: int, bins: int, label: int
) -> tuple[np.ndarray, ...]:
    """Slices that show how much of each part of time each phase takes, one after the other."""
    ipu, start, end, phase, _ = columns
    edges = np.linspace(0, cycles, bins + 1).astype(np.int64)
    found: list[np.ndarray] = []
    for which in range(num_ipus):
        for number in range(len(TRACE_PHASES)):
            mine = (ipu == which) & (phase == number)
            times = np.stack([start[mine], end[mine]], 1).ravel()
            done = np.stack([np.zeros(mine.sum(), np.int64), end[mine] - start[mine]], 1).ravel().cumsum()
            at_edges = np.interp(edges, times, done) if len(times) else np.zeros(bins + 1)
            found.append(np.diff(at_edges))
    spent = np.stack(found).reshape(num_ipus, len(TRACE_PHASES), bins).transpose(0, 2, 1)
    stops = edges[:-1, None] + spent.cumsum(2)
    there = np.nonzero(spent > 0)
    stop = stops[there]
    begin = stop - spent[there]
    return there[0], begin.astype(np.int64), stop.astype(np.int64), there[2], np.full(len(stop), label)
