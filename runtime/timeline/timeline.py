"""When each IPU does what: the program tree walked with one clock an IPU.

Input: a program, a `ClockStep` for each of its leaves, and what is known of data-dependent control. Output: `Timeline`.
A `Repeat` is walked once and then jumped over as a power of the max-plus matrix of its body (`maxplus`), which is
exact. Work is the same in every iteration, so a phase adds up by counting; only idle time depends on the clocks.
Branches that are data take the costlier one, and loops whose trip count is data need a count, unless a recording of a
run says what happened: then loops over such control are walked iteration by iteration.
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

# What data-dependent nodes did in a run, in order: iterations of a loop, 1 or 0 of an If, the case of a Switch (the
# number of cases for its default).
Recording = Mapping[Program, Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class TimelineStep:
    """One leaf as it ran first, or one loop with its first iteration inside.

    Args:
        program: the node.
        ipus: IPUs that take part, rising.
        starts: cycle at which each of them begins, waiting done; the cycle 0 is the start of the program.
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
        overlapped: cycles that I/O tiles of each IPU moved data while the others went on, int64[num_ipus].
        steps: what ran, in order; a loop is one step.
        executions: how often each leaf, and each decision of data-dependent control, ran.
        taken: the branch taken by each decision that was not recorded.
    """

    clocks: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    steps: tuple[TimelineStep, ...]
    executions: Mapping[Program, int] = field(repr=False)
    taken: Mapping[Program, int] = field(default_factory=dict, repr=False)

    @property
    def cycles(self) -> int:
        """Length of the run: the last IPU's clock."""
        return int(self.clocks.max())

    def phase_cycles(self, ipu: int) -> dict[str, int]:
        """Cycles of each phase of one IPU; with `idle`, up to the end of the run, they add up to `cycles`.

        Args:
            ipu: its number.
        """
        phases = {name: int(cycles) for name, cycles in zip(PHASES, self.work[ipu], strict=True)}
        return phases | {"idle": self.cycles - sum(phases.values())}

    def walk(self) -> Iterator[TimelineStep]:
        """All steps, parents first."""
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
    """Walks a program with one clock an IPU, all starting at 0.

    Args:
        program: the control tree.
        steps: what each leaf, and each decision of data-dependent control, does to the clocks.
        num_ipus: IPUs of the system.
        slots: rows of the clock state that are slots of buffered exchanges.
        trip_counts: iterations of data-dependent loops by name, see `steps.while_names`.
        recording: what data-dependent control did in a run; it takes precedence over `trip_counts`.

    Raises:
        ProfileError: a loop whose trip count is unknown, a recording that is too short, or 2^60 cycles or more.
    """
    walker = Walker(program, steps, num_ipus, slots, trip_counts or {}, recording or {})
    return walker.run(program)


class _Test(Program):
    """The test of a loop and the decision that it leads to."""

    __slots__ = ("loop", "test")

    def __init__(self, loop: Loop, test: Program) -> None:
        self.loop = loop
        self.test = test

    def children(self) -> tuple[Program, ...]:
        return (self.test,)


