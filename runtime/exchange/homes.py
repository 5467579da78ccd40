"""Where the elements of variables are mapped: the runs of flat elements that tiles hold, as a table or by arithmetic.

Input: the tile mappings of some variables, one after the other in a flat space (`exchange.runs.flat_bases`). Output:
`Homes`, which numbers the runs and says of each where it begins and ends, its tile, and its place there. A blocked
mapping of very many runs, one a row of each block, is not listed: its runs are computed from their numbers.
Limits: by arithmetic two blocks of one tile are never neighbours in its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange.runs import total
from ipujax.runtime.tensor import Blocked, TileMapping

_MOST_RUNS = 1 << 22  # that a table lists, assumed: 0.1 GB


class Homes(Protocol):
    """The runs of a flat space that tiles hold, numbered in rising order."""

    @property
    def size(self) -> int:
        """Elements of the flat space."""

    def run_of(self, element: np.ndarray) -> np.ndarray:
        """Number of the run that holds each element."""

    def start_of(self, run: np.ndarray) -> np.ndarray:
        """First element of each run."""

    def end_of(self, run: np.ndarray) -> np.ndarray:
        """One past the last element of each run."""

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        """The tile of each run, int64."""

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        """Position of the first element of each run in the memory of its tile, counted from anywhere."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Runs in a list.

    Args:
        start: first element of each run, int64[n].
        tile: the tile of each run, int64[n].
        rank: position of the run's first element in the memory of its tile; counts from anywhere, int64[n].
        size: elements of the flat space.
    """

    start: np.ndarray
    tile: np.ndarray
    rank: np.ndarray
    size: int

    def run_of(self, element: np.ndarray) -> np.ndarray:
        if len(element) > self.size // 8:  # a list by element is faster than searching for so many
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
class Rows:
    """Runs of one blocked mapping: the rows of its blocks.

    Args:
        mapping: where the elements are.
        last: the last dimension that is split; rows are of it and all behind it.
        cut: boundaries of a row, in elements, int64[blocks + 1].
    """

    mapping: Blocked
    last: int
    cut: np.ndarray

    @property
    def size(self) -> int:
        return prod(self.mapping.shape) + 1

    def run_of(self, element: np.ndarray) -> np.ndarray:
        row, place = np.divmod(element, self.cut[-1])
        return row * (len(self.cut) - 1) + np.searchsorted(self.cut, place, side="right") - 1

    def start_of(self, run: np.ndarray) -> np.ndarray:
        row, block = np.divmod(run, len(self.cut) - 1)
        return row * self.cut[-1] + self.cut[block]

    def end_of(self, run: np.ndarray) -> np.ndarray:
        row, block = np.divmod(run, len(self.cut) - 1)
        return row * self.cut[-1] + self.cut[block + 1]

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        return self.mapping.tiles[self._box_and_row(run)[0]].astype(np.int64)

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        box, row = self._box_and_row(run)
        length = np.diff(self.cut)[run % (len(self.cut) - 1)]
        return box * self.size + row * length

    def _box_and_row(self, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The block of each run, row-major, and which of its rows it is."""
        row, block = np.divmod(run, len(self.cut) - 1)
        box, place = np.zeros_like(run), np.zeros_like(run)
        outer = np.unravel_index(row, self.mapping.shape[: self.last]) if self.last else ()
        for axis, index in enumerate(outer):
            cuts = self.mapping.cuts[axis]
            at = np.searchsorted(cuts, index, side="right") - 1
            box, place = box * (len(cuts) - 1) + at, place * (cuts[at + 1] - cuts[at]) + index - cuts[at]
        return box * (len(self.cut) - 1) + block, place


