"""Which variables occupy tile memory during which step of a program.

Input: a program and its effects. Output: `Liveness`, intervals of steps for each variable. A step is a leaf of the tree
in program order, the branches of a decision one after the other, the body of a loop once. A call is one step: a
function has one frame, whose liveness is found once and which occupies memory during its calls.

A variable occupies memory at a step that reads or writes it, and from each step that may write it up to the last that
may read what was written; what a loop body reads before it has written all of it is live through the loop. Nothing is
live before its first write, unless it is read before. Constants that are used are always live.
Source: backward dataflow over a structured program, in one pass, as `Effects` already knows the fixpoint of every loop.
Limits: a variable is live as a whole; parts written by different steps count as partial writes, which kill nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ipujax.runtime.analysis.effects import Effects, EffectsOf
from ipujax.runtime.graph import (
    Block,
    Branch,
    Call,
    Decision,
    Function,
    Leaf,
    Loop,
    Program,
    distinct,
)
from ipujax.runtime.tensor import Variable

Step = Leaf | Call | Decision  # a decision stands for the reading of its decider


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps during which a variable occupies memory, both ends included."""

    variable: Variable
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Liveness of one program, or of the frame of one function.

    Args:
        steps: what runs, in order.
        intervals: when variables occupy memory, in the order of the graph's variables; constants are left out.
        functions: the frames of the functions that are called, by function.
    """

    steps: tuple[Step, ...]
    intervals: tuple[Interval, ...]
    functions: Mapping[Function, Liveness]

    def live_at(self, step: int) -> frozenset[Variable]:
        """The variables that occupy memory during a step, those of a called function's own frame left out."""
        return frozenset(i.variable for i in self.intervals if i.first <= step <= i.last)


def liveness(program: Program, effects: EffectsOf) -> Liveness:
    """Finds when each variable of a program occupies memory.

    Args:
        program: the control tree, run once; nothing is read after it.
        effects: the effects of its nodes.
    """
    return _Frames(program, effects).frame(program, None)


def constants(program: Program, effects: EffectsOf) -> frozenset[Variable]:
    """The constants a program uses."""
    return frozenset(v for v in effects(program).reads if v.is_constant)


class _Frames:
    """Liveness of a program and of every function in it."""

    def __init__(self, program: Program, effects: EffectsOf) -> None:
        self.effects = effects
        self.functions: dict[Function, Liveness] = {}
        self.own = _own_variables(program, effects)
        self.number = {variable: number for number, variable in enumerate(effects.graph.mappings)}

    def frame(self, program: Program, function: Function | None) -> Liveness:
        """Liveness of a program, for a function of the variables that only it touches."""
        for call in distinct(program, into_calls=False):
            if isinstance(call, Call) and call.function not in self.functions:
                self.functions[call.function] = self.frame(call.function.body, call.function)
        return _Scan(self.effects, self.own, function, self.number).run(program, self.functions)


def _own_variables(program: Program, effects: EffectsOf) -> dict[Variable, Function | None]:
    """For each variable the innermost function that holds all that touches it, None for the program itself.

    A variable that a function reads before it writes it keeps its value from call to call, and is the caller's.
    """
    holders: dict[Variable, tuple[Function, ...]] = {}
    seen: set[tuple[Program, tuple[Function, ...]]] = set()

    def visit(node: Program, chain: tuple[Function, ...]) -> None:
        if isinstance(node, Call):
            chain = (*chain, node.function)
            if (node.function.body, chain) in seen:
                return
            seen.add((node.function.body, chain))
        for child in node.children():
            visit(child, chain)
        touched = step_effects(node, effects) if isinstance(node, Step) and not isinstance(node, Call) else Effects()
        for variable in touched.reads | touched.writes:
            known = holders.get(variable)
            holders[variable] = chain if known is None else tuple(f for f in known if f in chain)

    visit(program, ())
    return {
        variable: next((f for f in reversed(chain) if variable not in effects(f.body).reads), None)
        for variable, chain in holders.items()
    }


def step_effects(step: Program, effects: EffectsOf) -> Effects:
    """What one step reads and writes; of a decision, its decider alone."""
    return Effects(frozenset(step.decider.variables())) if isinstance(step, Decision) else effects(step)


