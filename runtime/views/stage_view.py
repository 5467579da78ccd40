"""What a report shows of pipelines: sentences, a table of stages, and tasks to draw.

Input: `Figures`. Output: texts, rows of shares of the run, and `TaskView`, of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import STAGE_PHASES, Figures, PipelineCost, StageCost
from ipujax.runtime.profile.stage_figures import NO_STAGE

MOST_TASKS, MOST_LINKS = 8_000, 2_000  # that are drawn
SLOW = 1.5  # times the median, from which on a micro-batch is worth a word
STAGE_HEAD = ("stage", "IPU", *STAGE_PHASES, "fill", "steady", "drain", "waits for", "slow micro-batch")
STAGE_NOTE = (
    "Shares of the run. Forward, backward and recomputed are its tasks; exchange and sync are between tasks; outside "
    "is before and after the pipeline, such as the update; fill, steady and drain are parts of idle."
)


@dataclass(frozen=True, slots=True, eq=False)
class TaskView:
    """Tasks of pipelines as a chart shows them; arrays are int64[tasks].

    Args:
        num_ipus: IPUs of one replica.
        cycles: length of the run.
        ipu: the IPU of each task.
        stage: its stage.
        kind: the number of its kind in `TASK_KINDS`.
        micro_batch: its micro-batch.
        start: cycle at which its work begins.
        end: cycle at which it ends.
        busy: cycles that its IPU works in it.
        waited: cycles that its IPU does nothing before it or in it.
        labels: what each is.
        links: (from, to) tasks on different IPUs of which the first hands a value on to the second, int64[links, 2].
        left_out: tasks that are not drawn.
        links_left_out: links between drawn tasks that are not drawn.
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
    left_out: int
    links_left_out: int


def task_view(profile: Figures, most_tasks: int = MOST_TASKS, most_links: int = MOST_LINKS) -> TaskView:
    """The first tasks of a profile.

    Args:
        profile: of a run.
        most_tasks: how many at most.
        most_links: how many links between them at most.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that knew no tasks.
    """
    trace = profile.tasks
    shown = min(len(trace), most_tasks)
    links = trace.links()
    links = links[(links < shown).all(1)]
    links = links[np.argsort(trace.start[links[:, 1]], kind="stable")]
    return TaskView(
        num_ipus=profile.target.num_ipus,
        cycles=profile.cycles,
        ipu=trace.ipu[:shown],
        stage=trace.stage[:shown],
        kind=trace.kind[:shown],
        micro_batch=trace.micro_batch[:shown],
        start=trace.start[:shown],
        end=trace.end[:shown],
        busy=trace.busy[:shown],
        waited=trace.waited[:shown],
        labels=tuple(map(trace.label, range(shown))),
        links=links[:most_links],
        left_out=len(trace) - shown,
        links_left_out=max(0, len(links) - most_links),
    )


def pipeline_sentence(pipeline: PipelineCost) -> str:
    """What a pipeline is, how long it takes, and how much of that its IPUs wait.

    Args:
        pipeline: of a profile.
    """
    ipus = f"{pipeline.num_ipus:,} IPU{'s' if pipeline.num_ipus > 1 else ''}"
    text = f"Pipeline {pipeline.name}: {pipeline.schedule}, {pipeline.num_stages:,} stages on {ipus}, "
    text += f"{pipeline.micro_batches:,} micro-batches."
    if not pipeline.is_traced:
        return f"{text} It has too many tasks to follow them one by one, so waits are not told apart."
    text += f" From its first task to its last it takes {pipeline.cycles:,} cycles."
    return f"{text} {bubble_sentence(pipeline)}"


def bubble_sentence(pipeline: PipelineCost) -> str:
    """The bubble against that of the schedule.

    Args:
        pipeline: of a profile, traced.
    """
    equal = "equal stages" if pipeline.num_stages == pipeline.num_ipus else "IPUs of equal work"
    return (
        f"Its bubble is {pipeline.bubble_share:.1%} of that time ({pipeline.bubble_cycles:,} cycles an IPU); with "
        f"{equal} and free exchanges {pipeline.schedule} with {pipeline.micro_batches:,} micro-batches has "
        f"{pipeline.ideal_share:.1%}."
    )


def stage_cells(row: StageCost, cycles: int, several: bool) -> tuple[str, ...]:
    """What a table says of a stage, under `STAGE_HEAD`.

    Args:
        row: the stage.
        cycles: of the run.
        several: whether there are several pipelines.
    """
    whole = max(1, cycles)
    shares = [*(row.phases[name] for name in STAGE_PHASES), row.fill_cycles, row.steady_cycles, row.drain_cycles]
    awaited = "none"
    if row.waits_for != NO_STAGE:
        awaited = f"stage {row.waits_for}: {row.waits_for_cycles / whole:.1%}"
    slow = "all alike"
    if row.slow_micro_batch >= 0:
        slow = f"{row.slow_micro_batch}: {row.slow_ratio:.1f} × the others ({row.slow_kind.replace('_', ' of ')})"
    name = f"{row.pipeline}: {row.stage}" if several else f"{row.stage}"
    return (name, f"{row.ipu}", *(f"{share / whole:.1%}" for share in shares), awaited, slow)
