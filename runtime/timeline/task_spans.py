"""Task spans: start, end and waits of each task of each pipeline, with the loops around tasks unfolded.

Input: as of `timeline`. Output: `TaskSpans`. A task with static control is a max-plus matrix over the clocks that it
reads or changes, computed once and applied for every micro-batch, so that long pipelines take little time; one whose
control was recorded is walked each time. In a program of more tasks than a limit, tasks are counted only.
Limits: a pipeline runs once in a program, as lowering has it. The work of a loop that follows a pipeline counts as
contiguous from the loop's start, where it is distinguished from waiting for the pipeline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipujax.runtime.graph import Call, PipelineLayout, PipelineTask, Program, distinct, fold
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import ClockStep
from ipujax.runtime.timeline.timeline import Recording, TimelineStep, Walker

MAX_TASKS = 100_000  # that are walked one by one; 64 stages × 128 micro-batches have 16,384
COLUMNS = ("pipeline", "task", "micro_batch", "start", "end", "busy", "waited")
Leaves = Counter[tuple[str, Program]]  # runs of a step, by the part of the training step of its call


@dataclass(eq=False)
class TaskTotal:
    """Sums over all runs of one kind of task of one stage.

    Args:
        task: the task.
        calls: number of runs.
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
        leaves: runs of each step in it.
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
        exchanged: work up to its last task that is in no task, int64[num_ipus, 5]; that before its first task is of
            IPUs that load a micro-batch while another begins.
        early: cycles of that work before `start`, int64[num_ipus].
        drained: idle cycles of each IPU between its last task and `end`, int64[num_ipus]; 0 on IPUs without tasks.
        start: cycle at which its first task begins; 0, as `end`, where tasks are counted only.
        end: cycle at which its last task ends.
    """

    layout: PipelineLayout
    exchanged: np.ndarray
    drained: np.ndarray
    early: np.ndarray
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpans:
    """The tasks of all pipelines of a run.

    Args:
        totals: by task.
        pipelines: in order of the program.
        rows: one a task, in the order of the program: columns `COLUMNS`, int64[tasks, 7]. `pipeline` and `task` are
            numbers in `pipelines` and `totals`; `start` is the cycle at which its work begins, after its waits;
            `waited` is the idle cycles of its IPU from its task before, or the pipeline's start, to the task's end.
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
    max_tasks: int = MAX_TASKS,
) -> TaskSpans:
    """Return the spans of the tasks of all pipelines of a run.

    Args:
        program: as of `timeline`, as are the arguments that are not described here.
        steps: clock steps of nodes.
        num_ipus: IPUs of the system.
        slots: rows of the clock state beside the IPUs.
        trip_counts: iterations of loops by name.
        recording: choices of data-dependent control in a run.
        max_tasks: upper bound of tasks with rows; those of larger programs are counted only.

    Raises:
        ProfileError: as `timeline`.
    """
    if not any(isinstance(node, Call) and node.task is not None for node in distinct(program)):
        return TaskSpans((), (), np.zeros((0, len(COLUMNS)), np.int64))
    walker = _TaskWalker(program, steps, num_ipus, slots, trip_counts or {}, recording or {})
    walker.is_counting = walker.tasks_of(program) > max_tasks
    walker.run(program)
    return walker.spans()


@dataclass(eq=False)
class _Effect:
    """Effect of a task with static control on the clocks.

    Args:
        rows: rows of the clock state that it reads or changes.
        matrix: max-plus matrix over these rows, int64[rows, rows].
        begin: row of a matrix that gives the clock of its IPU when its work begins, int64[1, rows].
        work: cycles of each IPU and phase.
        overlapped: cycles of I/O tiles.
        leaves: runs of each step in it.
    """

    rows: list[int]
    matrix: np.ndarray
    begin: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    leaves: Leaves


@dataclass(eq=False)
class _Run:
    """A pipeline that is being walked; times are cycles.

    Args:
        span: its span.
        remaining_tasks: runs of tasks still to come.
        clocks: clocks of IPUs at the start of the walk.
        idle: idle cycles of each IPU since the start of the program, at the end of its last task or at first here.
        first_row: by IPU, the row of its first task.
        last_end: by IPU, the end of its last task.
        work_since: by IPU, (start, end) of its work since `last_end`, or since the walk began.
        work_before: by IPU, the same of its work before its first task, such as loads of a micro-batch.
        start: start of the first task.
        end: end of the last task.
    """

    span: PipelineSpan
    remaining_tasks: int
    clocks: np.ndarray
    idle: np.ndarray
    first_row: dict[int, int] = field(default_factory=dict)
    last_end: dict[int, int] = field(default_factory=dict)
    work_since: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    work_before: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    start: int = -maxplus.NEVER
    end: int = 0


