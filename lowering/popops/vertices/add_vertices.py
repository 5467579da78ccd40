"""Adds a compute set of one vertex group to a graph and to a program, as most operations do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipujax.runtime.graph import Access, Axis, Codelet, Execute, Graph, Sequence as ProgramSequence, VertexGroup


def add_vertices(
    graph: Graph,
    codelet: Codelet,
    axes: Sequence[Axis],
    accesses: Sequence[Access],
    tile: np.ndarray,
    prog: ProgramSequence,
    name: str,
    origins: Sequence[str] = (),
) -> None:
    """Adds a compute set of one vertex group, and executes it.

    Args:
        graph: graph to add to.
        codelet: what the vertices run.
        axes: the axes of the group.
        accesses: what its fields are connected to, in order.
        tile: the tile of each vertex, int32[blocks of each axis].
        prog: program the compute set is added to.
        name: debug name of the compute set.
        origins: names of the axes whose first index is a scalar field.
    """
    compute_set = graph.add_compute_set(name)
    group = VertexGroup(codelet, tuple(axes), tuple(accesses), tile, tuple(origins), graph.origin, parts=graph.parts)
    graph.add_vertices(compute_set, group)
    prog.add(Execute(compute_set))
