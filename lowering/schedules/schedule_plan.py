"""A schedule for a number of stages and micro-batches, checked, as slots and blocks of slots.

Input: a schedule, the number of stages and of micro-batches. Output: `SchedulePlan`, from which a program is emitted:

    for each block: Repeat(block.count): for each slot: each task on its IPU; then copies of values for other IPUs

A value that one task writes for a micro-batch and a later one reads is in a ring of slots, micro-batch j in slot
j mod depth; `SchedulePlan.depth` is the depth it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.grid import Grid, grid
from ipujax.lowering.schedules.names import as_schedule
from ipujax.lowering.schedules.repetition import Block, Slot, blocks
from ipujax.lowering.schedules.schedule import Schedule, as_task_list
from ipujax.lowering.schedules.tasks import BACKWARD, FORWARD, Kind, TaskList
from ipujax.lowering.schedules.validate import validate
from ipujax.runtime.errors import ScheduleError


@dataclass(frozen=True, slots=True, eq=False)
class SchedulePlan:
    """The tasks of each IPU in each slot of a pipeline.

    Args:
        schedule: the schedule.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.
        training: whether there are backward tasks.
        ipus: the IPU of each stage, in the schedule's numbering.
        lists: the tasks of each IPU, in order.
        grid: the slot of each task.
        blocks: the slots in order, repeated ones once.
    """

    schedule: Schedule
    num_stages: int
    micro_batches: int
    training: bool
    ipus: tuple[int, ...]
    lists: tuple[TaskList, ...]
    grid: Grid
    blocks: tuple[Block, ...]

    @property
    def num_ipus(self) -> int:
        """Number of IPUs the schedule uses."""
        return len(self.lists)

    def depth(self, written: tuple[int, Kind], read: tuple[int, Kind]) -> int:
        """Slots of a ring that holds a value from the task that writes it to the task that reads it.

        A value for another IPU is written there after the slot of the task that computes it, and a slot may be written
        again after the slot of the task that reads it.

        Args:
            written: stage and kind of the tasks that compute the values.
            read: stage and kind of the tasks that read them last.

        Returns:
            The fewest slots such that no value is overwritten before it is read.
        """
        writes = self.grid.of(*written)
        reads = self.grid.of(*read)
        return int((np.searchsorted(writes, reads) - np.arange(self.micro_batches)).max())

    def buffers(self, written: tuple[int, Kind], read: tuple[int, Kind]) -> int:
        """Variables in rotation for values on their way to another IPU: one more than the `depth` of their ring.

        A sender waits until the variable it writes has been read. With one to spare, this never lengthens a step of the
        schedules here, whatever the costs of the stages: a step takes as long as with a variable for each value.

        Args:
            written: stage and kind of the tasks that compute the values.
            read: stage and kind of the tasks that read them.
        """
        return self.depth(written, read) + 1

    def in_flight(self, stage: int, until: Kind = BACKWARD) -> int:
        """Micro-batches in the stash of a stage at once, from the forward task to a backward task.

        Args:
            stage: the stage.
            until: kind of the backward task; `BACKWARD_WEIGHT` for values that only weight gradients need.
        """
        return self.depth((stage, FORWARD), (stage, until))

    def blocks_by(self, multiple: int) -> tuple[Block, ...]:
        """The blocks, each with a stride that is a multiple of a number, at least 1, see `Block.by`."""
        return tuple(part for block in self.blocks for part in block.by(multiple))

    def slots(self) -> Iterator[Slot]:
        """All slots in order, unrolled."""
        for block in self.blocks:
            yield from block.unrolled()

    def drawing(self) -> str:
        """One line per IPU, one column per slot: F, B, I (input) or W (weight gradients), then stage.micro-batch."""
        cells = [[""] * self.grid.length for _ in self.lists]
        for row, tasks, slots in zip(cells, self.lists, self.grid.slots, strict=True):
            for task, slot in zip(tasks, slots.tolist(), strict=True):
                row[slot] = task.short
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)


def schedule_plan(schedule: str | Schedule, num_stages: int, micro_batches: int, training: bool = True) -> SchedulePlan:
    """Computes and checks the plan of a schedule for a number of stages and micro-batches.

    Args:
        schedule: the schedule, or its name.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.
        training: whether there are backward tasks.

    Raises:
        ScheduleError: for an unknown name, numbers outside its domain, or wrong tasks, with the first of them.
    """
    schedule = as_schedule(schedule)
    schedule.check(num_stages, micro_batches, training)
    tasks_of_ipus = (schedule.tasks if training else schedule.forward_tasks)(num_stages, micro_batches)
    if not isinstance(tasks_of_ipus, Iterable):
        raise ScheduleError(
            f"{schedule.name!r} returned no tasks", expected="a list of Tasks for each IPU", got=repr(tasks_of_ipus)
        )
    lists = tuple(map(as_task_list, tasks_of_ipus))
    ipus = validate(lists, num_stages, micro_batches, training)
    slots = grid(lists, num_stages, micro_batches)
    return SchedulePlan(schedule, num_stages, micro_batches, training, ipus, lists, slots, blocks(lists, slots))
