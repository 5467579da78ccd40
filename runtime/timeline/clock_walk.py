"""Walk over a program with one clock an IPU: its steps in order, and the sums of their work.

Input: a program, a `ClockStep` for each of its leaves, and a recording, or assumed trip counts, of data-dependent
control. Output: `TimelineStep` values, one after the other, while `Clocks` advance.
Iterations of a loop are walked one by one as far as `Walk.unfolded` says; all others are a power of the max-plus matrix
of its body (`maxplus`), which is exact. A task of a pipeline with static control is a matrix over the clocks that it
reads or changes, computed once and applied for every micro-batch, so that long pipelines take little time. Work is the
same in every iteration, so phases are counted; only idle time depends on the clocks.
Without a recording of a run, the costlier branch is assumed where the choice is data, and loops whose trip count is
data need a count. With one, loops around such control are walked step by step in the first iteration, then by matrices
of runs that decide alike (`recorded_runs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ipujax.runtime.graph import Block, Branch, Call, Leaf, Loop, PipelineTask, Program, WriteUndef, distinct
from ipujax.runtime.tensor import Origin, compose
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import ClockStep, StaticEffect, Sums, rows_of
from ipujax.runtime.timeline.recorded_runs import OUTSIDE, LoopTest, RecordedRuns
from ipujax.runtime.timeline.run_control import Clocks, Control, Recording, next_choice


@dataclass(frozen=True, slots=True, eq=False)
class TimelineStep:
    """The run of a leaf or of a task, or iterations of a loop.

    Args:
        program: the node; of a task its call.
        ipus: IPUs that take part, rising.
        starts: cycle at which each of them begins, after its waits; the program starts at cycle 0.
        ends: cycle at which each of them ends.
        repeats: iterations of a loop; 1 for others.
        children: the steps of the first iteration of a loop, where that stands for all.
        caller: the origin of the innermost call that runs it, `Origin()` outside of functions.
        times: runs of the program for which it stands, more than one in the first iteration of a loop.
        sums: over all that a task or iterations of a loop run; None for others.
    """

    program: Program
    ipus: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    repeats: int = 1
    children: tuple[TimelineStep, ...] = ()
    caller: Origin = OUTSIDE
    times: int = 1
    sums: Sums | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a walk depends on, and how closely it looks.

    Args:
        program: the control tree.
        steps: clock step of each leaf and of each decision of data-dependent control.
        num_ipus: IPUs of the system.
        slots: rows of the clock state beside the IPUs.
        control: decides data-dependent control.
        unfolded: takes the parts of a loop and its trip count; returns how many iterations are walked one by one, in
            the place of the loop, while the others are one step; None if the loop is one step, of which the first
            iteration stands for all. All loops are if it is None itself.
        has_tasks: whether the outermost call of a pipeline's task is one step.
        costliest: branch assumed for each decision that was not recorded, filled by the walk.
    """

    program: Program
    steps: Mapping[Program, ClockStep]
    num_ipus: int
    slots: int
    control: Control
    unfolded: Callable[[tuple[Program, ...], int], int | None] | None = None
    has_tasks: bool = False
    costliest: dict[Program, int] = field(default_factory=dict)
    _matrices: dict[Program, np.ndarray] = field(default_factory=dict)
    _effects: dict[tuple[PipelineTask, str], StaticEffect] = field(default_factory=dict)
    _tests: dict[Loop, LoopTest] = field(default_factory=dict)
    _runs: RecordedRuns = field(default_factory=RecordedRuns)

    @classmethod
    def of(
        cls,
        program: Program,
        steps: Mapping[Program, ClockStep],
        num_ipus: int,
        slots: int = 0,
        trip_counts: Mapping[str, int] | None = None,
        recording: Recording | None = None,
    ) -> Walk:
        """Return the walk of a run: without a recording loops have `trip_counts`, by the names of `while_names`."""
        return cls(program, steps, num_ipus, slots, Control.of(program, trip_counts or {}, recording or {}))

    def clocks_at_start(self) -> Clocks:
        """Return clocks of which all are 0."""
        choices = {node: iter(choices) for node, choices in self.control.recording.items()}
        return Clocks(np.zeros((self.num_ipus + self.slots, 1), np.int64), Sums.none(self.num_ipus), choices)

    def run(self, clocks: Clocks) -> Iterator[TimelineStep]:
        """Advance clocks over one run of the program; yield each step when it is over.

        Raises:
            ProfileError: a loop whose trip count is unknown, a recording that is too short, or 2^60 cycles or more.
        """
        return self.visit(self.program, clocks, 1, OUTSIDE)

    def visit(self, program: Program, clocks: Clocks, times: int, caller: Origin) -> Iterator[TimelineStep]:
        """Advance clocks over one run of a part of the program, counted as several runs; see `run`."""
        match program:
            case Leaf():  # first: most nodes are
                yield self._run_leaf(program, clocks, times, caller)
            case Call(function, origin, task):
                # As `profile.attribution` sees calls.
                inside = compose(caller, origin) if origin != OUTSIDE else caller
                if self.has_tasks and task is not None and clocks.task_ipu is None:
                    sums, start, end = self._run_task(program, task, clocks, times, inside)
                    yield TimelineStep(program, (task.ipu,), (start,), (end,), caller=caller, times=times, sums=sums)
                else:
                    yield from self.visit(function.body, clocks, times, inside)
            case Block():
                for child in program.children():
                    yield from self.visit(child, clocks, times, caller)
            case Loop(test=None):
                yield from self._run_loop(program, (program.body,), clocks, times, caller)
            case Loop(test=Program() as condition):
                test = self.test_of(program, condition)  # runs once more than the body
                yield from self.visit(test, clocks, times, caller)
                yield from self._run_loop(program, (program.body, test), clocks, times, caller)
            case LoopTest():
                yield from self.visit(program.test, clocks, times, caller)
                yield self._run_leaf(program.loop, clocks, times, caller)
            case Branch():
                yield self._run_leaf(program, clocks, times, caller)
                yield from self.visit(program.children()[self.chosen_branch(program, clocks)], clocks, times, caller)
            case WriteUndef():  # a hint to the compiler, which does nothing
                return
            case _:
                raise AssertionError("a program is a leaf or a form of control")

    def _iteration(
        self, parts: Iterable[Program], clocks: Clocks, times: int, caller: Origin
    ) -> Iterator[TimelineStep]:
        for part in parts:
            yield from self.visit(part, clocks, times, caller)

    def _run_leaf(self, leaf: Program, clocks: Clocks, times: int, caller: Origin) -> TimelineStep:
        """Advance clocks over one step; see `visit`."""
        step = self.steps[leaf]
        state = clocks.state
        clocks.sums.add_step(leaf, step, times, caller.part)
        step.start(state)
        starts = state[step.rows, 0].tolist()
        task_ipu = clocks.task_ipu
        if task_ipu is not None and clocks.begin is None and step.cycles[task_ipu]:
            clocks.begin = state[task_ipu].copy()
        step.finish(state)
        ends = state[step.rows, 0].tolist()
        if step.transfers:  # the span of I/O tiles: their IPU goes on at once
            ends = [int(state[row, 0]) for row, _, _ in step.transfers]
            starts = [end - cycles for end, (_, _, cycles) in zip(ends, step.transfers, strict=True)]
        maxplus.check_time(max(ends, default=0) if state.shape[1] == 1 else int(state.max()))
        return TimelineStep(leaf, step.ipus, tuple(starts), tuple(ends), caller=caller, times=times)

    # --- loops ---

    def _run_loop(
        self, node: Loop, parts: tuple[Program, ...], clocks: Clocks, times: int, caller: Origin
    ) -> Iterator[TimelineStep]:
        """Run a loop of `parts`: yield it as one step, or its first iterations step by step and the others as one."""
        count = self.control.trip_count(node, clocks)
        if count == 0:
            return
        unfolded = None if self.unfolded is None else self.unfolded(parts, count)
        if unfolded is None:
            yield self._whole_loop(node, parts, count, clocks, times, caller)
            return
        for _ in range(unfolded):
            yield from self._iteration(parts, clocks, times, caller)
        if count > unfolded:
            yield self._further_iterations(node, parts, count - unfolded, clocks, times, caller)

    def _whole_loop(
        self, node: Loop, parts: tuple[Program, ...], count: int, clocks: Clocks, times: int, caller: Origin
    ) -> TimelineStep:
        """Run `parts` in order, `count` times: the first iteration step by step, the others as a matrix power.

        `times` is the number of runs of the loop itself for which this one stands.
        """
        before = clocks.of_ipus.copy()
        # Recorded control may differ in each iteration. Other work is counted for all iterations in the first visit.
        is_recorded = any(map(self.control.is_recorded, parts))
        times_of_first = times if is_recorded else times * count
        children = tuple(self._iteration(parts, clocks, times_of_first, caller))
        if is_recorded:
            self._run_recorded(parts, count - 1, clocks, times, caller)
        elif count > 1:
            clocks.state[:] = maxplus.apply_power(self._matrix(node, parts), count - 1, clocks.state)
        ipus = tuple(sorted({ipu for child in children for ipu in child.ipus}))
        starts, ends = (tuple(cycles[list(ipus)].tolist()) for cycles in (before, clocks.of_ipus))
        return TimelineStep(node, ipus, starts, ends, count, children, times=times)

    def test_of(self, loop: Loop, condition: Program) -> LoopTest:
        return self._tests.setdefault(loop, LoopTest(loop, condition))

    def _run_recorded(self, parts: tuple[Program, ...], count: int, clocks: Clocks, times: int, caller: Origin) -> None:
        """Run `parts` with recorded control, in order, `count` times, without steps for the timeline."""
        while count and clocks.task_ipu is not None and clocks.begin is None:
            # A matrix does not tell which work of a task is its first.
            _run_all(self._iteration(parts, clocks, times, caller))
            count -= 1
        clocks.sums.add(self._runs.advance(self, parts, count, clocks, caller).times(times))

    def _further_iterations(
        self, node: Loop, parts: tuple[Program, ...], count: int, clocks: Clocks, times: int, caller: Origin
    ) -> TimelineStep:
        """Run iterations of a loop as one step."""
        inner = replace(clocks, sums=Sums.none(self.num_ipus))
        before = clocks.of_ipus.copy()
        self._at_once()._whole_loop(node, parts, count, inner, times, caller)
        clocks.sums.add(inner.sums)
        ipus = tuple(np.flatnonzero((inner.of_ipus > before) | (inner.sums.overlapped > 0)).tolist())
        starts, ends = (tuple(cycles[list(ipus)].tolist()) for cycles in (before, inner.of_ipus))
        return TimelineStep(node, ipus, starts, ends, count, times=times, sums=inner.sums)

    def _at_once(self) -> Walk:
        """Return the walk, of the same memory, in which the first iteration of each loop stands for all."""
        return replace(self, unfolded=None)

    def _matrix(self, node: Program, parts: tuple[Program, ...]) -> np.ndarray:
        """Return the max-plus matrix of one run of `parts`, the body of `node`."""
        if node not in self._matrices:
            clocks = Clocks(maxplus.identity(self.num_ipus + self.slots), Sums.none(self.num_ipus))
            _run_all(self._at_once()._iteration(parts, clocks, 1, OUTSIDE))
            self._matrices[node] = clocks.state
        return self._matrices[node]

    # --- branches ---

    def chosen_branch(self, node: Branch, clocks: Clocks) -> int:
        """Return the branch of the current run of a node: the recorded one, or else the costliest from equal clocks."""
        if node in self.control.recording:
            return node.recorded_choice(next_choice(clocks, node, node.origin))
        if node not in self.costliest:
            costs = []
            for branch in node.children():
                start = replace(self.clocks_at_start(), choices=clocks.choices)
                _run_all(self._at_once().visit(branch, start, 1, OUTSIDE))
                costs.append(int(start.state.max()))
            self.costliest[node] = int(np.argmax(costs))
        return self.costliest[node]

    # --- tasks ---

    def _run_task(
        self, call: Call, task: PipelineTask, clocks: Clocks, times: int, inside: Origin
    ) -> tuple[Sums, int, int]:
        """Run a task as one step; return its sums, and when its work begins and ends. `inside`: as its body sees it."""
        ipu = task.ipu
        if self.control.is_recorded(call):
            before = clocks.state[ipu].copy()
            inner = replace(clocks, sums=Sums.none(self.num_ipus), task_ipu=ipu)
            _run_all(self._at_once().visit(call.function.body, inner, times, inside))
            sums = inner.sums
            begin = before if inner.begin is None else inner.begin
        else:
            key = task, inside.part
            if key not in self._effects:
                self._effects[key] = self.effect_of((call.function.body,), inside, ipu)
            effect = self._effects[key]
            sums = effect.sums.times(times)
            begin = effect.apply_task(clocks.state)
        clocks.sums.add(sums)
        return sums, int(begin[0]), int(clocks.state[ipu, 0])

    def effect_of(self, parts: tuple[Program, ...], caller: Origin, task_ipu: int | None = None) -> StaticEffect:
        """Run parts with static control, in order, on the identity of the rows of their steps."""
        nodes = (node for part in parts for node in distinct(part))
        rows, clocks = self._identity(nodes, task_ipu)
        before = None if task_ipu is None else clocks.state[task_ipu].copy()
        _run_all(self._at_once()._iteration(parts, clocks, 1, caller))
        begin = before if clocks.begin is None else clocks.begin
        return StaticEffect(rows, clocks.state[list(rows)], None if begin is None else begin[None], clocks.sums)

    def effect_of_leaf(self, leaf: Program, caller: Origin) -> StaticEffect:
        """Run a leaf, or the decision of a node without its children, on the identity of its rows."""
        rows, clocks = self._identity((leaf,))
        self._run_leaf(leaf, clocks, 1, caller)
        return StaticEffect(rows, clocks.state[list(rows)], None, clocks.sums)

    def _identity(self, nodes: Iterable[Program], task_ipu: int | None = None) -> tuple[tuple[int, ...], Clocks]:
        """Return the rows of the steps of nodes, and clocks of which each is a column of the identity."""
        # Parts that take no time run too, and count: on one clock.
        stepped = (node.loop if isinstance(node, LoopTest) else node for node in nodes)  # its decision is the loop's
        rows = tuple(sorted({task_ipu or 0}.union(*map(rows_of, map(self.steps.get, stepped)))))
        state = maxplus.identity(self.num_ipus + self.slots)[:, rows]
        return rows, Clocks(state, Sums.none(self.num_ipus), task_ipu=task_ipu)


def _run_all(steps: Iterable[TimelineStep]) -> None:
    deque(steps, maxlen=0)
