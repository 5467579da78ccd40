"""Packing of a frame's items on the tiles of one IPU: each tile by itself, or similar tiles together.

Input: sizes and live ranges of items. Output: `Arena`, the memory they share on each tile.
The fullest tile decides whether a program fits. So similar tiles of a program are packed as one tile that has the
largest size of each item, and only tiles that are or may be the fullest are packed by themselves: the fullest tile
needs no more than if all tiles were. Of the others 9 in 10 are reported at most 1.5 % fuller, and those for which
another order is much better up to 28 % (measured: GPT-4, transformer, ResNet-50).
Functions are packed on every tile by itself: the fullest tile of a function need not be the fullest of the program.
Source: this model's; see `memory.packing` for the packing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from ipujax.runtime.memory.packing import (
    ORDERS,
    Span,
    group_similar_tiles,
    live_together,
    move_to_front,
    pack,
    sort_items,
)

_GAP_TO_ACCEPT = 0.01  # assumed: on tiles that lose no more than this share of their peak no other order is tried
_SIMILARITY = 0.02  # assumed: share of its bytes by which a tile may differ from those it is packed with
_PLACEMENTS = 2_000  # assumed: upper bound of placements of items in the search for a better sequence
_MAX_SEQUENCES = 36  # assumed: upper bound of sequences that are tried
_SEARCH_PLACEMENTS = 10_000  # assumed: the same for the fullest tile
_CLOSE = 0.001  # assumed: tiles that exceed the fullest by less are not searched for a better sequence
_FULLEST_AT_ONCE = 8  # assumed: tiles packed by themselves in the first round, twice as many in each later one


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """The memory that variables and buffers of a frame share, int64[tiles] each: those of the frame's IPUs.

    Args:
        size: its bytes.
        wide: bytes from its top down to the end of the last item that must be interleaved.
    """

    size: np.ndarray
    wide: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A variable, the buffers of a step, or the frame of a function, as packing sees it.

    Args:
        first: first tile with bytes of it.
        values: bytes on each tile from `first` on, padding included, int64[tiles].
        spans: its live range.
        wide: whether it must be interleaved.
    """

    first: int
    values: np.ndarray
    spans: tuple[Span, ...]
    wide: bool

    @property
    def stop(self) -> int:
        """One past the last tile."""
        return self.first + len(self.values)


