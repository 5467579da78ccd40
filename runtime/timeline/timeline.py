"""Start and end of each step on each IPU, by a walk over the program with one clock an IPU.

Input: a `Walk`. Output: `Timeline`, with the steps as a tree, and `Spans`, the steps as columns with loops unfolded
within a limit. Clocks and sums of a timeline are those of a walk by tasks of pipelines; the steps inside tasks, which
most readers do without, are walked when they are asked for.

In spans, iterations of a loop are steps of their own up to a limit of all steps; the others are one span an IPU, with
the work of all of them. So the work of all spans is that of the run, and start and end of each span are exact. In a
program of more steps than the limit, neighbouring steps are merged.
Limits: inside a span of several iterations or steps it is not known when an IPU waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from ipujax.runtime.graph import Loop, Program, fold
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline.clock_walk import TimelineStep, Walk
from ipujax.runtime.timeline.clocks import PHASES, ClockStep

MAX_STEPS = 4_000  # of spans of one IPU; more make files of traces large and slow to look at
Member = tuple[Program, Origin]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The clocks of all IPUs over one run of a program.

    Args:
        clocks: cycle at which each IPU ends, int64[num_ipus].
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
        overlapped: cycles of transfers on the I/O tiles of each IPU, int64[num_ipus].
        executions: number of runs of each leaf and of each decision of data-dependent control.
        taken: branch assumed for each decision that was not recorded, the costliest.
        walk_of_steps: the walk, of which each leaf is a step.
    """

    clocks: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    executions: Mapping[Program, int] = field(repr=False)
    taken: Mapping[Program, int] = field(repr=False)
    walk_of_steps: Walk = field(repr=False)

    @cached_property
    def steps(self) -> tuple[TimelineStep, ...]:
        """Steps in order; a loop is one step."""
        return tuple(self.walk_of_steps.run(self.walk_of_steps.clocks_at_start()))

    @property
    def cycles(self) -> int:
        """Length of the run: the largest clock."""
        return int(self.clocks.max())

    def phase_cycles(self, ipu: int) -> dict[str, int]:
        """Return the cycles of each phase of one IPU and of `idle`, up to the end of the run; they sum to `cycles`."""
        phases = {name: int(cycles) for name, cycles in zip(PHASES, self.work[ipu], strict=True)}
        return phases | {"idle": self.cycles - sum(phases.values())}

    def walk(self) -> Iterator[TimelineStep]:
        """Yield all steps, parents first."""
        stack = list(reversed(self.steps))
        while stack:
            step = stack.pop()
            yield step
            stack.extend(reversed(step.children))


def timeline(walk: Walk) -> Timeline:
    """Walk a program with one clock an IPU, all starting at 0; the tree of steps shows the first iteration of a loop.

    Raises:
        ProfileError: as `Walk.run`.
    """
    clocks = walk.clocks_at_start()
    deque(replace(walk, has_tasks=True).run(clocks), maxlen=0)
    executions = Counter[Program]()
    for (_, node), number in clocks.sums.runs.items():
        executions[node] += number
    for array in (clocks.state, clocks.sums.work, clocks.sums.overlapped):
        array.setflags(write=False)
    return Timeline(clocks.of_ipus, clocks.sums.work, clocks.sums.overlapped, dict(executions), walk.costliest, walk)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Steps of a run as spans on IPUs; arrays with a leading axis [spans] are sorted by IPU and start.

    Args:
        nodes: program node of each step: a leaf or a decision, or the loop whose iterations are one step.
        iterations: iterations of its loop in each step, else 1, int64[steps].
        merged_steps: steps of the program in each step, int64[steps]; of merged iterations one each.
        members: leaves and decisions of each step, the costliest first, each with the origin of the call that runs it,
            `Origin()` outside of functions; none for folded iterations.
        step: step of each span, int64[spans].
        ipu: IPU of each span, int64[spans].
        start: cycle at which it begins, after its waits, int64[spans].
        end: cycle at which it ends, int64[spans].
        work: cycles of each of `PHASES`, int64[spans, 5].
        transfer_cycles: cycles of transfers on I/O tiles, int64[spans].
    """

    nodes: tuple[Program, ...]
    iterations: np.ndarray
    merged_steps: np.ndarray
    members: tuple[tuple[Member, ...], ...]
    step: np.ndarray
    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    work: np.ndarray
    transfer_cycles: np.ndarray


def spans_of(walk: Walk, max_steps: int = MAX_STEPS) -> Spans:
    """Return the spans of a run: when each IPU begins and ends each step of the program.

    Args:
        walk: the program and what decides its control.
        max_steps: approximate most steps that have spans of their own; beyond, iterations of loops and neighbouring
            steps share a span.

    Raises:
        ProfileError: as `Walk.run`.
    """
    size_of = fold(partial(_num_spans, walk.steps))
    spare_steps = _SpareSteps(max(0, max_steps - size_of(walk.program)), size_of)
    steps = replace(walk, unfolded=spare_steps.unfolded).run(walk.clocks_at_start())
    rows_of = _Rows(walk)
    rows = [rows_of.row(step) for step in steps if step.ipus or step.sums]
    return _to_columns(_merge_neighbours(rows, max_steps), walk.num_ipus)


class _LeafWork(NamedTuple):
    """Work of a leaf, int64[num_ipus, 5], the sum of it, and cycles of transfers on I/O tiles, int64[num_ipus]."""

    work: np.ndarray
    busy_cycles: int
    transfer_cycles: np.ndarray | None  # None without transfers


@dataclass(slots=True)
class _Row:
    """One step of the spans: its IPUs, the start and end of each, its work and its transfers on I/O tiles."""

    node: Program
    ipus: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    work: np.ndarray  # [num_ipus, 5]
    busy_cycles: int  # sum of `work`
    transfer_cycles: np.ndarray | None  # [num_ipus]; None without transfers
    members: tuple[Member, ...]
    iterations: int = 1
    merged_steps: int = 1


def _num_spans(steps: Mapping[Program, ClockStep], node: Program, children: list[int]) -> int:
    """Return the number of spans of a node on an IPU: each loop has one iteration, and a span for all further ones.

    Steps without an IPU, as transfers of resident streams, have none.
    """
    of_step = node in steps and bool(steps[node].ipus)
    return of_step + isinstance(node, Loop) + sum(children)


@dataclass(slots=True)
class _SpareSteps:
    """Spans of which loops take those beyond their first iteration, outer and earlier loops first."""

    number: int
    size_of: Callable[[Program], int]

    def unfolded(self, parts: tuple[Program, ...], count: int) -> int:
        """Return the iterations of a loop that are walked one by one, and take their steps."""
        size = max(1, sum(map(self.size_of, parts)))
        unfolded = min(count, 1 + self.number // size)
        self.number -= max(0, unfolded - 1) * size
        return unfolded


class _Rows:
    """Rows of the steps of a walk; the work of a leaf, equal in all its runs, is computed once."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._leaf_works: dict[Program, _LeafWork] = {}

    def row(self, step: TimelineStep) -> _Row:
        """Return the row of one run of a leaf, or of further iterations of a loop, which are one step with sums."""
        times = step.program, step.ipus, step.starts, step.ends
        if (sums := step.sums) is not None:
            transfer_cycles = sums.overlapped if sums.overlapped.any() else None
            busy_cycles = int(sums.work.sum())
            return _Row(*times, sums.work, busy_cycles, transfer_cycles, members=(), iterations=step.repeats)
        if step.program not in self._leaf_works:
            self._leaf_works[step.program] = self._leaf_work(self._walk.steps[step.program])
        return _Row(*times, *self._leaf_works[step.program], members=((step.program, step.caller),))

    def _leaf_work(self, step: ClockStep) -> _LeafWork:
        transfer_cycles = np.zeros(self._walk.num_ipus, np.int64)
        for _, ipu, cycles in step.transfers:
            transfer_cycles[ipu] += cycles
        return _LeafWork(step.work, int(step.work.sum()), transfer_cycles if transfer_cycles.any() else None)


