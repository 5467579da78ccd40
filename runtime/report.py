"""The profile as JSON-able data, in the sections and under the names of Poplar's graph and execution profiles.

Input: an `Executable`, and for the execution profile a `Timeline`. Output: dicts of str, int, float, bool and lists of
them.
Ids are positions in lists: of a compute set in `computeSets`, of an exchange in its kind of exchanges, of a program in
`programs`.
Source: Poplar & PopLibs user guide, "Profiling", sections "Graph profile" and "Execution profile".
Limits: sections without data here are left out (memory regions, edge pointers, descriptors). `steps` shows the first
iteration of every loop; `repeats`, an addition, says how often the step ran in all. `cyclesOverlapped` is always 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipujax.runtime.clocks import SYNC
from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, ExchangeCost
from ipujax.runtime.program import (
    Call,
    ComputeSet,
    Function,
    If,
    Program,
    RemoteIn,
    Repeat,
    RepeatWhile,
    StreamIn,
    Switch,
)
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.steps import Leaf, leaf_name
from ipujax.runtime.target import Target
from ipujax.runtime.timeline import Timeline
from ipujax.runtime.transfer_cost import CopyCost, StreamCost, SyncCost
from ipujax.runtime.vertices import NO_TILE

Json = dict[str, Any]
_CONTROL = {If: "IfElse", Switch: "Switch", RepeatWhile: "RepeatWhileTrue", Repeat: "Repeat"}


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing a leaf does, as a program of its own: a phase on all tiles.

    Args:
        type: the program's type tag.
        cycles: cycles of each tile, int64[tiles].
        data: bytes each tile sends and receives, int64[tiles]; None for compute.
        facts: ids of what it runs, and its name.
    """

    type: str
    cycles: np.ndarray
    data: np.ndarray | None
    facts: Json


@dataclass(slots=True)
class Numbering:
    """Ids of everything in one executable, and the activities of each leaf with their program ids."""

    compute_sets: list[ComputeSetCost] = field(default_factory=list)
    exchanges: list[tuple[int, ExchangeCost]] = field(default_factory=list)
    external: list[tuple[int, CopyCost]] = field(default_factory=list)
    host: list[tuple[Leaf, StreamCost]] = field(default_factory=list)
    programs: list[Json] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    activities: dict[Leaf, list[tuple[int, Activity]]] = field(default_factory=dict)


def graph_report(executable: Executable) -> Json:
    """The graph profile of an executable."""
    ids = _number(executable)
    codelets = {g.codelet.name: g.codelet for c in ids.compute_sets for g in _groups(executable, c)}
    types = sorted(codelets)
    return {
        "target": _target(executable.target),
        "optimizationInfo": {},
        "graph": _counts(executable, ids),
        "vertexTypes": {"names": types, "sizes": [codelets[name].state_bytes for name in types]},
        "computeSets": _compute_sets(executable, ids, types),
        "exchanges": _exchanges(ids.exchanges, executable.target, "cyclesByTile"),
        "externalExchanges": _exchanges(
            ((c.first_ipu, c.exchange) for _, c in ids.external), executable.target, "estimatedCyclesByTile"
        ),
        "hostExchanges": _host_exchanges(ids, executable.target),
        "programs": ids.programs,
        "controlPrograms": [0],
        "functionPrograms": ids.functions,
        "memory": _memory(executable, ids, types),
    }


def execution_report(executable: Executable, timeline: Timeline) -> Json:
    """The execution profile of one run of an executable."""
    ids, target = _number(executable), executable.target
    trace: list[int] = []
    steps: list[Json] = []
    tile_cycles = dict.fromkeys(
        ("activeCompute", "compute", "copySharedStructure", "doExchange", "globalExchange", "streamCopy", "sync"), 0
    )
    for step in timeline.walk():
        leaf = step.program
        if not isinstance(leaf, Leaf) or leaf not in ids.activities:
            continue
        activities = ids.activities[leaf]
        if isinstance(executable.costs[leaf], SyncCost):
            trace.append(activities[0][0])
            steps.append({"type": "Sync", **activities[0][1].facts})
            continue
        clock, sync = min(step.starts, default=0), _sync_before(executable, leaf)
        for number, (program, activity) in enumerate(activities):
            if sync and (number == 0 or activity.type == "DoExchange"):
                steps.append({"type": "Sync", "syncType": "External" if _is_global(executable, leaf) else "Internal"})
                clock += sync
            trace.append(program)
            steps.append(_step(activity, program, clock, timeline.executions[leaf], target))
            clock += int(activity.cycles.max(initial=0))
    for leaf, runs in timeline.executions.items():
        tile_cycles["sync"] += int(executable.steps[leaf].work[:, SYNC].sum()) * target.tiles_per_ipu * runs
        for _, activity in ids.activities.get(leaf, ()):  # type: ignore[call-overload]
            if activity.type in _TILE_CYCLES:
                tile_cycles[_TILE_CYCLES[activity.type]] += int(activity.cycles.sum()) * runs
        cost = executable.costs.get(leaf)  # type: ignore[call-overload]
        if isinstance(cost, ComputeSetCost):
            tile_cycles["activeCompute"] += int(cost.active_cycles.sum()) * runs
    simulation = {"cycles": timeline.cycles, "tileCycles": tile_cycles, "steps": steps}
    return {"profilerMode": "IPU_MODEL", "programTrace": trace, "simulation": simulation}


