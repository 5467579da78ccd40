"""What one leaf of a program does to the clocks of the IPUs.

    step ::= wait for arrivals? ; meet? ; wait for free slots? ; work on some IPUs ; free slots ; deliver?

A step first makes its IPUs wait for what was sent to them and it reads (buffered exchanges); then it makes its groups
of IPUs meet (lockstep exchanges, shared decisions, sync zones), and senders wait until the slot they write is free
(buffered exchanges). Then each IPU works; last, the slots that were read are free again, and what was sent has arrived.
So an IPU waits where it needs a value, not where the program copies it. All of it is linear over (max, +), see
`maxplus`, so a clock state may be a vector or a matrix.

State: int64[num_ipus + slots, k] cycles; row i < num_ipus is the clock of IPU i, further rows are the times since when
each slot (the destination of a buffered exchange) is free, when what was sent there has arrived at each receiver, and
of the clocks of I/O tiles. A transfer on I/O tiles begins when it is issued and they are free; it has arrived when it
ends, and whoever needs what it moves waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PHASES = ("compute", "exchange", "global_exchange", "host_exchange", "sync")  # work; what is left over is idle
COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC = range(len(PHASES))
_NONE: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ClockStep:
    """What running one leaf once costs each IPU.

    Args:
        work: cycles of each of `PHASES` on each IPU, int64[num_ipus, 5].
        ipus: the IPUs that take part, rising.
        meets: groups of IPUs that wait for one another before they start.
        senders: IPUs that send in a buffered exchange.
        fills: slots that `senders` write, and so wait for, as rows of the state.
        frees: slots that the senders, or else all `ipus`, have read when the step ends, as rows of the state.
        awaits: IPUs and the arrivals they wait for, as (IPU, row of the state).
        delivers: arrivals at the end of the step, and the IPUs, or rows of I/O tiles, that send them, as (row of the
            state, rows).
        transfers: what I/O tiles do meanwhile, as (row of their clock, IPU, cycles).
    """

    work: np.ndarray
    ipus: tuple[int, ...]
    meets: tuple[tuple[int, ...], ...] = ()
    senders: tuple[int, ...] = _NONE
    fills: tuple[int, ...] = _NONE
    frees: tuple[int, ...] = _NONE
    awaits: tuple[tuple[int, int], ...] = ()
    delivers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    transfers: tuple[tuple[int, int, int], ...] = ()
    cycles: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.work.setflags(write=False)
        object.__setattr__(self, "cycles", self.work.sum(1))

    def start(self, state: np.ndarray) -> None:
        """Makes the IPUs of `state` wait for whatever they wait for before they work, in place."""
        for ipu, row in self.awaits:
            state[ipu] = np.maximum(state[ipu], state[row])
        for group in self.meets:
            rows = list(group)
            state[rows] = state[rows].max(0)
        if self.fills:
            senders = list(self.senders)
            state[senders] = np.maximum(state[senders], state[list(self.fills)].max(0))

    def finish(self, state: np.ndarray) -> None:
        """Makes the IPUs of a started `state` work, transfer, free slots and deliver, in place."""
        state[: len(self.cycles)] += self.cycles[:, None]
        for row, ipu, cycles in self.transfers:
            state[row] = np.maximum(state[row], state[ipu]) + cycles
        readers = list(self.senders or self.ipus)
        if self.frees and readers:
            frees = list(self.frees)
            state[frees] = np.maximum(state[frees], state[readers].max(0))
        for row, senders in self.delivers:
            state[row] = np.maximum(state[row], state[list(senders)].max(0))
