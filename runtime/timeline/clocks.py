"""Effect of one leaf of a program on the clocks of the IPUs.

    step ::= wait for arrivals? ; sync? ; wait for free slots? ; work on some IPUs ; free slots ; deliver?

First the IPUs of a step wait for the data that it reads (buffered exchanges); then groups of IPUs sync (lockstep
exchanges, shared decisions, sync zones), and senders wait until the slots that they write are free (buffered
exchanges). Then each IPU works; last, the slots that were read are free again, and sent data has arrived. So an IPU
waits where it needs a value, not where the program copies it. All of it is linear over (max, +), see `maxplus`, so a
clock state may be a vector or a matrix.

State: int64[num_ipus + slots, k] cycles. Row i < num_ipus is the clock of IPU i. Further rows are, for each slot (the
destination of a buffered exchange), the time since when it is free and the time of the last arrival at each receiver,
and the clocks of I/O tiles. A transfer on I/O tiles begins when it is issued and they are free; it arrives when it
ends, and a step that needs its data waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PHASES = ("compute", "exchange", "global_exchange", "host_exchange", "sync")  # of work; all other cycles are idle
COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC = range(len(PHASES))
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
