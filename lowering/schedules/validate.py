"""Checks of the tasks a schedule gave, before a grid is made of them.

Input: the tasks of each IPU. Output: nothing, or an error that names the first bad task. What the order between IPUs
has to hold (nothing waits for ever) is checked where the grid is made.

    each task names a stage, a micro-batch and a kind there are
    all tasks of a stage are on one IPU
    each task occurs once; backward work is done whole or in two parts, and is there in training only
    the tasks of a kind of a stage take the micro-batches in order (first in, first out)
    a stage runs backwards what it has run forwards (a stash is written before it is read)
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
    """Checks the tasks of each IPU.

    Args:
        lists: the tasks of each IPU, in order.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.
        training: whether there is backward work.

    Returns:
        The IPU of each stage.

    Raises:
        ScheduleError: naming the first bad task.
    """
    if not lists:
        raise ScheduleError("the schedule gives no IPU anything to do", expected=f"{num_stages} stages")
    if len({tasks.slots is None for tasks in lists}) != 1:
        raise ScheduleError("a schedule names the slots of all its tasks or of none", got=f"{len(lists)} IPUs")
    for ipu, tasks in enumerate(lists):
        _known(ipu, tasks, num_stages, micro_batches, training)
    ipus = _ipu_of_stages(lists, num_stages)
    _once(lists, num_stages, micro_batches, training)
    for tasks in lists:
        for stage in np.unique(tasks.stages).tolist():
            _in_order(tasks, stage)
    return ipus


def _known(ipu: int, tasks: TaskList, num_stages: int, micro_batches: int, training: bool) -> None:
    """Each task is one there is."""
    if not len(tasks):
        raise ScheduleError(f"the schedule gives IPU {ipu} nothing to do", hint="leave the IPU out")
    kinds = len(Kind) if training else 1
    for what, values, number in (
        ("stage", tasks.stages, num_stages),
        ("micro-batch", tasks.micro_batches, micro_batches),
        ("kind", tasks.kinds, kinds),
    ):
        bad = np.flatnonzero((values < 0) | (values >= number))
        if len(bad):
            raise ScheduleError(
                f"task {bad[0]} of IPU {ipu} is of a {what} that does not exist",
                expected=(
                    f"one of {', '.join(kind.name for kind in Kind if kind < kinds)}"
                    if what == "kind"
                    else f"a {what} from 0 to {number - 1}"
                ),
                got=int(values[bad[0]]),
            )


def _ipu_of_stages(lists: Sequence[TaskList], num_stages: int) -> tuple[int, ...]:
    """The IPU of each stage, which is one."""
    ipus = np.full(num_stages, -1)
    for ipu, tasks in enumerate(lists):
        elsewhere = np.flatnonzero((ipus >= 0)[tasks.stages])
        if len(elsewhere):
            task = tasks[elsewhere[0]]
            raise ScheduleError(f"{task} is on IPU {ipu}, but stage {task.stage} is on IPU {ipus[task.stage]}")
        ipus[tasks.stages] = ipu
    if (ipus < 0).any():
        raise ScheduleError(f"stage {np.flatnonzero(ipus < 0)[0]} has no tasks", got=f"{num_stages} stages")
    return tuple(ipus.tolist())


def _once(lists: Sequence[TaskList], num_stages: int, micro_batches: int, training: bool) -> None:
    """Each task occurs once."""
    times = np.zeros((len(Kind), num_stages, micro_batches), np.int64)
    for tasks in lists:
        np.add.at(times, (tasks.kinds, tasks.stages, tasks.micro_batches), 1)
    _refuse(times > 1, "{} occurs more than once", lists)
    _refuse((times[FORWARD] == 0)[None], "{} is missing", lists)
    if not training:
        return
    split = times[BACKWARD_INPUT] + times[BACKWARD_WEIGHT]
    both = np.zeros(times.shape, bool)
    both[BACKWARD] = (times[BACKWARD] > 0) & (split > 0)
    _refuse(both, "{} is there whole and in parts", lists)
    missing = np.zeros(times.shape, bool)
    missing[BACKWARD] = (times[BACKWARD] + split) == 0
    missing[BACKWARD_INPUT] = (times[BACKWARD_INPUT] == 0) & (split > 0)
    missing[BACKWARD_WEIGHT] = (times[BACKWARD_WEIGHT] == 0) & (split > 0)
    _refuse(missing, "{} is missing", lists)


def _refuse(bad: np.ndarray, what: str, lists: Sequence[TaskList]) -> None:
    """Raises for the first of some tasks: bool[kinds, stages, micro-batches], by stage and micro-batch."""
    stages, micro_batches, kinds = np.nonzero(bad.transpose(1, 2, 0))
    if len(kinds):
        task = Task(int(stages[0]), int(micro_batches[0]), Kind(int(kinds[0])))
        raise ScheduleError(what.format(task), expected="each task of each stage and micro-batch once")


def _in_order(tasks: TaskList, stage: int) -> None:
    """A stage's work of each sort takes micro-batches in order, and what reads a stash comes after it is written."""
    mine = tasks.stages == stage
    works = []  # places in the list, by micro-batch
    for kinds in ((FORWARD,), (BACKWARD, BACKWARD_INPUT), (BACKWARD, BACKWARD_WEIGHT)):
        places = np.flatnonzero(mine & np.isin(tasks.kinds, kinds))
        order = tasks.micro_batches[places]
        late = np.flatnonzero(np.diff(order) < 0)
        if len(late):
            raise ScheduleError(
                f"{tasks[places[late[0] + 1]]} comes after micro-batch {order[late[0]]}",
                expected="the micro-batches of a stage in order, first in, first out, forwards and backwards",
                hint="so that all schedules add up gradients in one order, and give the same bits",
            )
        works.append(places)
    for written, read in pairwise(works):
        if len(read):  # there is no backward work in inference
            early = np.flatnonzero(read < written)
            if len(early):
                raise ScheduleError(
                    f"{tasks[read[early[0]]]} reads what {tasks[written[early[0]]]} stashes only later",
                    expected="the task that writes a stash before the one that reads it",
                )
