"""Compression of a grid: slots that run once, and blocks of slots that repeat.

Input: the grid of a pipeline. Output: a list of `Block`s which, unrolled, are exactly the slots of the grid:

    Block ::= count × slots        iteration i runs each task of the slots on micro-batch task.micro_batch + i·stride

1F1B becomes a ramp-up, one repeated block, a ramp-down; GPipe has a second block, of backward tasks. Slots repeat if
slot t + period has the same tasks on the same IPUs as slot t, all of them `stride` micro-batches later. The block that
leaves the fewest slots is taken first, then the slots before and after it are compressed likewise.

Limits: a grid in which nothing repeats is not compressed, and grows with the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from ipujax.lowering.schedules.grid import Grid
from ipujax.lowering.schedules.tasks import Kind, Task, TaskList

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
        """Equal slots in blocks whose stride is a multiple: micro-batch j then uses variable j mod `multiple`."""
        if self.count == 1:
            return (self,)
        iterations = multiple // gcd(multiple, self.stride)
        count = self.count // iterations
        blocks_ = []
        if count:
            blocks_.append(
                Block(tuple(self._iterations(0, iterations)), count, self.stride * iterations if count > 1 else 0)
            )
        if count * iterations < self.count:
            blocks_.append(Block(tuple(self._iterations(count * iterations, self.count))))
        return tuple(blocks_)

    def _iterations(self, start: int, stop: int) -> Iterator[Slot]:
        for iteration in range(start, stop):
            shift = iteration * self.stride
            for slot in self.slots:
                yield tuple(Task(task.stage, task.micro_batch + shift, task.kind) for task in slot)


def blocks(lists: Sequence[TaskList], grid: Grid) -> tuple[Block, ...]:
    """The blocks of a grid, in order."""
    # One row a slot, with the kind, stage and micro-batch of the task of each IPU; −1 where it has none.
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
    return tuple(_cut(rows, numbers, first, 0, len(rows)))


def _cut(rows: np.ndarray, numbers: np.ndarray, first: np.ndarray, start: int, stop: int) -> Iterator[Block]:
    """The blocks of slots `start` to `stop`."""
    repetition = best_repetition(numbers[start:stop], first[start:stop])
    if repetition is None:
        if start < stop:
            yield Block(_slots(rows[start:stop]))
        return
    offset, period, count = repetition
    begin = start + offset
    end = start + offset + period * count
    yield from _cut(rows, numbers, first, start, begin)
    yield Block(_slots(rows[begin : begin + period]), count, int(first[begin + period] - first[begin]))
    yield from _cut(rows, numbers, first, end, stop)


def best_repetition(numbers: np.ndarray, first: np.ndarray) -> tuple[int, int, int] | None:
    """(offset, period, count) of the repetition that saves most slots; None if none runs three times."""
    # Slots repeat if they have equal numbers, int64[slots], and first micro-batches at one stride, int64[slots].
    length = len(numbers)
    saved = 0
    best = None
    for period in range(1, length // _MIN_REPEATS + 1):
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
        if count >= _MIN_REPEATS and (count - 1) * period > saved:
            saved = (count - 1) * period
            best = (int(bounds[longest]), period, count)
    return best


_NO_SHIFT = np.iinfo(np.int64).min // 2


def _slots(rows: np.ndarray) -> tuple[Slot, ...]:
    """The tasks of an array of rows."""
    return tuple(
        tuple(Task(stage, micro_batch, Kind(kind)) for kind, stage, micro_batch in row if kind >= 0)
        for row in rows.tolist()
    )
