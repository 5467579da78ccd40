"""Effect of leaves of a program, and of parts with static control, on the clocks of the IPUs.

    step ::= wait for arrivals? ; sync? ; wait for free slots? ; work on some IPUs ; free slots ; deliver?

First the IPUs of a step wait for the data that it reads (buffered exchanges); then groups of IPUs sync (lockstep
exchanges, shared decisions, sync zones), and senders wait until the slots that they write are free (buffered
exchanges). Then each IPU works; last, the slots that were read are free again, and sent data has arrived. So an IPU
waits where it needs a value, not where the program copies it. All of it is linear over (max, +), see `maxplus`, so a
clock state may be a vector or a matrix, and parts without data-dependent control are one matrix (`StaticEffect`), which
`clock_walk` computes once and applies for each run of the parts; their work is the same in every run (`Sums`).

State: int64[num_ipus + slots, k] cycles. Row i < num_ipus is the clock of IPU i. Further rows are, for each slot (the
destination of a buffered exchange), the time since when it is free and the time of the last arrival at each receiver,
and the clocks of I/O tiles. A transfer on I/O tiles begins when it is issued and they are free; it arrives when it
ends, and a step that needs its data waits for that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.graph import Program
from ipujax.runtime.timeline import maxplus

PHASES = ("compute", "exchange", "global_exchange", "host_exchange", "sync")  # of work; all other cycles are idle
COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC = range(len(PHASES))
Runs = Counter[tuple[str, Program]]  # of leaves and decisions, by the part of the training step of their call
_NONE: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ClockStep:
    """The work of one run of a leaf on each IPU, and its waits.

    Args:
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
        ipus: the IPUs that take part, rising.
        barriers: groups of IPUs that sync before they work.
        senders: IPUs that send in a buffered exchange.
        fills: slots that `senders` write, and so wait for, as rows of the state.
        frees: slots that the senders, or else all `ipus`, have read when the step ends, as rows of the state.
        awaits: arrivals for which IPUs or I/O tiles wait, as (IPU or row of a clock, row of the state).
        delivers: arrivals at the end of the step, as (row of the state, rows of the senders: IPUs or I/O tiles).
        transfers: transfers of I/O tiles beside the work, as (row of their clock, IPU, cycles).
        cycles: sum of `work` over phases, int64[num_ipus].
        rows: `ipus` as an index of the state, int64[IPUs that take part].
    """

    work: np.ndarray
    ipus: tuple[int, ...]
    barriers: tuple[tuple[int, ...], ...] = ()
    senders: tuple[int, ...] = _NONE
    fills: tuple[int, ...] = _NONE
    frees: tuple[int, ...] = _NONE
    awaits: tuple[tuple[int, int], ...] = ()
    delivers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    transfers: tuple[tuple[int, int, int], ...] = ()
    cycles: np.ndarray = field(init=False)
    rows: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.work.setflags(write=False)
        object.__setattr__(self, "cycles", self.work.sum(1))
        object.__setattr__(self, "rows", np.array(self.ipus, np.int64))

    def start(self, state: np.ndarray) -> None:
        """Advance the clocks of `state`, in place, over all waits before the work."""
        for ipu, row in self.awaits:
            state[ipu] = np.maximum(state[ipu], state[row])
        for group in self.barriers:  # after the awaits: a sync passes their delay on to the whole group
            rows = list(group)
            state[rows] = state[rows].max(0)
        if self.fills:
            senders = list(self.senders)
            state[senders] = np.maximum(state[senders], state[list(self.fills)].max(0))

    def finish(self, state: np.ndarray) -> None:
        """Advance the clocks of a started `state`, in place, over work and transfers; free slots and deliver."""
        of_ipus = state[: len(self.cycles)]
        of_ipus += self.cycles[:, None]
        for row, ipu, cycles in self.transfers:
            state[row] = np.maximum(state[row], state[ipu]) + cycles  # when I/O tiles and their IPU are ready
        if self.frees and (self.senders or self.ipus):
            # A slot is free only after its last reader, so later writers wait for all of them.
            frees = list(self.frees)
            state[frees] = np.maximum(state[frees], state[list(self.senders or self.ipus)].max(0))
        for row, senders in self.delivers:
            state[row] = np.maximum(state[row], state[list(senders)].max(0))


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over steps, to which a walk adds.

    Args:
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
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
