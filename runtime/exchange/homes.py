"""Home tiles of variables: the runs of flat elements mapped to one tile, as a table or by arithmetic.

Input: the tile mappings of some variables, one after the other in a flat space (`exchange.runs.flat_bases`). Output:
`Homes`, which numbers the runs and has the start, the end, the tile and the memory position of each. A blocked mapping
of very many runs, one for each row of a block, is not listed: its runs are computed from their numbers.
Limits: by arithmetic two blocks of one tile are never neighbours in its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange.runs import flat_size
from ipujax.runtime.tensor import Blocked, TileMapping

_MAX_RUNS = 1 << 22  # that a table lists, assumed: 0.1 GB


class Homes(Protocol):
    """Runs of a flat space, each mapped to one tile, numbered in rising order."""

    @property
    def size(self) -> int:
        """Elements of the flat space."""

    def run_of(self, element: np.ndarray) -> np.ndarray:
        """Return the number of the run that each element is in."""

    def start_of(self, run: np.ndarray) -> np.ndarray:
        """Return the first element of each run."""

    def end_of(self, run: np.ndarray) -> np.ndarray:
        """Return the end of each run, one past its last element."""

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        """Return the tile of each run, int64."""

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        """Return the position of each run in the memory of its tile; only differences of positions have a meaning."""


@dataclass(frozen=True, eq=False, slots=True)
class HomeTable:
    """Runs in a list.

    Args:
        start: first element of each run, int64[n].
        tile: tile of each run, int64[n].
        rank: position of the run in the memory of its tile, int64[n]; only differences have a meaning.
        size: elements of the flat space.
    """

    start: np.ndarray
    tile: np.ndarray
    rank: np.ndarray
    size: int

    def run_of(self, element: np.ndarray) -> np.ndarray:
        if len(element) > self.size // 8:  # a list by element is faster than so many searches
            return _run_of_element(self)[element]
        return np.searchsorted(self.start, element, side="right") - 1

    def start_of(self, run: np.ndarray) -> np.ndarray:
        return self.start[run]

    def end_of(self, run: np.ndarray) -> np.ndarray:
        return np.append(self.start[1:], self.size)[run]

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        return self.tile[run]

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        return self.rank[run]


@dataclass(frozen=True, eq=False, slots=True)
class BlockRows:
    """Runs of one blocked mapping: the rows of its blocks.

    Args:
        mapping: tile mapping of the variable.
        last: the last dimension that is split; a row covers it and all behind it.
        cuts: boundaries of a row, in elements, int64[blocks + 1].
    """

    mapping: Blocked
    last: int
    cuts: np.ndarray

    @property
    def size(self) -> int:
        return prod(self.mapping.shape) + 1

    def run_of(self, element: np.ndarray) -> np.ndarray:
        row, position = np.divmod(element, self.cuts[-1])
        return row * (len(self.cuts) - 1) + np.searchsorted(self.cuts, position, side="right") - 1

    def start_of(self, run: np.ndarray) -> np.ndarray:
        row, column = np.divmod(run, len(self.cuts) - 1)
        return row * self.cuts[-1] + self.cuts[column]

    def end_of(self, run: np.ndarray) -> np.ndarray:
        row, column = np.divmod(run, len(self.cuts) - 1)
        return row * self.cuts[-1] + self.cuts[column + 1]

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        block, _ = self._block_and_row(run)
        return self.mapping.tiles[block].astype(np.int64)

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        block, row = self._block_and_row(run)
        length = np.diff(self.cuts)[run % (len(self.cuts) - 1)]
        return block * self.size + row * length  # `size` exceeds any block: two blocks are never contiguous

    def _block_and_row(self, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the block of the mapping that each run is in, and the number of its row in that block."""
        row, column = np.divmod(run, len(self.cuts) - 1)
        block = np.zeros_like(run)
        block_row = np.zeros_like(run)
        outer = np.unravel_index(row, self.mapping.shape[: self.last]) if self.last else ()
        for axis, index in enumerate(outer):
            cuts = self.mapping.cuts[axis]
            at = np.searchsorted(cuts, index, side="right") - 1
            block = block * (len(cuts) - 1) + at
            block_row = block_row * (cuts[at + 1] - cuts[at]) + index - cuts[at]
        return block * (len(self.cuts) - 1) + column, block_row