class _Scan:
    """One backward walk of a frame; positions count from the end until the walk is over."""

    def __init__(
        self,
        effects: EffectsOf,
        own: Mapping[Variable, Function | None],
        function: Function | None,
        number: Mapping[Variable, int],
    ) -> None:
        self.effects, self.own, self.function, self.number = effects, own, function, number
        self.steps: list[Step] = []
        self.closed: list[tuple[Variable, int, int]] = []
        self.live: dict[Variable, int] = {}
        self.loops: list[tuple[int, int]] = []
        self.depth = 0

    def run(self, program: Program, functions: Mapping[Function, Liveness]) -> Liveness:
        self.visit(program)
        self.become(())
        end = len(self.steps) - 1
        steps = tuple(reversed(self.steps))
        earliest = self.earliest(steps, [(end - last, end - first) for first, last in self.loops])
        trimmed = ((v, max(end - first, earliest.get(v, 0)), end - last) for v, first, last in self.closed)
        # Sets of variables have another order in each process.
        ordered = sorted(trimmed, key=lambda interval: (self.number[interval[0]], interval[1]))
        intervals = tuple(Interval(v, first, last) for v, first, last in ordered if first <= last)
        called = {step.function: functions[step.function] for step in steps if isinstance(step, Call)}
        return Liveness(steps, intervals, called)

    def mine(self, variables: Iterable[Variable]) -> set[Variable]:
        """Those of some variables that this frame holds."""
        return {v for v in variables if not v.is_constant and self.own.get(v) is self.function}

    def become(self, live: Iterable[Variable]) -> None:
        """Makes exactly these variables live from here on backwards."""
        here, wanted = len(self.steps), set(live)
        for variable in self.live.keys() - wanted:
            self.close(variable, here - 1)
        for variable in wanted:
            self.live.setdefault(variable, here)

    def close(self, variable: Variable, first: int) -> None:
        last = self.live.pop(variable)
        if last <= first:
            self.closed.append((variable, first, last))

    def visit(self, node: Program) -> None:
        """Walks one node backwards, from the variables live after it to those live before it."""
        match node:
            case Call():
                self.step(node)
            case Block():
                for child in reversed(node.children()):
                    self.visit(child)
            case Loop():
                if node.trips != 0:
                    self.loop(node)
            case Branch():
                self.branch(node)
            case _:
                self.step(node)

    def step(self, node: Program) -> None:
        here = len(self.steps)
        self.steps.append(node)  # type: ignore[arg-type]
        effects = step_effects(node, self.effects)
        reads = self.mine(effects.reads)
        for variable in self.mine(effects.writes) - reads:
            if variable not in self.live:
                self.closed.append((variable, here, here))
            elif variable in effects.kills:
                self.close(variable, here)
        for variable in reads:
            self.live.setdefault(variable, here)

    def loop(self, node: Loop) -> None:
        first = len(self.steps)
        self.depth += 1
        if node.test is None:
            self.become(self.live.keys() | self.mine(self.effects(node.body).reads))
            self.visit(node.body)
        else:
            self.tested_loop(node, node.test)
        self.depth -= 1
        if self.depth == 0 and len(self.steps) > first:
            self.loops.append((first, len(self.steps) - 1))

    def tested_loop(self, loop: Loop, test: Program) -> None:
        after = set(self.live)
        test_effects = self.effects(test)
        tested = after | self.mine(step_effects(loop, self.effects).reads) | self.mine(self.effects(loop.body).reads)
        self.become(self.mine(test_effects.reads) | (tested - test_effects.kills))
        self.visit(loop.body)
        self.become(self.live.keys() | after)
        self.step(loop)
        self.visit(test)

    def branch(self, node: Branch) -> None:
        after = set(self.live)
        before: set[Variable] = set()
        for case in reversed(node.children()):
            self.become(after)
            self.visit(case)
            before |= self.live.keys()
        self.become(before)
        self.step(node)

    def earliest(self, steps: Sequence[Step], loops: Sequence[tuple[int, int]]) -> dict[Variable, int]:
        """The first step at which each variable may hold anything: where its first write is, or the loop around it."""
        start = list(range(len(steps)))
        for first, last in loops:
            start[first : last + 1] = [first] * (last + 1 - first)
        earliest: dict[Variable, int] = {}
        for position, step in enumerate(steps):
            effects = step_effects(step, self.effects)
            for variable in effects.reads:
                earliest.setdefault(variable, 0)
            for variable in effects.writes:
                earliest.setdefault(variable, start[position])
        return earliest
