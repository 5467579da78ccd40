"""Counts of a graph, in lines for the log.

Input: a graph. Output: lines of text: variables and their mappings, compute sets, vertices, and codelets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.vertex_group import VertexGroup
from ipujax.runtime.tensor import Blocked, TileMapping


def graph_counts(graph: Graph) -> Iterator[str]:
    """Yield the lines of a graph."""
    layouts = Counter(_layout(graph.mappings.get(variable)) for variable in graph.variables)
    num_bytes = sum(variable.num_bytes for variable in graph.variables)
    laid_out = ", ".join(f"{count:,} {layout}" for layout, count in sorted(layouts.items()))
    yield f"{len(graph.variables):,} variables of {num_bytes:,} bytes: {laid_out or 'none'}"
    groups = [group for groups in graph.groups.values() for group in groups]
    vertices = sum(group.num_vertices for group in groups)
    yield f"{len(graph.groups):,} compute sets, {len(groups):,} vertex groups, {vertices:,} vertices"
    by_codelet: dict[str, list[VertexGroup]] = defaultdict(list)
    for group in groups:
        by_codelet[group.codelet.name].append(group)
    for name, its_groups in sorted(by_codelet.items()):
        count = f"{len(its_groups):,} group{'' if len(its_groups) == 1 else 's'}"
        yield f"codelet {name}: {sum(group.num_vertices for group in its_groups):,} vertices in {count}"


def _layout(mapping: TileMapping | None) -> str:
    if mapping is None:
        return "not mapped"
    if np.unique(mapping.tiles).size <= 1:
        return "on one tile"
    return "in blocks" if isinstance(mapping, Blocked) else "in intervals"
