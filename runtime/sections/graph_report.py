"""Graph profile as JSON-able data, in the sections and under the names of Poplar's.

Input: an `Executable` and its `Numbering`. Output: dicts of str, int, float and lists of them.
Ids are positions in lists: of a compute set in `computeSets`, of an exchange in its kind of exchanges, of a program in
`programs`, of a vertex type in `vertexTypes`. `docs/profile.md` lists the names of the guide that are missing, and why.
Source: Poplar & PopLibs user guide, "Profiling", section "Graph profile".
Limits: lists are by id and tile, as in Poplar: those of tens of thousands of tiles and thousands of compute sets take
gigabytes. Arrays by tile are of one replica, as are the costs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ExchangeCost, StreamCost
from ipujax.runtime.graph import RemoteIn, StreamIn
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.sections.memory import ByTile, memory_section
from ipujax.runtime.sections.programs import external_cycles, stream_cycles
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import pad_tiles


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
        "memory": memory_section(executable, ids, by_tile),
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
    rows = [(isinstance(leaf, (StreamIn, RemoteIn)), cost) for leaf, cost in ids.host]

    def listed(values: np.ndarray, cost: StreamCost) -> Any:
        return by_tile(_all_tiles(values, cost.first_ipu, target))

    return {
        "bytesReceivedByTile": [listed(cost.tile_bytes * to_device, cost) for to_device, cost in rows],
        "bytesSentByTile": [listed(cost.tile_bytes * (not to_device), cost) for to_device, cost in rows],
        "estimatedCyclesByTile": [listed(stream_cycles(cost, target), cost) for _, cost in rows],
    }
