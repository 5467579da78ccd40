"""One IPU of a graph, as a graph: what planners see where a program spreads over several IPUs.

Its target is a system of one IPU, its tiles are numbered from 0, and what is added to it is added to the whole graph,
on the tiles of that IPU which compute; those that only move data are a view of their own. Of the whole graph it knows
the mappings that were made through it, so that nothing else is an operand here: a value of another IPU must be copied
first.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ipujax.runtime.graph import NO_TILE, ComputeSet, Graph, VertexGroup
from ipujax.runtime.tensor import Origin, TileMapping, Variable, check_mapping, frozen, moved


class IpuView(Graph):
    """The view of one IPU.

    Args:
        whole: the graph of all IPUs.
        ipu: number of the IPU.
        of_io_tiles: whether it is of the tiles that only move data.
    """

    def __init__(self, whole: Graph, ipu: int, *, of_io_tiles: bool = False) -> None:
        there, moving = whole.target.tiles_per_ipu, whole.io_tiles
        tiles = moving if of_io_tiles else there - moving
        one = whole.target.replace(num_ipus=1, tiles_per_ipu=tiles)
        super().__init__(one, whole.replication_factor, whole.byte_price_cycles)
        self.whole, self.ipu = whole, ipu
        self._io_view: IpuView | None = None
        self.variables, self.groups, self.roles = whole.variables, whole.groups, whole.roles
        self.fallbacks, self.libraries, self.off_chip = whole.fallbacks, whole.libraries, whole.off_chip
        self._first = ipu * there + (there - moving if of_io_tiles else 0)
        self._tiles = frozen(self._first + np.arange(tiles), np.int32)

    @property
    def origin(self) -> Origin:
        """Where what is being added comes from: the origin of this view if it has one, else of the whole graph."""
        return self.whole.origin if self._origin == Origin() else self._origin

    @property
    def io_view(self) -> IpuView | None:
        """The tiles of the IPU that only move data, None if there are none."""
        if self._io_view is None and self.whole.io_tiles:
            self._io_view = IpuView(self.whole, self.ipu, of_io_tiles=True)
        return self._io_view

    def set_tile_mapping(self, variable: Variable, mapping: TileMapping) -> None:
        check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
        there = moved(mapping, self._tiles)
        assert there is not None, "the mapping was checked against the tiles of one IPU"
        self.whole.set_tile_mapping(variable, there)
        self.mappings[variable] = mapping

    def add_copy_of(self, constant: Variable) -> Variable:
        """Adds another constant of the same value, which lies nowhere yet."""
        own = replace(constant)
        self.variables.append(own)
        return own

    def holds(self, variable: Variable) -> bool:
        """Whether a variable lies on this IPU."""
        return variable in self.mappings

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        tile = np.where(group.tile == NO_TILE, NO_TILE, group.tile + self._first)
        super().add_vertices(compute_set, replace(group, tile=frozen(tile, np.int32)))