class Walker:
    """One walk; owns what the walk mutates. `spans` walks likewise, and notes more."""

    def __init__(
        self,
        program: Program,
        steps: Mapping[Program, ClockStep],
        num_ipus: int,
        slots: int,
        trip_counts: Mapping[str, int],
        recording: Recording,
    ) -> None:
        self.steps, self.num_ipus, self.size = steps, num_ipus, num_ipus + slots
        self.loop_names, self.trip_counts = while_names(program), trip_counts
        self.recorded = {node: iter(choices) for node, choices in recording.items()}
        self.executions: Counter[Program] = Counter()
        self.work = np.zeros((num_ipus, len(PHASES)), np.int64)
        self.overlapped = np.zeros(num_ipus, np.int64)
        self._caller = Origin()  # of the innermost call
        self._matrices: dict[Program, np.ndarray] = {}
        self._dearest: dict[Program, int] = {}
        self.is_changing = fold(self._is_changing)

    def run(self, program: Program) -> Timeline:
        state = np.zeros((self.size, 1), np.int64)
        steps: list[TimelineStep] = []
        self.visit(program, state, 1, steps)
        clocks = state[: self.num_ipus, 0]
        clocks.setflags(write=False)
        self.work.setflags(write=False)
        self.overlapped.setflags(write=False)
        return Timeline(clocks, self.work, self.overlapped, tuple(steps), dict(self.executions), dict(self._dearest))

    def visit(self, program: Program, state: np.ndarray, times: int, into: list[TimelineStep] | None) -> None:
        """Advances `state` by one run of `program`, in place, and counts it as `times` runs; `into` gets the steps."""
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
                self.loop(program, (program.body,), self.trips(program), state, times, into)
            case Loop(test=Program() as condition):
                test = _Test(program, condition)
                self.visit(test, state, times, into)
                self.loop(program, (program.body, test), self.trips(program), state, times, into)
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
        """Runs one step."""
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
            if step.transfers:  # as I/O tiles see it
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
        """Runs `parts` in order, `count` times: the first iteration step by step, the others as a matrix power."""
        if count == 0:
            return
        before = state[: self.num_ipus, 0].copy()
        children: list[TimelineStep] | None = None if into is None else []
        changing = any(map(self.is_changing, parts))
        counted = times if changing else times * count
        for part in parts:
            self.visit(part, state, counted, children)
        if changing:
            for _ in range(count - 1):
                for part in parts:
                    self.visit(part, state, counted, None)
        elif count > 1:
            state[:] = maxplus.repeated(self.matrix(node, parts), count - 1, state)
        if into is not None and children is not None:
            after = state[: self.num_ipus, 0]
            ipus = tuple(sorted({ipu for child in children for ipu in child.ipus}))
            starts, ends = tuple(before[list(ipus)].tolist()), tuple(after[list(ipus)].tolist())
            into.append(TimelineStep(node, ipus, starts, ends, count, tuple(children)))

    def matrix(self, node: Program, parts: tuple[Program, ...]) -> np.ndarray:
        """The max-plus matrix of one run of `parts`, which belong to `node`."""
        if node not in self._matrices:
            state = maxplus.identity(self.size)
            for part in parts:
                self.visit(part, state, 0, None)
            self._matrices[node] = state
        return self._matrices[node]

    def _is_changing(self, node: Program, children: list[bool]) -> bool:
        """Whether what a node does was recorded, and so may differ from run to run of it."""
        return node in self.recorded or any(children)

    def trips(self, loop: Loop) -> int:
        """Iterations of a loop, this time."""
        if loop.trips is not None:
            return loop.trips
        names = self.loop_names[loop]
        if loop in self.recorded:
            return self._next(loop, names[0])
        known = [self.trip_counts[name] for name in names if name in self.trip_counts]
        if not known:
            raise ProfileError(
                f"the trip count of loop {names[-1]!r} is data, so its cycles are not known before it runs",
                where=loop.origin,
                expected=f"a trip count for one of the names {', '.join(map(repr, names))}",
                hint=f"Options(trip_counts={{{names[-1]!r}: n}}), or profile a call",
            )
        return known[0]

    def choice(self, node: Branch) -> int:
        """The branch of a node, this time: as recorded, or else the dearest from clocks that are equal."""
        if node in self.recorded:
            return node.recorded_choice(self._next(node, str(node.origin)))
        if node not in self._dearest:
            costs = []
            for branch in node.children():
                state = np.zeros((self.size, 1), np.int64)
                self.visit(branch, state, 0, None)
                costs.append(int(state.max()))
            self._dearest[node] = int(np.argmax(costs))
        return self._dearest[node]

    def _next(self, node: Program, name: str) -> int:
        for choice in self.recorded[node]:
            return int(choice)
        raise ProfileError(f"the recording ends before {name} runs for the last time")
