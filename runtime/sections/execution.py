"""The execution profile as JSON-able data: what ran, in order, and how long each step took.

Input: an `Executable`, its `Numbering`, and the `Timeline` of a run. Output: dicts of str, int, float and lists of
them. Also the totals that the text for people shows: cycles of all tiles by activity, and by vertex type.
Source: Poplar & PopLibs user guide, "Profiling", section "Execution profile".
Limits: `steps` shows the first iteration of every loop; `repeats`, an addition, says how often a step ran in all.
Steps have `line`, `layer` and `part`, additions, where these are known.
`programTrace` ends after `program_trace.TRACE_LIMIT` ids; `programTraceLength`, an addition, says how many there are.
`cyclesOverlapped` and `copySharedStructure` are always 0: nothing overlaps, and structures are not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import CopyCost, StreamCost, SyncCost
from ipujax.runtime.graph import Decision, Leaf, Program
from ipujax.runtime.sections.ids import Activity, Json, Numbering
from ipujax.runtime.sections.programs import decision_sync
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import SYNC, Timeline, TimelineStep

# The name of an activity's cycles in `tileCycles`, by its program type.
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
    timeline: Timeline,
    trace: list[int],
    trace_length: int,
    origin_of: Callable[[TimelineStep], Origin],
) -> Json:
    """The execution profile of one run.

    Args:
        executable: what ran.
        ids: its numbering.
        timeline: the run.
        trace: ids of the programs that ran, the first of them.
        trace_length: how many there are in all.
        origin_of: the line, the layer and the part of training of most of a step.
    """
    steps: list[Json] = []
    for step in timeline.walk():
        if step.program in ids.activities:
            steps.extend(_leaf_steps(executable, ids, timeline, step, _place(origin_of(step))))
        elif isinstance(step.program, Decision) and not step.children:  # a loop's test is a child
            steps.append({"type": "Sync", "syncType": decision_sync(executable.target)})
    simulation = {"cycles": timeline.cycles, "tileCycles": tile_cycles(executable, ids, timeline), "steps": steps}
    return {
        "profilerMode": "IPU_MODEL",
        "programTrace": trace,
        "programTraceLength": trace_length,
        "simulation": simulation,
    }


def tile_cycles(executable: Executable, ids: Numbering, timeline: Timeline) -> dict[str, int]:
    """Cycles of all tiles together, by what they do; a cycle of two tiles counts twice.

    Returns:
        As `tileCycles` of the execution profile.
    """
    total = dict.fromkeys(("activeCompute", *_TILE_CYCLES.values(), "sync"), 0)
    for node, runs in timeline.executions.items():
        total["sync"] += int(executable.steps[node].work[:, SYNC].sum()) * executable.target.tiles_per_ipu * runs
        for _, activity in ids.activities.get(node, ()):
            if activity.type in _TILE_CYCLES:
                total[_TILE_CYCLES[activity.type]] += int(activity.cycles.sum()) * runs
            if "computeSet" in activity.facts:
                total["activeCompute"] += int(ids.compute_sets[activity.facts["computeSet"]].active.sum()) * runs
    return total


def tile_balance(executable: Executable, timeline: Timeline) -> float:
    """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best, and of no phase."""
    tiles, used, spent = executable.target.tiles_per_ipu, 0, 0
    for leaf, cost in executable.costs.items():
        compute = getattr(cost, "compute_cycles", None)
        if compute is not None:
            runs = timeline.executions.get(leaf, 0)
            used += int(compute.sum()) * runs
            spent += int(compute.reshape(-1, tiles).max(1).sum()) * tiles * runs
    return used / spent if spent else 1.0


def vertex_type_cycles(ids: Numbering, timeline: Timeline) -> dict[str, tuple[int, int]]:
    """How many vertices of each type ran, and their active cycles, most cycles first."""
    ran, cycles = Counter[str](), Counter[str]()
    for node, runs in timeline.executions.items():
        for _, activity in ids.activities.get(node, ()):
            if "computeSet" in activity.facts:
                row = ids.compute_sets[activity.facts["computeSet"]]
                for name, count in row.vertices.items():
                    ran[name] += count * runs
                    cycles[name] += row.active_by_type.get(name, 0) * runs
    return {name: (ran[name], cycles[name]) for name in sorted(ran, key=lambda name: (-cycles[name], name))}


def _place(origin: Origin) -> Json:
    """Additions to Poplar's fields: where most of a step comes from; what is not known is left out."""
    facts = {"line": origin.line, "layer": origin.layer, "part": origin.part}
    return {name: fact for name, fact in facts.items() if fact}


def _leaf_steps(
    executable: Executable, ids: Numbering, timeline: Timeline, step: TimelineStep, place: Json
) -> list[Json]:
    """The steps of one leaf as it ran first, with the syncs that are part of it."""
    leaf, activities = step.program, ids.activities[step.program]
    assert isinstance(leaf, Leaf)
    cost = executable.costs[leaf]
    if isinstance(cost, SyncCost):
        return [{"type": "Sync", **activity.facts} for _, activity in activities]
    is_global = isinstance(cost, CopyCost) and cost.is_global
    sync_cycles = _sync_cycles(executable, leaf, is_global)
    rows: list[Json] = []
    clock = min(step.starts, default=0)
    for number, (program, activity) in enumerate(activities):
        if sync_cycles and (number == 0 or activity.type == "DoExchange"):
            rows.append({"type": "Sync", "syncType": "External" if is_global else "Internal"})
            clock += sync_cycles
        row = _step(activity, program, clock, timeline.executions[leaf], executable.target) | place
        if "computeSet" in activity.facts:
            row["threadBalance"] = _thread_balance(ids, activity)
        rows.append(row)
        clock += int(activity.cycles.max(initial=0))
    return rows


def _sync_cycles(executable: Executable, leaf: Program, is_global: bool) -> int:
    """Cycles of each sync of a leaf: one before its first activity and one before each later exchange; 0 for none."""
    if not executable.steps[leaf].work[:, SYNC].any() or isinstance(executable.costs[leaf], StreamCost):  # type: ignore[index]
        return 0
    target = executable.target
    return target.global_sync_cycles if is_global else target.internal_sync_cycles


def _step(activity: Activity, program: int, start: int, runs: int, target: Target) -> Json:
    """One step of the simulation; balances are means over tiles divided by the largest value."""
    longest = int(activity.cycles.max(initial=0))
    active = int(np.count_nonzero(activity.cycles))
    row = {
        "type": activity.type,
        "program": program,
        **{name: fact for name, fact in activity.facts.items() if fact != ""},
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
    """Share of the worker-cycles of computing tiles in which a worker has a vertex, or a part of one, to run.

    A tile issues for its workers in turn until the slowest ends, so that is the sum of the cycles of all workers over
    six times those of the slowest: 1/6 where one worker has all to do, 1 where all have as much. Products on the AMP
    unit and copies take all workers all the time.
    """
    spent, active = int(activity.cycles.sum()), int(ids.compute_sets[activity.facts["computeSet"]].active.sum())
    return active / spent if spent else 1.0
