"""Pipeline schedules on the clocks of IPUs that exchange through buffers, against a simulator of dependencies alone.

Each task is a step of its IPU, each value for another IPU a step of the sender, right after the slot; values rotate
through the buffers of the plan. Exchange is free, so that only waiting counts.
"""

from __future__ import annotations

from math import lcm
from random import Random

import numpy as np

from ipujax.lowering.schedules import BACKWARD, FORWARD
from ipujax.runtime.graph.program import ComputeSet, Execute, Repeat, Sequence
from ipujax.runtime.timeline.clock_walk import Walk
from ipujax.runtime.timeline.clocks import COMPUTE, PHASES, ClockStep
from ipujax.runtime.timeline.timeline import timeline
from tests.lowering.schedules.schedule_helpers import every_schedule, in_domain, lists_of, names, plan_of
from tests.lowering.schedules.schedule_simulator import letters, makespan


class Clocks:
    """A plan as a program of steps, whose tasks cost `costs[stage][kind]` cycles."""

    def __init__(self, plan, costs):
        self.plan = plan
        self.costs = costs
        self.steps = {}
        self.leaves = {}
        # Two rows of the clock state for each buffer: the time it became free, and the time a value arrived.
        self.buffers = {edge: plan.buffers(*edge) for edge in self.edges()}
        self.rows = {}
        for edge, number in self.buffers.items():
            for buffer in range(number):
                self.rows[edge, buffer] = plan.num_ipus + 2 * len(self.rows)

    def edges(self):
        """(writer, reader) of values that go from IPU to IPU, each a stage and a kind."""
        for stage in range(self.plan.num_stages - 1):
            if self.plan.ipus[stage] != self.plan.ipus[stage + 1]:
                yield (stage, FORWARD), (stage + 1, FORWARD)
                yield (stage + 1, BACKWARD), (stage, BACKWARD)

    def leaf(self, key, step):
        if key not in self.leaves:
            self.leaves[key] = Execute(ComputeSet(str(key)))
            self.steps[self.leaves[key]] = step
        return self.leaves[key]

    def row(self, task, end):
        """The row of the buffer a task writes (end 0) or reads (end 1), None if there is none."""
        stage, j, kind = letters(task)
        work = (stage, FORWARD if kind == "F" else BACKWARD)
        edges = [edge for edge in self.buffers if edge[end] == work and kind != "W"]
        return self.rows[edges[0], j % self.buffers[edges[0]]] if edges else None

    def task(self, task):
        ipu = self.plan.ipus[task.stage]
        row = self.row(task, 1)
        work = np.zeros((self.plan.num_ipus, len(PHASES)), np.int64)
        work[ipu, COMPUTE] = self.costs[task.stage][letters(task)[2]]
        conditions = {} if row is None else {"frees": (row,), "awaits": ((ipu, row + 1),)}
        return self.leaf((task.stage, task.kind, row), ClockStep(work, (ipu,), **conditions))

    def send(self, task):
        ipu = self.plan.ipus[task.stage]
        row = self.row(task, 0)
        if row is None:
            return Sequence()
        work = np.zeros((self.plan.num_ipus, len(PHASES)), np.int64)
        step = ClockStep(work, (ipu,), senders=(ipu,), fills=(row,), delivers=((row + 1, (ipu,)),))
        return self.leaf(("send", row), step)

    def cycles(self):
        blocks = self.plan.blocks_by(lcm(*self.buffers.values()))
        program = Sequence(
            *(
                Repeat(
                    block.count,
                    Sequence(*(step(task) for slot in block.slots for step in (self.task, self.send) for task in slot)),
                )
                for block in blocks
            )
        )
        return timeline(Walk.of(program, self.steps, self.plan.num_ipus, 2 * len(self.rows))).cycles


@every_schedule
def test_buffered_exchange_takes_as_long_as_dependencies(schedule):
    random = Random(names(schedule))
    for p, m in in_domain(schedule, (2, 3, 4, 6), (6, 12, 48)):
        plan = plan_of(schedule, p, m)
        for _ in range(3):
            costs = [{kind: random.randint(1, 9) for kind in "FIW"} for _ in range(p)]
            costs = [cost | {"B": cost["I"] + cost["W"]} for cost in costs]
            assert Clocks(plan, costs).cycles() == makespan(lists_of(plan), p, costs), (m, costs)
