"""Tasks of pipelines as marks on calls: which stage and which kind of work a call of a function is.

A call carries a `PipelineTask`; micro-batches are not marked, for the tasks of a stage and kind take them in order, so
that the n-th call is that of micro-batch n, counted anew in every run of the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

TASK_KINDS = ("forward", "backward", "backward_input", "backward_weight")
StageTask = tuple[int, str]  # a stage, and one of `TASK_KINDS`


@dataclass(frozen=True, slots=True, eq=False)
class PipelineLayout:
    """What runs in one pipeline, on which IPUs, and what is handed on.

    Args:
        name: debug name.
        schedule: name of its schedule.
        ipus: the IPU of each stage.
        micro_batches: of one run.
        tasks: the stage and kind of all its tasks; each runs once a micro-batch.
        links: (writer, reader) for each value that goes to another stage: the tasks that find it, and the first that
            read it, of the same micro-batch.
    """

    name: str
    schedule: str
    ipus: tuple[int, ...]
    micro_batches: int
    tasks: tuple[StageTask, ...]
    links: tuple[tuple[StageTask, StageTask], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTask:
    """The work of one kind of one stage on one micro-batch.

    Args:
        pipeline: that it is part of.
        stage: its number.
        kind: one of `TASK_KINDS`.
    """

    pipeline: PipelineLayout
    stage: int
    kind: str

    @property
    def ipu(self) -> int:
        """The IPU that does it."""
        return self.pipeline.ipus[self.stage]
