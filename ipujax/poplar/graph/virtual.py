"""Virtual graphs: a view of a graph that has some of its tiles, numbered from 0.

Additions to a virtual graph go to its parent, on the parent's tiles. The virtual graph sees the parent's variables that
are wholly mapped to its tiles. Programs are compiled for the top-level graph.

Source: Poplar & PopLibs user guide, "Virtual graphs".
Limits: a virtual graph has equally many tiles of each IPU, those of one IPU next to one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ipujax.poplar.graph.graph_base import SHARED, GraphBase
from ipujax.poplar.graph.groups import GroupTable
from ipujax.poplar.graph.mapping import UNMAPPED, Placement
from ipujax.poplar.vertex import VertexRef
from ipujax.runtime.errors import GraphError, whole_number
from ipujax.runtime.graph import NO_TILE, ComputeSet, VertexGroup
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, TileMapping, Variable, renumber_tiles


def chosen_tiles(target: Target, tiles: int | Iterable[int], upper: int | None) -> np.ndarray:
    """Return the tiles of a virtual graph, int32[n], from the arguments of `Graph.create_virtual_graph`."""
    if isinstance(tiles, bool | float | str):
        expected = "a number of tiles of each IPU, a range, or a list of tiles"
        raise GraphError("invalid `tiles` argument of a virtual graph", expected=expected, got=repr(tiles))
    if upper is not None:
        chosen = _tiles_of_range(target, tiles, upper)
    elif isinstance(tiles, int | np.integer):
        if not 0 < tiles <= target.tiles_per_ipu:
            raise GraphError("invalid number of tiles of each IPU", expected=f"1 … {target.tiles_per_ipu}", got=tiles)
        firsts = np.arange(target.num_ipus) * target.tiles_per_ipu
        chosen = (firsts[:, None] + np.arange(tiles)).reshape(-1)
    else:
        chosen = np.asarray(list(tiles))
        if chosen.size and chosen.dtype.kind not in "iu":
            got = repr(chosen.tolist())
            raise GraphError("invalid `tiles` argument of a virtual graph", expected="a list of integers", got=got)
    if not chosen.size or chosen.min() < 0 or chosen.max() >= target.num_tiles or len(np.unique(chosen)) < len(chosen):
        expected = f"different tiles in 0 … {target.num_tiles - 1}"
        raise GraphError("invalid tiles of a virtual graph", expected=expected, got=chosen.tolist()[:8])
    # Cast after the check: a number beyond 32 bits would become that of another tile.
    return chosen.astype(np.int32)


def _tiles_of_range(target: Target, first: Any, end: Any) -> np.ndarray:
    if any(isinstance(bound, bool) or not isinstance(bound, int | np.integer) for bound in (first, end)):
        raise GraphError("invalid tile range of a virtual graph", expected="first tile, end", got=(first, end))
    # One tile more than the target has is invalid: a range far beyond it is not listed.
    return np.array(range(int(first), min(int(end), int(first) + target.num_tiles + 1)))


def virtual_target(target: Target, tiles: np.ndarray) -> Target:
    """Return a target with some tiles of another; raises GraphError unless all IPUs have equally many, IPU by IPU."""
    ipus = tiles // target.tiles_per_ipu
    num_ipus = len(np.unique(ipus))
    # One row an IPU: valid if all tiles of a row are of one IPU.
    rows = ipus.reshape(num_ipus, -1) if len(ipus) % num_ipus == 0 else None
    if rows is None or np.any(rows != rows[:, :1]):
        raise GraphError(
            "virtual graph with unequal IPUs",
            expected="equally many tiles of each IPU, those of one IPU next to one another",
            got=f"{np.bincount(ipus)[np.unique(ipus)].tolist()} tiles of IPUs {np.unique(ipus).tolist()}",
        )
    return target.replace(num_ipus=num_ipus, tiles_per_ipu=rows.shape[1])


class _VirtualMappings(Mapping[Variable, TileMapping]):
    """Parent's mappings that are wholly on the tiles of a virtual graph, in its tile numbers."""

    def __init__(self, parent: GraphBase, inverse: np.ndarray) -> None:
        self._parent = parent
        self._inverse = inverse
        # A mapping with tiles outside of the virtual graph has the entry None.
        self._renumbered: dict[TileMapping, TileMapping | None] = {}

    def _mapping_of(self, variable: object) -> TileMapping | None:
        mapping = self._parent.mappings.get(variable)  # type: ignore[call-overload]
        if mapping is None:
            return None
        if mapping not in self._renumbered:
            self._renumbered[mapping] = renumber_tiles(mapping, self._inverse)
        return self._renumbered[mapping]

    def __getitem__(self, variable: Variable) -> TileMapping:
        mapping = self._mapping_of(variable)
        if mapping is None:
            raise KeyError(variable)
        return mapping

    def __contains__(self, variable: object) -> bool:
        return self._mapping_of(variable) is not None

    def __iter__(self) -> Iterator[Variable]:
        return (variable for variable in self._parent.mappings if variable in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _VirtualPlacement(Placement):
    """The placement of a parent in the tile numbers of a virtual graph."""

    def __init__(self, parent: GraphBase, tiles: np.ndarray, inverse: np.ndarray) -> None:
        super().__init__()
        self._parent = parent
        self._tiles = tiles
        self._inverse = inverse
        self._view = _VirtualMappings(parent, inverse)

    def mappings(self) -> Any:
        return self._view

    def place_variable(self, variable: Variable, mapping: TileMapping) -> None:
        parent_mapping = renumber_tiles(mapping, self._tiles)
        assert parent_mapping is not None, "the mapping was checked against the virtual target"
        self._parent._placement.place_variable(variable, parent_mapping)

    def place(self, tensor: Tensor, tile: int | np.ndarray) -> None:
        parent_tile = self._tiles[tile]
        self._parent._placement.place(tensor, parent_tile if isinstance(tile, np.ndarray) else int(parent_tile))

    def tiles(self, tensor: Tensor) -> np.ndarray:
        tiles = self._parent._placement.tiles(tensor)
        return np.where(tiles == UNMAPPED, UNMAPPED, self._inverse[tiles]).astype(np.int32)


class _VirtualGroups(GroupTable):
    """The vertex groups of a parent in the tile numbers of a virtual graph; compute sets are the parent's."""

    def __init__(self, parent: GraphBase, inverse: np.ndarray) -> None:
        super().__init__()
        self._parent = parent
        self._inverse = inverse
        # Groups are compared by identity, so each is renumbered once.
        self._renumbered: dict[VertexGroup, VertexGroup] = {}

    def __getitem__(self, compute_set: ComputeSet) -> list[VertexGroup]:
        groups = self._parent.groups[compute_set]
        for group in groups:
            if group not in self._renumbered:
                self._renumbered[group] = self._group_on_tiles(group, compute_set)
        return [self._renumbered[group] for group in groups]

    def _group_on_tiles(self, group: VertexGroup, compute_set: ComputeSet) -> VertexGroup:
        tile = np.where(group.tile == NO_TILE, NO_TILE, self._inverse[group.tile]).astype(np.int32)
        if np.any((tile == NO_TILE) & (group.tile != NO_TILE)):
            name = f"{group.codelet.name} in {compute_set.name}"
            raise GraphError(f"vertices of {name} are mapped to tiles this virtual graph lacks", where=group.origin)
        return replace(group, tile=tile)

    def __contains__(self, compute_set: object) -> bool:
        return compute_set in self._parent.groups

    def __iter__(self) -> Iterator[ComputeSet]:
        return iter(self._parent.groups)

    def __len__(self) -> int:
        return len(self._parent.groups)


class VirtualBase(GraphBase):
    """Base of graphs that are views of another with some of its tiles.

    Args:
        parent: the graph that it is a view of.
        tiles: the parent's number of each tile, int32[n].
    """

    tile_noun = "tile of this virtual graph"

    def __init__(self, parent: GraphBase, tiles: np.ndarray) -> None:
        super().__init__(virtual_target(parent.target, tiles))
        # The virtual graph's number of each tile of the parent; UNMAPPED for tiles that it lacks.
        inverse = np.full(parent.target.num_tiles, UNMAPPED, np.int32)
        inverse[tiles] = np.arange(len(tiles), dtype=np.int32)
        self._parent = parent
        self._tiles = tiles
        self._placement = _VirtualPlacement(parent, tiles, inverse)
        self.groups = _VirtualGroups(parent, inverse)
        self.replication_factor = parent.replication_factor
        for shared in (*SHARED, "variables", "vertices"):
            setattr(self, shared, getattr(parent, shared))

    def _top(self) -> GraphBase:
        return self._parent._top()

    def _tiles_in_top_level(self) -> np.ndarray:
        return self._parent._tiles_in_top_level()[self._tiles]

    def _add(self, variable: Variable, mapping: TileMapping | None) -> Tensor:
        # The parent maps nothing: `mapping` is in tile numbers of this graph.
        tensor = self._parent._add(variable, None)
        if mapping is not None:
            self.set_tile_mapping(variable, mapping)
        return tensor

    def get_tiles(self) -> list[int]:
        """Return the parent's number of each tile."""
        return self._tiles.tolist()

    def add_compute_set(self, name: str) -> ComputeSet:
        with self._parent.debug_origin(self.origin):
            return self._parent.add_compute_set(name)

    def set_tile_mapping(self, what: Any, mapping: Any) -> None:
        if not isinstance(what, VertexRef):
            super().set_tile_mapping(what, mapping)
        else:
            tile = whole_number(mapping, f"{what!r} is mapped to tile {mapping}", len(self._tiles) - 1)
            self._parent.set_tile_mapping(what, int(self._tiles[tile]))

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        tile = np.where(group.tile == NO_TILE, NO_TILE, self._tiles[group.tile]).astype(np.int32)
        self._parent.add_vertices(compute_set, replace(group, tile=tile))
