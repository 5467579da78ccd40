"""The grid of a pipeline: its tasks checked, and the slot of each, such that no task waits for a later slot.

Input: the tasks of each IPU, in order. Output: `Grid`. A slot holds at most one task of each IPU; the tasks that a task
waits for are in earlier slots, and values for other IPUs are copied between two slots. A schedule may set the slots of
its tasks; otherwise a task takes the first slot after its predecessor on the IPU and after all tasks it waits for.

Limits: slots have no length; only a timeline shows which grid is best on a target.

Before a grid is made its tasks are checked; deadlocks between IPUs are detected when it is made:

    each task has an existing stage, micro-batch and kind
    all tasks of a stage are on one IPU
    each task occurs once; backward work of a stage is either unsplit or in two halves, and in training only
    the tasks of a kind of a stage take the micro-batches in order (first in, first out)
    a stage runs a micro-batch forwards before backwards (a stash is written before it is read)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ipujax.lowering.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Kind, Task, TaskList
from ipujax.runtime.errors import ScheduleError


def validate(lists: Sequence[TaskList], num_stages: int, micro_batches: int, training: bool) -> tuple[int, ...]:
    """Checks that the tasks of a pipeline are complete and in a possible order; raises with the first bad one.

    Args:
        lists: tasks of each IPU, in order.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.
        training: whether there are backward tasks.

    Returns:
        The IPU of each stage.
    """
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
    """Raises for an IPU without tasks, and for a task of a stage, micro-batch or kind that does not exist."""
    if not len(tasks):
        raise ScheduleError(f"the schedule has no tasks for IPU {ipu}", hint="leave the IPU out")
    kinds = len(Kind) if training else 1  # kind 0 is forward
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
    """The IPU of each stage, which is the one that has its tasks; raises if several or none have."""
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
    """Raises for tasks that are missing or occur twice, and for backward work both unsplit and in two halves.

    In training each micro-batch has, on each stage, a forward task and one `BACKWARD` task, or instead of that both of
    its halves, the gradient of inputs and that of weights; all micro-batches of a stage alike.
    """
    # How often each task occurs.
    counts = np.zeros((len(Kind), num_stages, micro_batches), np.int64)
    for tasks in lists:
        np.add.at(counts, (tasks.kinds, tasks.stages, tasks.micro_batches), 1)
    _refuse_first(counts > 1, "{} occurs more than once")
    _refuse_first((counts[FORWARD] == 0)[None], "{} is missing")  # FORWARD is kind 0
    if not training:
        return
    split = counts[BACKWARD_INPUT] + counts[BACKWARD_WEIGHT]
    is_unsplit_and_split = np.zeros(counts.shape, bool)
    is_unsplit_and_split[BACKWARD] = (counts[BACKWARD] > 0) & (split > 0)
    _refuse_first(is_unsplit_and_split, "{} occurs both unsplit and split")
    missing = np.zeros(counts.shape, bool)
    missing[BACKWARD] = (counts[BACKWARD] + split) == 0
    missing[BACKWARD_INPUT] = (counts[BACKWARD_INPUT] == 0) & (split > 0)
    missing[BACKWARD_WEIGHT] = (counts[BACKWARD_WEIGHT] == 0) & (split > 0)
    _refuse_first(missing, "{} is missing")
    mixed = np.flatnonzero((counts[BACKWARD] > 0).any(1) & (split > 0).any(1))
    if len(mixed):
        raise ScheduleError(
            f"stage {mixed[0]} has unsplit backward tasks and tasks in two halves",
            expected="all backward tasks of a stage unsplit, or all in two halves",
            hint="BACKWARD_INPUT and then BACKWARD_WEIGHT in the place of BACKWARD",
        )


def _refuse_first(bad: np.ndarray, message: str) -> None:
    """Raises for the task of the first true element of bool[kinds, stages, micro-batches], by stage and micro-batch."""
    stages, micro_batches, kinds = np.nonzero(bad.transpose(1, 2, 0))
    if len(kinds):
        task = Task(int(stages[0]), int(micro_batches[0]), Kind(int(kinds[0])))
        raise ScheduleError(message.format(task), expected="each task of each stage and micro-batch once")


def _check_order(tasks: TaskList, stage: int) -> None:
    """Raises if a stage takes micro-batches out of order, or reads a stash before the task that writes it.

    `tasks` are all of the stage's IPU. A stash is written by the forward task, and by the first half of a backward one.
    """
    is_of_stage = tasks.stages == stage
    positions_of_work = []  # positions in the list, by micro-batch
    # An unsplit backward task does the work of both halves.
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


_FORWARD, _BACKWARD, _WEIGHT = range(3)  # planes of the table of slots
# By kind. BACKWARD reads the plane of input gradients, where unsplit backward tasks are entered, as in that of weights.
_PLANE = np.array([_FORWARD, _BACKWARD, _BACKWARD, _WEIGHT])
_UNKNOWN = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The slot of every task."""

    # The slot of each task of each IPU, rising, int64[tasks] by IPU; no slot is empty on all IPUs.
    slots: tuple[np.ndarray, ...]
    # The slots of the forward tasks, of the tasks of input gradients and of those of weight gradients (the latter two
    # equal for unsplit backward tasks), int64[3, stages, micro-batches]; `_UNKNOWN` where there are none.
    table: np.ndarray
    length: int  # number of slots

    def of(self, stage: int, kind: Kind) -> np.ndarray:
        """Slots of the tasks that do the work of a kind for a stage, int64[micro_batches]; see `_PLANE` for kinds."""
        return self.table[_PLANE[kind], stage]


