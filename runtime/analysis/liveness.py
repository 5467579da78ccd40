"""Liveness: steps of a program during which variables occupy tile memory.

Input: a program and its effects. Output: `Liveness`, intervals of steps for each variable. A step is a leaf of the tree
in program order, the branches of a decision one after the other, the body of a loop once. A call is one step: a
function has one frame, whose liveness is computed once and which occupies memory during its calls.

A variable occupies memory at a step that reads or writes it, and from each step that may write it up to the last that
may read that value; a variable that a loop body reads before it has written all of it is live through the loop. Nothing
is live before its first write, unless it is read before. Constants that are used are always live.
Source: backward dataflow over a structured program, in one pass, as `Effects` already has the fixpoint of every loop.
Limits: a variable is live as a whole; parts written by different steps count as partial writes, which kill nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ipujax.runtime.analysis.effects import Effects, EffectsOf
from ipujax.runtime.graph import Block, Branch, Call, Decision, Function, Leaf, Loop, Program, distinct
from ipujax.runtime.tensor import Variable

Step = Leaf | Call | Decision  # a decision as a step is the read of its decider


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
        steps: the steps in order.
        intervals: steps at which variables occupy memory, in the order of the graph's variables; constants are omitted.
        functions: the frames of the functions that are called, by function.
    """

    steps: tuple[Step, ...]
    intervals: tuple[Interval, ...]
    functions: Mapping[Function, Liveness]

    def live_at(self, step: int) -> frozenset[Variable]:
        """Return the variables that occupy memory during a step, without those of a called function's frame."""
        return frozenset(i.variable for i in self.intervals if i.first <= step <= i.last)


def liveness(program: Program, effects: EffectsOf) -> Liveness:
    """Compute the steps at which each variable of a program, run once, occupies memory; nothing is read after it."""
    return _Frames(program, effects).frame(program, None)


def constants(program: Program, effects: EffectsOf) -> frozenset[Variable]:
    """Return the constants that a program uses."""
    return frozenset(v for v in effects(program).reads if v.is_constant)


class _Frames:
    """Liveness of a program and of every function in it."""

    def __init__(self, program: Program, effects: EffectsOf) -> None:
        self.effects = effects
        self.functions: dict[Function, Liveness] = {}
        self.frame_of = _variable_frames(program, effects)
        self.number = {variable: number for number, variable in enumerate(effects.graph.mappings)}

    def frame(self, program: Program, function: Function | None) -> Liveness:
        """Compute the liveness of a program, or of a function, for the variables of its frame."""
        for call in distinct(program, into_calls=False):
            if isinstance(call, Call) and call.function not in self.functions:
                self.functions[call.function] = self.frame(call.function.body, call.function)
        return _Scan(self.effects, self.frame_of, function, self.number).run(program, self.functions)


def _variable_frames(program: Program, effects: EffectsOf) -> dict[Variable, Function | None]:
    """Return for each variable the innermost function outside of which no step uses it, None for the program itself."""
    # A variable that a function reads before it writes it keeps its value from call to call, and is the caller's.
    common_chain: dict[Variable, tuple[Function, ...]] = {}
    visited: set[tuple[Program, tuple[Function, ...]]] = set()

    def visit(node: Program, chain: tuple[Function, ...]) -> None:
        """Walk a node inside the functions of `chain`, outermost first."""
        if isinstance(node, Call):
            chain = (*chain, node.function)
            if (node.function.body, chain) in visited:
                return
            visited.add((node.function.body, chain))
        for child in node.children():
            visit(child, chain)
        # A call's effects are those of its body, which is visited with the function in the chain.
        used = step_effects(node, effects) if isinstance(node, Step) and not isinstance(node, Call) else Effects()
        for variable in used.reads | used.writes:
            earlier_chain = common_chain.get(variable)
            common_chain[variable] = chain if earlier_chain is None else tuple(f for f in earlier_chain if f in chain)

    visit(program, ())
    return {
        variable: next((f for f in reversed(chain) if variable not in effects(f.body).reads), None)
        for variable, chain in common_chain.items()
    }


def step_effects(step: Program, effects: EffectsOf) -> Effects:
    """Return the effects of one step; of a decision, those of reading its decider."""
    return Effects(frozenset(step.decider.variables())) if isinstance(step, Decision) else effects(step)


