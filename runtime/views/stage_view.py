"""Pipelines for reports: sentences, a table of stages, and tasks to draw.

Input: `Figures`. Output: texts, rows of shares of the run, and `TaskView`, of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import STAGE_PHASES, Figures, PipelineCost, StageCost
from ipujax.runtime.profile.stage_figures import NO_STAGE

MAX_TASKS = 8_000  # that are drawn
MAX_LINKS = 2_000
SLOW = 1.5  # times the median: a micro-batch that takes longer is named
STAGE_HEAD = ("stage", "IPU", *STAGE_PHASES, "fill", "steady", "drain", "waits for", "slow micro-batch")
STAGE_NOTE = (
    "Shares of the run. Forward, backward and recomputed are its tasks; exchange and sync are between tasks; host is "
    "host exchange in the pipeline, arguments that before and after; outside is other work before and after it, such "
    "as the update; fill, steady and drain are parts of idle."
)


@dataclass(frozen=True, slots=True, eq=False)
class TaskView:
    """Tasks of pipelines for a chart; arrays are int64[tasks].

    Args:
        num_ipus: IPUs of one replica.
        cycles: length of the run.
        ipu: of each task.
        stage: of each task.
        kind: position in `TASK_KINDS`.
        micro_batch: of each task.
        start: cycle at which its work begins.
        end: cycle at which it ends.
        busy: cycles that its IPU works in it.
        waited: cycles that its IPU is idle before it or in it.
        labels: stage, kind and micro-batch in words.
        links: (writer, reader) of a value, tasks on different IPUs, int64[links, 2].
        num_omitted: tasks that are not drawn.
        num_omitted_links: links between drawn tasks that are not drawn.
    """

    num_ipus: int
    cycles: int
    ipu: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    micro_batch: np.ndarray
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    waited: np.ndarray
    labels: tuple[str, ...]
    links: np.ndarray
    num_omitted: int
    num_omitted_links: int


def task_view(profile: Figures, max_tasks: int = MAX_TASKS, max_links: int = MAX_LINKS) -> TaskView:
    """Return the first tasks of a run and the first links between them.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    trace = profile.tasks
    num_tasks = min(len(trace), max_tasks)
    links = trace.links()
    links = links[(links < num_tasks).all(1)]  # both ends are drawn
    links = links[np.argsort(trace.start[links[:, 1]], kind="stable")]  # by time, so that the last are omitted
    return TaskView(
        num_ipus=profile.target.num_ipus,
        cycles=profile.cycles,
        ipu=trace.ipu[:num_tasks],
        stage=trace.stage[:num_tasks],
        kind=trace.kind[:num_tasks],
        micro_batch=trace.micro_batch[:num_tasks],
        start=trace.start[:num_tasks],
        end=trace.end[:num_tasks],
        busy=trace.busy[:num_tasks],
        waited=trace.waited[:num_tasks],
        labels=tuple(map(trace.label, range(num_tasks))),
        links=links[:max_links],
        num_omitted=len(trace) - num_tasks,
        num_omitted_links=max(0, len(links) - max_links),
    )


def pipeline_sentence(pipeline: PipelineCost) -> str:
    """Describe a pipeline: schedule, stages, micro-batches, cycles and bubble."""
    ipus = f"{pipeline.num_ipus:,} IPU{'s' if pipeline.num_ipus > 1 else ''}"
    text = f"Pipeline {pipeline.name}: {pipeline.schedule}, {pipeline.num_stages:,} stages on {ipus}, "
    text += f"{pipeline.micro_batches:,} micro-batches."
    if not pipeline.is_traced:
        return f"{text} It has too many tasks to follow them one by one, so waits are not told apart."
    text += f" From its first task to its last it takes {pipeline.cycles:,} cycles."
    return f"{text} {bubble_sentence(pipeline)}"


def bubble_sentence(pipeline: PipelineCost) -> str:
    """Compare the bubble of a traced pipeline with the ideal bubble of its schedule."""
    equal = "equal stages" if pipeline.num_stages == pipeline.num_ipus else "IPUs of equal work"
    return (
        f"Its bubble is {pipeline.bubble_share:.1%} of that time ({pipeline.bubble_cycles:,} cycles an IPU); with "
        f"{equal} and free exchanges {pipeline.schedule} with {pipeline.micro_batches:,} micro-batches has "
        f"{pipeline.ideal_share:.1%}."
    )


def stage_cells(row: StageCost, run_cycles: int, has_several_pipelines: bool) -> tuple[str, ...]:
    """Return the cells of a stage in a table with the columns `STAGE_HEAD`."""
    cycles = max(1, run_cycles)
    shares = [*(row.phases[name] for name in STAGE_PHASES), row.fill_cycles, row.steady_cycles, row.drain_cycles]
    awaited = "none"
    if row.waits_for != NO_STAGE:
        awaited = f"stage {row.waits_for}: {row.waits_for_cycles / cycles:.1%}"
    slow = "all alike"
    if row.slow_micro_batch >= 0:
        slow = f"{row.slow_micro_batch}: {row.slow_ratio:.1f} × the others ({row.slow_kind.replace('_', ' of ')})"
    name = f"{row.pipeline}: {row.stage}" if has_several_pipelines else f"{row.stage}"
    return (name, f"{row.ipu}", *(f"{share / cycles:.1%}" for share in shares), awaited, slow)
