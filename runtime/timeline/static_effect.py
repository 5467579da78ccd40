"""Effect of parts of a program with static control: a matrix over the clocks, and the sums of their work.

Input: clock steps of leaves. Output: `Sums` over steps, and `StaticEffect`, which `clock_walk` computes once and
applies for each run of the parts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.graph import Program
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import PHASES, ClockStep

Runs = Counter[tuple[str, Program]]  # of leaves and decisions, by the part of the training step of their call


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over steps, to which a walk adds.

    Args:
        work: cycles of each of `clocks.PHASES` on each IPU, int64[num_ipus, 5].
        overlapped: cycles of transfers on the I/O tiles of each IPU, int64[num_ipus].
        runs: number of runs of each leaf and of each decision of data-dependent control.
    """

    work: np.ndarray
    overlapped: np.ndarray
    runs: Runs

    @classmethod
    def none(cls, num_ipus: int) -> Sums:
        """Return the sums over no steps."""
        return cls(np.zeros((num_ipus, len(PHASES)), np.int64), np.zeros(num_ipus, np.int64), Counter())

    def add_step(self, leaf: Program, step: ClockStep, times: int, part: str) -> None:
        """Add runs of a leaf."""
        if times > 1:  # of one run the clocks are checked
            maxplus.check_time(times * int(step.cycles.max()))
        self.runs[part, leaf] += times
        work = self.work
        work += step.work if times == 1 else step.work * times
        for _, ipu, cycles in step.transfers:
            self.overlapped[ipu] += cycles * times

    def add(self, other: Sums) -> None:
        """Add other sums."""
        self.work[:] += other.work
        self.overlapped[:] += other.overlapped
        for key, number in other.runs.items():
            self.runs[key] += number

    def times(self, count: int) -> Sums:
        """Return the sums over `count` repetitions."""
        if count == 1:
            return self
        runs = Counter({key: number * count for key, number in self.runs.items()})
        return Sums(self.work * count, self.overlapped * count, runs)


@dataclass(frozen=True, slots=True, eq=False)
class StaticEffect:
    """Effect of parts with static control on the clocks.

    Args:
        rows: rows of the clock state that they read or change.
        matrix: max-plus matrix over these rows, int64[rows, rows].
        begin: of a task: row of a matrix that gives the clock of its IPU when its work begins, int64[1, rows].
        sums: over their steps.
    """

    rows: tuple[int, ...]
    matrix: np.ndarray
    begin: np.ndarray | None
    sums: Sums

    def apply(self, state: np.ndarray, count: int = 1) -> None:
        """Advance the clocks of `state`, int64[IPUs + slots, k] cycles, in place, over `count` runs of the parts."""
        apply_to_rows(self.matrix, self.rows, state, count)

    def apply_task(self, state: np.ndarray) -> np.ndarray:
        """Advance the clocks of `state` in place; return that of the task's IPU when its work begins, int64[k]."""
        assert self.begin is not None, "the effect is of a task"
        chosen = list(self.rows)
        # As one product: a task of a pipeline has few rows, and a ramp of s stages s² tasks.
        clocks = maxplus.product(np.concatenate([self.matrix, self.begin]), state[chosen])
        state[chosen] = clocks[:-1]
        begin: np.ndarray = clocks[-1]
        return begin


def apply_to_rows(matrix: np.ndarray, rows: tuple[int, ...], state: np.ndarray, count: int) -> None:
    """Advance clocks, int64[n, k], in place: `matrix` over `rows`, `count` times."""
    chosen = list(rows)
    state[chosen] = maxplus.apply_power(matrix, count, state[chosen])


def rows_of(step: ClockStep | None) -> set[int]:
    """Return the rows of the clock state that a step reads or changes."""
    if step is None:
        return set()
    rows = {*step.ipus, *np.flatnonzero(step.cycles).tolist(), *step.senders, *step.fills, *step.frees}
    rows |= {row for pair in step.awaits for row in pair} | {row for group in step.barriers for row in group}
    rows |= {row for arrival, senders in step.delivers for row in (arrival, *senders)}
    return rows | {row for clock, ipu, _ in step.transfers for row in (clock, ipu)}
