"""Tile mappings made slice by slice, as Poplar's `setTileMapping` does.

Input: tensors, and for each a tile, a tile for every element, or Poplar's list of intervals for every tile. Output: a
`Flat` mapping of each variable whose elements are all mapped; partly mapped variables have none yet.

Limits: a variable that is mapped by slices takes four bytes an element on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int

import numpy as np

from ipujax.runtime.errors import MappingError
from ipujax.runtime.graph import element_ranges
from ipujax.runtime.tensor import Affine, Tensor, TileMapping, Variable, canonical, flat_mapping, on_one_tile, owners

Interval = tuple[int, int]  # first element, one past the last, in the flat order of a tensor
UNMAPPED = -1


class Placement:
    """Tile of every element of the variables of a graph."""

    def __init__(self) -> None:
        self._mappings: dict[Variable, TileMapping] = {}
        self._owners: dict[Variable, np.ndarray] = {}  # tile of each element, of variables that are mapped by slices
        # Variables whose `Flat` mapping is out of date; converted once, at the next look at `mappings`.
        self._changed: dict[Variable, None] = {}

    def mappings(self) -> dict[Variable, TileMapping]:
        """Return the mappings of the variables whose elements are all mapped; the same dict every time."""
        for variable in self._changed:
            mapping = _as_flat(self._owners[variable])
            if mapping is not None:
                self._mappings[variable] = mapping
        self._changed.clear()
        return self._mappings

    def elements_left_out(self) -> dict[Variable, np.ndarray]:
        """Return the flat numbers of the elements without a tile of every variable that is mapped in part."""
        mappings = self.mappings()
        return {v: np.flatnonzero(t == UNMAPPED) for v, t in self._owners.items() if v not in mappings}

    def place_variable(self, variable: Variable, mapping: TileMapping) -> None:
        """Map all elements of a variable."""
        self._owners.pop(variable, None)
        self._changed.pop(variable, None)
        self._mappings[variable] = mapping

    def place(self, tensor: Tensor, tile: int | np.ndarray) -> None:
        """Map the elements of a view to one tile, or each to its own: int32[tensor.size] in flat order."""
        # From the cheapest form of a mapping to the general one.
        node = tensor.node
        if isinstance(tile, int) and tensor.is_whole_variable:
            self.place_variable(tensor.variables()[0], on_one_tile(tensor.size, tile))
        elif isinstance(node, Affine) and (interval := _contiguous(node)) is not None:
            self._owners_of(node.variable)[interval[0] : interval[0] + interval[1]] = tile
        else:
            which, index = tensor.flat_indices()
            tiles = np.broadcast_to(np.asarray(tile, np.int32), (tensor.size,))
            for number, variable in enumerate(tensor.variables()):
                is_of_variable = which.reshape(-1) == number
                self._owners_of(variable)[index.reshape(-1)[is_of_variable]] = tiles[is_of_variable]

    def tiles(self, tensor: Tensor) -> np.ndarray:
        """Return the tile of every element of a tensor in flat order, −1 where it has none; int32[size]."""
        which, index = (array.reshape(-1) for array in tensor.flat_indices())
        result = np.full(tensor.size, UNMAPPED, np.int32)
        for number, variable in enumerate(tensor.variables()):
            is_of_variable = which == number
            result[is_of_variable] = self._current_owners(variable)[index[is_of_variable]]
        return result

    def _current_owners(self, variable: Variable) -> np.ndarray:
        if variable in self._owners:
            return self._owners[variable]
        if variable in self._mappings:
            return owners(self._mappings[variable])
        return np.full(variable.size, UNMAPPED, np.int32)

    def _owners_of(self, variable: Variable) -> np.ndarray:
        """Return the mutable array of the tiles of a variable's elements."""
        if variable not in self._owners:
            self._owners[variable] = np.array(self._current_owners(variable), np.int32)
        self._changed[variable] = None
        return self._owners[variable]


def _contiguous(node: Affine) -> tuple[int, int] | None:
    """Return the first element and size of a view that is one contiguous interval of its variable, else None."""
    radices = canonical(node.subdims)
    if not radices:
        return node.offset, 1
    return (node.offset, radices[0][0]) if len(radices) == 1 and radices[0][1] == 1 else None


def _as_flat(tiles: np.ndarray) -> TileMapping | None:
    """Return the mapping of every element to its tile; None if an element has no tile."""
    if tiles.size and tiles.min() < 0:
        return None
    starts = np.flatnonzero(np.diff(tiles, prepend=UNMAPPED))
    return flat_mapping(tiles.size, starts, tiles[starts])


def tiles_of_intervals(intervals: Sequence[Sequence[Interval]], size: int, num_tiles: int, name: str) -> np.ndarray:
    """Return the tile of each element, int32[size], from `(begin, end)` intervals by tile; refuse gaps and overlaps."""
    if len(intervals) > num_tiles:
        raise MappingError(f"mapping of {name} names tiles the target lacks", expected=num_tiles, got=len(intervals))
    tiles = np.full(size, UNMAPPED, np.int32)
    for tile, tile_intervals in enumerate(intervals):
        for interval in tile_intervals:
            begin, end = _bounds(interval, tile, name)
            if not 0 <= begin <= end <= size:
                got = f"({begin}, {end}) on tile {tile}"
                raise MappingError(
                    f"mapping of {name} has an interval outside of the tensor",
                    expected=f"intervals in 0 … {size}",
                    got=got,
                )
            twice = begin + np.flatnonzero(tiles[begin:end] != UNMAPPED)
            if twice.size:
                message = f"mapping of {name} maps {element_ranges(twice)} twice"
                raise MappingError(message, got=f"tile {tiles[twice[0]]} and ({begin}, {end}) on tile {tile}")
            tiles[begin:end] = tile
    # One call maps a tensor entirely, or is an error.
    missing = np.flatnonzero(tiles == UNMAPPED)
    if missing.size:
        message = f"mapping of {name} leaves {element_ranges(missing)} out"
        raise MappingError(message, expected=f"{size} elements", got=f"{size - missing.size}")
    return tiles


def _bounds(interval: Interval, tile: int, name: str) -> Interval:
    try:
        begin, end = map(as_int, interval)
    except (TypeError, ValueError) as error:
        got = f"{interval!r} on tile {tile}"
        raise MappingError(f"mapping of {name} has an invalid interval", expected="(begin, end)", got=got) from error
    return begin, end


def intervals_of_tiles(tiles: np.ndarray, num_tiles: int) -> list[list[Interval]]:
    """Return Poplar's form of a mapping from the tile of every element; the reverse of `tiles_of_intervals`."""
    # No tile is UNMAPPED − 1, so the first element always starts an interval.
    starts = np.flatnonzero(np.diff(tiles, prepend=UNMAPPED - 1))
    stops = np.append(starts[1:], tiles.size)
    result: list[list[Interval]] = [[] for _ in range(num_tiles)]
    for begin, end in zip(starts.tolist(), stops.tolist(), strict=False):
        result[int(tiles[begin])].append((begin, end))
    return result
