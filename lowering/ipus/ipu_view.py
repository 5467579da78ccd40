"""View of one IPU as a graph: the graph that planners see if a program spreads over several IPUs.

Its target has one IPU, its tiles are numbered from 0, and vertices and variables are added to the full graph, on the
tiles of that IPU which compute; I/O tiles have a view of their own. It holds only mappings that were set through it, so
that a value of another IPU is no operand here: it must be copied first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ipujax.runtime.graph import NO_TILE, ComputeSet, Graph, VertexGroup
from ipujax.runtime.tensor import Origin, TileMapping, Variable, check_mapping, frozen, renumber_tiles


class IpuView(Graph):
    """The view of one IPU.

    Args:
        graph: the graph of all IPUs.
        ipu: number of the IPU.
        of_io_tiles: whether it is the view of the I/O tiles instead of the tiles that compute.
    """

    def __init__(self, graph: Graph, ipu: int, *, of_io_tiles: bool = False) -> None:
        tiles_per_ipu = graph.target.tiles_per_ipu
        num_io_tiles = graph.io_tiles
        tiles = num_io_tiles if of_io_tiles else tiles_per_ipu - num_io_tiles
        target = graph.target.replace(num_ipus=1, tiles_per_ipu=tiles)
        super().__init__(target, graph.replication_factor, graph.byte_cost_cycles)
        self.full_graph = graph
        self.ipu = ipu
        self._io_view: IpuView | None = None
        self.variables = graph.variables
        self.groups = graph.groups
        self.roles = graph.roles
        self.fallbacks = graph.fallbacks
        self.libraries = graph.libraries
        self.off_chip = graph.off_chip
        # The I/O tiles of an IPU are its last.
        self._first = ipu * tiles_per_ipu + (tiles_per_ipu - num_io_tiles if of_io_tiles else 0)
        self._tiles = frozen(self._first + np.arange(tiles), np.int32)

    @property
    def origin(self) -> Origin:
        """Origin of the vertices that are being added: that of this view, else of the full graph."""
        return self.full_graph.origin if self._origin == Origin() else self._origin

    @property
    def io_view(self) -> IpuView | None:
        """The view of the I/O tiles of the IPU, None if there are none."""
        if self._io_view is None and self.full_graph.io_tiles:
            self._io_view = IpuView(self.full_graph, self.ipu, of_io_tiles=True)
        return self._io_view

    def set_tile_mapping(self, variable: Variable, mapping: TileMapping) -> None:
        check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
        mapping_of_graph = renumber_tiles(mapping, self._tiles)
        assert mapping_of_graph is not None, "the mapping was checked against the tiles of one IPU"
        self.full_graph.set_tile_mapping(variable, mapping_of_graph)
        self.mappings[variable] = mapping

    def add_copy_of(self, constant: Variable) -> Variable:
        """Adds another constant of the same value, unmapped."""
        copy = replace(constant)
        self.variables.append(copy)
        return copy

    def holds(self, variable: Variable) -> bool:
        """True if a variable is mapped to this IPU."""
        return variable in self.mappings

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        tile = np.where(group.tile == NO_TILE, NO_TILE, group.tile + self._first)
        super().add_vertices(compute_set, replace(group, tile=frozen(tile, np.int32)))
