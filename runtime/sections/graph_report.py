"""Graph profile as JSON-able data, in the sections and under the names of Poplar's; and figures read from a saved one.

Input: an `Executable` and its `Numbering`. Output: dicts of str, int, float and lists of them.
Ids are positions in lists: of a compute set in `computeSets`, of an exchange in its kind of exchanges, of a program in
`programs`, of a vertex type in `vertexTypes`. `docs/profile.md` lists the names of the guide that are missing, and why.
A saved graph profile has runs in place of lists by tile.

In the section of memory, categories fill the regions in the order code, always-live data, data that share memory, so
that they add up to the bytes of each region. `overlapped` bytes share memory; they are those at the peak of each tile,
so that the categories of a tile add up to its `total`.
Source: Poplar & PopLibs user guide, "Profiling", sections "Graph profile" and "Memory use".
Limits: lists are by id and tile, as in Poplar: those of tens of thousands of tiles and thousands of compute sets take
gigabytes. Arrays by tile are of one replica, as are the costs. The bytes of a vertex are not split into instance, edge
pointers, copy pointers, descriptors and padding: all of them are `vertexDataBytes`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ExchangeCost, StreamCost
from ipujax.runtime.files import numbers_of_runs, total_of_runs
from ipujax.runtime.graph import NO_TILE, RemoteIn, StreamIn, VertexGroup
from ipujax.runtime.memory import FIXED, LIVE, MemoryReport
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.sections.live_variables import items_section, liveness_section
from ipujax.runtime.sections.programs import external_cycles, stream_cycles
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import pad_tiles

ByTile = Callable[[np.ndarray], Any]  # from an array by tile, int64[tiles], to what a report has for it


def graph_report(executable: Executable, ids: Numbering, by_tile: ByTile = np.ndarray.tolist) -> Json:
    """Return the graph profile of an executable; `by_tile` makes what it has for an array by tile, by default lists."""
    target = executable.target
    types = ids.vertex_types()
    sizes = {group.codelet.name: group.codelet.state_bytes for row in ids.compute_sets for group in row.groups}
    return {
        "target": _target_fields(executable),
        "optimizationInfo": optimization_info(executable),
        "byteCost": _byte_cost(executable),
        "graph": graph_counts(executable, ids),
        "vertexTypes": {
            "names": types,
            "sizes": [sizes.get(name, 0) for name in types],
            "languages": [ids.vertex_type_languages()[name] for name in types],
        },
        "computeSets": _compute_sets(ids, types, target, by_tile),
        "exchanges": _exchange_bytes(
            ((first, e, e.cycles) for first, e in ids.exchanges), target, "cyclesByTile", by_tile
        ),
        "externalExchanges": _exchange_bytes(
            ((first, c.exchange, external_cycles(c, target)) for first, c in ids.external),
            target,
            "estimatedCyclesByTile",
            by_tile,
        ),
        "hostExchanges": _host_exchanges(ids, target, by_tile),
        "programs": copy.deepcopy(ids.programs),  # the caller may change its data
        "controlPrograms": [ids.root],
        "functionPrograms": list(ids.functions),
        "memory": _memory_section(executable, ids, by_tile),
        "streamingMemory": {"bytes": executable.streaming_memory_bytes},
    }


def optimization_info(executable: Executable) -> dict[str, float]:
    """Return the seconds of each step of the compilation."""
    return {f"{name}Seconds": float(seconds) for name, seconds in executable.timings.items()}


def _byte_cost(executable: Executable) -> Json:
    """Return the costs per byte in cycles, the last of which is used, and the cycles it adds, where known."""
    cost = executable.byte_cost_added_cycles
    return {"tried": list(executable.byte_costs), **({} if cost is None else {"addedCycles": cost})}


def graph_counts(executable: Executable, ids: Numbering) -> dict[str, int]:
    """Count compute sets, edges, variables and vertices of the graph, with vertices that copy within a tile."""
    return {
        "numComputeSets": len(ids.compute_sets),
        "numEdges": sum(g.num_vertices * len(g.accesses) for row in ids.compute_sets for g in row.groups),
        "numVars": len(executable.graph.variables),
        "numVertices": sum(sum(row.vertices.values()) for row in ids.compute_sets),
    }


def _target_fields(executable: Executable) -> Json:
    """Return the fields of the target; `numIPUs`, `numTiles` and `totalMemory` are those of all replicas together."""
    target = executable.target
    system = executable.graph.system_target
    return {
        "type": "IPU_MODEL",
        "bytesPerIPU": target.bytes_per_tile * target.tiles_per_ipu,
        "bytesPerTile": target.bytes_per_tile,
        "clockFrequency": target.clock_hz,
        "numIPUs": system.num_ipus,
        "tilesPerIPU": target.tiles_per_ipu,
        "numTiles": system.num_tiles,
        "totalMemory": system.total_memory_bytes,
        "numReplicas": executable.graph.replication_factor,
        "relativeSyncDelayByTile": [0] * target.tiles_per_ipu,  # a sync of the model reaches all tiles at once
        "minSyncDelay": target.internal_sync_cycles,
    }


def _all_tiles(values: np.ndarray, first_ipu: int, target: Target) -> np.ndarray:
    """Return values of all tiles of the replica, 0 on IPUs without a value."""
    return pad_tiles(values, first_ipu * target.tiles_per_ipu, target.num_tiles)


def _compute_sets(ids: Numbering, types: list[str], target: Target, by_tile: ByTile) -> Json:
    """Return names, vertices by type and cycles of all compute sets, as the section `computeSets` has them."""
    sets = ids.compute_sets
    index = {name: number for number, name in enumerate(types)}
    return {
        "names": [row.name for row in sets],
        "vertexCounts": [list(row.vertices.values()) for row in sets],
        "vertexTypes": [[index[name] for name in row.vertices] for row in sets],
        "cycleEstimates": {
            "activeCyclesByTile": [by_tile(_all_tiles(row.active, row.first_ipu, target)) for row in sets],
            "activeCyclesByVertexType": [[row.active_by_type.get(name, 0) for name in types] for row in sets],
            "cyclesByTile": [by_tile(_all_tiles(row.cycles, row.first_ipu, target)) for row in sets],
        },
    }


def _exchange_bytes(
    exchanges: Iterable[tuple[int, ExchangeCost, np.ndarray]], target: Target, name: str, by_tile: ByTile
) -> Json:
    """Return bytes and cycles of exchanges, each given as (first IPU, cost, cycles of each tile)."""
    rows = list(exchanges)
    return {
        "bytesReceivedByTile": [by_tile(_all_tiles(e.received_bytes, first, target)) for first, e, _ in rows],
        "bytesSentByTile": [by_tile(_all_tiles(e.sent_bytes, first, target)) for first, e, _ in rows],
        name: [by_tile(_all_tiles(cycles, first, target)) for first, _, cycles in rows],
    }


def _host_exchanges(ids: Numbering, target: Target, by_tile: ByTile) -> Json:
    """Return bytes and cycles of the transfers with the host and with streaming memory."""
    rows = [(isinstance(leaf, (StreamIn, RemoteIn)), cost) for leaf, cost in ids.host]

    def listed(values: np.ndarray, cost: StreamCost) -> Any:
        return by_tile(_all_tiles(values, cost.first_ipu, target))

    return {
        "bytesReceivedByTile": [listed(cost.tile_bytes * to_device, cost) for to_device, cost in rows],
        "bytesSentByTile": [listed(cost.tile_bytes * (not to_device), cost) for to_device, cost in rows],
        "estimatedCyclesByTile": [listed(stream_cycles(cost, target), cost) for _, cost in rows],
    }


def _memory_section(executable: Executable, ids: Numbering, by_tile: ByTile) -> Json:
    """Return the section `memory`."""
    return {
        "byTile": _by_region(executable.memory, by_tile),
        "byCategory": _by_category(executable.memory, by_tile),
        "byComputeSet": _vertex_rows(
            [_vertex_bytes(row.groups, executable.target) for row in ids.compute_sets], by_tile
        ),
        "byVertexType": _vertex_rows(
            [_vertex_bytes(groups, executable.target) for groups in _groups_by_type(ids).values()], by_tile
        ),
        "liveness": _worst_tile(executable.memory) | liveness_section(executable, ids),
    }


def vertex_type_bytes(executable: Executable, ids: Numbering) -> dict[str, int]:
    """Return the bytes of state and code of each vertex type, on all tiles together."""
    target = executable.target
    return {name: int(np.sum(_vertex_bytes(groups, target))) for name, groups in _groups_by_type(ids).items()}


def _by_region(memory: MemoryReport, by_tile: ByTile) -> Json:
    arrays = {
        **region_bytes(memory, including_gaps=False),
        **{f"{name}IncludingGaps": values for name, values in region_bytes(memory, including_gaps=True).items()},
        "total": memory.tile_bytes - memory.gap_bytes,
        "totalIncludingGaps": memory.tile_bytes,
    }
    return {name: by_tile(values) for name, values in sorted(arrays.items())}


def region_bytes(memory: MemoryReport, *, including_gaps: bool) -> dict[str, np.ndarray]:
    """Return the bytes of each tile in each region, int64[tiles]."""
    # Data that share memory are at the top where they must be interleaved; all others fill the memory from below.
    target = memory.target
    gaps = 0 if including_gaps else memory.gap_bytes
    total = memory.tile_bytes - gaps
    shared = memory.shared_bytes - gaps  # gaps are between data that share memory
    overflowed = np.maximum(memory.overflowed_bytes - gaps, 0)
    at_top = np.where(memory.is_from_top, np.minimum(shared, target.interleaved_bytes), 0)
    ordinary = target.bytes_per_tile - target.interleaved_bytes  # below the interleaved region
    interleaved = np.maximum(at_top, total - overflowed - ordinary)
    return {
        "nonInterleaved": total - overflowed - interleaved,
        "interleaved": interleaved,
        "overflowed": overflowed,
    }


def _by_category(memory: MemoryReport, by_tile: ByTile) -> Json:
    """Return the bytes of each category in each region of memory, by tile."""
    section: dict[str, Json] = {}
    sizes = region_bytes(memory, including_gaps=False)
    start = np.zeros_like(memory.tile_bytes)
    for name in (*FIXED, *LIVE):  # stacked: each category from `start`, each region from `low`
        tile_bytes = memory.by_category[name]
        kinds = ("nonOverlapped", "overlapped") if name in FIXED else ("overlapped", "nonOverlapped")
        entry: Json = {}
        low = np.zeros_like(start)
        for region, length in sizes.items():
            overlap = np.maximum(np.minimum(start + tile_bytes, low + length) - np.maximum(start, low), 0)
            entry[region] = dict(zip(kinds, (by_tile(overlap), by_tile(np.zeros_like(overlap))), strict=True))
            low = low + length
        section[name] = entry | {"total": by_tile(tile_bytes)}
        start = start + tile_bytes
    return section


def _groups_by_type(ids: Numbering) -> dict[str, list[VertexGroup]]:
    """Return the vertex groups of each vertex type; none for the type of copies."""
    groups: dict[str, list[VertexGroup]] = {name: [] for name in ids.vertex_types()}
    for row in ids.compute_sets:
        for group in row.groups:
            groups[group.codelet.name].append(group)
    return groups


def _vertex_bytes(groups: Iterable[VertexGroup], target: Target) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of code, counted once for each tile and codelet, and of vertices, int64[tiles] each."""
    state = np.zeros(target.num_tiles, np.int64)
    code: dict[str, np.ndarray] = {}
    for group in groups:
        on_tile = np.bincount(group.tile[group.tile != NO_TILE], minlength=target.num_tiles)
        state += on_tile * group.codelet.state_bytes
        size = (on_tile > 0) * group.codelet.code_bytes
        code[group.codelet.name] = np.maximum(code.get(group.codelet.name, 0), size)
    return np.asarray(sum(code.values(), np.zeros_like(state)), np.int64), state


