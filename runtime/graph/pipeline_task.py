"""Tasks of pipelines as marks on calls: stage and kind of the work of a call.

A call carries a `PipelineTask`, without the number of its micro-batch: the tasks of a stage and kind take micro-batches
in order, so that the n-th call in a run of the pipeline is that of micro-batch n.
"""

from __future__ import annotations

from dataclasses import dataclass

TASK_KINDS = ("forward", "backward", "backward_input", "backward_weight")
StageTask = tuple[int, str]  # a stage, and one of `TASK_KINDS`


@dataclass(frozen=True, slots=True, eq=False)
class PipelineLayout:
    """Stages of a pipeline, their IPUs, their tasks, and the values between them.

    Args:
        name: debug name.
        schedule: name of its schedule.
        ipus: the IPU of each stage, by its number; a number that is left out has the IPU of the next stage.
        micro_batches: number of micro-batches in one run.
        tasks: stage and kind of all its tasks; each runs once a micro-batch.
        links: (writer, reader) for each value that goes to another stage: the task that computes it, and the first one
            of the same micro-batch that reads it.
    """

    name: str
    schedule: str
    ipus: tuple[int, ...]
    micro_batches: int
    tasks: tuple[StageTask, ...]
    links: tuple[tuple[StageTask, StageTask], ...]

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages that have tasks, in order."""
        return sorted({stage for stage, _ in self.tasks})


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTask:
    """The work of one kind of one stage on one micro-batch.

    Args:
        pipeline: the pipeline.
        stage: number of the stage.
        kind: one of `TASK_KINDS`.
    """

    pipeline: PipelineLayout
    stage: int
    kind: str

    @property
    def ipu(self) -> int:
        """IPU of the stage."""
        return self.pipeline.ipus[self.stage]
