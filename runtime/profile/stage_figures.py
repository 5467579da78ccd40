"""What each stage of a pipeline does all the time, and what the pipeline loses to waiting.

Input: the tasks of a run and its `Timeline`. Output: a `StageCost` for each stage and a `PipelineCost` for each
pipeline. The cycles of the stages of an IPU add up to those of the run: what the IPU does in no task of its own
(handing values on, syncs, the host, the update) is divide among its stages by the cycles of their tasks, and so is
idle time outside of pipelines.

    waits of an IPU ::= fill: before its first task | steady: between tasks | drain: after its last
    bubble          ::= the share of the time from the first task to the last in which IPUs do nothing for the pipeline
    ideal           ::= the bubble of the schedule if all IPUs worked equally long, and so did the stages of each, and
                        handing on took no time

Source of the ideal: the order of the schedule's tasks, each as soon as what it waits for is done; with one stage an IPU
this is (p − 1)(T_F + T_B) of GPipe and 1F1B (arXiv 2104.04473) and what other schedules say of theirs. Stages that
share an IPU have equal parts of its work: an embedding and a head on one IPU are not twice the work of the others.
Limits: an IPU is said to wait for the stage elsewhere whose task ended last before it went on, of those that it
exchanges values with where exchanges are buffered. Waits are not told apart where there are too many tasks to trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.graph import TASK_KINDS, Program
from ipujax.runtime.profile.attribution import Share, divide
from ipujax.runtime.profile.task_trace import TaskTrace
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import TaskSpans, TaskTotal, Timeline
from ipujax.runtime.timeline.clocks import GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC

STAGE_PHASES = ("forward", "backward", "recomputed", "exchange", "sync", "host", "outside", "idle")
NO_STAGE = -1
_Slow = tuple[int, str, float, int]  # a micro-batch, a kind of task, its cycles over those of others, and beyond them
_AGAIN = "rematted_computation"  # as `jax.checkpoint` names it


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage of a pipeline costs in one run of the program.

    Args:
        pipeline: number of its pipeline.
        stage: its number.
        ipu: where it runs.
        phases: cycles of its IPU by what they go to: its "forward", "backward" and "recomputed" work with the exchanges
            inside of them, "exchange" with other stages, the "sync" for it, "host" exchange, what is "outside" of the
            pipeline, such as the update, and "idle"; see the module for IPUs of several stages.
        fill_cycles: idle cycles before its first task, if that is the first of its IPU; part of "idle", as the next.
        steady_cycles: idle cycles before its other tasks.
        drain_cycles: idle cycles after its last task, if that is the last of its IPU.
        waits_for: the stage that it waits for longest; `NO_STAGE` if it never waits for one.
        waits_for_cycles: how long it waits for that.
        slow_micro_batch: the micro-batch that takes most cycles beyond the median of the others; −1 if all are alike.
        slow_kind: the kind of task in which it does.
        slow_ratio: its cycles over the median of the others.
        slow_excess_cycles: its cycles beyond that median.
    """

    pipeline: int
    stage: int
    ipu: int
    phases: dict[str, int] = field(hash=False)
    fill_cycles: int = 0
    steady_cycles: int = 0
    drain_cycles: int = 0
    waits_for: int = NO_STAGE
    waits_for_cycles: int = 0
    slow_micro_batch: int = -1
    slow_kind: str = ""
    slow_ratio: float = 1.0
    slow_excess_cycles: int = 0

    @property
    def task_cycles(self) -> int:
        """Cycles of its tasks."""
        return sum(self.phases[name] for name in STAGE_PHASES[:3])


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """What one pipeline takes in one run of the program.

    Args:
        name: debug name.
        schedule: its schedule.
        num_stages: stages.
        num_ipus: IPUs they are on.
        micro_batches: micro-batches.
        is_traced: whether its tasks are in the trace; if not, the next three figures are 0.
        cycles: from the first task to the last.
        bubble_cycles: cycles thereof that an IPU does nothing for the pipeline, on average: it waits, unless there is
            something to do outside of the pipeline, such as its part of the update.
        ideal_share: share of the time that is idle if IPUs worked equally long and exchanges were free.
        slowest_stage: the stage with most cycles on the IPU whose tasks take most.
    """

    name: str
    schedule: str
    num_stages: int
    num_ipus: int
    micro_batches: int
    is_traced: bool
    cycles: int
    bubble_cycles: int
    ideal_share: float
    slowest_stage: int

    @property
    def bubble_share(self) -> float:
        """Share of its time that its IPUs do nothing for the pipeline, on average, as `ipu.pipeline_plan` has it."""
        return self.bubble_cycles / self.cycles if self.cycles else 0.0