def _vertex_rows(rows: list[tuple[np.ndarray, np.ndarray]], by_tile: ByTile) -> Json:
    return {
        "codeBytes": [by_tile(code) for code, _ in rows],
        "vertexDataBytes": [by_tile(state) for _, state in rows],
        "totalBytes": [by_tile(code + state) for code, state in rows],
    }


def _worst_tile(memory: MemoryReport) -> Json:
    return {"worstTile": memory.worst_tile, "peakStep": memory.peak_step, "variables": items_section(memory.largest)}


# Sections that have runs by tile, and no other texts.
_BY_TILE = (
    *(("computeSets", "cycleEstimates", name) for name in ("activeCyclesByTile", "cyclesByTile")),
    *((name,) for name in ("exchanges", "externalExchanges", "hostExchanges")),
    *(("memory", name) for name in ("byTile", "byCategory", "byComputeSet", "byVertexType")),
)


def with_lists(graph: Json) -> Json:
    """Return a graph profile with lists by tile in place of runs, which it changes."""
    for *path, last in _BY_TILE:
        section = reduce(getitem, path, graph)
        section[last] = _expanded(section[last])
    return graph


def _expanded(section: Any) -> Any:
    if isinstance(section, str):
        return numbers_of_runs(section).tolist()
    if isinstance(section, dict):
        return {name: _expanded(each) for name, each in section.items()}
    return [_expanded(each) for each in section]


def saved_vertex_bytes(graph: Json) -> dict[str, int]:
    """Return the bytes of each vertex type, as `Figures.vertex_type_bytes`."""
    rows = graph["memory"]["byVertexType"]["totalBytes"]
    return {name: total_of_runs(row) for name, row in zip(graph["vertexTypes"]["names"], rows, strict=True)}


def saved_languages(graph: Json) -> dict[str, str]:
    """Return the language of each vertex type, as `Figures.vertex_type_languages`."""
    types = graph["vertexTypes"]
    return dict(zip(types["names"], types["languages"], strict=True))


def saved_vertices(graph: Json) -> list[dict[str, tuple[int, int]]]:
    """Return the vertices of each compute set, as `Figures.compute_set_vertices`."""
    sets = graph["computeSets"]
    names = graph["vertexTypes"]["names"]
    # By compute set: numbers of its vertex types, and for each of these its vertices and its active cycles.
    columns = sets["vertexTypes"], sets["vertexCounts"], sets["cycleEstimates"]["activeCyclesByVertexType"]
    return [
        {names[n]: (count, active[n]) for n, count in zip(types, counts, strict=True)}
        for types, counts, active in zip(*columns, strict=True)
    ]