@dataclass(frozen=True, eq=False, slots=True)
class JoinedHomes:
    """Runs of several variables, one variable after the other.

    Args:
        parts: runs of each variable.
        element: first flat element of each variable, int64[parts].
        run: number of the first run of each variable, int64[parts].
    """

    parts: tuple[Homes, ...]
    element: np.ndarray
    run: np.ndarray

    @property
    def size(self) -> int:
        return int(self.element[-1]) + self.parts[-1].size

    def run_of(self, element: np.ndarray) -> np.ndarray:
        part_of = np.searchsorted(self.element, element, side="right") - 1
        runs = np.zeros(len(element), np.int64)
        for number, part in enumerate(self.parts):
            inside = part_of == number
            runs[inside] = self.run[number] + part.run_of(element[inside] - self.element[number])
        return runs

    def start_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("start_of", run, self.element)

    def end_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("end_of", run, self.element)

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("tile_of", run, np.zeros(len(self.parts), np.int64))

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        # Ranks of different variables are spread so far that parts of two never look contiguous.
        ranks = [len(p.mapping.tiles) * p.size if isinstance(p, BlockRows) else p.size for p in self.parts]
        return self._of_parts("rank_of", run, np.arange(len(self.parts)) * (max(ranks) + 1))

    def _of_parts(self, name: str, run: np.ndarray, bases: np.ndarray) -> np.ndarray:
        part_of = np.searchsorted(self.run, run, side="right") - 1
        values = np.zeros(len(run), np.int64)
        for number, (part, base) in enumerate(zip(self.parts, bases, strict=True)):
            inside = part_of == number
            values[inside] = base + getattr(part, name)(run[inside] - self.run[number])
        return values


def find_homes(mappings: tuple[TileMapping, ...]) -> Homes:
    """Return the home runs of several mappings in one flat space: listed if they are few, else by arithmetic."""
    counts = [_number_of_runs(mapping) for mapping in mappings]
    if sum(counts) <= _MAX_RUNS:
        return home_table(mappings)
    parts = tuple(
        _rows(mapping) if isinstance(mapping, Blocked) and count > 1 else home_table((mapping,))
        for mapping, count in zip(mappings, counts, strict=True)
    )
    if len(parts) == 1:
        return parts[0]
    sizes = [part.size for part in parts]
    return JoinedHomes(parts, np.cumsum([0, *sizes[:-1]]), np.cumsum([0, *counts[:-1]]))


def _number_of_runs(mapping: TileMapping) -> int:
    if not isinstance(mapping, Blocked):
        return len(mapping.starts)
    last = _last_split(mapping)
    return prod(mapping.shape[:last]) * (len(mapping.cuts[last]) - 1) if last >= 0 else 1


def _last_split(mapping: Blocked) -> int:
    return max((axis for axis, cut in enumerate(mapping.cuts) if len(cut) > 2), default=-1)


def _rows(mapping: Blocked) -> BlockRows:
    last = _last_split(mapping)
    return BlockRows(mapping, last, mapping.cuts[last] * prod(mapping.shape[last + 1 :]))


@remembered
def home_table(mappings: tuple[TileMapping, ...]) -> HomeTable:
    """List the home runs of several mappings, one after the other."""
    intervals = [mapping.runs() for mapping in mappings]
    sizes = [int(of_mapping.lengths.sum()) for of_mapping in intervals]
    bases = [flat_size(sizes[:number]) for number in range(len(sizes))]
    start = np.concatenate([of_mapping.starts + base for of_mapping, base in zip(intervals, bases, strict=True)])
    length = np.concatenate([of_mapping.lengths for of_mapping in intervals])
    tile = np.concatenate([of_mapping.tiles for of_mapping in intervals]).astype(np.int64)
    variable = np.repeat(np.arange(len(intervals)), [len(of_mapping.starts) for of_mapping in intervals])
    order = in_tile_order(tile)
    rank = np.empty_like(start)
    # A position remains free between variables: parts of two are never one fragment.
    rank[order] = np.cumsum(length[order]) - length[order] + variable[order]
    return HomeTable(start, tile, rank, flat_size(sizes))


def in_tile_order(tile: np.ndarray) -> np.ndarray:
    """Return positions of runs sorted by tile, those of one tile in order."""
    # NumPy sorts 16-bit integers in linear time.
    return np.argsort(tile.astype(np.uint16) if tile.max(initial=0) < 2**16 else tile, kind="stable")


@remembered
def _run_of_element(homes: HomeTable) -> np.ndarray:
    """Return the number of the run of every element, int32[size]."""
    lengths = np.diff(np.append(homes.start, homes.size))
    return np.repeat(np.arange(len(homes.start), dtype=np.int32), lengths)