def stage_costs(
    spans: TaskSpans,
    trace: TaskTrace,
    timeline: Timeline,
    shares: Callable[[Program], list[Share]],
    works: Mapping[Program, np.ndarray],
    is_buffered: bool,
) -> tuple[StageCost, ...]:
    """The stages of all pipelines, in order.

    Args:
        spans: of the run.
        trace: of the same.
        timeline: of the same.
        shares: the shares of a step where it is, whatever calls it.
        works: cycles of each phase on each IPU of each step, int64[num_ipus, 5].
        is_buffered: whether a stage waits for those alone that it exchanges values with.
    """
    number = {layout: n for n, layout in enumerate(trace.pipelines)}
    tasks: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: dict.fromkeys(STAGE_PHASES, 0))
    rest = timeline.work.copy()
    between = sum((span.exchanged for span in spans.pipelines), np.zeros_like(rest))
    for total in spans.totals:
        task, work = total.task, total.work[total.task.ipu]
        phases = tasks[number[task.pipeline], task.stage]
        phases["host"] += int(work[HOST_EXCHANGE])
        phases["exchange"] += int(work[GLOBAL_EXCHANGE])
        own = int(work.sum() - work[HOST_EXCHANGE] - work[GLOBAL_EXCHANGE])
        again = 0 if task.kind == "forward" else min(own, _recomputed_cycles(total, shares, works))
        phases["forward" if task.kind == "forward" else "backward"] += own - again
        phases["recomputed"] += again
        rest[task.ipu] -= work
        between += total.work  # on other IPUs, as those that decide with it how a loop goes on
        between[task.ipu] -= work
    waits = _waits(spans, trace)
    homes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, layout in enumerate(trace.pipelines):
        for stage, ipu in enumerate(layout.ipus):
            homes[ipu].append((place, stage))
    for ipu, keys in homes.items():
        idle = timeline.cycles - int(timeline.work[ipu].sum()) - sum(sum(waits[key]) for key in keys)
        handed, outside = between[ipu], rest[ipu] - between[ipu]
        shared = {
            "exchange": handed.sum() - handed[SYNC] - handed[HOST_EXCHANGE],
            "sync": handed[SYNC],
            "host": handed[HOST_EXCHANGE] + outside[HOST_EXCHANGE],
            "outside": outside.sum() - outside[HOST_EXCHANGE],
            "idle": idle,
        }
        weights = [sum(tasks[key].values()) for key in keys]
        for name, cycles in shared.items():
            parts = divide(int(cycles), weights if any(weights) else [1] * len(keys))
            for key, part in zip(keys, parts, strict=True):
                tasks[key][name] += part + (sum(waits[key]) if name == "idle" else 0)
    awaited = _awaited(trace, is_buffered)
    slow = _slow_micro_batches(trace)
    return tuple(_stage_cost(key, trace, tasks[key], waits[key], awaited[key], slow[key]) for key in sorted(tasks))


