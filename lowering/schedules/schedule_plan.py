"""A schedule for a number of stages and micro-batches, checked, as slots and blocks of slots.

Input: a schedule, the number of stages and of micro-batches. Output: `SchedulePlan`, from which a program is emitted:

    for each block: Repeat(block.count): for each slot: each task on its IPU; then copies of values for other IPUs

The grid of a pipeline is compressed to slots that run once and blocks of slots that repeat:

    Block ::= count × slots        iteration i runs each task of the slots on micro-batch task.micro_batch + i·stride

1F1B becomes a ramp-up, one repeated block, a ramp-down; GPipe has a second block, of backward tasks. Slots repeat if
slot t + period has the same tasks on the same IPUs as slot t, all of them `stride` micro-batches later. The block that
leaves the fewest slots is taken first, then the slots before and after it are compressed likewise.

A value that one task writes for a micro-batch and a later one reads is in a ring of slots, micro-batch j in slot
j mod depth; `SchedulePlan.depth` is the depth it needs.
Limits: a grid in which nothing repeats is not compressed, and grows with the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from ipujax.lowering.schedules.grid import Grid, grid, validate
from ipujax.lowering.schedules.names import as_schedule
from ipujax.lowering.schedules.schedule import BACKWARD, FORWARD, Kind, Schedule, Task, TaskList, as_task_list
from ipujax.runtime.errors import ScheduleError

Slot = tuple[Task, ...]  # the tasks of a slot, by IPU
_MIN_REPEATS = 3  # two iterations take as many nodes as two copies of the slots


@dataclass(frozen=True, slots=True)
class Block:
    """Slots that run several times."""

    slots: tuple[Slot, ...]  # tasks, with the micro-batches of the first iteration
    count: int = 1  # number of iterations, at least 1
    stride: int = 0  # difference of micro-batches between two iterations

    def unrolled(self) -> Iterator[Slot]:
        """The slots of all iterations, in order."""
        return self._iterations(0, self.count)

    def by(self, multiple: int) -> tuple[Block, ...]:
        """Joins iterations of the loop to longer ones, which are a multiple of `multiple` micro-batches apart.

        Micro-batch j uses variable j mod `multiple`, as buffers rotate: so all iterations of a longer one use the same
        variables at the same place, as a loop needs. Returns the block of the longer iterations, and one of those that
        are left over, if any.
        """
        if self.count == 1:
            return (self,)
        period = multiple // gcd(multiple, self.stride)  # iterations of this block in one of the new ones
        count = self.count // period
        parts = []
        if count:
            parts.append(Block(tuple(self._iterations(0, period)), count, self.stride * period if count > 1 else 0))
        if count * period < self.count:
            parts.append(Block(tuple(self._iterations(count * period, self.count))))
        return tuple(parts)

    def _iterations(self, start: int, stop: int) -> Iterator[Slot]:
        for iteration in range(start, stop):
            shift = iteration * self.stride
            for slot in self.slots:
                yield tuple(Task(task.stage, task.micro_batch + shift, task.kind) for task in slot)


def blocks(lists: Sequence[TaskList], grid: Grid) -> tuple[Block, ...]:
    """Compresses the slots of a grid to blocks, each of slots that run once or repeat for later micro-batches.

    Args:
        lists: tasks of each IPU.
        grid: the slot of each task.
    """
    # One row a slot, with the kind, stage and micro-batch of the task of each IPU; −1 where it has none. No slot is
    # empty on all IPUs: its first micro-batch is that of its first task.
    rows = np.full((grid.length, len(lists), 3), -1, np.int64)
    for ipu, (tasks, slots) in enumerate(zip(lists, grid.slots, strict=True)):
        rows[slots, ipu] = np.stack([tasks.kinds, tasks.stages, tasks.micro_batches], -1)
    has_task = rows[:, :, 0] >= 0
    first = rows[np.arange(len(rows)), has_task.argmax(1), 2]
    relative = rows.copy()
    relative[:, :, 2] = np.where(has_task, rows[:, :, 2] - first[:, None], 0)
    # Slots with equal numbers do the same tasks, up to a shift of all micro-batches, which `first` tells.
    number_of_row: dict[bytes, int] = {}
    numbers = np.array([number_of_row.setdefault(row.tobytes(), len(number_of_row)) for row in relative])
    return tuple(_blocks_of_slots(rows, numbers, first, 0, len(rows)))


def _blocks_of_slots(
    rows: np.ndarray, numbers: np.ndarray, first: np.ndarray, start: int, stop: int
) -> Iterator[Block]:
    """Yields the blocks of slots from `start` to before `stop`: those before the best repetition, it, those after it.

    Args:
        rows: kind, stage and micro-batch of the task of each IPU in each slot, int64[slots, IPUs, 3].
        numbers: of slots, equal for those with the same tasks up to a shift of all micro-batches, int64[slots].
        first: micro-batch of the first task of each slot, int64[slots].
        start: first slot of the range.
        stop: slot after it.
    """
    repetition = best_repetition(numbers[start:stop], first[start:stop])
    if repetition is None:
        if start < stop:
            yield Block(_slots(rows[start:stop]))
        return
    begin = start + repetition.offset
    next_begin = begin + repetition.period
    end = begin + repetition.period * repetition.iterations
    yield from _blocks_of_slots(rows, numbers, first, start, begin)
    # An iteration has the micro-batches of the one before, plus the stride; there are several iterations.
    stride = int(first[next_begin] - first[begin])
    yield Block(_slots(rows[begin:next_begin]), repetition.iterations, stride)
    yield from _blocks_of_slots(rows, numbers, first, end, stop)


class Repetition(NamedTuple):
    """Slots that repeat: the first of them, how many an iteration has, and how many iterations there are."""

    offset: int
    period: int
    iterations: int


def best_repetition(numbers: np.ndarray, first: np.ndarray) -> Repetition | None:
    """Finds the run of slots whose repetition in a loop saves the most slots; None if none runs three times.

    Args:
        numbers: of slots, equal for those with the same tasks up to a shift of all micro-batches, int64[slots].
        first: first micro-batch of each slot; those of a repetition are at one stride, int64[slots].
    """
    length = len(numbers)
    saved = 0  # slots that `best` saves: all iterations but one
    best = None
    for period in range(1, length // _MIN_REPEATS + 1):
        if saved >= length - period:  # no longer period can save more
            break
        # Quick test: a repetition that saves more is so long that it must contain this slot, if no later than `saved`.
        edge = length - (saved + period + 1)
        if edge <= saved and numbers[edge] != numbers[edge + period]:
            continue
        # True where a slot has the same tasks as the slot a period later, up to a shift of micro-batches; runs of such
        # slots with equal shifts are repetitions.
        same = numbers[period:] == numbers[:-period]
        # The shift where slots repeat; elsewhere numbers that are never equal to their neighbours.
        shift = np.where(same, first[period:] - first[:-period], _NO_SHIFT - np.arange(len(same)))
        run_bounds = np.flatnonzero(np.diff(shift, prepend=_NO_SHIFT + 1, append=_NO_SHIFT + 1))
        counts = (np.diff(run_bounds) + period) // period  # iterations of each run
        counts[~same[run_bounds[:-1]]] = 1
        longest = int(counts.argmax())
        count = int(counts[longest])
        if count >= _MIN_REPEATS and (count - 1) * period > saved:
            saved = (count - 1) * period
            best = Repetition(int(run_bounds[longest]), period, count)
    return best


_NO_SHIFT = np.iinfo(np.int64).min // 2


def _slots(rows: np.ndarray) -> tuple[Slot, ...]:
    """The tasks of rows of (kind, stage, micro-batch) by IPU."""
    return tuple(
        tuple(Task(stage, micro_batch, Kind(kind)) for kind, stage, micro_batch in row if kind >= 0)
        for row in rows.tolist()
    )


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
        """Number of slots of the ring buffer that holds values from the task that writes to the one that reads them.

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
        # Before the n-th read, counted from 0, n values are no longer needed of those that have been written by then.
        return int((np.searchsorted(writes, reads) - np.arange(self.micro_batches)).max())

    def buffers(self, written: tuple[int, Kind], read: tuple[int, Kind]) -> int:
        """Number of variables used in rotation for values on their way to another IPU: one more than their `depth`.

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
    """Computes the plan of a schedule for a number of stages and micro-batches: tasks, their slots, blocks of slots.

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