_TILE_CYCLES = {
    "OnTileExecute": "compute",
    "DoExchange": "doExchange",
    "GlobalExchange": "globalExchange",
    "StreamCopy": "streamCopy",
}


def _step(activity: Activity, program: int, start: int, runs: int, target: Target) -> Json:
    """One step of the simulation; balances are means over tiles divided by the largest value."""
    longest = int(activity.cycles.max(initial=0))
    active = int(np.count_nonzero(activity.cycles))
    row = {
        "type": activity.type,
        "program": program,
        **activity.facts,
        "tileBalance": _balance(activity.cycles, target.num_tiles),
        "activeTiles": active,
        "activeTileBalance": _balance(activity.cycles, active),
        "cycles": longest,
        "cyclesFrom": start,
        "cyclesTo": start + longest,
        "repeats": runs,
    }
    if activity.data is not None:
        row |= {"totalData": int(activity.data.sum()), "dataBalance": _balance(activity.data, target.num_tiles)}
    if activity.type in ("OnTileExecute", "DoExchange"):
        row["cyclesOverlapped"] = 0
    return row


def _balance(values: np.ndarray, tiles: int) -> float:
    largest = int(values.max(initial=0))
    return float(values.sum() / (largest * tiles)) if largest and tiles else 1.0


def _sync_before(executable: Executable, leaf: Leaf) -> int:
    """Cycles of each sync of a leaf: one before its first activity and one before each later exchange."""
    if isinstance(executable.costs[leaf], StreamCost):
        return 0
    target = executable.target
    return target.global_sync_cycles if _is_global(executable, leaf) else target.internal_sync_cycles


def _is_global(executable: Executable, leaf: Leaf) -> bool:
    cost = executable.costs[leaf]
    return isinstance(cost, CopyCost) and cost.is_global


def _groups(executable: Executable, cost: ComputeSetCost) -> list[Any]:
    return executable.graph.groups[cost.compute_set]


# --- numbering --------------------------------------------------------------------------------------------------------


def _number(executable: Executable) -> Numbering:
    ids = Numbering()
    sets: dict[ComputeSet, tuple[int, int, int]] = {}
    functions: dict[Function, int] = {}
    _program(executable.program, executable, ids, sets, functions)
    return ids


def _add(ids: Numbering, entry: Json) -> int:
    ids.programs.append(entry)
    return len(ids.programs) - 1


def _program(
    node: Program,
    executable: Executable,
    ids: Numbering,
    sets: dict[ComputeSet, tuple[int, int, int]],
    functions: dict[Function, int],
) -> list[int]:
    """Adds the entries of one node; returns the ids that stand for it in its parent."""
    if isinstance(node, Leaf):
        if node not in ids.activities:
            activities = _activities(node, executable.costs[node], executable.target, ids, sets)
            ids.activities[node] = [(_add(ids, {"type": a.type, **a.facts}), a) for a in activities]
        return [program for program, _ in ids.activities[node]]
    entry: Json = {"type": "Sequence" if isinstance(node, ProgramSequence) else _CONTROL.get(type(node), "Call")}
    if isinstance(node, RepeatWhile) and node.until:
        entry["type"] = "RepeatWhileFalse"
    number = _add(ids, entry)
    if isinstance(node, Call):
        if node.function not in functions:
            functions[node.function] = len(ids.functions)
            ids.functions.append(-1)
            body = _one(node.function.body, executable, ids, sets, functions)
            ids.functions[functions[node.function]] = body
        entry |= {"target": functions[node.function], "name": node.function.name}
        return [number]
    if isinstance(node, Repeat):
        entry["count"] = node.count
    if isinstance(node, ProgramSequence):
        children = [_program(child, executable, ids, sets, functions) for child in node.children()]
        entry["children"] = [program for programs in children for program in programs]
    else:
        entry["children"] = [_one(child, executable, ids, sets, functions) for child in node.children()]
    return [number]


