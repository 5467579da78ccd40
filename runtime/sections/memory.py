"""Memory section of the graph profile: bytes by tile, by category, by compute set and by vertex type, and liveness.

Input: an `Executable` and its `Numbering`. Output: dicts of str, int and lists of them, JSON-able; lists are by tile.

Categories fill the regions in the order code, always-live data, data that share memory, so that they add up to the
bytes of each region. `overlapped` bytes share memory; they are those at the peak of each tile, so that the categories
of a tile add up to its `total`.
Source: Poplar & PopLibs user guide, "Profiling", section "Memory use".
Limits: the bytes of a vertex are not split into instance, edge pointers, copy pointers, descriptors and padding: all of
them are `vertexDataBytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import NO_TILE, VertexGroup
from ipujax.runtime.memory import FIXED, LIVE, MemoryReport
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.sections.live_variables import items_section, liveness_section
from ipujax.runtime.target import Target

ByTile = Callable[[np.ndarray], Any]  # from an array by tile, int64[tiles], to what a report has for it


def memory_section(executable: Executable, ids: Numbering, by_tile: ByTile) -> Json:
    """Return the section `memory`."""
    return {
        "byTile": _by_region(executable.memory, by_tile),
        "byCategory": _by_category(executable.memory, by_tile),
        "byComputeSet": _rows([_vertex_bytes(row.groups, executable.target) for row in ids.compute_sets], by_tile),
        "byVertexType": _rows(
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


def _rows(rows: list[tuple[np.ndarray, np.ndarray]], by_tile: ByTile) -> Json:
    return {
        "codeBytes": [by_tile(code) for code, _ in rows],
        "vertexDataBytes": [by_tile(state) for _, state in rows],
        "totalBytes": [by_tile(code + state) for code, state in rows],
    }


def _worst_tile(memory: MemoryReport) -> Json:
    return {"worstTile": memory.worst_tile, "peakStep": memory.peak_step, "variables": items_section(memory.largest)}
