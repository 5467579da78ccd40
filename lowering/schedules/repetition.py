"""A grid as a short program: slots that run once, and blocks of slots that repeat.

Input: the grid of a pipeline. Output: a list of `Block`s which, unrolled, are the slots of the grid exactly:

    Block ::= count × slots        iteration i runs each task of the slots on micro-batch task.micro_batch + i·stride

1F1B becomes a ramp-up, one repeated block, a ramp-down; GPipe has a second block, of backward tasks. A block is found
where slot t + period does in the same places the same tasks as slot t, all of them `stride` micro-batches later. The
block that leaves the fewest slots to write down is taken first, then what is before and after it likewise.

Limits: a grid in which nothing repeats is written down as it is, and grows with the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from ipujax.lowering.schedules.grid import Grid
from ipujax.lowering.schedules.tasks import Kind, Task, TaskList

Slot = tuple[Task, ...]  # the tasks of a slot, by IPU
_FEWEST_REPEATS = 3  # two iterations are as short written out


@dataclass(frozen=True, slots=True)
class Block:
    """Some slots, run some times.

    Args:
        slots: what runs, with the micro-batches of the first iteration.
        count: number of iterations, at least 1.
        stride: how many micro-batches later each iteration is than the one before.
    """

    slots: tuple[Slot, ...]
    count: int = 1
    stride: int = 0

    def unrolled(self) -> Iterator[Slot]:
        """The slots of all iterations, in order."""
        return self._iterations(0, self.count)

    def by(self, multiple: int) -> tuple[Block, ...]:
        """The same slots in blocks whose stride is a multiple of a number.

        Micro-batch j is then in slot j mod `multiple` of a ring in every iteration alike, so that the ring can be that
        many variables.

        Args:
            multiple: the number, at least 1.
        """
        if self.count == 1:
            return (self,)
        together = multiple // gcd(multiple, self.stride)
        count = self.count // together
        parts = []
        if count:
            parts.append(Block(tuple(self._iterations(0, together)), count, self.stride * together if count > 1 else 0))
        if count * together < self.count:
            parts.append(Block(tuple(self._iterations(count * together, self.count))))
        return tuple(parts)

    def _iterations(self, start: int, stop: int) -> Iterator[Slot]:
        for iteration in range(start, stop):
            later = iteration * self.stride
            for slot in self.slots:
                yield tuple(Task(task.stage, task.micro_batch + later, task.kind) for task in slot)


def blocks(lists: Sequence[TaskList], grid: Grid) -> tuple[Block, ...]:
    """The blocks of a grid, in order.

    Args:
        lists: the tasks of each IPU.
        grid: their slots.
    """
    # One row a slot, with the kind, stage and micro-batch of the task of each IPU; −1 where it has none.
    rows = np.full((grid.length, len(lists), 3), -1, np.int64)
    for ipu, (tasks, slots) in enumerate(zip(lists, grid.slots, strict=True)):
        rows[slots, ipu] = np.stack([tasks.kinds, tasks.stages, tasks.micro_batches], -1)
    has_task = rows[:, :, 0] >= 0
    first = rows[np.arange(len(rows)), has_task.argmax(1), 2]
    relative = rows.copy()
    relative[:, :, 2] = np.where(has_task, rows[:, :, 2] - first[:, None], 0)
    # Slots with equal numbers do the same tasks, up to a shift of all micro-batches, which `first` tells.
    known: dict[bytes, int] = {}
    numbers = np.array([known.setdefault(row.tobytes(), len(known)) for row in relative])
    return tuple(_cut(rows, numbers, first, 0, len(rows)))


def _cut(rows: np.ndarray, numbers: np.ndarray, first: np.ndarray, start: int, stop: int) -> Iterator[Block]:
    """The blocks of slots `start` to `stop`."""
    found = best_repetition(numbers[start:stop], first[start:stop])
    if found is None:
        if start < stop:
            yield Block(_slots(rows[start:stop]))
        return
    offset, period, count = found
    begin, end = start + offset, start + offset + period * count
    yield from _cut(rows, numbers, first, start, begin)
    yield Block(_slots(rows[begin : begin + period]), count, int(first[begin + period] - first[begin]))
    yield from _cut(rows, numbers, first, end, stop)


def best_repetition(numbers: np.ndarray, first: np.ndarray) -> tuple[int, int, int] | None:
    """The repetition in some slots that leaves the fewest to write down.

    Args:
        numbers: what each slot does, up to a shift of all micro-batches, int64[slots].
        first: the micro-batch each slot begins with, int64[slots].

    Returns:
        (offset, period, count): from `offset` on, `period` slots run `count` times; None if none runs three times.
    """
    length, saved, best = len(numbers), 0, None
    for period in range(1, length // _FEWEST_REPEATS + 1):
        if saved >= length - period:  # no longer period can save more
            break
        edge = length - (saved + period + 1)  # a slot of every repetition that saves more, if no later than `saved`
        if edge <= saved and numbers[edge] != numbers[edge + period]:
            continue
        same = numbers[period:] == numbers[:-period]
        # The shift where slots repeat; elsewhere numbers that are never equal to their neighbours.
        shift = np.where(same, first[period:] - first[:-period], _NO_SHIFT - np.arange(len(same)))
        bounds = np.flatnonzero(np.diff(shift, prepend=_NO_SHIFT + 1, append=_NO_SHIFT + 1))
        counts = (np.diff(bounds) + period) // period
        counts[~same[bounds[:-1]]] = 1
        longest = int(counts.argmax())
        count = int(counts[longest])
        if count >= _FEWEST_REPEATS and (count - 1) * period > saved:
            saved, best = (count - 1) * period, (int(bounds[longest]), period, count)
    return best


_NO_SHIFT = np.iinfo(np.int64).min // 2


def _slots(rows: np.ndarray) -> tuple[Slot, ...]:
    """The tasks of some rows."""
    return tuple(
        tuple(Task(stage, micro_batch, Kind(kind)) for kind, stage, micro_batch in row if kind >= 0)
        for row in rows.tolist()
    )