def _one(
    node: Program,
    executable: Executable,
    ids: Numbering,
    sets: dict[ComputeSet, tuple[int, int, int]],
    functions: dict[Function, int],
) -> int:
    """The id of one entry that stands for a node, a Sequence if it needs several."""
    programs = _program(node, executable, ids, sets, functions)
    return programs[0] if len(programs) == 1 else _add(ids, {"type": "Sequence", "children": programs})


def _activities(
    leaf: Leaf,
    cost: ComputeSetCost | CopyCost | StreamCost | SyncCost,
    target: Target,
    ids: Numbering,
    sets: dict[ComputeSet, tuple[int, int, int]],
) -> list[Activity]:
    name = leaf_name(leaf)
    if isinstance(cost, SyncCost):
        return [Activity("Sync", np.zeros(0, np.int64), None, {"syncType": cost.kind.title()})]
    if isinstance(cost, StreamCost):
        ids.host.append((leaf, cost))
        facts = {"hostExchange": len(ids.host) - 1, "name": name}
        return [Activity("StreamCopy", _stream_cycles(cost, target), cost.tile_bytes, facts)]
    if isinstance(cost, CopyCost):
        copying = Activity("OnTileExecute", cost.copy_cycles, None, {"name": f"{name}/OnTileCopy"})
        activities = [copying] if cost.copy_cycles.any() else []
        if cost.exchange.cycles.any():
            activities.insert(0, _copy_exchange(cost, name, target, ids))
        return activities
    return _compute_set_activities(cost, name, ids, sets)


