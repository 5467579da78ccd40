"""Timeline: start and end of each step on each IPU, by a walk over the program with one clock an IPU.

Input: a program, a `ClockStep` for each of its leaves, and a recording, or assumed trip counts, of data-dependent
control. Output: `Timeline`.
Of a `Repeat` the first iteration is walked, and the others are a power of the max-plus matrix of its body (`maxplus`),
which is exact. Work is the same in every iteration, so phases are counted; only idle time depends on the clocks.
Without a recording of a run, the costlier branch is assumed where the choice is data, and loops whose trip count is
data need a count. With one, loops around such control are walked iteration by iteration.
Limits: the tree of steps shows the first iteration of a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import (
    Block,
    Branch,
    Call,
    Loop,
    Program,
    WriteUndef,
    fold,
    while_names,
)
from ipujax.runtime.tensor import Origin, compose
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import PHASES, ClockStep

# Choices of each data-dependent node in a run, in order: iterations of a loop, 1 or 0 of an If, the case of a Switch
# (the number of cases for its default).
Recording = Mapping[Program, Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class TimelineStep:
    """The first run of a leaf, or a loop with the steps of its first iteration.

    Args:
        program: the node.
        ipus: IPUs that take part, rising.
        starts: cycle at which each of them begins, after its waits; the program starts at cycle 0.
        ends: cycle at which each of them ends.
        repeats: iterations of a loop; 1 for a leaf.
        children: the steps of the first iteration of a loop.
        caller: the origin of the innermost call that runs it, `Origin()` outside of functions.
    """

    program: Program
    ipus: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    repeats: int = 1
    children: tuple[TimelineStep, ...] = ()
    caller: Origin = Origin()


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The clocks of all IPUs over one run of a program.

    Args:
        clocks: cycle at which each IPU ends, int64[num_ipus].
        work: cycles of each of `clocks.PHASES` on each IPU, int64[num_ipus, 5].
        overlapped: cycles of transfers on the I/O tiles of each IPU, int64[num_ipus].
        steps: steps in order; a loop is one step.
        executions: number of runs of each leaf and of each decision of data-dependent control.
        taken: branch assumed for each decision that was not recorded, the costliest.
    """

    clocks: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    steps: tuple[TimelineStep, ...]
    executions: Mapping[Program, int] = field(repr=False)
    taken: Mapping[Program, int] = field(default_factory=dict, repr=False)

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


def timeline(
    program: Program,
    steps: Mapping[Program, ClockStep],
    num_ipus: int,
    slots: int = 0,
    trip_counts: Mapping[str, int] | None = None,
    recording: Recording | None = None,
) -> Timeline:
    """Walk a program with one clock an IPU, all starting at 0.

    Args:
        program: the control tree.
        steps: clock step of each leaf and of each decision of data-dependent control.
        num_ipus: IPUs of the system.
        slots: rows of the clock state beside the IPUs.
        trip_counts: iterations of data-dependent loops by name, see `graph.while_names`.
        recording: choices of data-dependent control in a run; it takes precedence over `trip_counts`.

    Raises:
        ProfileError: a loop whose trip count is unknown, a recording that is too short, or 2^60 cycles or more.
    """
    return Walker(program, steps, num_ipus, slots, trip_counts or {}, recording or {}).run(program)


class _Test(Program):
    """The test of a loop and the decision after it, as a node that can be walked."""

    __slots__ = ("loop", "test")

    def __init__(self, loop: Loop, test: Program) -> None:
        self.loop = loop
        self.test = test

    def children(self) -> tuple[Program, ...]:
        return (self.test,)


