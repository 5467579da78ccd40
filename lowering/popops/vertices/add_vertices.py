"""Compute sets of one vertex group, the form of most operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipujax.runtime.graph import Access, Axis, Builder, Codelet, Execute, VertexGroup


def add_vertices(
    builder: Builder,
    codelet: Codelet,
    axes: Sequence[Axis],
    accesses: Sequence[Access],
    tile: np.ndarray,
    origins: Sequence[str] = (),
) -> None:
    """Adds a compute set of one vertex group to the graph, and its execution to the program.

    Args:
        codelet: code of the vertices.
        axes: axes of the group.
        accesses: tensors that its fields are connected to, in order.
        tile: tile of each vertex, int32[blocks of each axis]; −1 where there is none.
        origins: names of the axes along which the codelet gets the first index of its block.
    """
    graph = builder.graph
    compute_set = graph.add_compute_set(builder.name)
    group = VertexGroup(
        codelet, tuple(axes), tuple(accesses), tile, tuple(origins), graph.origin, parts=graph.scope.parts
    )
    graph.add_vertices(compute_set, group)
    builder.prog.add(Execute(compute_set))
