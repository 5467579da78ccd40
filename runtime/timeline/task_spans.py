"""Task spans: start, end and waits of each task of each pipeline, with the loops around tasks unfolded.

Input: a `Walk`. Output: `TaskSpans`. In a program of more tasks than a limit, tasks are counted only.
Limits: a pipeline runs once in a program, as lowering has it. The work of a loop that follows a pipeline counts as
contiguous from the loop's start, where it is distinguished from waiting for the pipeline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ipujax.runtime.graph import Call, Leaf, PipelineLayout, PipelineTask, Program, distinct, fold
from ipujax.runtime.tensor import PLUMBING
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clock_walk import TimelineStep, Walk
from ipujax.runtime.timeline.clocks import ClockStep, Runs
from ipujax.runtime.timeline.run_control import Clocks

MAX_TASKS = 100_000  # that are walked one by one; 64 stages × 128 micro-batches have 16,384
COLUMNS = ("pipeline", "task", "micro_batch", "start", "end", "busy", "waited")


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
    leaves: Runs


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
        prepared: work for pipelines before their first and after their last tasks, such as counters, copies of
            parameters to other IPUs, and loads of the first micro-batch, int64[num_ipus, 5].
        is_counted: whether there are too many tasks for rows.
    """

    totals: tuple[TaskTotal, ...]
    pipelines: tuple[PipelineSpan, ...]
    rows: np.ndarray
    prepared: np.ndarray
    is_counted: bool = False


def task_spans(walk: Walk, max_tasks: int = MAX_TASKS) -> TaskSpans:
    """Return the spans of the tasks of all pipelines of a run.

    Args:
        walk: the program and what decides its control.
        max_tasks: upper bound of tasks with rows; those of larger programs are counted only.

    Raises:
        ProfileError: as `Walk.run`.
    """
    if not any(isinstance(node, Call) and node.task is not None for node in distinct(walk.program)):
        nothing = np.zeros_like(walk.clocks_at_start().sums.work)
        return TaskSpans((), (), np.zeros((0, len(COLUMNS)), np.int64), nothing)
    num_tasks = fold(_num_tasks)
    is_counted = num_tasks(walk.program) > max_tasks

    def unfolded(parts: tuple[Program, ...], count: int) -> int | None:
        """Return all iterations of a loop around tasks, and none of another; None where tasks are counted only."""
        if not any(map(num_tasks, parts)):
            return 0
        return count if not is_counted or any(map(walk.control.is_recorded, parts)) else None

    clocks = walk.clocks_at_start()
    recorder = _Recorder(clocks, walk.steps, is_counted)
    for step in replace(walk, unfolded=unfolded, has_tasks=True).run(clocks):
        recorder.add(step)
    return recorder.spans()


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


