"""How much a graph holds, in lines for the log.

Input: a graph. Output: lines of text: variables and how they are laid out, compute sets, vertices, and codelets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.vertex_group import VertexGroup
from ipujax.runtime.tensor import Blocked, TileMapping


def graph_counts(graph: Graph) -> Iterator[str]:
    """The lines of a graph.

    Args:
        graph: variables, mappings and vertices.
    """
    layouts = Counter(_layout(graph.mappings.get(variable)) for variable in graph.variables)
    num_bytes = sum(variable.num_bytes for variable in graph.variables)
    laid_out = ", ".join(f"{count:,} {layout}" for layout, count in sorted(layouts.items()))
    yield f"{len(graph.variables):,} variables of {num_bytes:,} bytes: {laid_out or 'none'}"
    groups = [group for groups in graph.groups.values() for group in groups]
    vertices = sum(group.num_vertices for group in groups)
    yield f"{len(graph.groups):,} compute sets, {len(groups):,} vertex groups, {vertices:,} vertices"
    of_codelet: dict[str, list[VertexGroup]] = defaultdict(list)
    for group in groups:
        of_codelet[group.codelet.name].append(group)
    for name, own in sorted(of_codelet.items()):
        groups_of = f"{len(own):,} group{'' if len(own) == 1 else 's'}"
        yield f"codelet {name}: {sum(group.num_vertices for group in own):,} vertices in {groups_of}"


def _layout(mapping: TileMapping | None) -> str:
    if mapping is None:
        return "not mapped"
    if np.unique(mapping.tiles).size <= 1:
        return "on one tile"
    return "in blocks" if isinstance(mapping, Blocked) else "in intervals"
