"""Tasks of a pipeline, and the order in which one IPU runs them.

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

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
