"""Figures that are parts of the graph profile, read from the section of a saved one.

Input: the graph profile with runs in place of lists by tile. Output: values as `Figures` has them, and `graph()`.
"""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

from ipujax.runtime.files import numbers_of_runs, total_of_runs
from ipujax.runtime.sections.ids import Json

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
