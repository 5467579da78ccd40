"""Execution profile as JSON-able data: the steps that ran, in order, with their cycles.

Input: an `Executable`, its `Numbering`, the program, the recording and the `Timeline` of a run. Output: dicts of str,
int, float and lists of them. Also totals for the summary: cycles of all tiles by activity, and by vertex type.
Source: Poplar & PopLibs user guide, "Profiling", sections "Execution profile" and "Program trace information".
Limits: `steps` has the first iteration of every loop; `repeats`, an addition, counts the runs of a step.
Steps have `line`, `layer` and `part`, additions, where these are known.
`programTrace` has every iteration of every loop, and ends after `_TRACE_LIMIT` ids; `programTraceLength`, an addition,
counts all.
`cyclesOverlapped` and `copySharedStructure` are always 0: nothing overlaps, and structures are not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import CopyCost, StreamCost, SyncCost
from ipujax.runtime.graph import Block, Branch, Decision, Leaf, Loop, Program, fold, while_names
from ipujax.runtime.sections.ids import Activity, Json, Numbering
from ipujax.runtime.sections.programs import decision_sync
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import SYNC, Recording, Timeline, TimelineStep

_TRACE_LIMIT = 100_000  # ids; a longer trace is cut off
# Name of an activity's cycles in `tileCycles`, by its program type; others count as `sync` or take no tile cycles.
_TILE_CYCLES = {
    "OnTileExecute": "compute",
    "CopySharedStructure": "copySharedStructure",
    "DoExchange": "doExchange",
    "GlobalExchange": "globalExchange",
    "StreamCopy": "streamCopy",
}


def execution_report(
    executable: Executable,
    ids: Numbering,
    program: Program,
    recording: Recording | None,
    timeline: Timeline,
    origin_of: Callable[[TimelineStep], Origin],
) -> Json:
    """Return the execution profile of a run.

    Args:
        executable: that ran.
        ids: its numbering.
        program: the control tree that ran, of its steps.
        recording: choices of data-dependent control; None for the static run.
        timeline: of the run.
        origin_of: line, layer and part of training of most of a step.
    """
    steps: list[Json] = []
    for step in timeline.walk():
        if step.program in ids.activities:
            steps.extend(_leaf_steps(executable, ids, timeline, step, _origin_fields(origin_of(step))))
        elif isinstance(step.program, Decision) and not step.children:  # a loop's test is a child
            steps.append({"type": "Sync", "syncType": decision_sync(executable.target)})
    trace, trace_length = _program_trace(executable, ids, program, recording, timeline)
    simulation = {"cycles": timeline.cycles, "tileCycles": tile_cycles(executable, ids, timeline), "steps": steps}
    return {
        "profilerMode": "IPU_MODEL",
        "programTrace": trace,
        "programTraceLength": trace_length,
        "simulation": simulation,
    }


def tile_cycles(executable: Executable, ids: Numbering, timeline: Timeline) -> dict[str, int]:
    """Return `tileCycles` of the execution profile: cycles of all tiles by activity; one of two tiles counts twice."""
    total = dict.fromkeys(("activeCompute", *_TILE_CYCLES.values(), "sync"), 0)
    for node, runs in timeline.executions.items():
        # The work of a step is by IPU: every tile of an IPU takes part in its syncs.
        total["sync"] += int(executable.steps[node].work[:, SYNC].sum()) * executable.target.tiles_per_ipu * runs
        for _, activity in ids.activities.get(node, ()):
            if activity.type in _TILE_CYCLES:
                total[_TILE_CYCLES[activity.type]] += int(activity.cycles.sum()) * runs
            if "computeSet" in activity.fields:
                total["activeCompute"] += int(ids.compute_sets[activity.fields["computeSet"]].active.sum()) * runs
    return total


def tile_balance(executable: Executable, timeline: Timeline) -> float:
    """Return the mean share of compute phases in which a tile computes; 1 at best, and without compute phases."""
    tiles = executable.target.tiles_per_ipu
    busy, total = 0, 0  # tile cycles
    for leaf, cost in executable.costs.items():
        compute = getattr(cost, "compute_cycles", None)
        if compute is not None:
            runs = timeline.executions.get(leaf, 0)
            busy += int(compute.sum()) * runs
            # A phase lasts as long as the slowest tile of its IPU; IPUs that take no part count 0.
            total += int(compute.reshape(-1, tiles).max(1).sum()) * tiles * runs
    return busy / total if total else 1.0


def vertex_type_cycles(ids: Numbering, timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Count the vertices of each type that ran, and their active cycles, most cycles first."""
    ran = Counter[str]()
    cycles = Counter[str]()
    for node, runs in timeline.executions.items():
        for _, activity in ids.activities.get(node, ()):
            if "computeSet" in activity.fields:
                row = ids.compute_sets[activity.fields["computeSet"]]
                for name, count in row.vertices.items():
                    ran[name] += count * runs
                    cycles[name] += row.active_by_type.get(name, 0) * runs
    return {name: (ran[name], cycles[name]) for name in sorted(ran, key=lambda name: (-cycles[name], name))}


def _origin_fields(origin: Origin) -> Json:
    """Return the known fields of an origin, which are additions to Poplar's."""
    fields = {"line": origin.line, "layer": origin.layer, "part": origin.part}
    return {name: value for name, value in fields.items() if value}


