"""Checks of the tasks of a schedule, before a grid is made of them.

Input: the tasks of each IPU. Output: nothing, or an error with the first bad task. Deadlocks between IPUs are detected
when the grid is made.

    each task has an existing stage, micro-batch and kind
    all tasks of a stage are on one IPU
    each task occurs once; backward work is either unsplit or in two halves, and in training only
    the tasks of a kind of a stage take the micro-batches in order (first in, first out)
    a stage runs a micro-batch forwards before backwards (a stash is written before it is read)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ipujax.lowering.schedules.tasks import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Kind,
    Task,
    TaskList,
)
from ipujax.runtime.errors import ScheduleError


def validate(lists: Sequence[TaskList], num_stages: int, micro_batches: int, training: bool) -> tuple[int, ...]:
    """Checks the tasks of each IPU; returns the IPU of each stage, or raises with the first bad task."""
    if not lists:
        raise ScheduleError("the schedule has no list of tasks", expected=f"{num_stages} stages")
    if len({tasks.slots is None for tasks in lists}) != 1:
        raise ScheduleError("a schedule must name the slots of all its tasks or of none", got=f"{len(lists)} IPUs")
    for ipu, tasks in enumerate(lists):
        _check_existence(ipu, tasks, num_stages, micro_batches, training)
    ipus = _ipu_of_stages(lists, num_stages)
    _check_occurrence(lists, num_stages, micro_batches, training)
    for tasks in lists:
        for stage in np.unique(tasks.stages).tolist():
            _check_order(tasks, stage)
    return ipus


def _check_existence(ipu: int, tasks: TaskList, num_stages: int, micro_batches: int, training: bool) -> None:
    """Refuses tasks of a stage, micro-batch or kind that does not exist."""
    if not len(tasks):
        raise ScheduleError(f"the schedule has no tasks for IPU {ipu}", hint="leave the IPU out")
    kinds = len(Kind) if training else 1
    for noun, values, number in (
        ("stage", tasks.stages, num_stages),
        ("micro-batch", tasks.micro_batches, micro_batches),
        ("kind", tasks.kinds, kinds),
    ):
        bad = np.flatnonzero((values < 0) | (values >= number))
        if len(bad):
            raise ScheduleError(
                f"task {bad[0]} of IPU {ipu} is of a {noun} that does not exist",
                expected=(
                    f"one of {', '.join(kind.name for kind in Kind if kind < kinds)}"
                    if noun == "kind"
                    else f"a {noun} from 0 to {number - 1}"
                ),
                got=int(values[bad[0]]),
            )


def _ipu_of_stages(lists: Sequence[TaskList], num_stages: int) -> tuple[int, ...]:
    """The IPU of each stage; refuses a stage on several."""
    ipus = np.full(num_stages, -1)
    for ipu, tasks in enumerate(lists):
        on_other_ipu = np.flatnonzero((ipus >= 0)[tasks.stages])
        if len(on_other_ipu):
            task = tasks[on_other_ipu[0]]
            raise ScheduleError(f"{task} is on IPU {ipu}, but stage {task.stage} is on IPU {ipus[task.stage]}")
        ipus[tasks.stages] = ipu
    if (ipus < 0).any():
        raise ScheduleError(f"stage {np.flatnonzero(ipus < 0)[0]} has no tasks", got=f"{num_stages} stages")
    return tuple(ipus.tolist())


def _check_occurrence(lists: Sequence[TaskList], num_stages: int, micro_batches: int, training: bool) -> None:
    """Refuses tasks that are missing or occur twice."""
    counts = np.zeros((len(Kind), num_stages, micro_batches), np.int64)
    for tasks in lists:
        np.add.at(counts, (tasks.kinds, tasks.stages, tasks.micro_batches), 1)
    _refuse(counts > 1, "{} occurs more than once", lists)
    _refuse((counts[FORWARD] == 0)[None], "{} is missing", lists)
    if not training:
        return
    split = counts[BACKWARD_INPUT] + counts[BACKWARD_WEIGHT]
    is_unsplit_and_split = np.zeros(counts.shape, bool)
    is_unsplit_and_split[BACKWARD] = (counts[BACKWARD] > 0) & (split > 0)
    _refuse(is_unsplit_and_split, "{} occurs both unsplit and split", lists)
    missing = np.zeros(counts.shape, bool)
    missing[BACKWARD] = (counts[BACKWARD] + split) == 0
    missing[BACKWARD_INPUT] = (counts[BACKWARD_INPUT] == 0) & (split > 0)
    missing[BACKWARD_WEIGHT] = (counts[BACKWARD_WEIGHT] == 0) & (split > 0)
    _refuse(missing, "{} is missing", lists)


def _refuse(bad: np.ndarray, message: str, lists: Sequence[TaskList]) -> None:
    """Raises for the first true element of bool[kinds, stages, micro-batches], by stage and micro-batch."""
    stages, micro_batches, kinds = np.nonzero(bad.transpose(1, 2, 0))
    if len(kinds):
        task = Task(int(stages[0]), int(micro_batches[0]), Kind(int(kinds[0])))
        raise ScheduleError(message.format(task), expected="each task of each stage and micro-batch once")


def _check_order(tasks: TaskList, stage: int) -> None:
    """Refuses micro-batches out of order, and a stash that is read before it is written."""
    is_of_stage = tasks.stages == stage
    positions_of_work = []  # positions in the list, by micro-batch
    for kinds in ((FORWARD,), (BACKWARD, BACKWARD_INPUT), (BACKWARD, BACKWARD_WEIGHT)):
        positions = np.flatnonzero(is_of_stage & np.isin(tasks.kinds, kinds))
        order = tasks.micro_batches[positions]
        late = np.flatnonzero(np.diff(order) < 0)
        if len(late):
            raise ScheduleError(
                f"{tasks[positions[late[0] + 1]]} comes after micro-batch {order[late[0]]}",
                expected="the micro-batches of a stage in order, first in, first out, forwards and backwards",
                hint="so that all schedules add up gradients in one order, and give the same bits",
            )
        positions_of_work.append(positions)
    for written, read in pairwise(positions_of_work):
        if len(read):  # there is no backward work in inference
            early = np.flatnonzero(read < written)
            if len(early):
                raise ScheduleError(
                    f"{tasks[read[early[0]]]} reads a stash before {tasks[written[early[0]]]} writes it",
                    expected="the task that writes a stash before the one that reads it",
                )
