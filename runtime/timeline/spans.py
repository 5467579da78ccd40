"""Which step keeps which IPU busy from when to when: the timeline with its loops unfolded, as far as that stays small.

Input: as `timeline`. Output: `Spans`. Iterations of a loop are shown one by one while all steps shown stay within a
limit; the others are one span an IPU, with the work of all of them. So the work of all spans is that of the run, and
where each span begins and ends is exact. A program of more steps than the limit has neighbouring steps joined.
Limits: inside a span of several iterations or steps it is not known when an IPU waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.graph import Block, Decision, Loop, Program, fold
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline.clocks import PHASES, ClockStep
from ipujax.runtime.timeline.timeline import Recording, TimelineStep, Walker

MOST_STEPS = 4_000  # of spans of one IPU; more make files of traces large and slow to look at


Member = tuple[Program, Origin]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """What keeps IPUs busy; members with a leading axis [spans] are in order of time for each IPU.

    Args:
        nodes: the program node of each step: a leaf or a decision, or the loop whose iterations are one step.
        iterations: of each step: 1, or how many iterations of its loop it holds, int64[steps].
        joined: how many steps of the program each step holds, int64[steps].
        members: the leaves and decisions of each step, the most expensive first, each with the origin of the call that
            runs it, `Origin()` outside of functions; none for folded iterations.
        step: the step of each span, int64[spans].
        ipu: the IPU of each span, int64[spans].
        start: cycle at which it begins, waiting done, int64[spans].
        end: cycle at which it ends, int64[spans].
        work: cycles of each of `PHASES`, int64[spans, 5].
        moved: cycles in which I/O tiles moved data, int64[spans].
    """

    nodes: tuple[Program, ...]
    iterations: np.ndarray
    joined: np.ndarray
    members: tuple[tuple[Member, ...], ...]
    step: np.ndarray
    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    work: np.ndarray
    moved: np.ndarray


def spans_of(
    program: Program,
    steps: Mapping[Program, ClockStep],
    num_ipus: int,
    slots: int = 0,
    trip_counts: Mapping[str, int] | None = None,
    recording: Recording | None = None,
    most_steps: int = MOST_STEPS,
) -> Spans:
    """Walks a program as `timeline` does, and notes what each IPU does.

    Args:
        program: as of `timeline`, as are the arguments that are not described here.
        steps: what each node does to the clocks.
        num_ipus: IPUs of the system.
        slots: rows of the clock state beside the IPUs.
        trip_counts: iterations of loops by name.
        recording: what data-dependent control did in a run.
        most_steps: about how many steps to show.

    Raises:
        ProfileError: as `timeline`.
    """
    tracer = _Tracer(program, steps, num_ipus, slots, trip_counts or {}, recording or {})
    tracer.left = max(0, most_steps - tracer.size_of(program))
    tracer.run(program)
    return _as_spans(_joined(tracer.rows, most_steps), num_ipus)


@dataclass(slots=True)
class _Row:
    """One step: IPUs that take part, and for each when, its work and that of its I/O tiles."""

    node: Program
    ipus: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    work: np.ndarray  # [num_ipus, 5]
    moved: np.ndarray  # [num_ipus]
    members: tuple[Member, ...]
    iterations: int = 1
    joined: int = 1


def _num_steps(node: Program, children: list[int]) -> int:
    """Steps of a node, each loop once."""
    is_step = isinstance(node, Decision) or not isinstance(node, Block | Loop)
    return is_step + sum(children)


class _Tracer(Walker):
    """A walk that notes rows. Every visit counts once, so that `work` is that of what was walked so far."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: list[_Row] = []
        self.left = 0  # steps that loops may still show beyond their first iteration
        self.size_of = fold(_num_steps)

    def leaf(self, leaf: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        super().leaf(leaf, state, times, into)
        if into is not None and into[-1].ipus:
            step, moved = self.steps[leaf], np.zeros(self.num_ipus, np.int64)
            for _, ipu, cycles in step.transfers:
                moved[ipu] += cycles
            row = into[-1]
            self.rows.append(_Row(leaf, row.ipus, row.starts, row.ends, step.work, moved, ((leaf, row.caller),)))

    def loop(
        self,
        node: Program,
        parts: tuple[Program, ...],
        count: int,
        state: np.ndarray,
        times: int,
        into: list[TimelineStep] | None,
    ) -> None:
        if into is None:
            super().loop(node, parts, count, state, times, None)
            return
        size = max(1, sum(map(self.size_of, parts)))
        shown = min(count, 1 + self.left // size)
        self.left -= max(0, shown - 1) * size
        for _ in range(shown):
            for part in parts:
                self.visit(part, state, times, into)
        if count > shown:
            self.fold(node, parts, count - shown, state)

    def fold(self, node: Program, parts: tuple[Program, ...], count: int, state: np.ndarray) -> None:
        """Runs further iterations as one row."""
        clocks, work, moved = state[: self.num_ipus, 0].copy(), self.work.copy(), self.overlapped.copy()
        super().loop(node, parts, count, state, 1, None)
        after, work, moved = state[: self.num_ipus, 0], self.work - work, self.overlapped - moved
        ipus = tuple(np.flatnonzero((after > clocks) | (moved > 0)).tolist())
        index = list(ipus)
        starts, ends = tuple(clocks[index].tolist()), tuple(after[index].tolist())
        self.rows.append(_Row(node, ipus, starts, ends, work, moved, (), count))


def _one(rows: list[_Row]) -> _Row:
    """Neighbouring rows as one, under the name of the dearest."""
    if len(rows) == 1:
        return rows[0]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in rows:
        for ipu, start, end in zip(row.ipus, row.starts, row.ends, strict=True):
            first.setdefault(ipu, start)
            last[ipu] = end
    work, moved = (np.sum([getattr(row, name) for row in rows], 0) for name in ("work", "moved"))
    by_work, ipus = sorted(rows, key=lambda row: -int(row.work.sum())), tuple(sorted(first))
    starts, ends = (tuple(times[ipu] for ipu in ipus) for times in (first, last))
    members = tuple(member for row in by_work for member in row.members)
    return _Row(by_work[0].node, ipus, starts, ends, work, moved, members, 1, sum(row.joined for row in rows))


def _joined(rows: list[_Row], most: int) -> list[_Row]:
    """Neighbouring rows as one, where there are too many; what I/O tiles do stays by itself, for it overlaps."""
    plain = [row for row in rows if not row.moved.any() or row.work.any()]
    transfers = [row for row in rows if row.moved.any() and not row.work.any()]
    size = -(-len(plain) // most)
    if size > 1:
        plain = [_one(plain[n : n + size]) for n in range(0, len(plain), size)]
    return plain + transfers


def _as_spans(rows: list[_Row], num_ipus: int) -> Spans:
    """Rows as columns, by IPU and time; iterations of folded loops may hold both work and transfers."""
    step = np.repeat(np.arange(len(rows)), [len(row.ipus) for row in rows])
    ipu, start, end = (
        np.array([value for row in rows for value in getattr(row, name)], np.int64)
        for name in ("ipus", "starts", "ends")
    )
    work = np.array([row.work for row in rows], np.int64).reshape(-1, num_ipus, len(PHASES))
    moved = np.array([row.moved for row in rows], np.int64).reshape(-1, num_ipus)
    order = np.lexsort((step, start, ipu))
    step, ipu, start, end = step[order], ipu[order], start[order], end[order]
    iterations, joined = (np.array([getattr(row, name) for row in rows], np.int64) for name in ("iterations", "joined"))
    nodes, members = tuple(row.node for row in rows), tuple(row.members for row in rows)
    return Spans(nodes, iterations, joined, members, step, ipu, start, end, work[step, ipu], moved[step, ipu])
