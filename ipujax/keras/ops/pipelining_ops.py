"""Schedules of pipelines, under the names of Graphcore's TensorFlow.

Each has the name of a schedule of `ipu.pipeline`, see `docs/pipelines.md`.
"""

from enum import Enum


class PipelineSchedule(Enum):
    """Schedules for `model.set_pipelining_options(pipeline_schedule=)`."""

    Grouped = "grouped"
    Interleaved = "interleaved"
    Sequential = "sequential"