def grid(lists: Sequence[TaskList], num_stages: int, micro_batches: int) -> Grid:
    """Gives each task of a pipeline a slot, such that all that it waits for is in earlier slots.

    Slots are those that the schedule sets, or the earliest possible ones. Raises for a task that never becomes ready (a
    deadlock), or that the schedule sets too early.

    Args:
        lists: tasks of each IPU, in order, which `validate` has checked.
        num_stages: stages of the model.
        micro_batches: micro-batches of a step.
    """
    positions = [_Positions.of(tasks, num_stages, micro_batches) for tasks in lists]
    # `Grid.table` flat, the slot of each task, with one element more: slot −1, for tasks that wait for nothing.
    table = np.full(3 * num_stages * micro_batches + 1, _UNKNOWN)
    table[-1] = -1
    if lists[0].slots is None:
        slots = _earliest_slots(lists, positions, table, num_stages, micro_batches)
    else:
        slots = _checked_slots(lists, positions, table)
    # Slots that are empty on all IPUs are dropped, and the others numbered again.
    used, numbers = np.unique(np.concatenate(slots), return_inverse=True)
    slots = np.split(numbers, np.cumsum([len(tasks) for tasks in lists])[:-1])
    for tasks, places, slots_of_ipu in zip(lists, positions, slots, strict=True):
        table[places.task] = slots_of_ipu
        # An unsplit backward task does the work of weight gradients too, whose plane is the next one.
        is_unsplit = tasks.kinds == BACKWARD
        table[places.task[is_unsplit] + num_stages * micro_batches] = slots_of_ipu[is_unsplit]
    planes = table[:-1].reshape(3, num_stages, micro_batches)
    for array in (*slots, planes):
        array.setflags(write=False)
    return Grid(tuple(slots), planes, len(used))


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """Positions in the flat table of slots of each task of an IPU, and of what it waits for.

    Args:
        task: of each task, int64[tasks].
        awaited: of a task that it waits for, int64[tasks].
        also_awaited: of another one, int64[tasks]; both are the last of the table where there is none.
    """

    task: np.ndarray
    awaited: np.ndarray
    also_awaited: np.ndarray

    @classmethod
    def of(cls, tasks: TaskList, num_stages: int, micro_batches: int) -> _Positions:
        """Computes the position of each task of an IPU in the flat table of slots, and of the tasks that it waits for.

        The table has a plane for each kind of work, in it a row for each stage, and in that the micro-batches; then one
        element past all planes, for tasks that wait for nothing.
        """
        plane = num_stages * micro_batches
        forward = tasks.stages * micro_batches + tasks.micro_batches
        task = _PLANE[tasks.kinds] * plane + forward
        nothing = np.full(len(tasks), 3 * plane)
        is_forward = tasks.kinds == FORWARD
        is_weight = tasks.kinds == BACKWARD_WEIGHT
        is_backward = ~(is_forward | is_weight)
        previous_stage = np.where(tasks.stages > 0, forward - micro_batches, nothing)
        next_stage = np.where(tasks.stages < num_stages - 1, _BACKWARD * plane + forward + micro_batches, nothing)
        # Forward waits for the previous stage, weight gradients for input gradients, backward for forward and the
        # next stage.
        awaited = np.select([is_forward, is_weight], [previous_stage, _BACKWARD * plane + forward], forward)
        return cls(task, awaited, np.where(is_backward, next_stage, nothing))


