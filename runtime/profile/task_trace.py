"""Task trace: spans of the tasks of each pipeline as plain columns.

Input: `TaskSpans` of a run. Output: `TaskTrace`, of arrays and texts, convertible to JSON-able data and back.
Limits: those of `timeline.task_spans`; without rows where there are too many tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.graph import TASK_KINDS, PipelineLayout
from ipujax.runtime.sections.ids import Json
from ipujax.runtime.timeline import TaskSpans

COLUMNS = (
    "pipeline_start",
    "pipeline_end",
    "pipeline",
    "stage",
    "kind",
    "micro_batch",
    "start",
    "end",
    "busy",
    "waited",
)


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

    pipelines: tuple[PipelineLayout, ...]
    pipeline_start: np.ndarray
    pipeline_end: np.ndarray
    pipeline: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    micro_batch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    waited: np.ndarray

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

    def data(self) -> Json:
        """Return the columns as JSON-able data."""
        pipelines = [
            {
                "name": layout.name,
                "schedule": layout.schedule,
                "ipus": list(layout.ipus),
                "micro_batches": layout.micro_batches,
                "tasks": [list(task) for task in layout.tasks],
                "links": [[*a, *b] for a, b in layout.links],
            }
            for layout in self.pipelines
        ]
        return {"pipelines": pipelines, **{name: getattr(self, name).tolist() for name in COLUMNS}}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> TaskTrace:
        """Return the trace saved as the result of `data`."""
        pipelines = tuple(
            PipelineLayout(
                row["name"],
                row["schedule"],
                tuple(row["ipus"]),
                row["micro_batches"],
                tuple((stage, kind) for stage, kind in row["tasks"]),
                tuple(((a, x), (b, y)) for a, x, b, y in row["links"]),
            )
            for row in data["pipelines"]
        )
        return cls(pipelines, **{name: np.array(data[name], np.int64) for name in COLUMNS})


def task_trace(spans: TaskSpans) -> TaskTrace:
    """Return the trace of the spans of a run."""
    layouts = tuple(span.layout for span in spans.pipelines)
    starts, ends = (np.array([getattr(span, name) for span in spans.pipelines], np.int64) for name in ("start", "end"))
    stages = np.array([total.task.stage for total in spans.totals], np.int64)
    kinds = np.array([TASK_KINDS.index(total.task.kind) for total in spans.totals], np.int64)
    pipeline, task, micro_batch, start, end, busy, waited = spans.rows.T
    return TaskTrace(layouts, starts, ends, pipeline, stages[task], kinds[task], micro_batch, start, end, busy, waited)
