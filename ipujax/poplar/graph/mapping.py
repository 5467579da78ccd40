"""Tile mappings made slice by slice, as Poplar's `setTileMapping` does.

Input: tensors, and for each a tile, a tile for every element, or Poplar's list of intervals for every tile. Output: for
each variable whose elements all have a tile, a `Flat` mapping; variables that are mapped in part have none yet.

Limits: a variable that is mapped by slices takes four bytes an element on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int

import numpy as np

from ipujax.runtime.errors import MappingError
from ipujax.runtime.tensor import Affine, Tensor, TileMapping, Variable, canonical, flat_mapping, on_one_tile, owners

Interval = tuple[int, int]  # first element, one past the last, in the flat order of a tensor
UNMAPPED = -1


class Placement:
    """The tile of every element of the variables of a graph."""

    def __init__(self) -> None:
        self._mappings: dict[Variable, TileMapping] = {}
        self._owners: dict[Variable, np.ndarray] = {}
        self._changed: dict[Variable, None] = {}

    def mappings(self) -> dict[Variable, TileMapping]:
        """The mappings of the variables whose elements all have a tile; the same dict every time."""
        for variable in self._changed:
            mapping = _as_flat(self._owners[variable])
            if mapping is not None:
                self._mappings[variable] = mapping
        self._changed.clear()
        return self._mappings

    def place_whole(self, variable: Variable, mapping: TileMapping) -> None:
        """Maps all of a variable."""
        self._owners.pop(variable, None)
        self._changed.pop(variable, None)
        self._mappings[variable] = mapping

    def place(self, tensor: Tensor, tile: int | np.ndarray) -> None:
        """Maps the elements of a tensor.

        Args:
            tensor: any view of any variables.
            tile: one tile, or one for each element in flat order, int32[tensor.size].
        """
        node = tensor.node
        if isinstance(tile, int) and tensor.is_whole_variable:
            self.place_whole(tensor.variables()[0], on_one_tile(tensor.size, tile))
        elif isinstance(node, Affine) and (run := _contiguous(node)) is not None:
            self._owners_of(node.variable)[run[0] : run[0] + run[1]] = tile
        else:
            which, index = tensor.flat_indices()
            each = np.broadcast_to(np.asarray(tile, np.int32), (tensor.size,))
            for number, variable in enumerate(tensor.variables()):
                here = which.reshape(-1) == number
                self._owners_of(variable)[index.reshape(-1)[here]] = each[here]

    def tiles(self, tensor: Tensor) -> np.ndarray:
        """The tile of every element of a tensor in flat order, −1 where it has none; int32[size]."""
        which, index = (part.reshape(-1) for part in tensor.flat_indices())
        result = np.full(tensor.size, UNMAPPED, np.int32)
        for number, variable in enumerate(tensor.variables()):
            here = which == number
            result[here] = self._known_owners(variable)[index[here]]
        return result

    def _known_owners(self, variable: Variable) -> np.ndarray:
        if variable in self._owners:
            return self._owners[variable]
        if variable in self._mappings:
            return owners(self._mappings[variable])
        return np.full(variable.size, UNMAPPED, np.int32)

    def _owners_of(self, variable: Variable) -> np.ndarray:
        """The mutable array of the tiles of a variable's elements."""
        if variable not in self._owners:
            self._owners[variable] = np.array(self._known_owners(variable), np.int32)
        self._changed[variable] = None
        return self._owners[variable]


def _contiguous(node: Affine) -> tuple[int, int] | None:
    """First element and size of a view that is one contiguous interval of its variable, else None."""
    radices = canonical(node.subdims)
    if not radices:
        return node.offset, 1
    return (node.offset, radices[0][0]) if len(radices) == 1 and radices[0][1] == 1 else None


def _as_flat(tiles: np.ndarray) -> TileMapping | None:
    """The mapping that puts each element on its tile, None where an element has none."""
    if tiles.size and tiles.min() < 0:
        return None
    starts = np.flatnonzero(np.diff(tiles, prepend=UNMAPPED))
    return flat_mapping(tiles.size, starts, tiles[starts])


def tiles_of_intervals(intervals: Sequence[Sequence[Interval]], size: int, num_tiles: int, name: str) -> np.ndarray:
    """The tile of every element from Poplar's form of a mapping: for every tile its intervals of elements.

    Args:
        intervals: `intervals[tile]` are the `(begin, end)` of that tile; there may be fewer entries than tiles.
        size: number of elements.
        num_tiles: tiles of the target.
        name: of what is mapped, for messages.

    Returns:
        int32[size].

    Raises:
        MappingError: for a tile the target lacks, an interval outside the tensor, or an element left out or held twice.
    """
    if len(intervals) > num_tiles:
        raise MappingError(f"mapping of {name} names tiles the target lacks", expected=num_tiles, got=len(intervals))
    tiles = np.full(size, UNMAPPED, np.int32)
    for tile, held in enumerate(intervals):
        for interval in held:
            begin, end = _bounds(interval, tile, name)
            if not 0 <= begin <= end <= size:
                got = f"({begin}, {end}) on tile {tile}"
                raise MappingError(f"mapping of {name} leaves the tensor", expected=f"intervals in 0 … {size}", got=got)
            if np.any(tiles[begin:end] != UNMAPPED):
                raise MappingError(f"mapping of {name} holds elements twice", got=f"({begin}, {end}) on tile {tile}")
            tiles[begin:end] = tile
    if np.any(tiles == UNMAPPED):
        missing = int(np.flatnonzero(tiles == UNMAPPED)[0])
        raise MappingError(f"mapping of {name} leaves elements out", expected=f"{size} elements", got=f"no {missing}")
    return tiles


def _bounds(interval: Interval, tile: int, name: str) -> Interval:
    try:
        begin, end = map(as_int, interval)
    except (TypeError, ValueError) as error:
        got = f"{interval!r} on tile {tile}"
        raise MappingError(f"mapping of {name} is of no intervals", expected="(begin, end)", got=got) from error
    return begin, end


def intervals_of_tiles(tiles: np.ndarray, num_tiles: int) -> list[list[Interval]]:
    """Poplar's form of a mapping from the tile of every element; the reverse of `tiles_of_intervals`."""
    starts = np.flatnonzero(np.diff(tiles, prepend=UNMAPPED - 1))
    ends = np.append(starts[1:], tiles.size)
    result: list[list[Interval]] = [[] for _ in range(num_tiles)]
    for begin, end in zip(starts.tolist(), ends.tolist(), strict=False):
        result[int(tiles[begin])].append((begin, end))
    return result