class Walker:
    """One walk over a program, with the state that it mutates; subclasses record more (`spans`, `task_spans`)."""

    def __init__(
        self,
        program: Program,
        steps: Mapping[Program, ClockStep],
        num_ipus: int,
        slots: int,
        trip_counts: Mapping[str, int],
        recording: Recording,
    ) -> None:
        self.steps = steps
        self.num_ipus = num_ipus
        self.size = num_ipus + slots  # rows of the clock state
        self.loop_names = while_names(program)
        self.trip_counts = trip_counts
        self.recorded = {node: iter(choices) for node, choices in recording.items()}
        self.executions: Counter[Program] = Counter()
        self.work = np.zeros((num_ipus, len(PHASES)), np.int64)
        self.overlapped = np.zeros(num_ipus, np.int64)
        self._caller = Origin()  # of the innermost call
        self._matrices: dict[Program, np.ndarray] = {}
        self._costliest: dict[Program, int] = {}
        self.is_recorded = fold(self._is_recorded)

    def run(self, program: Program) -> Timeline:
        state = np.zeros((self.size, 1), np.int64)
        steps: list[TimelineStep] = []
        self.visit(program, state, 1, steps)
        clocks = state[: self.num_ipus, 0]
        clocks.setflags(write=False)
        self.work.setflags(write=False)
        self.overlapped.setflags(write=False)
        return Timeline(clocks, self.work, self.overlapped, tuple(steps), dict(self.executions), dict(self._costliest))

    def visit(self, program: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        """Advance `state`, in place, by one run of `program`, counted as `times` runs; append its steps to `into`."""
        match program:
            case Call(function, origin):
                outer = self._caller
                if origin != Origin():  # as `profile.attribution` sees calls
                    self._caller = compose(outer, origin)
                self.visit(function.body, state, times, into)
                self._caller = outer
            case Block():
                for child in program.children():
                    self.visit(child, state, times, into)
            case Loop(test=None):
                self.loop(program, (program.body,), self.trip_count(program), state, times, into)
            case Loop(test=Program() as condition):
                test = _Test(program, condition)  # runs once more than the body
                self.visit(test, state, times, into)
                self.loop(program, (program.body, test), self.trip_count(program), state, times, into)
            case _Test():
                self.visit(program.test, state, times, into)
                self.leaf(program.loop, state, times, into)
            case Branch():
                self.leaf(program, state, times, into)
                self.visit(program.children()[self.choice(program)], state, times, into)
            case WriteUndef():  # a hint to the compiler, which does nothing
                return
            case _:
                self.leaf(program, state, times, into)

    def leaf(self, leaf: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        """Advance `state` over one step; see `visit`."""
        step = self.steps[leaf]
        if times:
            maxplus.check_time(times * int(step.cycles.max()))
            self.executions[leaf] += times
            self.work += step.work * times
            for _, ipu, cycles in step.transfers:
                self.overlapped[ipu] += cycles * times
        step.start(state)
        ipus = list(step.ipus)
        starts = state[ipus, 0].tolist() if into is not None else ()
        step.finish(state)
        maxplus.check_time(int(state.max()))
        if into is not None:
            ends = state[ipus, 0].tolist()
            if step.transfers:  # the span of I/O tiles: their IPU goes on at once
                ends = [int(state[row, 0]) for row, _, _ in step.transfers]
                starts = [end - cycles for end, (_, _, cycles) in zip(ends, step.transfers, strict=True)]
            into.append(TimelineStep(leaf, step.ipus, tuple(starts), tuple(ends), caller=self._caller))

    def loop(
        self,
        node: Program,
        parts: tuple[Program, ...],
        count: int,
        state: np.ndarray,
        times: int,
        into: list[TimelineStep] | None,
    ) -> None:
        """Run `parts` in order, `count` times: the first iteration step by step, the others as a matrix power."""
        if count == 0:
            return
        before = state[: self.num_ipus, 0].copy()
        children: list[TimelineStep] | None = None if into is None else []
        # Recorded control may differ in each iteration. Other work is counted for all iterations in the first visit.
        is_recorded = any(map(self.is_recorded, parts))
        runs = times if is_recorded else times * count
        for part in parts:
            self.visit(part, state, runs, children)
        if is_recorded:
            for _ in range(count - 1):
                for part in parts:
                    self.visit(part, state, runs, None)
        elif count > 1:
            state[:] = maxplus.apply_power(self.matrix(node, parts), count - 1, state)
        if into is not None and children is not None:
            after = state[: self.num_ipus, 0]
            ipus = tuple(sorted({ipu for child in children for ipu in child.ipus}))
            starts = tuple(before[list(ipus)].tolist())
            ends = tuple(after[list(ipus)].tolist())
            into.append(TimelineStep(node, ipus, starts, ends, count, tuple(children)))

    def matrix(self, node: Program, parts: tuple[Program, ...]) -> np.ndarray:
        """Return the max-plus matrix of one run of `parts`, the body of `node`."""
        if node not in self._matrices:
            state = maxplus.identity(self.size)
            for part in parts:
                self.visit(part, state, 0, None)  # 0 times: only the clocks move
            self._matrices[node] = state
        return self._matrices[node]

    def _is_recorded(self, node: Program, children: list[bool]) -> bool:
        """Return whether control in a node was recorded, so that its runs may differ."""
        return node in self.recorded or any(children)

    def trip_count(self, loop: Loop) -> int:
        """Return the iterations of the current run of a loop."""
        if loop.trips is not None:
            return loop.trips
        names = self.loop_names[loop]
        if loop in self.recorded:
            return self._next(loop, names[0])
        counts = [self.trip_counts[name] for name in names if name in self.trip_counts]
        if not counts:
            raise ProfileError(
                f"the trip count of loop {names[-1]!r} is data, so its cycles are not known before it runs",
                where=loop.origin,
                expected=f"a trip count for one of the names {', '.join(map(repr, names))}",
                hint=f"Options(trip_counts={{{names[-1]!r}: n}}), or profile a call",
            )
        return counts[0]

    def choice(self, node: Branch) -> int:
        """Return the branch of the current run of a node: the recorded one, or else the costliest from equal clocks."""
        if node in self.recorded:
            return node.recorded_choice(self._next(node, str(node.origin)))
        if node not in self._costliest:
            costs = []
            for branch in node.children():
                state = np.zeros((self.size, 1), np.int64)
                self.visit(branch, state, 0, None)
                costs.append(int(state.max()))
            self._costliest[node] = int(np.argmax(costs))
        return self._costliest[node]

    def _next(self, node: Program, name: str) -> int:
        for choice in self.recorded[node]:
            return int(choice)
        raise ProfileError(f"the recording ends before {name} runs for the last time")
