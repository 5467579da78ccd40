"""The blocks of an access as a list over the vertices that exist.

Input: a vertex group and one of its accesses. Output: arrays over vertices, where `vertices.extents` gives arrays over
the grid. For the tile interpreter, and for the verifier where its quick tests decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.graph.vertex_group import Access, VertexGroup, extents


@dataclass(frozen=True, eq=False, slots=True)
class Boxes:
    """The blocks of one access, for the vertices that exist, in row-major order of the grid.

    Args:
        start: first index of each block in each dimension of the tensor, int64[vertices, dims].
        length: number of indices, int64[vertices, dims].
        pad_low: fill before the block, in dilated indices, int64[vertices, dims].
        pad_high: fill after it, int64[vertices, dims].
        tile: the tile of each vertex, int32[vertices].
    """

    start: np.ndarray
    length: np.ndarray
    pad_low: np.ndarray
    pad_high: np.ndarray
    tile: np.ndarray


def boxes(group: VertexGroup, access: Access) -> Boxes:
    """The blocks of `access` for the vertices of `group` that exist."""
    present = group.tile >= 0
    per_dim = extents(group, access)

    def column(name: str) -> np.ndarray:
        columns = [np.broadcast_to(getattr(extent, name), group.grid)[present] for extent in per_dim]
        return np.stack(columns, axis=1) if columns else np.zeros((int(present.sum()), 0), np.int64)

    return Boxes(column("start"), column("length"), column("pad_low"), column("pad_high"), group.tile[present])
