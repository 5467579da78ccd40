"""Cycles of each stage of a pipeline by activity, and the waits and bubble of the pipeline.

Input: the tasks of a run and its `Timeline`. Output: a `StageCost` for each stage and a `PipelineCost` for each
pipeline. The cycles of the stages of an IPU add up to those of the run: its work outside of its tasks (exchanges with
other stages, syncs, the host, the update) is divided among its stages by the cycles of their tasks, and so is idle time
outside of pipelines.

    waits of an IPU ::= fill: before its first task | steady: between tasks | drain: after its last
    bubble          ::= share of the time from the first task to the last without work of IPUs for the pipeline
    ideal           ::= bubble of the schedule if all IPUs worked equally long, and so did the stages of each, and
                        exchanges took no time

Source of the ideal: the order of the schedule's tasks, each as soon as its inputs are there; with one stage an IPU this
is (p − 1)(T_F + T_B) of GPipe and 1F1B (arXiv 2104.04473), and agrees with the papers of other schedules. Stages that
share an IPU have equal parts of its work: an embedding and a head on one IPU are not twice the work of the others.
Limits: an IPU counts as waiting for the stage elsewhere whose task ended last before it resumed; where exchanges are
buffered, only stages with which it exchanges values count. With too many tasks to trace, waits have no cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np

from ipujax.runtime.files.figure_kinds import IpuIndex
from ipujax.runtime.files.kinds import Integer, Record, Text
from ipujax.runtime.graph import TASK_KINDS, PipelineLayout, Program
from ipujax.runtime.profile.attribution import Share, divide
from ipujax.runtime.profile.execution_trace import TaskTrace
from ipujax.runtime.tensor import REMATERIALISED, Origin
from ipujax.runtime.timeline import TaskSpans, TaskTotal, Timeline
from ipujax.runtime.timeline.clocks import GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC

STAGE_PHASES = ("forward", "backward", "recomputed", "exchange", "sync", "host", "arguments", "outside", "idle")
NO_STAGE = -1
_StageKey = tuple[int, int]  # numbers of a pipeline and of a stage of it


class _IdleCycles(NamedTuple):
    """Idle cycles of a stage: before the first task of its IPU, between tasks, after the last; see the module."""

    fill: int = 0
    steady: int = 0
    drain: int = 0


class _Awaited(NamedTuple):
    """The stage for which a stage waits longest, `NO_STAGE` if it never waits for one, and the cycles of that."""

    stage: int
    cycles: int


class _SlowMicroBatch(NamedTuple):
    """Slowest task of a stage: ratio of its cycles to the median of other micro-batches, and cycles beyond that."""

    micro_batch: int = -1
    kind: str = ""
    ratio: float = 1.0
    excess_cycles: int = 0


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cycles of one stage of a pipeline in one run of the program.

    Args:
        pipeline: number of its pipeline.
        stage: its number.
        ipu: number of its IPU.
        phases: cycles of its IPU by activity: its "forward", "backward" and "recomputed" work with the exchanges inside
            of them, "exchange" with other IPUs (stages, and collectives of its tasks), the "sync" for that with stages,
            "host" exchange in the pipeline, that of "arguments", results and first micro-batches around it, other work
            "outside" of it, such as the update, and "idle"; see the module for IPUs of several stages. What prepares a
            pipeline, such as its counters, is "exchange" too.
        fill_cycles: idle cycles before its first task, if that is the first of its IPU; part of "idle", as the next.
        steady_cycles: idle cycles before its other tasks.
        drain_cycles: idle cycles after its last task, if that is the last of its IPU.
        waits_for: stage for which it waits longest; `NO_STAGE` if it never waits for one.
        waits_for_cycles: cycles of these waits.
        slow_micro_batch: micro-batch with most cycles beyond the median of the others; −1 if all have equal cycles.
        slow_kind: kind of its task.
        slow_ratio: ratio of its cycles to the median of the others.
        slow_excess_cycles: its cycles beyond that median.
    """

    pipeline: Annotated[int, Integer(below="pipelines")]
    stage: int
    ipu: IpuIndex
    phases: Annotated[dict[str, int], Record(dict.fromkeys(STAGE_PHASES, Integer()))] = field(hash=False)
    fill_cycles: int = 0
    steady_cycles: int = 0
    drain_cycles: int = 0
    waits_for: Annotated[int, Integer(NO_STAGE)] = NO_STAGE
    waits_for_cycles: int = 0
    slow_micro_batch: Annotated[int, Integer(-1)] = -1
    slow_kind: Annotated[str, Text(("", *TASK_KINDS))] = ""
    slow_ratio: float = 1.0
    slow_excess_cycles: int = 0

    @property
    def task_cycles(self) -> int:
        """Cycles of its tasks."""
        return sum(self.phases[name] for name in STAGE_PHASES[:3])

    @property
    def busy_cycles(self) -> int:
        """Cycles of its tasks and of the host exchanges for its micro-batches, during which it computes nothing."""
        return self.task_cycles + self.phases["host"]


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Cycles of one pipeline in one run of the program.

    Args:
        name: debug name.
        schedule: name of its schedule.
        num_stages: number of stages.
        num_ipus: number of their IPUs.
        micro_batches: number of micro-batches.
        is_traced: whether its tasks are in the trace; if not, the next three figures are 0.
        cycles: cycles from the start of the first task to the end of the last.
        bubble_cycles: mean over its IPUs of the cycles without work for the pipeline: waits, and work outside of the
            pipeline, such as the IPU's part of the update.
        ideal_share: idle share of the time if IPUs worked equally long and exchanges were free.
        slowest_stage: stage with most cycles on the IPU with most cycles of tasks and host exchanges.
    """

    name: str
    schedule: str
    num_stages: Annotated[int, Integer(1)]
    num_ipus: Annotated[int, Integer(1)]
    micro_batches: Annotated[int, Integer(1)]
    is_traced: bool
    cycles: int
    bubble_cycles: int
    ideal_share: float
    slowest_stage: int

    @property
    def bubble_share(self) -> float:
        """Mean share of its time without work of its IPUs for it, as in `ipu.pipeline_plan`."""
        return self.bubble_cycles / self.cycles if self.cycles else 0.0


def stage_costs(
    spans: TaskSpans,
    trace: TaskTrace,
    timeline: Timeline,
    shares: Callable[[Program], list[Share]],
    works: Mapping[Program, np.ndarray],
    is_buffered: bool,
) -> tuple[StageCost, ...]:
    """Return the stages of all pipelines, in order of pipeline and stage, from spans and times of their tasks."""
    # `shares` returns shares of a step without its calls; `works` has cycles of a step's phases, int64[num_ipus, 5].
    # Buffered, a stage waits only for stages with which it exchanges values.
    number = {layout: n for n, layout in enumerate(trace.pipelines)}
    tasks: dict[_StageKey, dict[str, int]] = defaultdict(lambda: dict.fromkeys(STAGE_PHASES, 0))
    rest = timeline.work.copy()
    between = sum((span.exchanged for span in spans.pipelines), np.zeros_like(rest))
    for total in spans.totals:
        task = total.task
        work = total.work[task.ipu]
        phases = tasks[number[task.pipeline], task.stage]
        phases["host"] += int(work[HOST_EXCHANGE])
        phases["exchange"] += int(work[GLOBAL_EXCHANGE])
        inner = int(work.sum() - work[HOST_EXCHANGE] - work[GLOBAL_EXCHANGE])
        recomputed = 0 if task.kind == "forward" else min(inner, _recomputed_cycles(total, shares, works))
        phases["forward" if task.kind == "forward" else "backward"] += inner - recomputed
        phases["recomputed"] += recomputed
        rest[task.ipu] -= work
        between += total.work  # work of a task on other IPUs, such as syncs of IPUs that share a decision
        between[task.ipu] -= work
    waits = _idle_cycles(spans, trace)
    stages_of_ipu: dict[int, list[_StageKey]] = defaultdict(list)
    for pipeline, layout in enumerate(trace.pipelines):
        for stage in layout.stages:
            stages_of_ipu[layout.ipus[stage]].append((pipeline, stage))
    for ipu, keys in stages_of_ipu.items():
        idle = timeline.cycles - int(timeline.work[ipu].sum()) - sum(sum(waits[key]) for key in keys)
        transfer = between[ipu] + spans.prepared[ipu]
        outside = rest[ipu] - transfer
        before = spans.prepared[ipu, HOST_EXCHANGE]  # the stage does not wait for loads before its pipeline
        shared = {
            "exchange": transfer.sum() - transfer[SYNC] - transfer[HOST_EXCHANGE],
            "sync": transfer[SYNC],
            "host": transfer[HOST_EXCHANGE] - before,
            "arguments": outside[HOST_EXCHANGE] + before,
            "outside": outside.sum() - outside[HOST_EXCHANGE],
            "idle": idle,
        }
        weights = [sum(tasks[key].values()) for key in keys]
        for name, cycles in shared.items():
            parts = divide(int(cycles), weights if any(weights) else [1] * len(keys))
            for key, part in zip(keys, parts, strict=True):
                tasks[key][name] += part + (sum(waits[key]) if name == "idle" else 0)
    awaited = _find_awaited(trace, is_buffered)
    slow = _find_slow_micro_batches(trace)
    return tuple(_stage_cost(key, trace, tasks[key], waits[key], awaited[key], slow[key]) for key in sorted(tasks))


def _stage_cost(
    key: _StageKey,
    trace: TaskTrace,
    phases: dict[str, int],
    waits: _IdleCycles,
    awaited: _Awaited,
    slow: _SlowMicroBatch,
) -> StageCost:
    """Return the row of a stage from its figures; `phases` are its cycles by activity."""
    pipeline, stage = key
    ipu = trace.pipelines[pipeline].ipus[stage]
    return StageCost(
        pipeline,
        stage,
        ipu,
        phases,
        waits.fill,
        waits.steady,
        waits.drain,
        awaited.stage,
        awaited.cycles,
        slow.micro_batch,
        slow.kind,
        slow.ratio,
        slow.excess_cycles,
    )


def _recomputed_cycles(
    total: TaskTotal, shares: Callable[[Program], list[Share]], works: Mapping[Program, np.ndarray]
) -> int:
    """Return the cycles of a task that recompute activations of its forward task."""
    cycles = 0
    for (part, leaf), times in total.leaves.items():
        work = works[leaf][total.task.ipu]
        leaf_cycles = int(work.sum() - work[HOST_EXCHANGE] - work[GLOBAL_EXCHANGE]) * times
        if leaf_cycles:
            leaf_shares = shares(leaf)
            pieces = divide(leaf_cycles, [share.weight for share in leaf_shares])
            pairs = zip(pieces, leaf_shares, strict=True)
            cycles += sum(piece for piece, share in pairs if _is_recomputed(share.origin, part))
    return cycles


def _is_recomputed(origin: Origin, part: str) -> bool:
    """Return whether an operation is recomputed, by its own part, that of its call, or the scope of JAX."""
    return (origin.part or part) == "recomputed" or (not origin.part and REMATERIALISED in origin.path)


def _idle_cycles(spans: TaskSpans, trace: TaskTrace) -> dict[_StageKey, _IdleCycles]:
    """Return the idle cycles of each stage within its pipeline."""
    waits: dict[_StageKey, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))  # fill, steady, drain
    has_begun: set[tuple[int, int]] = set()  # (pipeline, IPU): only the first task of an IPU waits for the fill
    last: dict[tuple[int, int], int] = {}
    columns = (column.tolist() for column in (trace.pipeline, trace.stage, trace.ipu, trace.waited))
    for number, stage, ipu, waited in zip(*columns, strict=True):
        waits[number, stage][int((number, ipu) in has_begun)] += waited
        has_begun.add((number, ipu))
        last[number, ipu] = stage
    for (number, ipu), stage in last.items():
        waits[number, stage][2] += spans.pipelines[number].drained[ipu]
    keys = ((n, stage) for n, layout in enumerate(trace.pipelines) for stage in range(len(layout.ipus)))
    return {key: _IdleCycles(*waits[key].tolist()) for key in keys}


def _find_awaited(trace: TaskTrace, is_buffered: bool) -> dict[_StageKey, _Awaited]:
    """Return, for each stage, the stage for which it waits longest: it names the cause of idle time in a pipeline."""
    result: dict[_StageKey, _Awaited] = {}
    for pipeline, layout in enumerate(trace.pipelines):
        waits = _waits_between_stages(trace, pipeline, _can_wait(layout, is_buffered))
        for stage in range(len(layout.ipus)):
            awaited = int(waits[stage].argmax())
            cycles = int(waits[stage, awaited])
            result[pipeline, stage] = _Awaited(awaited, cycles) if cycles else _Awaited(NO_STAGE, 0)
    return result


def _can_wait(layout: PipelineLayout, is_buffered: bool) -> np.ndarray:
    """Return whether a stage can wait for another, on another IPU, bool[stages, stages].

    Where exchanges between IPUs are buffered, only for those with which it exchanges values; else for all.
    """
    stages = len(layout.ipus)
    ipus = np.array(layout.ipus)
    can_wait = np.full((stages, stages), not is_buffered)
    for (writer, _), (reader, _) in layout.links:
        can_wait[reader, writer] = True  # for values
        can_wait[writer, reader] = True  # for free slots of a buffer
    return can_wait & (ipus[:, None] != ipus[None])


def _waits_between_stages(trace: TaskTrace, pipeline: int, can_wait: np.ndarray) -> np.ndarray:
    """Return the cycles that stages of a pipeline wait for others, int64[stages that wait, stages awaited].

    A wait is for the stage whose task ended last before it was over.
    """
    stages = len(can_wait)
    waiting = np.flatnonzero((trace.pipeline == pipeline) & (trace.waited > 0))  # tasks
    wait_end = (trace.end - trace.busy)[waiting]
    last_end = np.full((stages, len(waiting)), -1, np.int64)  # of a stage's tasks before each wait was over, or −1
    for stage in range(stages):
        ends = np.sort(trace.end[(trace.pipeline == pipeline) & (trace.stage == stage)])
        number_before = np.searchsorted(ends, wait_end, "right")
        ends_before = np.concatenate([[-1], ends])[number_before]
        last_end[stage] = np.where(can_wait[trace.stage[waiting], stage], ends_before, -1)
    waits = np.zeros((stages, stages), np.int64)
    has_cause = last_end.max(0, initial=-1) >= 0
    caused = waiting[has_cause]
    np.add.at(waits, (trace.stage[caused], last_end[:, has_cause].argmax(0)), trace.waited[caused])
    return waits


def _find_slow_micro_batches(trace: TaskTrace) -> dict[_StageKey, _SlowMicroBatch]:
    """Return, for each stage, the micro-batch with most cycles beyond the median of the others."""
    slow: dict[_StageKey, _SlowMicroBatch] = defaultdict(_SlowMicroBatch)
    if not len(trace):
        return slow
    order = np.lexsort((trace.micro_batch, trace.kind, trace.stage, trace.pipeline))
    groups = np.stack([trace.pipeline, trace.stage, trace.kind], 1)[order]
    cuts = np.flatnonzero((np.diff(groups, axis=0) != 0).any(1)) + 1
    for rows in np.split(order, cuts):  # the tasks of one kind of one stage
        busy = trace.busy[rows]
        slowest = int(busy.argmax())
        remaining = np.delete(busy, slowest)
        median = int(np.median(remaining)) if len(remaining) else int(busy[slowest])
        key = int(trace.pipeline[rows[0]]), int(trace.stage[rows[0]])
        excess = int(busy[slowest]) - median
        if excess > slow[key].excess_cycles:
            kind = TASK_KINDS[trace.kind[rows[0]]]
            ratio = float(busy[slowest] / max(1, median))
            slow[key] = _SlowMicroBatch(int(trace.micro_batch[rows[slowest]]), kind, ratio, excess)
    return slow


def pipeline_costs(spans: TaskSpans, trace: TaskTrace, stages: tuple[StageCost, ...]) -> tuple[PipelineCost, ...]:
    """Return the cycles of each pipeline of a run, with the result of `stage_costs` for it."""
    rows = []
    for number, layout in enumerate(trace.pipelines):
        pipeline_stages = [row for row in stages if row.pipeline == number]
        ipus = sorted(set(layout.ipus))
        cycles = int(trace.pipeline_end[number] - trace.pipeline_start[number])
        work = spans.pipelines[number].exchanged + sum(t.work for t in spans.totals if t.task.pipeline is layout)
        busy = int(work[ipus].sum() - spans.pipelines[number].early[ipus].sum())
        idle = max(0, cycles * len(ipus) - busy)
        by_ipu = {ipu: sum(row.busy_cycles for row in pipeline_stages if row.ipu == ipu) for ipu in ipus}
        busiest = max(ipus, key=lambda ipu: by_ipu[ipu])
        slowest = max((row for row in pipeline_stages if row.ipu == busiest), key=lambda row: row.busy_cycles)
        rows.append(
            PipelineCost(
                layout.name,
                layout.schedule,
                len(layout.stages),
                len(ipus),
                layout.micro_batches,
                not spans.is_counted,
                cycles,
                idle // len(ipus),
                ideal_share(trace, number),
                slowest.stage,
            )
        )
    return tuple(rows)


def ideal_share(trace: TaskTrace, pipeline: int) -> float:
    """Return the idle share of the time of a pipeline if IPUs worked equally long and exchanges took no time."""
    # The trace has the order of the tasks of each IPU, and the mean cycles of each kind of task.
    layout = trace.pipelines[pipeline]
    rows = np.flatnonzero(trace.pipeline == pipeline)
    busy = trace.busy[rows]
    kinds = trace.kind[rows]
    means = {kind: float(busy[kinds == kind].mean()) for kind in np.unique(kinds).tolist()}
    split = [means[TASK_KINDS.index(name)] for name in TASK_KINDS[2:] if TASK_KINDS.index(name) in means]
    if split:  # undivided backward tasks beside divided ones, as those of the first stage of zb-h1
        means[TASK_KINDS.index("backward")] = sum(split)
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (writer, wrote), (reader, read) in layout.links:
        waits[reader, TASK_KINDS.index(read)].append((writer, TASK_KINDS.index(wrote)))
    # Tasks are replayed in order: each starts when its IPU is free and all tasks that it waits for have ended.
    task_end: dict[tuple[int, int, int], float] = {}
    free = dict.fromkeys(layout.ipus, 0.0)
    total = 0.0
    sharing = Counter(layout.ipus)
    columns = (column[rows].tolist() for column in (trace.stage, trace.kind, trace.micro_batch))
    for stage, kind, micro_batch in zip(*columns, strict=True):
        ipu = layout.ipus[stage]
        ready = max((task_end.get((*task, micro_batch), 0.0) for task in waits[stage, kind]), default=0.0)
        cycles = means[kind] / sharing[ipu]
        free[ipu] = task_end[stage, kind, micro_batch] = max(free[ipu], ready) + cycles
        total += cycles
    available = max(free.values()) * len(free)
    return 1 - total / available if available else 0.0