def _stage_cost(
    key: tuple[int, int],
    trace: TaskTrace,
    phases: dict[str, int],
    waits: tuple[int, int, int],
    awaited: tuple[int, int],
    slow: _Slow,
) -> StageCost:
    number, stage = key
    fill, steady, drain = waits
    micro_batch, kind, ratio, excess = slow
    ipu = trace.pipelines[number].ipus[stage]
    return StageCost(number, stage, ipu, phases, fill, steady, drain, *awaited, micro_batch, kind, ratio, excess)


def _recomputed_cycles(
    total: TaskTotal, shares: Callable[[Program], list[Share]], works: Mapping[Program, np.ndarray]
) -> int:
    """Cycles of a task that compute again what its forward task has not kept."""
    cycles = 0
    for (part, leaf), times in total.leaves.items():
        work = works[leaf][total.task.ipu]
        spent = int(work.sum() - work[HOST_EXCHANGE] - work[GLOBAL_EXCHANGE]) * times
        if spent:
            parts = shares(leaf)
            again = [_is_recomputed(share.origin, part) for share in parts]
            pieces = divide(spent, [share.weight for share in parts])
            cycles += sum(piece for piece, is_again in zip(pieces, again, strict=True) if is_again)
    return cycles


def _is_recomputed(origin: Origin, part: str) -> bool:
    """Whether an operation is recomputed, by its part of training, that of its call, or JAX's name of such work."""
    return (origin.part or part) == "recomputed" or (not origin.part and _AGAIN in origin.path)


def _waits(spans: TaskSpans, trace: TaskTrace) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Idle cycles of each stage in runs of its pipeline: filling, in steady state, draining."""
    found: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
    first: set[tuple[int, int]] = set()
    last: dict[tuple[int, int], int] = {}
    columns = (column.tolist() for column in (trace.pipeline, trace.stage, trace.ipu, trace.waited))
    for number, stage, ipu, waited in zip(*columns, strict=True):
        found[number, stage][int((number, ipu) in first)] += waited
        first.add((number, ipu))
        last[number, ipu] = stage
    for (number, ipu), stage in last.items():
        found[number, stage][2] += spans.pipelines[number].drained[ipu]
    none = np.zeros(3, np.int64)
    keys = ((n, stage) for n, layout in enumerate(trace.pipelines) for stage in range(len(layout.ipus)))
    return {key: (int(w[0]), int(w[1]), int(w[2])) for key in keys for w in [found.get(key, none)]}


def _awaited(trace: TaskTrace, is_buffered: bool) -> dict[tuple[int, int], tuple[int, int]]:
    """For each stage the one that it waits for longest, and for how long."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    resumed = trace.end - trace.busy
    for number, layout in enumerate(trace.pipelines):
        stages = len(layout.ipus)
        ipus = np.array(layout.ipus)
        met = np.repeat(not is_buffered, stages * stages).reshape(stages, stages)
        for (a, _), (b, _) in layout.links:
            met[a, b] = met[b, a] = True
        met &= ipus[:, None] != ipus[None]
        rows = np.flatnonzero((trace.pipeline == number) & (trace.waited > 0))
        latest = np.full((stages, len(rows)), -1, np.int64)
        for stage in range(stages):
            ends = np.sort(trace.end[(trace.pipeline == number) & (trace.stage == stage)])
            before = np.searchsorted(ends, resumed[rows], "right")
            known = np.concatenate([[-1], ends])[before]
            latest[stage] = np.where(met[trace.stage[rows], stage], known, -1)
        waits = np.zeros((stages, stages), np.int64)
        if len(rows):
            awaited, is_known = latest.argmax(0), latest.max(0) >= 0
            np.add.at(waits, (trace.stage[rows][is_known], awaited[is_known]), trace.waited[rows][is_known])
        for stage in range(stages):
            most = int(waits[stage].argmax())
            cycles = int(waits[stage, most])
            found[number, stage] = (most, cycles) if cycles else (NO_STAGE, 0)
    return found