def _leaf_steps(
    executable: Executable, ids: Numbering, timeline: Timeline, step: TimelineStep, origin: Json
) -> list[Json]:
    """Return the steps of a leaf in its first run, with the syncs that are part of it."""
    leaf = step.program
    activities = ids.activities[leaf]
    assert isinstance(leaf, Leaf)
    cost = executable.costs[leaf]
    if isinstance(cost, SyncCost):
        return [{"type": "Sync", **activity.fields} for _, activity in activities]
    is_global = isinstance(cost, CopyCost) and cost.is_global
    sync_cycles = _sync_cycles(executable, leaf, is_global)
    rows: list[Json] = []
    clock = min(step.starts, default=0)
    for number, (program, activity) in enumerate(activities):
        if sync_cycles and (number == 0 or activity.type == "DoExchange"):
            rows.append({"type": "Sync", "syncType": "External" if is_global else "Internal"})
            clock += sync_cycles
        row = _simulation_step(activity, program, clock, timeline.executions[leaf], executable.target) | origin
        if "computeSet" in activity.fields:
            row["threadBalance"] = _thread_balance(ids, activity)
        rows.append(row)
        clock += int(activity.cycles.max(initial=0))
    return rows


def _sync_cycles(executable: Executable, leaf: Program, is_global: bool) -> int:
    """Return the cycles of each sync of a leaf, before its first activity and each later exchange; 0 for none."""
    # A StreamCopy is a single program: its sync is no step of the profile.
    if not executable.steps[leaf].work[:, SYNC].any() or isinstance(executable.costs[leaf], StreamCost):  # type: ignore[index]
        return 0
    target = executable.target
    return target.global_sync_cycles if is_global else target.internal_sync_cycles


def _simulation_step(activity: Activity, program: int, start: int, runs: int, target: Target) -> Json:
    """Return a step of the simulation; balances are means over tiles divided by the largest value."""
    longest = int(activity.cycles.max(initial=0))
    active = int(np.count_nonzero(activity.cycles))
    row = {
        "type": activity.type,
        "program": program,
        **{name: value for name, value in activity.fields.items() if value != ""},
        "tileBalance": _balance(activity.cycles, target.num_tiles),
        "activeTiles": active,
        "activeTileBalance": _balance(activity.cycles, active),
        "cycles": longest,
        "cyclesFrom": start,
        "cyclesTo": start + longest,
        "repeats": runs,
    }
    if activity.data is not None:
        row |= {"totalData": activity.moved_bytes, "dataBalance": _balance(activity.data, target.num_tiles)}
    if activity.type in ("OnTileExecute", "DoExchange"):
        row["cyclesOverlapped"] = 0
    return row


def _balance(values: np.ndarray, tiles: int) -> float:
    largest = int(values.max(initial=0))
    return float(values.sum() / (largest * tiles)) if largest and tiles else 1.0


def _thread_balance(ids: Numbering, activity: Activity) -> float:
    """Return the share of worker cycles of computing tiles in which a worker has a vertex, or a part of one, to run."""
    # A tile issues for its workers in turn until the slowest ends, so that is the sum of the cycles of all workers over
    # six times those of the slowest: 1/6 where one worker computes, 1 where all compute as long. Products on the AMP
    # unit and copies take all workers all the time.
    active = int(ids.compute_sets[activity.fields["computeSet"]].active.sum())
    total = int(activity.cycles.sum())
    return active / total if total else 1.0


def _program_trace(
    executable: Executable, ids: Numbering, program: Program, recording: Recording | None, timeline: Timeline
) -> tuple[list[int], int]:
    """Return the ids of the first programs that ran, one after the other, and the number of all."""
    # The length is a product of counts: a trace of millions of ids is never walked.
    length = sum(runs * len(ids.programs_of(node)) for node, runs in timeline.executions.items())
    tracer = _Tracer(program, ids, timeline, executable.options.trip_counts, recording or {})
    return list(islice(tracer.visit(program), _TRACE_LIMIT)), length


class _Tracer:
    """Walk of a program as it ran."""

    def __init__(
        self, program: Program, ids: Numbering, timeline: Timeline, trip_counts: Mapping[str, int], recording: Recording
    ) -> None:
        self.ids = ids
        self.static_choices = timeline.taken  # branches assumed without a recording
        self.trip_counts = trip_counts  # by the name of a loop
        self.names = while_names(program)
        self.recorded = {node: iter(choices) for node, choices in recording.items()}
        self.has_programs = fold(self._has_programs)  # remembered by node

    def visit(self, node: Program) -> Iterator[int]:
        """Yield the ids of the programs that a run of a node executes, in order; loops iteration by iteration."""
        match node:
            case Block():
                for child in node.children():
                    yield from self.visit(child)
            case Loop(test=None):
                # A long loop without programs would take time and yield nothing.
                for _ in range(self.trips(node) if self.has_programs(node.body) else 0):
                    yield from self.visit(node.body)
            case Loop(test=Program() as test):
                yield from self.visit(test)
                yield from self.ids.programs_of(node)
                for _ in range(self.trips(node)):  # the test runs once more than the body
                    yield from self.visit(node.body)
                    yield from self.visit(test)
                    yield from self.ids.programs_of(node)
            case Branch():
                yield from self.ids.programs_of(node)
                yield from self.visit(node.children()[self.choice(node)])
            case _:
                yield from self.ids.activity_ids(node)

    def _has_programs(self, node: Program, children: list[bool]) -> bool:
        return isinstance(node, Decision) or bool(self.ids.activity_ids(node)) or any(children)

    def trips(self, loop: Loop) -> int:
        if loop.trips is not None:
            return loop.trips
        if loop in self.recorded:
            return int(next(self.recorded[loop]))
        return next(self.trip_counts[name] for name in self.names[loop] if name in self.trip_counts)

    def choice(self, node: Branch) -> int:
        if node not in self.recorded:
            return self.static_choices[node]
        return node.recorded_choice(int(next(self.recorded[node])))
