"""Base class of schedules, and tasks of a pipeline: those of each IPU, in order.

Input: a number of stages and of micro-batches. Output: a `TaskList` for each IPU. The IPU of a stage follows from the
lists, as every task of a stage is in the list of one IPU. A user's schedule is a class with one method:

    class FirstInFirstOut(Schedule):
        def tasks(self, num_stages, micro_batches):
            return [[Task(stage, j, kind) for kind in (FORWARD, BACKWARD) for j in range(micro_batches)]
                    for stage in range(num_stages)]

A schedule is a value: equal schedules give equal lists. `schedule_plan` checks it, so it need only check its domain.

Tasks of a pipeline:

    Task     ::= (stage, micro-batch, kind)
    Kind     ::= FORWARD | BACKWARD | BACKWARD_INPUT | BACKWARD_WEIGHT
    TaskList ::= Task*                 tasks of one IPU, in order; stored as arrays

The backward work of a stage on a micro-batch is either one BACKWARD task, or is split into BACKWARD_INPUT, which
computes the gradients that the previous stage waits for, and BACKWARD_WEIGHT, which computes those of the parameters,
later.

A task waits for

    FORWARD(s, j)                        FORWARD(s − 1, j)
    BACKWARD(s, j), BACKWARD_INPUT(s, j) FORWARD(s, j), BACKWARD(s + 1, j) or BACKWARD_INPUT(s + 1, j)
    BACKWARD_WEIGHT(s, j)                BACKWARD_INPUT(s, j)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral

import numpy as np

from ipujax.runtime.errors import ScheduleError
from ipujax.runtime.tensor import frozen


class Kind(IntEnum):
    """The kind of work of a task."""

    FORWARD = 0
    BACKWARD = 1  # gradients of inputs and of parameters
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = Kind
_SHORT = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}


@dataclass(frozen=True, slots=True)
class Task:
    """The work of a stage on a micro-batch.

    Args:
        stage: stage of the model, from 0.
        micro_batch: micro-batch, from 0.
        kind: forward, or all or half of backward.
    """

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.name}(stage {self.stage}, micro-batch {self.micro_batch})"

    @property
    def short(self) -> str:
        """A letter and two numbers, for drawings: F1.0 is the forward task of stage 1 on micro-batch 0."""
        return f"{_SHORT[self.kind]}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True, eq=False)
class TaskList:
    """The tasks of one IPU, in order.

    Args:
        stages: the stage of each task, int64[tasks].
        micro_batches: its micro-batch, int64[tasks].
        kinds: its `Kind`, int64[tasks].
        slots: its slot in the pipeline's grid, int64[tasks], rising; the earliest possible when None.
    """

    stages: np.ndarray
    micro_batches: np.ndarray
    kinds: np.ndarray
    slots: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "kinds", "slots"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, frozen(values, np.int64))
                if getattr(self, name).shape != (len(self.stages),):
                    raise ScheduleError(f"a list of tasks has {len(self.stages)} stages, but not as many {name}")

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> TaskList:
        """A list of tasks, in their order."""
        rows = np.array([(task.stage, task.micro_batch, int(task.kind)) for task in tasks], np.int64).reshape(-1, 3)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2])

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Task:
        return Task(int(self.stages[index]), int(self.micro_batches[index]), Kind(int(self.kinds[index])))

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, range(len(self)))

    def forward_only(self) -> TaskList:
        """Its forward tasks, in the same order, each as early as possible."""
        is_forward = self.kinds == FORWARD
        return TaskList(self.stages[is_forward], self.micro_batches[is_forward], self.kinds[is_forward])


@dataclass(frozen=True, slots=True)
class Domain:
    """Numbers of micro-batches a schedule works for.

    Args:
        least: lowest number.
        multiple: numbers are a multiple of this.
        why: reason, as the end of a sentence.
    """

    least: int = 1
    multiple: int = 1
    why: str = ""


class Schedule(ABC):
    """The order of the tasks of a pipeline. Subclasses are frozen dataclasses, or have no state."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name in messages and comparisons."""
        return type(self).__name__

    @abstractmethod
    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList | Iterable[Task]]:
        """The tasks of a training step, for each IPU in order.

        Args:
            num_stages: stages of the model, at least 1.
            micro_batches: micro-batches of one step, at least 1 and in the `domain`.
        """

    def forward_tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList | Iterable[Task]]:
        """The tasks of inference; by default the forward tasks of training, in the same order.

        Args:
            num_stages: stages of the model, at least 1.
            micro_batches: micro-batches of one call, at least 1 and in the `domain` of inference.
        """
        return [as_task_list(tasks).forward_only() for tasks in self.tasks(num_stages, micro_batches)]

    def domain(self, num_stages: int, training: bool) -> Domain:
        """Numbers of micro-batches that the schedule works with; any number, unless a schedule overrides this.

        Args:
            num_stages: stages of the model, at least 1.
            training: whether there are backward tasks.

        Raises:
            ScheduleError: if no number works.
        """
        return Domain()

    def check(self, num_stages: int, micro_batches: int, training: bool = True) -> None:
        """Checks that the schedule works with these numbers of stages and micro-batches, by its `domain`.

        Args:
            num_stages: stages of the model.
            micro_batches: micro-batches of a step.
            training: whether there are backward tasks.

        Raises:
            ScheduleError: with the numbers that work, and why.
        """
        for noun, number in (("stage", num_stages), ("micro-batch", micro_batches)):
            if number < 1:
                raise ScheduleError(f"a pipeline needs at least one {noun}", got=number)
        domain = self.domain(num_stages, training)
        subject = f"the schedule {self.name!r} over {num_stages} stages"
        if micro_batches < domain.least:
            min_number = _multiple_from(domain.least, domain.multiple)
            raise ScheduleError(
                f"{subject} needs at least {min_number} micro-batches: {domain.why}",
                expected=f"micro_batches ≥ {min_number}",
                got=micro_batches,
                hint="more and smaller micro-batches, fewer stages, or the schedule '1f1b', which takes any number",
            )
        if micro_batches % domain.multiple:
            above = _multiple_from(micro_batches, domain.multiple)
            below = above - domain.multiple
            nearest = f"{below} or {above}" if below >= domain.least else f"{above}"
            raise ScheduleError(
                f"{subject} needs a multiple of {domain.multiple} micro-batches: {domain.why}",
                expected=f"micro_batches={nearest}, or another multiple of {domain.multiple}",
                got=micro_batches,
                hint="the schedule '1f1b' takes any number",
            )


