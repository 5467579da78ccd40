"""When each task of each pipeline runs: the timeline with the loops around tasks unfolded.

Input: as `timeline`. Output: `TaskSpans`. A task whose control is static is a max-plus matrix over the clocks that it
touches, made once and applied for every micro-batch, so that long pipelines cost little; one whose control was recorded
is walked anew each time. A program of more tasks than a limit is walked as by `timeline`, and its tasks are counted
alone.
Limits: a pipeline runs once in a program, as lowering has it. Work inside loops that follow a pipeline counts as done
at once, when it is told from waiting for the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipujax.runtime.graph import Call, PipelineLayout, PipelineTask, Program, distinct, fold
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import ClockStep
from ipujax.runtime.timeline.timeline import Recording, TimelineStep, Walker

MOST_TASKS = 100_000  # that are walked one by one; 64 stages × 128 micro-batches have 16,384
COLUMNS = ("pipeline", "task", "micro_batch", "start", "end", "busy", "waited")
Leaves = Counter[tuple[str, Program]]  # how often a step runs, by the part of training of the call that it is in


@dataclass(eq=False)
class TaskTotal:
    """All that one kind of task of one stage does in all runs.

    Args:
        task: the task.
        calls: how often it ran.
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
        leaves: the steps that it ran.
    """

    task: PipelineTask
    calls: int
    work: np.ndarray
    leaves: Leaves


@dataclass(eq=False)
class PipelineSpan:
    """The run of a pipeline.

    Args:
        layout: of the pipeline.
        exchanged: work between its first and its last task that is in no task, int64[num_ipus, 5].
        drained: cycles that each IPU does nothing between its last task and `end`, int64[num_ipus]; 0 on others.
        start: cycle at which its first task begins; 0, as `end`, where tasks are counted alone.
        end: cycle at which its last task ends.
    """

    layout: PipelineLayout
    exchanged: np.ndarray
    drained: np.ndarray
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpans:
    """The tasks of all pipelines of a run.

    Args:
        totals: by task.
        pipelines: in order of the program.
        rows: one a task, in the order of the program: columns `COLUMNS`, int64[tasks, 7]. `pipeline` and `task` are
            numbers in `pipelines` and `totals`; `start` is when its work begins, waiting done; `waited` is what its IPU
            does nothing since its task before, or since the pipeline began, up to the task's end.
        is_counted: whether there are too many tasks for rows.
    """

    totals: tuple[TaskTotal, ...]
    pipelines: tuple[PipelineSpan, ...]
    rows: np.ndarray
    is_counted: bool = False


def task_spans(
    program: Program,
    steps: Mapping[Program, ClockStep],
    num_ipus: int,
    slots: int = 0,
    trip_counts: Mapping[str, int] | None = None,
    recording: Recording | None = None,
    most_tasks: int = MOST_TASKS,
) -> TaskSpans:
    """Walks a program as `timeline` does, and notes when tasks of pipelines run.

    Args:
        program: as of `timeline`, as are the arguments that are not described here.
        steps: what each node does to the clocks.
        num_ipus: IPUs of the system.
        slots: rows of the clock state beside the IPUs.
        trip_counts: iterations of loops by name.
        recording: what data-dependent control did in a run.
        most_tasks: of how many tasks at most to make rows.

    Raises:
        ProfileError: as `timeline`.
    """
    if not any(isinstance(node, Call) and node.task is not None for node in distinct(program)):
        return TaskSpans((), (), np.zeros((0, len(COLUMNS)), np.int64))
    walker = _TaskWalker(program, steps, num_ipus, slots, trip_counts or {}, recording or {})
    walker.is_counting = walker.tasks_of(program) > most_tasks
    walker.run(program)
    return walker.spans()


@dataclass(eq=False)
class _Effect:
    """What a task of static control does to the clocks.

    Args:
        rows: of the clock state that it touches.
        matrix: what it does to them, int64[rows, rows].
        begin: the clock of its IPU when its work begins, from those rows, int64[1, rows].
        work: cycles of each IPU and phase.
        overlapped: cycles of I/O tiles.
        leaves: the steps it runs.
    """

    rows: list[int]
    matrix: np.ndarray
    begin: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    leaves: Leaves


@dataclass(eq=False)
class _Run:
    """A pipeline while it is walked.

    Args:
        span: of it.
        left: tasks still to come.
        clocks: of IPUs when it began.
        idle: cycles each IPU had done nothing, at the end of its last task or, before that, when the pipeline began.
        first: the row of the first task of each IPU.
        last: when the last task of each IPU ended.
        later: (start, end) of what each IPU did since.
        start: of its first task.
        end: of its last task.
    """

    span: PipelineSpan
    left: int
    clocks: np.ndarray
    idle: np.ndarray
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    later: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    start: int = -maxplus.NEVER
    end: int = 0


def _num_tasks(node: Program, children: list[int]) -> int:
    """Tasks in one run of a node; those in loops whose trip count is data once."""
    return 1 if isinstance(node, Call) and node.task is not None else sum(children) * node.child_runs


class _TaskWalker(Walker):
    """A walk that notes tasks. Where rows are made every visit counts once, so that clock less work is idle time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_counting = False
        self.totals: dict[PipelineTask, TaskTotal] = {}
        self.rows: list[tuple[int, ...]] = []
        self.pipelines: list[PipelineSpan] = []
        self._effects: dict[PipelineTask, _Effect] = {}
        self.tasks_of = fold(_num_tasks)
        self._task: PipelineTask | None = None  # that is being walked
        self._part = ""  # of training, of the innermost call that says so
        self._leaves: Leaves = Counter()
        self._begin: np.ndarray | None = None
        self._run: _Run | None = None  # the last that began
        self._is_in_loop = False  # which holds no tasks, and is noted as a whole

    def spans(self) -> TaskSpans:
        """All that was noted."""
        self._close()
        rows = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        return TaskSpans(tuple(self.totals.values()), tuple(self.pipelines), rows, self.is_counting)

    # --- the walk ---

    def visit(self, program: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        if not isinstance(program, Call):
            super().visit(program, state, times, into)
        elif program.task is not None and self._task is None:
            self._visit_task(program, program.task, state, times)
        else:
            outer, self._part = self._part, program.origin.part or self._part
            super().visit(program, state, times, into)
            self._part = outer

    def leaf(self, leaf: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        super().leaf(leaf, state, times, into)
        step = self.steps[leaf]
        if not times:
            return
        if self._task is not None:
            self._leaves[self._part, leaf] += times
            if self._begin is None and step.cycles[self._task.ipu]:
                self._begin = state[self._task.ipu] - step.cycles[self._task.ipu]
            return
        run = self._run
        if run is None:
            return
        if run.left > 0:
            run.span.exchanged += step.work * times
        if not self._is_in_loop:
            self._note(run, state[: self.num_ipus, 0] - step.cycles, step.cycles)

    def loop(
        self,
        node: Program,
        parts: tuple[Program, ...],
        count: int,
        state: np.ndarray,
        times: int,
        into: list[TimelineStep] | None,
    ) -> None:
        is_around_tasks = self._task is None and any(map(self.tasks_of, parts))
        if not is_around_tasks or self.is_counting:
            clocks, work, was_in_loop = state[: self.num_ipus, 0].copy(), self.work.copy(), self._is_in_loop
            self._is_in_loop = True
            super().loop(node, parts, count, state, times, None)
            self._is_in_loop = was_in_loop
            if self._run is not None and self._task is None and times and not was_in_loop:
                self._note(self._run, clocks, (self.work - work).sum(1))
            return
        for _ in range(count):
            for part in parts:
                self.visit(part, state, times, None)

    # --- tasks ---

    def _visit_task(self, call: Call, task: PipelineTask, state: np.ndarray, times: int) -> None:
        if times:
            self._open(task, state)
        work, begin = self.work.copy(), state[task.ipu].copy()
        if self.is_changing(call):
            self._task, self._begin, self._leaves = task, None, Counter()
            super().visit(call.function.body, state, times, None)
            begin = begin if self._begin is None else self._begin
            leaves, self._task = self._leaves, None
        else:
            effect = self._effects.get(task) or self._effect(call, task)
            before = state[effect.rows]
            begin = maxplus.product(effect.begin, before)[0]
            state[effect.rows] = maxplus.product(effect.matrix, before)
            self.work += effect.work * times
            self.overlapped += effect.overlapped * times
            leaves = Counter({key: number * times for key, number in effect.leaves.items()})
        if times:
            self._count(task, times, self.work - work, leaves)
            self._end(task, times, int(begin[0]), state, work)

    def _effect(self, call: Call, task: PipelineTask) -> _Effect:
        """Runs a task of static control on the rows that it touches."""
        rows = sorted({task.ipu} | {row for node in distinct(call) for row in _rows(self.steps.get(node))})
        state = np.full((self.size, len(rows)), maxplus.NEVER, np.int64)
        state[rows, range(len(rows))] = 0
        begin = state[task.ipu].copy()
        kept = self.work, self.overlapped
        self.work, self.overlapped = np.zeros_like(self.work), np.zeros_like(self.overlapped)
        self._task, self._begin, self._leaves = task, None, Counter()
        super().visit(call.function.body, state, 1, None)
        begin = begin if self._begin is None else self._begin
        effect = _Effect(rows, state[rows], begin[None], self.work, self.overlapped, self._leaves)
        self.work, self.overlapped = kept
        self._task = None
        self._effects[task] = effect
        return effect

    def _count(self, task: PipelineTask, times: int, work: np.ndarray, leaves: Leaves) -> None:
        if task not in self.totals:
            self.totals[task] = TaskTotal(task, 0, np.zeros_like(self.work), Counter())
        total = self.totals[task]
        total.calls += times
        total.work += work
        for key, number in leaves.items():
            total.leaves[key] += number

    # --- pipelines ---

    def _open(self, task: PipelineTask, state: np.ndarray) -> None:
        """Begins a pipeline with its first task."""
        if self._run is not None and self._run.left > 0:
            return
        self._close()
        layout, clocks = task.pipeline, state[: self.num_ipus, 0].copy()
        span = PipelineSpan(layout, np.zeros_like(self.work), np.zeros(self.num_ipus, np.int64))
        self._run = _Run(span, len(layout.tasks) * layout.micro_batches, clocks, clocks - self.work.sum(1))
        self.pipelines.append(span)

    def _end(self, task: PipelineTask, times: int, begin: int, state: np.ndarray, work: np.ndarray) -> None:
        """Notes a task that has run."""
        run, ipu = self._run, task.ipu
        assert run is not None
        run.left -= times
        if self.is_counting:
            return
        number, end = list(self.totals).index(task), int(state[ipu, 0])
        busy, idle = int((self.work - work)[ipu].sum()), end - int(self.work[ipu].sum())
        run.first.setdefault(ipu, len(self.rows))
        waited, micro_batch = idle - int(run.idle[ipu]), self.totals[task].calls - 1
        self.rows.append((len(self.pipelines) - 1, number, micro_batch, begin, end, busy, waited))
        run.idle[ipu], run.last[ipu], run.later[ipu] = idle, end, []
        run.start, run.end = min(run.start, begin), max(run.end, end)

    def _note(self, run: _Run, starts: np.ndarray, cycles: np.ndarray) -> None:
        """Notes what IPUs do outside of tasks after they have done some, while it matters."""
        for ipu in np.flatnonzero(cycles).tolist():
            start = int(starts[ipu])
            if ipu in run.later and (run.left > 0 or start < run.end):
                run.later[ipu].append((start, start + int(cycles[ipu])))

    def _close(self) -> None:
        """Ends a pipeline: waits before the first tasks count from its start, those after the last ones to its end."""
        run, self._run = self._run, None
        if run is None or not run.last:
            return
        run.span.start, run.span.end = run.start, run.end
        for ipu, place in run.first.items():
            *row, waited = self.rows[place]
            self.rows[place] = (*row, max(0, waited - max(0, run.start - int(run.clocks[ipu]))))
        for ipu, last in run.last.items():
            busy = sum(max(0, min(end, run.end) - start) for start, end in run.later[ipu])
            run.span.drained[ipu] = run.end - last - busy


def _rows(step: ClockStep | None) -> set[int]:
    """The rows of the clock state that a step reads or writes."""
    if step is None:
        return set()
    rows = {*step.ipus, *np.flatnonzero(step.cycles).tolist(), *step.senders, *step.fills, *step.frees}
    rows |= {row for pair in step.awaits for row in pair} | {row for group in step.meets for row in group}
    rows |= {row for arrival, senders in step.delivers for row in (arrival, *senders)}
    return rows | {row for clock, ipu, _ in step.transfers for row in (clock, ipu)}
