"""Time of variants of a program: the same steps with other work, all variants walked at once.

Input: the steps of an executable, and their work in each variant. Output: cycles. Clocks are a function of work alone,
so the cycles of a variant are as exact as those of the program.
Limits: variants of a recorded run are walked one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import StreamCost
from ipujax.runtime.graph import Leaf, Program
from ipujax.runtime.timeline import ClockStep, MachineClocks, Recording, Walk
from ipujax.runtime.timeline.clocks import HOST_EXCHANGE
from ipujax.runtime.timeline.timeline import timeline

_MOST_AT_ONCE_BYTES = 1 << 26  # work of the variants that are walked together


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a program.

    Args:
        executable: the compiled program.
        program: the control tree that ran, of the executable's steps.
        recording: choices of its data-dependent control; None for the static run.
    """

    executable: Executable
    program: Program
    recording: Recording | None

    def cycles(self, works: Iterable[np.ndarray]) -> list[int]:
        """Return the length of the run with each work of its steps.

        Args:
            works: work of all steps in a variant, see `whole_work`; few of them are in memory at once.

        Raises:
            ProfileError: a trip count is data.
        """
        if self.recording is not None:
            return [self._walked(work) for work in works]
        remaining = iter(works)
        cycles: list[int] = []
        while (work := next(remaining, None)) is not None:
            at_once = max(1, _MOST_AT_ONCE_BYTES // max(1, work.nbytes))
            cycles += self._walked_at_once([work, *islice(remaining, at_once - 1)])
        return cycles

    def _walked_at_once(self, works: Sequence[np.ndarray]) -> list[int]:
        executable = self.executable
        steps = _steps_of(executable, np.stack(works, -1))
        trip_counts = executable.options.trip_counts
        cycles: list[int] = MachineClocks.of(self.program, steps, executable.slots, trip_counts).cycles().tolist()
        return cycles

    def _walked(self, work: np.ndarray) -> int:
        executable = self.executable
        steps = _steps_of(executable, work)
        trip_counts = executable.options.trip_counts
        return timeline(
            Walk.of(self.program, steps, executable.target.num_ipus, executable.slots, trip_counts, self.recording)
        ).cycles


def whole_work(executable: Executable) -> np.ndarray:
    """Return the work of the steps of an executable, int64[steps, num_ipus, 5].

    Cycles of I/O tiles, which work beside their IPU, are those of the host exchange of their step, which has no others.
    """
    work = np.stack([step.work for step in executable.steps.values()])
    for row, step in zip(work, executable.steps.values(), strict=True):
        for _, ipu, cycles in step.transfers:
            row[ipu, HOST_EXCHANGE] = cycles
    work.setflags(write=False)  # many variants are made from it
    return work


def latency_of(executable: Executable, node: Program) -> np.ndarray:
    """Return the cycles of a step for the latency of a host exchange, int64[num_ipus].

    The first transfer of an exchange has it, which may be a scalar: of no argument is it more than of the others.
    """
    cost = executable.costs.get(node) if isinstance(node, Leaf) else None
    work = executable.steps[node].work[:, HOST_EXCHANGE]
    if not isinstance(cost, StreamCost):
        return np.zeros_like(work)
    return np.asarray(np.minimum(cost.counts.latency_cycles(executable.target), work))


def is_beside(executable: Executable) -> np.ndarray:
    """Return the steps of I/O tiles, bool[steps]."""
    return np.array([bool(step.transfers) for step in executable.steps.values()], bool)


def _steps_of(executable: Executable, works: np.ndarray) -> dict[Program, ClockStep]:
    """Return clock steps with other work, [steps, num_ipus, 5, …]."""
    return {node: _with_work(step, works[n]) for n, (node, step) in enumerate(executable.steps.items())}


def _with_work(step: ClockStep, work: np.ndarray) -> ClockStep:
    if not step.transfers:
        return replace(step, work=work)
    transfers = tuple((row, ipu, work[ipu, HOST_EXCHANGE]) for row, ipu, _ in step.transfers)
    return replace(step, work=np.zeros_like(work), transfers=transfers)