def _multiple_from(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def as_task_list(tasks: TaskList | Iterable[Task]) -> TaskList:
    """Converts the tasks of one IPU, as a user's schedule returns them, to a `TaskList`; checks their types."""
    if isinstance(tasks, TaskList):
        return tasks
    if not isinstance(tasks, Iterable):
        raise ScheduleError("a schedule returned no tasks for an IPU", expected="a list of Tasks", got=repr(tasks))
    listed = list(tasks)
    for number, task in enumerate(listed):
        if not isinstance(task, Task):
            raise ScheduleError(f"item {number} in the list of an IPU is not a Task", got=repr(task))
        if not all(isinstance(field, Integral) for field in (task.stage, task.micro_batch, task.kind)):
            expected = "Task(stage, micro_batch, kind): whole numbers, and a Kind"
            raise ScheduleError(
                f"task {number} of an IPU has a field that is not an integer", expected=expected, got=repr(task)
            )
    return TaskList.of(listed)


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Times at which one IPU runs the tasks of one kind of one stage: micro-batch j at `times[j]`."""

    stage: int
    kind: Kind
    times: np.ndarray  # rising, int64[micro_batches]; no two tasks of an IPU have the same


def in_order(parts: Sequence[Times], as_slots: bool = False) -> TaskList:
    """The tasks of one IPU in the order of their times, from parts of one stage and kind with a time a micro-batch.

    With `as_slots` times are also the slots of the grid, columns of equal time on all IPUs, in which the tasks run.
    """
    times = np.concatenate([part.times for part in parts])
    order = np.argsort(times, kind="stable")
    lengths = [len(part.times) for part in parts]
    stages = np.repeat([part.stage for part in parts], lengths)[order]
    kinds = np.repeat([int(part.kind) for part in parts], lengths)[order]
    micro_batches = np.concatenate([np.arange(length) for length in lengths])[order]
    return TaskList(stages, micro_batches, kinds, times[order] if as_slots else None)


def forward_backward(stage: int, forward: np.ndarray, backward: np.ndarray, as_slots: bool = False) -> TaskList:
    """The unsplit forward and backward tasks of one stage by their times, see `in_order`."""
    return in_order((Times(stage, FORWARD, forward), Times(stage, BACKWARD, backward)), as_slots)


def alternating(tasks: int, ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Times of forward and backward tasks, int64[tasks] each: `ahead` forward tasks, then one of each in turn."""
    j = np.arange(tasks)
    forward = np.where(j < ahead, j, 2 * j - ahead)
    backward = np.where(j < tasks - ahead, ahead + 1 + 2 * j, tasks + j)
    return forward, backward
