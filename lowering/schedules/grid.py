"""The grid of a pipeline: in which slot every task runs, so that nothing waits for a later slot.

Input: the tasks of each IPU, in order. Output: `Grid`. A slot holds at most one task of each IPU; what a task of a slot
waits for ran in earlier slots, and what goes to another IPU is copied between two slots. A schedule may name the slots
of its tasks; otherwise a task takes the first slot that is after its predecessor on the IPU and after all it waits for.

Limits: slots have no length; which grid is best on a machine, its timeline tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.tasks import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    Kind,
    Task,
    TaskList,
)
from ipujax.runtime.errors import ScheduleError

_FORWARD, _BACKWARD, _WEIGHT = range(3)  # planes of the table of slots
_PLANE = np.array([_FORWARD, _BACKWARD, _BACKWARD, _WEIGHT])  # by kind
_UNKNOWN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The slot of every task.

    Args:
        slots: the slot of each task of each IPU, rising, int64[tasks] by IPU; no slot is empty on all IPUs.
        table: the slots of the forward tasks, of those that find the gradients of inputs and of those that find the
            gradients of parameters (the latter two the same where backward tasks are whole), int64[3, stages,
            micro-batches]; `_UNKNOWN` where there are none.
        length: number of slots.
    """

    slots: tuple[np.ndarray, ...]
    table: np.ndarray
    length: int

    def of(self, stage: int, kind: Kind) -> np.ndarray:
        """The slots of the tasks that do the work of a kind for a stage, by micro-batch, int64[micro_batches].

        Args:
            stage: the stage.
            kind: the kind; a whole backward task also does the work of `BACKWARD_INPUT` and `BACKWARD_WEIGHT`, and
                `BACKWARD` means the task that finds the gradients of inputs.
        """
        return self.table[_PLANE[kind], stage]


def grid(lists: Sequence[TaskList], num_stages: int, micro_batches: int) -> Grid:
    """The grid of some lists of tasks, each of which occurs once.

    Args:
        lists: the tasks of each IPU.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.

    Raises:
        ScheduleError: naming the first task that waits for ever, or whose own slot is too early.
    """
    waits = [_Waits.of(tasks, num_stages, micro_batches) for tasks in lists]
    table = np.full(3 * num_stages * micro_batches + 1, _UNKNOWN)
    table[-1] = -1  # what a task waits for that waits for nothing
    if lists[0].slots is None:
        slots = _earliest(lists, waits, table, num_stages, micro_batches)
    else:
        slots = _own_slots(lists, waits, table)
    used, numbers = np.unique(np.concatenate(slots), return_inverse=True)
    slots = np.split(numbers, np.cumsum([len(tasks) for tasks in lists])[:-1])
    for tasks, wait, own in zip(lists, waits, slots, strict=True):
        table[wait.own] = own
        whole = tasks.kinds == BACKWARD
        table[wait.own[whole] + num_stages * micro_batches] = own[whole]
    planes = table[:-1].reshape(3, num_stages, micro_batches)
    for array in (*slots, planes):
        array.setflags(write=False)
    return Grid(tuple(slots), planes, len(used))


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """For each task of an IPU the place in the flat table of slots of itself and of the two tasks it waits for."""

    own: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, tasks: TaskList, num_stages: int, micro_batches: int) -> _Waits:
        plane = num_stages * micro_batches
        here = tasks.stages * micro_batches + tasks.micro_batches
        own = _PLANE[tasks.kinds] * plane + here
        nothing = np.full(len(tasks), 3 * plane)
        is_forward, is_weight = tasks.kinds == FORWARD, tasks.kinds == BACKWARD_WEIGHT
        is_backward = ~(is_forward | is_weight)
        before = np.where(tasks.stages > 0, here - micro_batches, nothing)
        after = np.where(tasks.stages < num_stages - 1, _BACKWARD * plane + here + micro_batches, nothing)
        first = np.select([is_forward, is_weight], [before, _BACKWARD * plane + here], here)
        return cls(own, first, np.where(is_backward, after, nothing))


def _earliest(
    lists: Sequence[TaskList], waits: Sequence[_Waits], table: np.ndarray, num_stages: int, micro_batches: int
) -> list[np.ndarray]:
    """Each task in the first slot it can have: every IPU runs as far as it can, in turns, until all are done."""
    done = table.tolist()
    rows = [(wait.own.tolist(), wait.first.tolist(), wait.second.tolist()) for wait in waits]
    slots: list[list[int]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for mine, (own, first, second) in zip(slots, rows, strict=True):
            last = mine[-1] if mine else -1
            for task in range(len(mine), len(own)):
                latest = max(done[first[task]], done[second[task]])
                if latest == _UNKNOWN:
                    break
                last = max(last, latest) + 1
                done[own[task]] = last
                mine.append(last)
                moved = True
    for ipu, (mine, tasks, (_, first, second)) in enumerate(zip(slots, lists, rows, strict=True)):
        stuck = len(mine)
        if stuck < len(tasks):
            awaited = first[stuck] if done[first[stuck]] == _UNKNOWN else second[stuck]
            raise ScheduleError(
                f"the schedule never ends: {tasks[stuck]} waits for ever, and IPU {ipu} with it",
                expected=f"{_task_at(awaited, num_stages, micro_batches)} can run before it",
                got=f"{stuck} of the {len(tasks)} tasks of IPU {ipu} run",
                hint="an IPU does its tasks in the order given, and waits at the first that is not ready",
            )
    return [np.array(mine, np.int64) for mine in slots]


def _task_at(place: int, num_stages: int, micro_batches: int) -> Task:
    """The task of a place in the flat table; a backward task by the name of a whole one."""
    plane, stage, micro_batch = (int(index) for index in np.unravel_index(place, (3, num_stages, micro_batches)))
    return Task(stage, micro_batch, (FORWARD, BACKWARD, BACKWARD_WEIGHT)[plane])


def _own_slots(lists: Sequence[TaskList], waits: Sequence[_Waits], table: np.ndarray) -> list[np.ndarray]:
    """The slots the schedule names, checked."""
    slots = [tasks.slots for tasks in lists if tasks.slots is not None]
    for wait, own in zip(waits, slots, strict=True):
        table[wait.own] = own
    for ipu, (tasks, wait, own) in enumerate(zip(lists, waits, slots, strict=True)):
        early = np.flatnonzero(np.diff(own, prepend=-1) <= 0)
        if len(early):
            raise ScheduleError(
                f"the slots of IPU {ipu} do not rise at {tasks[early[0]]}", got=f"slot {own[early[0]]} for it"
            )
        ready = np.maximum(table[wait.first], table[wait.second])
        early = np.flatnonzero(ready >= own)
        if len(early):
            raise ScheduleError(
                f"{tasks[early[0]]} on IPU {ipu} is in a slot before it is ready",
                expected=f"a slot after {ready[early[0]]}",
                got=f"slot {own[early[0]]}",
            )
    return slots
