"""Tile mappings: the tile of each element of a variable, each element exactly once.

`Blocked` cuts every dimension and maps each block to one tile: the mappings of planners. `Flat` cuts the row-major flat
order: the mappings of the linear rule. Both are compared by identity, so that everything derived from a mapping can be
cached; the functions that make mappings are themselves memoised.

Source of the linear rule: poplibs `poputil/TileMapping.cpp` and `Util.cpp:splitRegions` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import MappingError
from ipujax.runtime.markup import table

MIN_BYTES_PER_TILE = 128  # poplibs TileMapping.cpp: smallest share that has its own tile
VECTOR_BYTES = 8  # data path width of a tile; one grain is one vector


def frozen(values: object, dtype: type) -> np.ndarray:
    """Copy values to a read-only array."""
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def pad_tiles(values: np.ndarray, first: int, size: int) -> np.ndarray:
    """Pad values of neighbouring tiles from tile `first` on to int64[size], one for each tile; 0 elsewhere."""
    padded = np.zeros(size, np.int64)
    padded[first : first + len(values)] = values
    return padded


class MappedIntervals(NamedTuple):
    """Flat intervals of a variable on tiles, in rising order: starts int64[n], lengths int64[n], tiles int32[n]."""

    starts: np.ndarray
    lengths: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Blocked:
    """Blocks of a variable on tiles.

    Args:
        cuts: per dimension the boundaries `0 = c0 < … < cn = size`, int64[n + 1].
        tile: tile of each block, int32[n1, …, nr].
    """

    cuts: tuple[np.ndarray, ...]
    tile: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(c[-1]) for c in self.cuts)

    @property
    def tiles(self) -> np.ndarray:
        """Tile of each block, row-major, int32[blocks]."""
        return self.tile.ravel()

    def on_tiles(self, tiles: np.ndarray) -> Blocked:
        """Map the same blocks to other tiles, int[blocks]."""
        return blocked_mapping(self.cuts, tiles)

    def elements_per_tile(self, num_tiles: int) -> np.ndarray:
        """Count the elements mapped to each tile, int64[num_tiles]."""
        # Axis by axis: sizes of blocks are products, no element is listed.
        counts = np.ones(self.tile.shape, np.int64)
        for axis, cut in enumerate(self.cuts):
            counts = counts * np.diff(cut).reshape([-1 if a == axis else 1 for a in range(len(self.cuts))])
        return np.bincount(self.tile.ravel(), counts.ravel(), num_tiles).astype(np.int64)

    def runs(self) -> MappedIntervals:
        """Return flat intervals, each on one tile; neighbours may be on one tile too."""
        shape = self.shape
        if prod(shape) == 0:
            return MappedIntervals(frozen([], np.int64), frozen([], np.int64), frozen([], np.int32))
        # Dimensions behind the last one that is split are contiguous on their tile: they only scale its cuts.
        last = max((axis for axis, cut in enumerate(self.cuts) if len(cut) > 2), default=-1)
        inner = prod(shape[last + 1 :])
        tiles = np.asarray(self.tile)
        cut = self.cuts[last] * inner if last >= 0 else np.array([0, inner])
        rows = np.arange(0, prod(shape), cut[-1])
        for axis in range(last):
            tiles = np.repeat(tiles, np.diff(self.cuts[axis]), axis)
        lengths = np.broadcast_to(np.diff(cut), (len(rows), len(cut) - 1)).ravel()
        return MappedIntervals((rows[:, None] + cut[:-1]).ravel(), lengths, tiles.ravel())

    def _repr_html_(self) -> str:
        return _as_html(
            self, prod(self.shape), f"Tile mapping of {' × '.join(map(str, self.shape))} elements, in blocks"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """Intervals of a variable's row-major flat order on tiles.

    Args:
        size: number of elements.
        starts: first element of each interval, rising from 0, int64[n].
        tiles: tile of each interval, int32[n].
    """

    size: int
    starts: np.ndarray
    tiles: np.ndarray

    def on_tiles(self, tiles: np.ndarray) -> Flat:
        """Map the same intervals to other tiles, int[n]."""
        return flat_mapping(self.size, self.starts, tiles)

    def elements_per_tile(self, num_tiles: int) -> np.ndarray:
        """Count the elements mapped to each tile, int64[num_tiles]."""
        lengths = np.diff(np.append(self.starts, self.size))
        return np.bincount(self.tiles, lengths, num_tiles).astype(np.int64)

    def runs(self) -> MappedIntervals:
        """Return flat intervals, each on one tile; neighbours may be on one tile too."""
        return MappedIntervals(self.starts, np.diff(np.append(self.starts, self.size)), self.tiles)

    def _repr_html_(self) -> str:
        return _as_html(self, self.size, f"Tile mapping of {self.size:,} elements, in intervals")


TileMapping = Blocked | Flat


def _as_html(mapping: TileMapping, size: int, kind: str) -> str:
    """Return a table of a mapping for notebooks."""
    tiles = int(mapping.tiles.max(initial=-1)) + 1
    counts = mapping.elements_per_tile(tiles)
    used = counts[counts > 0]
    rows: list[tuple[str, object]] = [("Elements", size), ("Pieces", len(mapping.tiles)), ("Tiles", len(used))]
    if len(used):
        first = int(np.flatnonzero(counts)[0])
        fullest = int(counts.argmax())
        rows += [("First and last tile", f"{first:,} to {tiles - 1:,}"), ("Fewest elements of a tile", int(used.min()))]
        rows.append(("Most elements of a tile", f"{counts[fullest]:,}, tile {fullest:,}"))
    return table((), rows, kind)


def blocked_mapping(cuts: Sequence[np.ndarray], tile: np.ndarray) -> Blocked:
    """Return the `Blocked` of cuts, int[n + 1] each, and tiles: one object for equal contents, so that caches match."""
    # Bytes as keys: arrays are not hashable, and the arrays of the mapping are then read-only views of them.
    return _blocked(tuple(np.asarray(c, np.int64).tobytes() for c in cuts), np.asarray(tile, np.int32).tobytes())


@remembered
def _blocked(cuts: tuple[bytes, ...], tile: bytes) -> Blocked:
    arrays = tuple(np.frombuffer(c, np.int64) for c in cuts)
    return Blocked(arrays, np.frombuffer(tile, np.int32).reshape([len(c) - 1 for c in arrays]))


def flat_mapping(size: int, starts: np.ndarray, tiles: np.ndarray) -> Flat:
    """Return the `Flat` of starts and tiles, int[n] each: one object for equal contents, so that caches match."""
    return _flat(size, np.asarray(starts, np.int64).tobytes(), np.asarray(tiles, np.int32).tobytes())


@remembered
def _flat(size: int, starts: bytes, tiles: bytes) -> Flat:
    return Flat(size, np.frombuffer(starts, np.int64), np.frombuffer(tiles, np.int32))


def owners(mapping: TileMapping) -> np.ndarray:
    """Return the tile of every element in flat order, int32[size]; for small variables."""
    _, lengths, tiles = mapping.runs()
    return np.repeat(tiles, lengths)


def renumber_tiles(mapping: TileMapping, new_tiles: np.ndarray) -> TileMapping | None:
    """Map each tile t to `to[t]`, int32[tiles]; None where that is not a tile (negative)."""
    tiles = new_tiles[mapping.tiles]
    return None if np.any(tiles < 0) else mapping.on_tiles(tiles)


@remembered
def shift_tiles(mapping: TileMapping, shift: int) -> TileMapping:
    """Add `shift` to every tile of a mapping; the same object for the same contents."""
    return mapping.on_tiles(mapping.tiles + shift)


def even_cuts(extent: int, blocks: int, grain: int = 1) -> np.ndarray:
    """Cut `extent` in at most `blocks` blocks, at least 1, of complete grains, as equal as possible.

    Returns:
        Boundaries, int64[blocks + 1], all but the last multiples of `grain`; `[0]` when `extent` is 0.
    """
    return _even_cuts(int(extent), int(blocks), int(grain))


@remembered
def _even_cuts(extent: int, blocks: int, grain: int) -> np.ndarray:
    if extent == 0:
        return frozen([0], np.int64)
    grains = -(-extent // grain)
    num_blocks = min(blocks, grains)
    return frozen(
        np.minimum(np.arange(num_blocks + 1, dtype=np.int64) * grains // num_blocks * grain, extent), np.int64
    )


@remembered
def linear(size: int, element_bytes: int, num_tiles: int, first_tile: int = 0) -> Flat:
    """Map elements in order to at most `num_tiles` tiles from `first_tile` on, by the linear rule of PopLibs."""
    # Grains of one vector are spread evenly, with at least 128 bytes a tile unless there are less in all.
    grain = max(1, VECTOR_BYTES // element_bytes)  # elements
    min_grains = max(1, -(-MIN_BYTES_PER_TILE // (grain * element_bytes)))
    grains = -(-size // grain)
    parts = min(num_tiles, max(1, grains // min_grains))
    # Rounded up as PopLibs does, so fewer tiles than allowed may be used.
    per_part = -(-grains // parts) if grains else 1
    parts = -(-grains // per_part) if grains else 0
    bounds = even_cuts(size, max(1, parts), grain)
    tiles = first_tile + np.arange(len(bounds) - 1)
    return Flat(size, bounds[:-1], frozen(tiles, np.int32))


@remembered
def on_one_tile(size: int, tile: int) -> Flat:
    """Map all elements to one tile."""
    return Flat(size, frozen([0] if size else [], np.int64), frozen([tile] if size else [], np.int32))


@remembered
def grid(shape: tuple[int, ...], blocks: tuple[int, ...], first_tile: int = 0) -> Blocked:
    """Cut every dimension evenly and map the blocks, row-major, to tiles from `first_tile` on."""
    cuts = tuple(even_cuts(extent, n) for extent, n in zip(shape, blocks, strict=True))
    counts = [len(c) - 1 for c in cuts]
    return Blocked(cuts, frozen(first_tile + np.arange(prod(counts)).reshape(counts), np.int32))


def check_mapping(mapping: TileMapping, shape: Sequence[int], num_tiles: int, name: str) -> None:
    """Refuse a mapping that has not each element of `shape` once, on tiles of the target."""
    flaw = _find_flaw(mapping, tuple(shape), num_tiles)
    if flaw is not None:
        text, expected, got = flaw
        raise MappingError(f"tile mapping of {name} {text}", expected=expected, got=got)


@remembered
def _find_flaw(mapping: TileMapping, shape: tuple[int, ...], num_tiles: int) -> tuple[str, object, object] | None:
    """Return the text of a mapping's first flaw, the expected value and the actual one; None without a flaw."""
    size = prod(shape)
    if isinstance(mapping, Blocked):
        if mapping.shape != shape:
            return "must have the shape of the variable", shape, mapping.shape
        rising = all(c[0] == 0 and np.all(np.diff(c) > 0) for c in mapping.cuts)
        tiles = mapping.tile
        if tuple(len(c) - 1 for c in mapping.cuts) != tiles.shape:
            return "must have one tile for each block", tuple(len(c) - 1 for c in mapping.cuts), tiles.shape
    else:
        tiles = mapping.tiles
        rising = mapping.size == size and len(tiles) == len(mapping.starts)
        rising = rising and (size == 0 or (len(tiles) > 0 and mapping.starts[0] == 0))
        rising = rising and bool(np.all(np.diff(np.append(mapping.starts, size)) > 0))
    if not rising:
        return "must have each element once", f"rising boundaries over {size} elements", None
    if tiles.size and (tiles.min() < 0 or tiles.max() >= num_tiles):
        return "must name tiles of the target", f"0 … {num_tiles - 1}", f"{tiles.min()} … {tiles.max()}"
    return None
