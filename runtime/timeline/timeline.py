"""Timeline: start and end of each step on each IPU, by a walk over the program with one clock an IPU.

Input: a `Walk`. Output: `Timeline`. Clocks and sums are those of a walk by tasks of pipelines; the steps inside tasks,
which most readers do without, are walked when they are asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ipujax.runtime.graph import Program
from ipujax.runtime.timeline.clock_walk import TimelineStep, Walk
from ipujax.runtime.timeline.clocks import PHASES


@dataclass(frozen=True, eq=False)
class Timeline:
    """The clocks of all IPUs over one run of a program.

    Args:
        clocks: cycle at which each IPU ends, int64[num_ipus].
        work: cycles of each of `clocks.PHASES` on each IPU, int64[num_ipus, 5].
        overlapped: cycles of transfers on the I/O tiles of each IPU, int64[num_ipus].
        executions: number of runs of each leaf and of each decision of data-dependent control.
        taken: branch assumed for each decision that was not recorded, the costliest.
        walk_of_steps: the walk, of which each leaf is a step.
    """

    clocks: np.ndarray
    work: np.ndarray
    overlapped: np.ndarray
    executions: Mapping[Program, int] = field(repr=False)
    taken: Mapping[Program, int] = field(repr=False)
    walk_of_steps: Walk = field(repr=False)

    @cached_property
    def steps(self) -> tuple[TimelineStep, ...]:
        """Steps in order; a loop is one step."""
        return tuple(self.walk_of_steps.run(self.walk_of_steps.clocks_at_start()))

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


def timeline(walk: Walk) -> Timeline:
    """Walk a program with one clock an IPU, all starting at 0; the tree of steps shows the first iteration of a loop.

    Raises:
        ProfileError: as `Walk.run`.
    """
    clocks = walk.clocks_at_start()
    deque(replace(walk, has_tasks=True).run(clocks), maxlen=0)
    executions = Counter[Program]()
    for (_, node), number in clocks.sums.runs.items():
        executions[node] += number
    for array in (clocks.state, clocks.sums.work, clocks.sums.overlapped):
        array.setflags(write=False)
    return Timeline(clocks.of_ipus, clocks.sums.work, clocks.sums.overlapped, dict(executions), walk.costliest, walk)