@dataclass(frozen=True, eq=False)
class Chip:
    """The items of a frame on one IPU.

    Args:
        tiles: the tiles of the IPU.
        items: some may extend over other IPUs too.
        interleaved_bytes: interleaved memory of a tile.
    """

    tiles: range
    items: Sequence[Item]
    interleaved_bytes: int

    def num_sequences(self, minimum: int) -> int:
        """Return how many sequences are tried: more for few items, within the bounds of this module."""
        return min(_MAX_SEQUENCES, max(minimum, _PLACEMENTS // max(1, len(self.items))))

    def form(self) -> tuple[object, ...]:
        """Return all of its items that a packing depends on; equal stages have it on other IPUs, at other steps."""
        arrays = (self._sizes, self._live_together, self._is_wide, *self._sequences())
        return len(self.items), self.interleaved_bytes, *(sha256(x.tobytes()).digest() for x in arrays)

    def pack_best(self, tiles: np.ndarray, enough: np.ndarray, tolerance: float, sequences: int) -> Arena:
        """Return the smallest arena of each tile over at most `sequences` sequences, fewer if it has `enough` bytes."""
        # `tolerance` is the share by which tiles that are packed as one may differ.
        return self._search_sequences(tiles, enough, tolerance, sequences)[0]

    def best_sequence(self, tile: int, enough_bytes: float, start: np.ndarray | None) -> np.ndarray:
        """Return the sequence of the smallest arena of a tile, or the first of at most `enough_bytes`."""
        sequences = min(_MAX_SEQUENCES, max(6 * len(ORDERS), _SEARCH_PLACEMENTS // max(1, len(self.items))))
        return self._search_sequences(np.array([tile]), np.array([enough_bytes]), 0.0, sequences, start)[1]

    def pack_in(self, sequence: np.ndarray, tiles: np.ndarray) -> Arena:
        """Return the arena of each tile in one sequence, every tile by itself."""
        sizes = self._sizes[:, tiles - self.tiles.start]
        return self._arena_of(self._end_addresses(sizes, group_similar_tiles(sizes, 0.0), sequence))

    def _search_sequences(
        self, tiles: np.ndarray, enough: np.ndarray, tolerance: float, sequences: int, start: np.ndarray | None = None
    ) -> tuple[Arena, np.ndarray]:
        """Return the smallest arena of each tile over several sequences, and the sequence whose largest is smallest."""
        best = Arena(np.full(len(tiles), np.iinfo(np.int64).max), np.zeros(len(tiles), np.int64))
        best_sequence = np.zeros(0, np.int64)
        if not self.items:
            return Arena(best.wide, best.wide), best_sequence
        sizes, grouped, groups = self._sizes, tiles[:0], (self._sizes, tiles)  # of the tiles that are still large
        waiting = deque(self._sequences())
        if start is not None:
            waiting.appendleft(start)
        smallest = np.iinfo(np.int64).max
        for _ in range(sequences):
            large = np.flatnonzero(best.size > enough)
            if not len(large) or not waiting:
                break
            sequence = waiting.popleft()
            if len(large) != len(grouped):  # fewer from sequence to sequence
                grouped = large
                sizes = self._sizes[:, tiles[large] - self.tiles.start]
                groups = group_similar_tiles(sizes, tolerance)
            end = self._end_addresses(sizes, groups, sequence)
            arena = self._arena_of(end)
            better = arena.size < best.size[large]
            best.size[large[better]] = arena.size[better]
            best.wide[large[better]] = arena.wide[better]
            if arena.size.max() < smallest:
                smallest = arena.size.max()
                best_sequence = sequence
            # The item on top of the largest arena is placed before all others when the turn of this order comes again.
            on_top = int(end[:, arena.size.argmax()].argmax())
            if on_top != sequence[0]:
                waiting.append(move_to_front(on_top, sequence))
        return best, best_sequence

    def _sequences(self) -> list[np.ndarray]:
        """Return the numbers of the items in each order."""
        # By sizes on the whole IPU: a tile's arena must not depend on the tiles packed with it.
        spans = [item.spans for item in self.items]
        return [sort_items(self._sizes, spans, order) for order in ORDERS]

    def _arena_of(self, end: np.ndarray) -> Arena:
        return Arena(end.max(0, initial=0), end[self._is_wide].max(0, initial=0))

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Bytes of each item on each tile of the IPU, int64[items, tiles]."""
        return self._cut_to_tiles([(item.first, item.values) for item in self.items])

    @cached_property
    def _live_together(self) -> np.ndarray:
        return live_together([item.spans for item in self.items])

    def _end_addresses(
        self, sizes: np.ndarray, groups_of_tiles: tuple[np.ndarray, np.ndarray], sequence: np.ndarray
    ) -> np.ndarray:
        """Pack tiles in one sequence; return the end of each item, int64[items, tiles], 0 where it has no bytes.

        Args:
            sizes: bytes of items, int64[items, tiles].
            groups_of_tiles: `group_similar_tiles` of them.
            sequence: numbers of the items.
        """
        maxima, group = groups_of_tiles
        end = np.zeros_like(maxima.T)
        # Wide items go first only in groups where the sequence puts them outside interleaved memory: it costs gaps.
        groups = np.arange(len(end))
        for attempt in (sequence, move_to_front(np.flatnonzero(self._is_wide), sequence)):
            end[groups] = pack(maxima[:, groups], self._live_together, self._is_wide, attempt).end
            groups = np.flatnonzero(end[:, self._is_wide].max(1, initial=0) > self.interleaved_bytes)
            if not groups.size:
                break
        return np.where(sizes > 0, end[group].T, 0)

    @property
    def _is_wide(self) -> np.ndarray:
        return np.array([item.wide for item in self.items], bool)

    def _cut_to_tiles(self, pieces: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """Cut values that begin at some tile to the tiles of the IPU, int64[pieces, tiles of the IPU]."""
        rows = np.zeros((len(pieces), len(self.tiles)), np.int64)
        for row, (start, values) in zip(rows, pieces, strict=True):
            low = max(start, self.tiles.start)
            high = min(start + len(values), self.tiles.stop)
            if low < high:
                row[low - self.tiles.start : high - self.tiles.start] = values[low - start : high - start]
        return rows


class KnownArenas:
    """Arenas of the IPUs of a program, of which equal ones are packed once."""

    def __init__(self) -> None:
        self._arenas: dict[object, Arena] = {}

    def pack_best(self, chip: Chip, enough: np.ndarray, tolerance: float, sequences: int) -> Arena:
        """Return `Chip.pack_best` of all tiles of an IPU."""
        key = chip.form(), enough.tobytes(), tolerance, sequences
        if key not in self._arenas:
            self._arenas[key] = chip.pack_best(np.array(chip.tiles), enough, tolerance, sequences)
        return self._arenas[key]


def pack_all(chips: Sequence[Chip], peak: np.ndarray, arenas: KnownArenas) -> Arena:
    """Pack every tile by itself, as functions are; `peak` are the peak live bytes of all tiles of the chips."""
    enough = np.split(peak * (1 + _GAP_TO_ACCEPT), len(chips))
    return _concatenate(
        [
            arenas.pack_best(chip, own, 0.0, chip.num_sequences(len(ORDERS)))
            for chip, own in zip(chips, enough, strict=True)
        ]
    )


def pack_fullest(chips: Sequence[Chip], peak: np.ndarray, always: np.ndarray, arenas: KnownArenas) -> Arena:
    """Pack similar tiles as one, and the fullest tiles by themselves, as a program is."""
    # `peak` live bytes and bytes `always` beside the arena, int64[num_tiles], decide which tiles are the fullest.
    accepted = peak * (1 + _GAP_TO_ACCEPT)
    accepted_in_group = accepted * (1 + _SIMILARITY)
    packed = _concatenate(
        [arenas.pack_best(chip, accepted_in_group[chip.tiles], _SIMILARITY, chip.num_sequences(1)) for chip in chips]
    )
    is_exact = np.zeros(len(peak), bool)
    full = (always + peak).max(initial=0)  # lower bound of the fullest tile; rises with the tiles that are exact
    sequences: dict[range, np.ndarray] = {}  # tiles of an IPU → sequence that suits the fullest of them
    count = _FULLEST_AT_ONCE
    # Ends when no group leaves a tile fuller than `full`: only then the largest of all tiles is known exactly.
    while len(fuller := np.flatnonzero((always + packed.size > full) & ~is_exact)):
        fuller = fuller[np.argsort(-(always + packed.size)[fuller], kind="stable")]
        fullest = fuller[0]
        chip = next(chip for chip in chips if fullest in chip.tiles)
        enough = max(accepted[fullest], (1 + _CLOSE) * full - always[fullest])
        sequences[chip.tiles] = chip.best_sequence(fullest, enough, sequences.get(chip.tiles))
        # A sequence that suits the fullest tile suits others, too.
        tiles = fuller[(fuller >= chip.tiles.start) & (fuller < chip.tiles.stop)][:count]
        exact = chip.pack_in(sequences[chip.tiles], tiles)
        better = exact.size < packed.size[tiles]
        packed.size[tiles[better]] = exact.size[better]
        packed.wide[tiles[better]] = exact.wide[better]
        is_exact[fullest] = True
        is_exact[tiles[always[tiles] + packed.size[tiles] <= (1 + _CLOSE) * (always + packed.size)[fullest]]] = True
        full = max(full, (always + packed.size)[is_exact].max())
        count *= 2
    return packed


def _concatenate(arenas: Sequence[Arena]) -> Arena:
    return Arena(np.concatenate([arena.size for arena in arenas]), np.concatenate([arena.wide for arena in arenas]))