class _Recorder:
    """Spans of the tasks of a walk, step by step. Every step ran once, so that idle time is clock minus work."""

    def __init__(self, clocks: Clocks, steps: Mapping[Program, ClockStep], is_counted: bool) -> None:
        self._clocks = clocks
        self._steps = steps
        self._is_counted = is_counted
        self._totals: dict[PipelineTask, TaskTotal] = {}
        self._rows: list[tuple[int, ...]] = []
        self._pipelines: list[PipelineSpan] = []
        self._run: _Run | None = None  # of the pipeline that began last
        self._prepared = np.zeros_like(clocks.sums.work)  # work of steps that prepare pipelines
        self._note_clocks()

    def spans(self) -> TaskSpans:
        """Return the recorded spans."""
        self._end_pipeline()
        rows = np.array(self._rows, np.int64).reshape(-1, len(COLUMNS))
        return TaskSpans(tuple(self._totals.values()), tuple(self._pipelines), rows, self._prepared, self._is_counted)

    def _note_clocks(self) -> None:
        """Keep the clocks of IPUs, and the work up to them, for a pipeline that begins with the next step."""
        self._clocks_before = self._clocks.of_ipus.copy()
        self._work_before = self._clocks.sums.work.sum(1)

    def add(self, step: TimelineStep) -> None:
        """Record a step, which has just run."""
        if isinstance(step.program, Call) and step.program.task is not None:
            self._add_task(step.program.task, step)
        elif step.children:  # where tasks are counted only
            for child in step.children:
                self.add(child)
        elif self._is_preparation(step):
            self._prepared += self._steps[step.program].work * step.times
        elif self._run is not None and step.sums is not None:
            self._add_exchange(self._run, step, step.sums.work)
        elif self._run is not None and step.program in self._steps:
            self._add_exchange(self._run, step, self._steps[step.program].work * step.times)
        self._note_clocks()

    def _is_preparation(self, step: TimelineStep) -> bool:
        """Return whether a step is for a pipeline, but before its first or after its last task."""
        is_between = self._run is not None and self._run.remaining_tasks > 0
        return not is_between and isinstance(step.program, Leaf) and step.program.builder_part == PLUMBING

    def _add_exchange(self, run: _Run, step: TimelineStep, work: np.ndarray) -> None:
        """Record a step outside of tasks, as far as it may be before the pipeline's end."""
        if run.remaining_tasks > 0:
            run.span.exchanged += work
        if self._is_counted:
            return
        cycles = work.sum(1).tolist()
        for ipu, start in zip(step.ipus, step.starts, strict=True):
            if cycles[ipu] and (run.remaining_tasks > 0 or start < run.end):
                run.work_since[ipu].append((start, start + cycles[ipu]))

    def _add_task(self, task: PipelineTask, step: TimelineStep) -> None:
        """Record a task, as a row unless tasks are counted only."""
        run = self._run_of(task)
        sums = step.sums
        assert sums is not None
        total = self._totals.setdefault(task, TaskTotal(task, 0, np.zeros_like(sums.work), Counter()))
        total.calls += step.times
        total.work += sums.work
        for key, number in sums.runs.items():
            total.leaves[key] += number
        run.remaining_tasks -= step.times
        if self._is_counted:
            return
        ipu = task.ipu
        number = list(self._totals).index(task)
        (begin,), (end,) = step.starts, step.ends
        busy = int(sums.work[ipu].sum())
        idle = end - int(self._clocks.sums.work[ipu].sum())  # every IPU is busy or idle, so its clock is their sum
        waited = idle - int(run.idle[ipu])
        if ipu not in run.first_row:
            run.first_row[ipu] = len(self._rows)
            run.work_before[ipu] = run.work_since[ipu]
        self._rows.append((len(self._pipelines) - 1, number, total.calls - 1, begin, end, busy, waited))
        run.idle[ipu] = idle
        run.last_end[ipu] = end
        run.work_since[ipu] = []
        run.start = min(run.start, begin)
        run.end = max(run.end, end)

    def _run_of(self, task: PipelineTask) -> _Run:
        """Return the run of a task's pipeline, which begins if this is its first task."""
        if self._run is not None and self._run.remaining_tasks > 0:
            return self._run
        self._end_pipeline()
        layout = task.pipeline
        clocks = self._clocks_before
        none = np.zeros_like(clocks)
        span = PipelineSpan(layout, np.zeros_like(self._clocks.sums.work), none, none.copy())
        self._pipelines.append(span)
        self._run = _Run(span, len(layout.tasks) * layout.micro_batches, clocks, clocks - self._work_before)
        return self._run

    def _end_pipeline(self) -> None:
        """End a pipeline: cut waits before first tasks at its start, and idle time after last tasks at its end."""
        run = self._run
        if run is None or not run.last_end:
            return
        run.span.start = run.start
        run.span.end = run.end
        for ipu, number in run.first_row.items():
            *row, waited = self._rows[number]
            opened = int(run.clocks[ipu])
            busy = sum(max(0, min(end, run.start) - max(begin, opened)) for begin, end in run.work_before[ipu])
            self._rows[number] = (*row, max(0, waited - max(0, run.start - opened - busy)))
            run.span.early[ipu] = busy
        for ipu, last_end in run.last_end.items():
            busy = sum(max(0, min(end, run.end) - start) for start, end in run.work_since[ipu])
            run.span.drained[ipu] = run.end - last_end - busy