def _slow_micro_batches(trace: TaskTrace) -> dict[tuple[int, int], _Slow]:
    """For each stage the micro-batch that takes most beyond the others: it, in which kind of task, and how much."""
    found: dict[tuple[int, int], _Slow] = defaultdict(lambda: (-1, "", 1.0, 0))
    if not len(trace):
        return found
    order = np.lexsort((trace.micro_batch, trace.kind, trace.stage, trace.pipeline))
    groups = np.stack([trace.pipeline, trace.stage, trace.kind], 1)[order]
    cuts = np.flatnonzero((np.diff(groups, axis=0) != 0).any(1)) + 1
    for rows in np.split(order, cuts):
        busy = trace.busy[rows]
        slowest = int(busy.argmax())
        others = np.delete(busy, slowest)
        usual = int(np.median(others)) if len(others) else int(busy[slowest])
        key, excess = (int(trace.pipeline[rows[0]]), int(trace.stage[rows[0]])), int(busy[slowest]) - usual
        if excess > found[key][3]:
            kind = TASK_KINDS[trace.kind[rows[0]]]
            found[key] = int(trace.micro_batch[rows[slowest]]), kind, float(busy[slowest] / max(1, usual)), excess
    return found


def pipeline_costs(spans: TaskSpans, trace: TaskTrace, stages: tuple[StageCost, ...]) -> tuple[PipelineCost, ...]:
    """What each pipeline takes.

    Args:
        spans: of the run.
        trace: of the same.
        stages: of the same.
    """
    rows = []
    for number, layout in enumerate(trace.pipelines):
        own = [row for row in stages if row.pipeline == number]
        ipus = sorted(set(layout.ipus))
        cycles = int(trace.pipeline_end[number] - trace.pipeline_start[number])
        work = spans.pipelines[number].exchanged + sum(t.work for t in spans.totals if t.task.pipeline is layout)
        idle = max(0, cycles * len(ipus) - int(work[ipus].sum()))
        by_ipu = {ipu: sum(row.task_cycles for row in own if row.ipu == ipu) for ipu in ipus}
        busiest = max(ipus, key=lambda ipu: by_ipu[ipu])
        slowest = max((row for row in own if row.ipu == busiest), key=lambda row: row.task_cycles)
        rows.append(
            PipelineCost(
                layout.name,
                layout.schedule,
                len(layout.ipus),
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
    """The share of the time in which IPUs would be idle if all worked equally long and exchanges took no time.

    Args:
        trace: of a run; with the order of the tasks of each IPU.
        pipeline: its number.
    """
    layout, rows = trace.pipelines[pipeline], np.flatnonzero(trace.pipeline == pipeline)
    busy, kinds = trace.busy[rows], trace.kind[rows]
    means = {kind: float(busy[kinds == kind].mean()) for kind in np.unique(kinds).tolist()}
    split = [means[TASK_KINDS.index(name)] for name in TASK_KINDS[2:] if TASK_KINDS.index(name) in means]
    if split:  # whole backward tasks beside such in two parts, as those of the first stage of zb-h1
        means[TASK_KINDS.index("backward")] = sum(split)
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (writer, wrote), (reader, read) in layout.links:
        waits[reader, TASK_KINDS.index(read)].append((writer, TASK_KINDS.index(wrote)))
    done: dict[tuple[int, int, int], float] = {}
    free = dict.fromkeys(layout.ipus, 0.0)
    total = 0.0
    sharing = Counter(layout.ipus)
    columns = (column[rows].tolist() for column in (trace.stage, trace.kind, trace.micro_batch))
    for stage, kind, micro_batch in zip(*columns, strict=True):
        ipu = layout.ipus[stage]
        ready = max((done.get((*task, micro_batch), 0.0) for task in waits[stage, kind]), default=0.0)
        cycles = means[kind] / sharing[ipu]
        free[ipu] = done[stage, kind, micro_batch] = max(free[ipu], ready) + cycles
        total += cycles
    whole = max(free.values()) * len(free)
    return 1 - total / whole if whole else 0.0
