"""Task trace: spans of the tasks of each pipeline as plain columns.

Input: `TaskSpans` of a run. Output: `TaskTrace`, of arrays and texts.
Limits: those of `timeline.task_spans`; without rows where there are too many tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.files.figure_kinds import Row
from ipujax.runtime.files.kinds import Integer, List, Record, Text
from ipujax.runtime.graph import TASK_KINDS, PipelineLayout
from ipujax.runtime.timeline import TaskSpans

_TASK = Row((Integer(), Text(TASK_KINDS)))
_PIPELINE = Record(
    {"name": Text(), "schedule": Text(), "ipus": List(Integer(below="IPUs"), minimum=1), "micro_batches": Integer(1)}
    | {"tasks": List(_TASK), "links": List(Row((_TASK, _TASK)))}
)
_OF_PIPELINES = List(Integer(), "pipelines")
_OF_TASKS = List(Integer(), "tasks")


@dataclass(frozen=True, slots=True, eq=False)
class TaskTrace:
    """The tasks of all pipelines in program order; those of one IPU are sorted by time.

    Args:
        pipelines: layout of each pipeline.
        pipeline_start: cycle at which the first task of each begins, int64[pipelines].
        pipeline_end: cycle at which its last task ends, int64[pipelines]; 0, as its start, if it has no tasks here.
        pipeline: the pipeline of each task, int64[tasks].
        stage: its stage, int64[tasks].
        kind: index of its kind in `TASK_KINDS`, int64[tasks].
        micro_batch: its micro-batch, int64[tasks].
        start: cycle at which its work begins, after its waits, int64[tasks].
        end: cycle at which it ends, int64[tasks].
        busy: busy cycles of its IPU from `start` to `end`, int64[tasks].
        waited: idle cycles of its IPU since its task before, or the start of the pipeline, int64[tasks].
    """

    pipelines: Annotated[tuple[PipelineLayout, ...], List(_PIPELINE, "pipelines")]
    pipeline_start: Annotated[np.ndarray, _OF_PIPELINES]
    pipeline_end: Annotated[np.ndarray, _OF_PIPELINES]
    pipeline: Annotated[np.ndarray, List(Integer(below="pipelines"), "tasks")]
    stage: Annotated[np.ndarray, _OF_TASKS]
    kind: Annotated[np.ndarray, List(Integer(maximum=len(TASK_KINDS) - 1), "tasks")]
    micro_batch: Annotated[np.ndarray, _OF_TASKS]
    start: Annotated[np.ndarray, _OF_TASKS]
    end: Annotated[np.ndarray, _OF_TASKS]
    busy: Annotated[np.ndarray, _OF_TASKS]
    waited: Annotated[np.ndarray, _OF_TASKS]

    def __len__(self) -> int:
        return len(self.pipeline)

    @property
    def ipu(self) -> np.ndarray:
        """The IPU of each task, int64[tasks]."""
        ipus = [np.array(layout.ipus, np.int64) for layout in self.pipelines]
        first = np.cumsum([0, *(len(each) for each in ipus)])
        return np.concatenate([*ipus, np.zeros(0, np.int64)])[first[self.pipeline] + self.stage]

    def label(self, task: int) -> str:
        """Return stage, kind and micro-batch of a task by its number, and its pipeline where there are several."""
        kind = self.kind_name(task).replace("_", " of ")
        text = f"stage {self.stage[task]}, {kind}, micro-batch {self.micro_batch[task]}"
        return text if len(self.pipelines) == 1 else f"{text} of {self.pipelines[self.pipeline[task]].name}"

    def kind_name(self, task: int) -> str:
        """Return the kind of a task by its number, one of `TASK_KINDS`."""
        return TASK_KINDS[self.kind[task]]

    def links(self, between_ipus: bool = True) -> np.ndarray:
        """Return the pairs of tasks of which the first sends a value to the second, int64[pairs, 2]."""
        keys = (self.pipeline, self.stage, self.kind, self.micro_batch)
        number_of = {key: n for n, key in enumerate(zip(*(column.tolist() for column in keys), strict=True))}
        pairs: list[tuple[int, int]] = []
        for number, layout in enumerate(self.pipelines):
            for (writer, wrote), (reader, read) in layout.links:
                if between_ipus and layout.ipus[writer] == layout.ipus[reader]:
                    continue
                a, b = (TASK_KINDS.index(name) for name in (wrote, read))
                for micro_batch in range(layout.micro_batches):
                    sender = number_of.get((number, writer, a, micro_batch))
                    receiver = number_of.get((number, reader, b, micro_batch))
                    if sender is not None and receiver is not None:
                        pairs.append((sender, receiver))
        return np.array(pairs, np.int64).reshape(-1, 2)


def task_trace(spans: TaskSpans) -> TaskTrace:
    """Return the trace of the spans of a run."""
    layouts = tuple(span.layout for span in spans.pipelines)
    starts, ends = (np.array([getattr(span, name) for span in spans.pipelines], np.int64) for name in ("start", "end"))
    stages = np.array([total.task.stage for total in spans.totals], np.int64)
    kinds = np.array([TASK_KINDS.index(total.task.kind) for total in spans.totals], np.int64)
    pipeline, task, micro_batch, start, end, busy, waited = spans.rows.T
    return TaskTrace(layouts, starts, ends, pipeline, stages[task], kinds[task], micro_batch, start, end, busy, waited)