@dataclass(frozen=True, eq=False, slots=True)
class Joined:
    """The runs of several variables, one variable after the other.

    Args:
        parts: those of each.
        element: where each variable starts in the flat space, int64[parts].
        run: number of the first run of each, int64[parts].
    """

    parts: tuple[Homes, ...]
    element: np.ndarray
    run: np.ndarray

    @property
    def size(self) -> int:
        return int(self.element[-1]) + self.parts[-1].size

    def run_of(self, element: np.ndarray) -> np.ndarray:
        at, out = np.searchsorted(self.element, element, side="right") - 1, np.zeros(len(element), np.int64)
        for number, part in enumerate(self.parts):
            out[at == number] = self.run[number] + part.run_of(element[at == number] - self.element[number])
        return out

    def start_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("start_of", run, self.element)

    def end_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("end_of", run, self.element)

    def tile_of(self, run: np.ndarray) -> np.ndarray:
        return self._of_parts("tile_of", run, np.zeros(len(self.parts), np.int64))

    def rank_of(self, run: np.ndarray) -> np.ndarray:
        ranks = [len(p.mapping.tiles) * p.size if isinstance(p, Rows) else p.size for p in self.parts]
        return self._of_parts("rank_of", run, np.arange(len(self.parts)) * (max(ranks) + 1))

    def _of_parts(self, name: str, run: np.ndarray, bases: np.ndarray) -> np.ndarray:
        at, out = np.searchsorted(self.run, run, side="right") - 1, np.zeros(len(run), np.int64)
        for number, (part, base) in enumerate(zip(self.parts, bases, strict=True)):
            out[at == number] = base + getattr(part, name)(run[at == number] - self.run[number])
        return out


def homes(mappings: tuple[TileMapping, ...]) -> Homes:
    """The runs of several mappings in one flat space: listed if they are few, else computed from their numbers."""
    counts = [_number_of_runs(mapping) for mapping in mappings]
    if sum(counts) <= _MOST_RUNS:
        return table(mappings)
    parts = tuple(
        _rows(mapping) if isinstance(mapping, Blocked) and count > 1 else table((mapping,))
        for mapping, count in zip(mappings, counts, strict=True)
    )
    if len(parts) == 1:
        return parts[0]
    sizes = [part.size for part in parts]
    return Joined(parts, np.cumsum([0, *sizes[:-1]]), np.cumsum([0, *counts[:-1]]))


def _number_of_runs(mapping: TileMapping) -> int:
    if not isinstance(mapping, Blocked):
        return len(mapping.starts)
    last = _last_split(mapping)
    return prod(mapping.shape[:last]) * (len(mapping.cuts[last]) - 1) if last >= 0 else 1


def _last_split(mapping: Blocked) -> int:
    return max((axis for axis, cut in enumerate(mapping.cuts) if len(cut) > 2), default=-1)


def _rows(mapping: Blocked) -> Rows:
    last = _last_split(mapping)
    return Rows(mapping, last, mapping.cuts[last] * prod(mapping.shape[last + 1 :]))


@remembered
def table(mappings: tuple[TileMapping, ...]) -> Table:
    """The runs of several mappings one after the other, listed."""
    runs = [mapping.runs() for mapping in mappings]
    sizes = [int(lengths.sum()) for _, lengths, _ in runs]
    bases = [total(sizes[:number]) for number in range(len(sizes))]
    start = np.concatenate([starts + base for (starts, _, _), base in zip(runs, bases, strict=True)])
    length = np.concatenate([lengths for _, lengths, _ in runs])
    tile = np.concatenate([tiles for _, _, tiles in runs]).astype(np.int64)
    variable = np.repeat(np.arange(len(runs)), [len(starts) for starts, _, _ in runs])
    order = in_tile_order(tile)
    rank = np.empty_like(start)
    # One is left free between variables: parts of two are never one fragment.
    rank[order] = np.cumsum(length[order]) - length[order] + variable[order]
    return Table(start, tile, rank, total(sizes))


def in_tile_order(tile: np.ndarray) -> np.ndarray:
    """Positions of runs by their tile, those of one tile in order, int64[n]; numpy sorts 16 bits in linear time."""
    return np.argsort(tile.astype(np.uint16) if tile.max(initial=0) < 2**16 else tile, kind="stable")


@remembered
def _run_of_element(where: Table) -> np.ndarray:
    """Number of the run of every element, int32[size]."""
    lengths = np.diff(np.append(where.start, where.size))
    return np.repeat(np.arange(len(where.start), dtype=np.int32), lengths)