def _num_tasks(node: Program, children: list[int]) -> int:
    """Return the number of tasks in one run of a node, one iteration for loops whose trip count is data."""
    return 1 if isinstance(node, Call) and node.task is not None else sum(children) * node.child_runs


class _TaskWalker(Walker):
    """A walk that records tasks. With rows every visit counts once, so that idle time is clock minus work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_counting = False
        self.totals: dict[PipelineTask, TaskTotal] = {}
        self.rows: list[tuple[int, ...]] = []
        self.pipelines: list[PipelineSpan] = []
        self._effects: dict[PipelineTask, _Effect] = {}
        self.tasks_of = fold(_num_tasks)
        self._task: PipelineTask | None = None  # that is being walked
        self._part = ""  # of the training step, of the innermost call that has one
        self._leaves: Leaves = Counter()  # of the current task
        self._begin: np.ndarray | None = None  # clock at the first work of the current task
        self._run: _Run | None = None  # of the pipeline that began last
        self._is_in_loop = False  # without tasks, whose work is recorded at its end

    def spans(self) -> TaskSpans:
        """Return the recorded spans."""
        self._close()
        rows = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        return TaskSpans(tuple(self.totals.values()), tuple(self.pipelines), rows, self.is_counting)

    # --- the walk ---

    def visit(self, program: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        """Advance the clocks by a node: a call of an outermost task gets a span, other calls name their part."""
        if not isinstance(program, Call):
            super().visit(program, state, times, into)
        elif program.task is not None and self._task is None:
            self._visit_task(program, program.task, state, times)
        else:
            outer = self._part
            self._part = program.origin.part or outer
            super().visit(program, state, times, into)
            self._part = outer

    def leaf(self, leaf: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        """Count a leaf for the task that runs, or, between tasks, for the pipeline's exchange and waits."""
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
        if run.remaining_tasks > 0:
            run.span.exchanged += step.work * times
        if not self._is_in_loop:
            self._record_work(run, state[: self.num_ipus, 0] - step.cycles, step.cycles)

    def loop(
        self,
        node: Program,
        parts: tuple[Program, ...],
        count: int,
        state: np.ndarray,
        times: int,
        into: list[TimelineStep] | None,
    ) -> None:
        """Visit each iteration of a loop around tasks; any other loop is advanced at once."""
        is_around_tasks = self._task is None and any(map(self.tasks_of, parts))
        if not is_around_tasks or self.is_counting:
            clocks = state[: self.num_ipus, 0].copy()
            work_before = self.work.copy()
            was_in_loop = self._is_in_loop
            self._is_in_loop = True
            super().loop(node, parts, count, state, times, None)
            self._is_in_loop = was_in_loop
            if self._run is not None and self._task is None and times and not was_in_loop:
                self._record_work(self._run, clocks, (self.work - work_before).sum(1))
            return
        for _ in range(count):
            for part in parts:
                self.visit(part, state, times, None)

    # --- tasks ---

    def _visit_task(self, call: Call, task: PipelineTask, state: np.ndarray, times: int) -> None:
        if times:
            self._open(task, state)
        work_before = self.work.copy()
        begin = state[task.ipu].copy()
        if self.is_recorded(call):
            self._start_task(task)
            super().visit(call.function.body, state, times, None)
            begin = begin if self._begin is None else self._begin
            leaves = self._leaves
            self._task = None
        else:
            effect = self._effects.get(task) or self._find_effect(call, task)
            clocks = state[effect.rows]
            begin = maxplus.product(effect.begin, clocks)[0]
            state[effect.rows] = maxplus.product(effect.matrix, clocks)
            self.work += effect.work * times
            self.overlapped += effect.overlapped * times
            leaves = Counter({key: number * times for key, number in effect.leaves.items()})
        if times:
            self._count(task, times, self.work - work_before, leaves)
            self._end(task, times, int(begin[0]), state, work_before)

    def _start_task(self, task: PipelineTask) -> None:
        self._task = task
        self._begin = None
        self._leaves = Counter()

    def _find_effect(self, call: Call, task: PipelineTask) -> _Effect:
        """Run a task with static control on the identity of the rows of its steps."""
        rows = sorted({task.ipu} | {row for node in distinct(call) for row in _rows(self.steps.get(node))})
        state = np.full((self.size, len(rows)), maxplus.NEVER, np.int64)
        state[rows, range(len(rows))] = 0
        begin = state[task.ipu].copy()
        # The walk adds to these totals: they are set aside, so that they hold the task's work only.
        totals = self.work, self.overlapped
        self.work = np.zeros_like(self.work)
        self.overlapped = np.zeros_like(self.overlapped)
        self._start_task(task)
        super().visit(call.function.body, state, 1, None)
        begin = begin if self._begin is None else self._begin
        effect = _Effect(rows, state[rows], begin[None], self.work, self.overlapped, self._leaves)
        self.work, self.overlapped = totals
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
        """Begin a pipeline if this is its first task."""
        if self._run is not None and self._run.remaining_tasks > 0:
            return
        self._close()
        layout = task.pipeline
        clocks = state[: self.num_ipus, 0].copy()
        none = np.zeros(self.num_ipus, np.int64)
        span = PipelineSpan(layout, np.zeros_like(self.work), none, none.copy())
        self._run = _Run(span, len(layout.tasks) * layout.micro_batches, clocks, clocks - self.work.sum(1))
        self.pipelines.append(span)

    def _end(self, task: PipelineTask, times: int, begin: int, state: np.ndarray, work_before: np.ndarray) -> None:
        """Record the end of a task, as a row unless tasks are counted only."""
        run = self._run
        ipu = task.ipu
        assert run is not None
        run.remaining_tasks -= times
        if self.is_counting:
            return
        number = list(self.totals).index(task)
        end = int(state[ipu, 0])
        busy = int((self.work - work_before)[ipu].sum())
        idle = end - int(self.work[ipu].sum())  # every IPU is busy or idle, so its clock is their sum
        waited = idle - int(run.idle[ipu])
        micro_batch = self.totals[task].calls - 1
        if ipu not in run.first_row:
            run.first_row[ipu] = len(self.rows)
            run.work_before[ipu] = run.work_since[ipu]
        self.rows.append((len(self.pipelines) - 1, number, micro_batch, begin, end, busy, waited))
        run.idle[ipu] = idle
        run.last_end[ipu] = end
        run.work_since[ipu] = []
        run.start = min(run.start, begin)
        run.end = max(run.end, end)

    def _record_work(self, run: _Run, starts: np.ndarray, cycles: np.ndarray) -> None:
        """Record work outside of tasks, as far as it may be before the pipeline's end."""
        for ipu in np.flatnonzero(cycles).tolist():
            start = int(starts[ipu])
            if run.remaining_tasks > 0 or start < run.end:
                run.work_since[ipu].append((start, start + int(cycles[ipu])))

    def _close(self) -> None:
        """End a pipeline: cut waits before first tasks at its start, and idle time after last tasks at its end."""
        run = self._run
        self._run = None
        if run is None or not run.last_end:
            return
        run.span.start = run.start
        run.span.end = run.end
        for ipu, number in run.first_row.items():
            *row, waited = self.rows[number]
            opened = int(run.clocks[ipu])
            busy = sum(max(0, min(end, run.start) - max(begin, opened)) for begin, end in run.work_before[ipu])
            self.rows[number] = (*row, max(0, waited - max(0, run.start - opened - busy)))
            run.span.early[ipu] = busy
        for ipu, last_end in run.last_end.items():
            busy = sum(max(0, min(end, run.end) - start) for start, end in run.work_since[ipu])
            run.span.drained[ipu] = run.end - last_end - busy


def _rows(step: ClockStep | None) -> set[int]:
    """Return the rows of the clock state that a step reads or changes."""
    if step is None:
        return set()
    rows = {*step.ipus, *np.flatnonzero(step.cycles).tolist(), *step.senders, *step.fills, *step.frees}
    rows |= {row for pair in step.awaits for row in pair} | {row for group in step.barriers for row in group}
    rows |= {row for arrival, senders in step.delivers for row in (arrival, *senders)}
    return rows | {row for clock, ipu, _ in step.transfers for row in (clock, ipu)}