def _earliest_slots(
    lists: Sequence[TaskList], positions: Sequence[_Positions], table: np.ndarray, num_stages: int, micro_batches: int
) -> list[np.ndarray]:
    """Puts each task in the earliest slot: after the task before it on its IPU, and after all that it waits for.

    The IPUs are simulated in rotation, each as far as it can run, until none can; raises if tasks are left then.

    Args:
        lists: tasks of each IPU, in order.
        positions: for each IPU the positions in `table` of its tasks and of those that they wait for.
        table: slot of each task, `_UNKNOWN` at first; −1 at the position for nothing.
        num_stages: for the error, as the next.
        micro_batches: see there.

    Returns:
        Slots of the tasks of each IPU, rising.
    """
    slot_at = table.tolist()  # lists, as their elements are read one by one
    rows = [(places.task.tolist(), places.awaited.tolist(), places.also_awaited.tolist()) for places in positions]
    slots: list[list[int]] = [[] for _ in lists]
    has_progress = True
    while has_progress:
        has_progress = False
        for slots_of_ipu, (position, awaited, also_awaited) in zip(slots, rows, strict=True):
            last = slots_of_ipu[-1] if slots_of_ipu else -1
            for task in range(len(slots_of_ipu), len(position)):
                ready = max(slot_at[awaited[task]], slot_at[also_awaited[task]])
                if ready == _UNKNOWN:
                    break
                last = max(last, ready) + 1
                slot_at[position[task]] = last
                slots_of_ipu.append(last)
                has_progress = True
    for ipu, (slots_of_ipu, tasks, (_, awaited, also_awaited)) in enumerate(zip(slots, lists, rows, strict=True)):
        stuck = len(slots_of_ipu)
        if stuck < len(tasks):
            missing = awaited[stuck] if slot_at[awaited[stuck]] == _UNKNOWN else also_awaited[stuck]
            raise ScheduleError(
                f"the schedule has a deadlock: {tasks[stuck]} never becomes ready, and blocks IPU {ipu}",
                expected=f"{_task_at(missing, num_stages, micro_batches)} can run before it",
                got=f"{stuck} of the {len(tasks)} tasks of IPU {ipu} run",
                hint="an IPU runs its tasks in order, and waits at the first that is not ready",
            )
    return [np.array(slots_of_ipu, np.int64) for slots_of_ipu in slots]


def _task_at(position: int, num_stages: int, micro_batches: int) -> Task:
    """The task at a position in the flat table; a backward task as an unsplit one."""
    plane, stage, micro_batch = (int(index) for index in np.unravel_index(position, (3, num_stages, micro_batches)))
    return Task(stage, micro_batch, (FORWARD, BACKWARD, BACKWARD_WEIGHT)[plane])


def _checked_slots(lists: Sequence[TaskList], positions: Sequence[_Positions], table: np.ndarray) -> list[np.ndarray]:
    """The slots that a schedule sets for its tasks, checked: they rise on each IPU, and come after all waited for.

    Args:
        lists: tasks of each IPU, in order, with slots.
        positions: for each IPU the positions in `table` of its tasks and of those that they wait for.
        table: slot of each task, filled here; −1 at the position for nothing.
    """
    slots = [tasks.slots for tasks in lists if tasks.slots is not None]
    for places, slots_of_ipu in zip(positions, slots, strict=True):
        table[places.task] = slots_of_ipu
    for ipu, (tasks, places, slots_of_ipu) in enumerate(zip(lists, positions, slots, strict=True)):
        early = np.flatnonzero(np.diff(slots_of_ipu, prepend=-1) <= 0)
        if len(early):
            raise ScheduleError(
                f"the slots of IPU {ipu} do not rise at {tasks[early[0]]}", got=f"slot {slots_of_ipu[early[0]]} for it"
            )
        ready = np.maximum(table[places.awaited], table[places.also_awaited])
        early = np.flatnonzero(ready >= slots_of_ipu)
        if len(early):
            raise ScheduleError(
                f"{tasks[early[0]]} on IPU {ipu} is in a slot before it is ready",
                expected=f"a slot after {ready[early[0]]}",
                got=f"slot {slots_of_ipu[early[0]]}",
            )
    return slots