def _merge_rows(rows: list[_Row]) -> _Row:
    """Merge rows into one, from the first start to the last end of each IPU, with the node of the costliest."""
    if len(rows) == 1:
        return rows[0]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row in rows:
        for ipu, start, end in zip(row.ipus, row.starts, row.ends, strict=True):
            first.setdefault(ipu, start)
            last[ipu] = end
    work = np.add.reduce([row.work for row in rows])
    moved = [row.transfer_cycles for row in rows if row.transfer_cycles is not None]
    by_work = sorted(rows, key=lambda row: -row.busy_cycles)
    ipus = tuple(sorted(first))
    starts, ends = (tuple(times[ipu] for ipu in ipus) for times in (first, last))
    members = tuple(member for row in by_work for member in row.members)
    merged_steps = sum(row.merged_steps * row.iterations for row in rows)
    busy_cycles = sum(row.busy_cycles for row in rows)
    transfer_cycles = np.add.reduce(moved) if moved else None
    return _Row(by_work[0].node, ipus, starts, ends, work, busy_cycles, transfer_cycles, members, 1, merged_steps)


def _merge_neighbours(rows: list[_Row], max_rows: int) -> list[_Row]:
    """Merge neighbouring rows where there are too many."""
    # Transfers on I/O tiles are not merged: they overlap with the rows around them.
    plain = [row for row in rows if row.transfer_cycles is None or row.busy_cycles]
    transfers = [row for row in rows if row.transfer_cycles is not None and not row.busy_cycles]
    size = -(-len(plain) // max_rows)
    if size > 1:
        plain = [_merge_rows(plain[n : n + size]) for n in range(0, len(plain), size)]
    return plain + transfers


def _to_columns(rows: list[_Row], num_ipus: int) -> Spans:
    """Return rows as columns, sorted by IPU and time."""
    step = np.repeat(np.arange(len(rows)), [len(row.ipus) for row in rows])
    ipu, start, end = (
        np.array([value for row in rows for value in getattr(row, name)], np.int64)
        for name in ("ipus", "starts", "ends")
    )
    work = np.array([row.work for row in rows], np.int64).reshape(-1, num_ipus, len(PHASES))
    none = np.zeros(num_ipus, np.int64)
    moved = [none if row.transfer_cycles is None else row.transfer_cycles for row in rows]
    transfer_cycles = np.array(moved, np.int64).reshape(-1, num_ipus)
    order = np.lexsort((step, start, ipu))
    step, ipu, start, end = (column[order] for column in (step, ipu, start, end))
    iterations = np.array([row.iterations for row in rows], np.int64)
    merged_steps = np.array([row.merged_steps for row in rows], np.int64)
    nodes = tuple(row.node for row in rows)
    members = tuple(row.members for row in rows)
    columns = (column[step, ipu] for column in (work, transfer_cycles))
    return Spans(nodes, iterations, merged_steps, members, step, ipu, start, end, *columns)