class _Scan:
    """Backward walk of a frame; positions count steps from the end, until `run` turns them around.

    Args:
        effects: of programs.
        frame_of: frame of each variable, by its function.
        function: that of this frame; None for the program.
        number: order of variables in the result.
    """

    def __init__(
        self,
        effects: EffectsOf,
        frame_of: Mapping[Variable, Function | None],
        function: Function | None,
        number: Mapping[Variable, int],
    ) -> None:
        self.effects = effects
        self.frame_of = frame_of
        self.function = function
        self.number = number
        self.steps: list[Step] = []  # the last one first
        self.intervals: list[tuple[Variable, int, int]] = []  # variable, first and last step
        self.live: dict[Variable, int] = {}  # at the current position: variable → position of its last read
        self.loops: list[tuple[int, int]] = []  # positions of the last and the first step of each outermost loop
        self.depth = 0  # loops around the current position

    def run(self, program: Program, functions: Mapping[Function, Liveness]) -> Liveness:
        """Walk the program of the frame; return its liveness, with that of the functions which it calls."""
        self.visit(program)
        self.set_live(())  # closes the intervals of all that is read before it is written
        end = len(self.steps) - 1
        steps = tuple(reversed(self.steps))
        earliest = self.earliest(steps, [(end - last, end - first) for first, last in self.loops])
        trimmed = ((v, max(end - first, earliest.get(v, 0)), end - last) for v, first, last in self.intervals)
        # Sets of variables have another order in each process.
        ordered = sorted(trimmed, key=lambda interval: (self.number[interval[0]], interval[1]))
        intervals = tuple(Interval(v, first, last) for v, first, last in ordered if first <= last)
        called = {step.function: functions[step.function] for step in steps if isinstance(step, Call)}
        return Liveness(steps, intervals, called)

    def in_frame(self, variables: Iterable[Variable]) -> set[Variable]:
        """Return those of some variables that are in this frame."""
        return {v for v in variables if not v.is_constant and self.frame_of.get(v) is self.function}

    def set_live(self, live: Iterable[Variable]) -> None:
        """Make exactly these variables live from here on backwards."""
        position = len(self.steps)
        live = set(live)
        for variable in self.live.keys() - live:
            self.close(variable, position - 1)
        for variable in live:
            self.live.setdefault(variable, position)

    def close(self, variable: Variable, first: int) -> None:
        last = self.live.pop(variable)
        if last <= first:
            self.intervals.append((variable, first, last))

    def visit(self, node: Program) -> None:
        """Walk one node backwards, from the variables live after it to those live before it."""
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
        """Walk a step backwards: before it, its operands are live, and variables that it overwrites are not."""
        position = len(self.steps)
        self.steps.append(node)  # type: ignore[arg-type]
        effects = step_effects(node, self.effects)
        reads = self.in_frame(effects.reads)
        for variable in self.in_frame(effects.writes) - reads:
            if variable not in self.live:  # written and never read, it still occupies memory while written
                self.intervals.append((variable, position, position))
            elif variable in effects.kills:
                self.close(variable, position)
        for variable in reads:
            self.live.setdefault(variable, position)

    def loop(self, node: Loop) -> None:
        """Walk a loop, as one iteration at whose end the operands of the next are live."""
        first = len(self.steps)
        self.depth += 1
        if node.test is None:
            # At the end of an iteration all that the next one reads is live too.
            self.set_live(self.live.keys() | self.in_frame(self.effects(node.body).reads))
            self.visit(node.body)
        else:
            self.tested_loop(node, node.test)
        self.depth -= 1
        # Only outermost loops: those inside them begin no earlier.
        if self.depth == 0 and len(self.steps) > first:
            self.loops.append((first, len(self.steps) - 1))

    def tested_loop(self, loop: Loop, test: Program) -> None:
        """Walk a loop with a test, which runs before each iteration and once after the last."""
        after = set(self.live)
        test_effects = self.effects(test)
        tested = (
            after | self.in_frame(step_effects(loop, self.effects).reads) | self.in_frame(self.effects(loop.body).reads)
        )
        # Live at the end of the body: all that the next test reads, and all live after a test that it does not kill.
        self.set_live(self.in_frame(test_effects.reads) | (tested - test_effects.kills))
        self.visit(loop.body)
        self.set_live(self.live.keys() | after)
        self.step(loop)
        self.visit(test)

    def branch(self, node: Branch) -> None:
        """Walk all branches from what is live behind them; before them, all that any of them reads is live."""
        after = set(self.live)
        before: set[Variable] = set()
        for case in reversed(node.children()):
            self.set_live(after)
            self.visit(case)
            before |= self.live.keys()
        self.set_live(before)
        self.step(node)

    def earliest(self, steps: Sequence[Step], loops: Sequence[tuple[int, int]]) -> dict[Variable, int]:
        """Return the first step at which each variable may have a value: its first write, or the loop around that."""
        # A value written in one iteration may be read earlier in the next, so it begins with the outermost loop.
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
