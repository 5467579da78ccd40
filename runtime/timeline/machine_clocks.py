"""Clocks of all IPUs at the end of a program, for many machines at once that differ in rates.

Input: a program, and a `ClockStep` for each of its leaves whose work has an entry for each machine. Output: clocks, and
the runs of each leaf. It is the walk of `clock_walk` without steps, phases and recordings: loops are powers of max-plus
matrices, functions that are called often are one, and of branches that data decide each machine takes its costliest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.graph import Block, Branch, Call, Function, Loop, Program, WriteUndef
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import ClockStep, Sums
from ipujax.runtime.timeline.run_control import Clocks, Control


@dataclass(frozen=True, slots=True, eq=False)
class MachineClocks:
    """A program on many machines.

    Args:
        program: the control tree.
        steps: clock step of each leaf and decision, of all machines.
        rows: rows of the clock state: IPUs and slots.
        num_ipus: number of IPUs.
        machines: number of machines.
        control: trip counts of loops.
    """

    program: Program
    steps: Mapping[Program, ClockStep]
    rows: int
    num_ipus: int
    machines: int
    control: Control
    _matrices: dict[Program | Function, np.ndarray] = field(default_factory=dict)
    _calls: dict[Function, int] = field(default_factory=dict)
    _choices: dict[Program, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, program: Program, steps: Mapping[Program, ClockStep], slots: int, trip_counts: Mapping[str, int]
    ) -> MachineClocks:
        """Return the clocks of a program whose loops have `trip_counts`, by name, where these are data."""
        num_ipus, _, machines = next((step.work.shape for step in steps.values()), (1, 0, 1))
        return cls(program, steps, num_ipus + slots, num_ipus, machines, Control.of(program, trip_counts, {}))

    def cycles(self) -> np.ndarray:
        """Return the length of one run on each machine, [machines].

        Raises:
            ProfileError: a loop whose trip count is unknown.
        """
        state = self._zeros(1)
        self._run_part(self.program, state)
        return np.asarray(state[: self.num_ipus, 0].max(0))

    def _zeros(self, columns: int) -> np.ndarray:
        dtype = next((step.work.dtype for step in self.steps.values()), np.dtype(np.int64))
        return np.zeros((self.rows, columns, self.machines), dtype)

    def _run_part(self, program: Program, state: np.ndarray) -> None:
        """Advance `state` in place over one run of a part of the program.

        `state` is [rows, columns, machines]: a row for each clock, of an IPU or a slot, and one column in a run; of the
        max-plus matrix of a function as many columns as rows.
        """
        match program:
            case Call(function):
                self._run_call(function, state)
            case Block():
                for child in program.children():
                    self._run_part(child, state)
            case Loop(test=None):
                self._run_iterations(program, lambda clocks: self._run_part(program.body, clocks), state)
            case Loop(test=Program() as condition):
                self._test(program, condition, state)
                self._run_iterations(program, lambda clocks: self._body_and_test(program, condition, clocks), state)
            case Branch():
                self._leaf(program, state)
                self._run_costliest_branch(program, state)
            case WriteUndef():
                return
            case _:
                self._leaf(program, state)

    def _run_call(self, function: Function, state: np.ndarray) -> None:
        """Run a function: step by step, then, once it ran as often as a matrix has columns, by its matrix."""
        calls = self._calls[function] = self._calls.get(function, 0) + state.shape[1]
        if calls <= self.rows:
            self._run_part(function.body, state)
            return
        if function not in self._matrices:
            matrix = self._zeros(self.rows) + maxplus.identity(self.rows)[:, :, None]
            self._run_part(function.body, matrix)
            self._matrices[function] = matrix
        state[:] = maxplus.product(self._matrices[function], state)

    def _leaf(self, leaf: Program, state: np.ndarray) -> None:
        step = self.steps[leaf]
        step.start(state)
        step.finish(state)

    def _test(self, loop: Loop, condition: Program, state: np.ndarray) -> None:
        self._run_part(condition, state)
        self._leaf(loop, state)

    def _body_and_test(self, loop: Loop, condition: Program, state: np.ndarray) -> None:
        self._run_part(loop.body, state)
        self._test(loop, condition, state)

    def _run_iterations(self, loop: Loop, iteration: Callable[[np.ndarray], None], state: np.ndarray) -> None:
        """Run the iterations of a loop: the first step by step, the others as a matrix power."""
        count = self.control.trip_count(loop, Clocks(state, Sums.none(self.num_ipus)))
        if count:
            iteration(state)
        if count > 1:
            if loop not in self._matrices:
                matrix = self._zeros(self.rows) + maxplus.identity(self.rows)[:, :, None]
                iteration(matrix)
                self._matrices[loop] = matrix
            state[:] = maxplus.apply_power(self._matrices[loop], count - 1, state)

    def _run_costliest_branch(self, node: Branch, state: np.ndarray) -> None:
        """Run the branch that is costliest from equal clocks, which may be another on each machine."""
        branches = node.children()
        if node not in self._choices:
            self._choices[node] = np.argmax([self._alone(branch) for branch in branches], axis=0)
        before = state.copy()
        for number, branch in enumerate(branches):
            chosen = self._choices[node] == number
            if chosen.any():
                after = before.copy()
                self._run_part(branch, after)
                state[..., chosen] = after[..., chosen]

    def _alone(self, branch: Program) -> np.ndarray:
        state = self._zeros(1)
        self._run_part(branch, state)
        return np.asarray(state.max((0, 1)))


def equal_ipus(steps: Sequence[ClockStep]) -> np.ndarray:
    """Return the class of each machine by the IPUs that have work in each step, int64[machines].

    Which IPUs take part in a step must be the same for all machines of one `MachineClocks`; only on machines with
    phases of no cycles it is not.
    """
    if not steps:
        return np.zeros(1, np.int64)
    has_work = np.concatenate([step.work.any(1) for step in steps])
    if (has_work == has_work[:, :1]).all():
        return np.zeros(has_work.shape[-1], np.int64)
    return np.unique(has_work, axis=1, return_inverse=True)[1].reshape(-1)