def _copy_exchange(cost: CopyCost, name: str, target: Target, ids: Numbering) -> Activity:
    data = cost.exchange.received_bytes + cost.exchange.sent_bytes
    if cost.link_cycles is None:
        ids.exchanges.append((cost.first_ipu, cost.exchange))
        return Activity("DoExchange", cost.exchange.cycles, data, {"exchange": len(ids.exchanges) - 1, "name": name})
    ids.external.append((cost.first_ipu, cost))
    by_ipu = cost.link_cycles[cost.first_ipu :][: len(data) // target.tiles_per_ipu]
    cycles = np.where(data > 0, np.maximum(cost.exchange.cycles, np.repeat(by_ipu, target.tiles_per_ipu)), 0)
    return Activity("GlobalExchange", cycles, data, {"externalExchange": len(ids.external) - 1, "name": name})


def _compute_set_activities(
    cost: ComputeSetCost, name: str, ids: Numbering, sets: dict[ComputeSet, tuple[int, int, int]]
) -> list[Activity]:
    if cost.compute_set not in sets:
        number = len(ids.compute_sets)
        ids.compute_sets.append(cost)
        places = []
        for exchange in (cost.before, cost.after):
            places.append(len(ids.exchanges) if exchange.cycles.any() else -1)
            if places[-1] >= 0:
                ids.exchanges.append((cost.first_ipu, exchange))
        sets[cost.compute_set] = number, places[0], places[1]
    number, before, after = sets[cost.compute_set]
    compute = Activity("OnTileExecute", cost.compute_cycles, None, {"computeSet": number, "name": name})
    return [
        *_internal(cost.before, before, f"{name}/ExchangePre"),
        compute,
        *_internal(cost.after, after, f"{name}/ExchangePost"),
    ]


def _internal(exchange: ExchangeCost, number: int, name: str) -> list[Activity]:
    """An internal exchange, if there is one."""
    data = exchange.received_bytes + exchange.sent_bytes
    activity = Activity("DoExchange", exchange.cycles, data, {"exchange": number, "name": name})
    return [activity] if number >= 0 else []


def _stream_cycles(cost: StreamCost, target: Target) -> np.ndarray:
    """Cycles each tile waits for its part of a transfer, from those of its IPU."""
    by_ipu = cost.cycles[cost.first_ipu :][: len(cost.tile_bytes) // target.tiles_per_ipu]
    return np.where(cost.tile_bytes > 0, np.repeat(by_ipu, target.tiles_per_ipu), 0)


# --- sections ---------------------------------------------------------------------------------------------------------


def _target(target: Target) -> Json:
    return {
        "type": "IPU_MODEL",
        "bytesPerIPU": target.bytes_per_tile * target.tiles_per_ipu,
        "bytesPerTile": target.bytes_per_tile,
        "clockFrequency": target.clock_hz,
        "numIPUs": target.num_ipus,
        "tilesPerIPU": target.tiles_per_ipu,
        "numTiles": target.num_tiles,
        "totalMemory": target.total_memory_bytes,
        "relativeSyncDelayByTile": [0] * target.tiles_per_ipu,
        "minSyncDelay": target.internal_sync_cycles,
    }


def _counts(executable: Executable, ids: Numbering) -> Json:
    groups = [group for cost in ids.compute_sets for group in _groups(executable, cost)]
    return {
        "numComputeSets": len(ids.compute_sets),
        "numEdges": sum(group.num_vertices * len(group.accesses) for group in groups),
        "numVars": len(executable.graph.variables),
        "numVertices": sum(group.num_vertices for group in groups),
    }


def _all_tiles(values: np.ndarray, first_ipu: int, target: Target) -> list[int]:
    """The values of all tiles of the system, 0 outside those given."""
    full = np.zeros(target.num_tiles, np.int64)
    first = first_ipu * target.tiles_per_ipu
    full[first : first + len(values)] = values
    return full.tolist()


def _compute_sets(executable: Executable, ids: Numbering, types: list[str]) -> Json:
    target, index = executable.target, {name: number for number, name in enumerate(types)}
    kinds, counts, active = [], [], []
    for cost in ids.compute_sets:
        vertices: dict[str, int] = {}
        for group in _groups(executable, cost):
            vertices[group.codelet.name] = vertices.get(group.codelet.name, 0) + group.num_vertices
        kinds.append([index[name] for name in vertices])
        counts.append(list(vertices.values()))
        cycles = dict(cost.active_by_codelet)
        active.append([cycles.get(name, 0) for name in types])
    sets = ids.compute_sets
    return {
        "names": [cost.compute_set.name for cost in sets],
        "vertexCounts": counts,
        "vertexTypes": kinds,
        "cycleEstimates": {
            "activeCyclesByTile": [_all_tiles(cost.active_cycles, cost.first_ipu, target) for cost in sets],
            "activeCyclesByVertexType": active,
            "cyclesByTile": [_all_tiles(cost.compute_cycles, cost.first_ipu, target) for cost in sets],
        },
    }


def _exchanges(exchanges: Iterable[tuple[int, ExchangeCost]], target: Target, cycles: str) -> Json:
    rows = list(exchanges)
    return {
        "bytesReceivedByTile": [_all_tiles(e.received_bytes, first, target) for first, e in rows],
        "bytesSentByTile": [_all_tiles(e.sent_bytes, first, target) for first, e in rows],
        cycles: [_all_tiles(e.cycles, first, target) for first, e in rows],
    }


def _host_exchanges(ids: Numbering, target: Target) -> Json:
    rows = [(isinstance(leaf, (StreamIn, RemoteIn)), cost) for leaf, cost in ids.host]
    return {
        "bytesReceivedByTile": [_all_tiles(c.tile_bytes * to_device, c.first_ipu, target) for to_device, c in rows],
        "bytesSentByTile": [_all_tiles(c.tile_bytes * (not to_device), c.first_ipu, target) for to_device, c in rows],
        "estimatedCyclesByTile": [_all_tiles(_stream_cycles(c, target), c.first_ipu, target) for _, c in rows],
    }


def _memory(executable: Executable, ids: Numbering, types: list[str]) -> Json:
    memory = executable.memory
    overflowed = np.maximum(memory.tile_bytes - executable.target.bytes_per_tile, 0)
    return {
        "byTile": {"total": memory.tile_bytes.tolist(), "overflowed": overflowed.tolist()},
        "byCategory": {name: {"total": layer.tolist()} for name, layer in memory.by_category.items()},
        "byVertexType": _by_vertex_type(executable, ids, types),
        "liveness": {
            "worstTile": memory.worst_tile,
            "peakStep": memory.peak_step,
            "variables": [
                {"name": item.name, "bytes": item.num_bytes, "category": item.category, "origin": str(item.origin)}
                for item in memory.largest
            ],
        },
    }


def _by_vertex_type(executable: Executable, ids: Numbering, types: list[str]) -> Json:
    """Bytes of code and of vertex state of each vertex type on each tile."""
    tiles = executable.target.num_tiles
    code, state = np.zeros((len(types), tiles), np.int64), np.zeros((len(types), tiles), np.int64)
    for cost in ids.compute_sets:
        for group in _groups(executable, cost):
            row = types.index(group.codelet.name)
            on_tile = np.bincount(group.tile[group.tile != NO_TILE], minlength=tiles)
            state[row] += on_tile * group.codelet.state_bytes
            code[row] = np.maximum(code[row], (on_tile > 0) * group.codelet.code_bytes)
    return {
        "codeBytes": code.tolist(),
        "vertexDataBytes": state.tolist(),
        "totalBytes": (code + state).tolist(),
    }
