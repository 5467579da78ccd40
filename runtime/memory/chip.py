"""What a frame holds on the tiles of one IPU, packed: on each tile on its own, or on those that are alike together.

Input: sizes and lives of items, and the buffers of steps. Output: `Arena`, the memory they share on each tile.
What decides is the fullest tile. Inside a program, tiles that hold nearly the same are packed as one, which has the
most that any of them has of each item, in one order; only tiles that are or may be the fullest are packed on their own,
in all orders. So the fullest tile needs no more than if all were packed so. Of the others 9 in 10 are reported at most
1.5 % fuller, and those for which another order is much better up to 28 % (measured: GPT-4, transformer, ResNet-50).
Functions are packed on their own on every tile, as what is the fullest tile there need not be it in the program.
Source: this model's; see `memory.packing` for the packing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.memory.live import Layer
from ipujax.runtime.memory.packing import (
    ORDERS,
    Order,
    Packing,
    Span,
    classes_of,
    flat,
    groups_of,
    in_order,
    pack,
    place,
    round_up,
)

_GAP_TO_ACCEPT = 0.01  # assumed: on tiles that lose no more than this share of their peak no other order is tried
_NEARLY = 0.02  # assumed: share by which tiles may differ that are packed together
_FULLEST_AT_ONCE = 8  # assumed: tiles that are packed on their own at first, twice as many each time


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """The memory that variables and buffers of a frame share, int64[num_tiles] each.

    Args:
        size: its bytes.
        wide: bytes from its top down to the end of the last item that must be interleaved.
    """

    size: np.ndarray
    wide: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What is packed: a variable, or the frame of a function.

    Args:
        first: the first tile that holds any of it.
        values: bytes of each tile from there on, padding included, int64[tiles].
        spans: the steps during which it lives.
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


@dataclass(frozen=True, slots=True, eq=False)
class Chip:
    """What a frame holds on one IPU.

    Args:
        tiles: the tiles of the IPU.
        items: what is packed.
        layers: the buffers of each step that has any, in the order in which they are placed.
        interleaved_bytes: memory of a tile that is interleaved.
    """

    tiles: range
    items: Sequence[Item]
    layers: Sequence[tuple[int, Sequence[Layer]]]
    interleaved_bytes: int

    def pack(self, tiles: np.ndarray, order: Order, tolerance: float) -> Arena:
        """The arena of some tiles when items are placed in an order, and buffers after them."""
        held = self._rows([(item.first, item.values) for item in self.items])
        spans, is_wide = [item.spans for item in self.items], np.array([item.wide for item in self.items], bool)
        # What must be interleaved is put on top only where that may matter: it costs gaps.
        is_first = is_wide & (held.sum(0).max(initial=0) > self.interleaved_bytes)
        sizes = held[:, tiles - self.tiles.start]
        most, group = groups_of(sizes, tolerance)
        packing = pack(most, spans, is_wide, in_order(held, spans, is_first, order))
        end = np.where(sizes > 0, packing.end[group].T, 0)
        size = end.max(0, initial=0)
        self._add_buffers(size, tiles, spans, packing, group)
        return Arena(size, end[is_wide].max(0, initial=0))

    def _rows(self, pieces: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """What each tile has of pieces that begin at some tile, int64[pieces, tiles of the IPU]."""
        rows = np.zeros((len(pieces), len(self.tiles)), np.int64)
        for row, (first, values) in zip(rows, pieces, strict=True):
            low, high = max(first, self.tiles.start), min(first + len(values), self.tiles.stop)
            if low < high:
                row[low - self.tiles.start : high - self.tiles.start] = values[low - first : high - first]
        return rows

    def _add_buffers(
        self,
        size: np.ndarray,
        tiles: np.ndarray,
        spans: Sequence[Sequence[Span]],
        packing: Packing,
        group: np.ndarray,
    ) -> None:
        """Raises `size`, in place, where the buffers of a step need more memory than the packing of items has.

        Args:
            size: of the arena on each of some tiles, int64[tiles].
            tiles: their numbers, int64[tiles].
            spans: when items live.
            packing: where they lie.
            group: the group of each tile.
        """
        of, begin, stop = flat(spans)
        for position, found in self.layers:
            buffers = self._rows([(first, round_up(values)) for _, first, values in found])[:, tiles - self.tiles.start]
            need = buffers.sum(0)
            if not need.any():
                continue
            live = of[(begin <= position) & (stop >= position)]
            # On top of what lives they always fit; where that is more than there is, they are put into the gaps.
            short = np.flatnonzero((need > 0) & (packing.extent(live)[group] + need > size))
            if len(short):
                example, alike = classes_of(np.vstack((group[short], buffers[:, short])))
                taken = np.ix_(group[short[example]], live)
                top = _top(packing.start[taken], packing.end[taken], buffers[:, short[example]])
                size[short] = np.maximum(size[short], top[alike])

    def pack_best(self, tiles: np.ndarray, enough: np.ndarray) -> Arena:
        """The least arena of each of some tiles; `enough` is with which no other order is tried, float64[tiles]."""
        size, wide = np.full(len(tiles), np.iinfo(np.int64).max), np.zeros(len(tiles), np.int64)
        for order in ORDERS:
            large = np.flatnonzero(size > enough)
            if len(large):
                packed = self.pack(tiles[large], order, tolerance=0.0)
                better = packed.size < size[large]
                size[large[better]], wide[large[better]] = packed.size[better], packed.wide[better]
        return Arena(size, wide)


def pack_all(chips: Sequence[Chip], peak: np.ndarray) -> Arena:
    """Packs every tile on its own, as functions are.

    Args:
        chips: what a frame holds on each IPU.
        peak: the most bytes of it that live at once, int64[num_tiles].
    """
    enough = peak * (1 + _GAP_TO_ACCEPT)
    return _joined([chip.pack_best(np.array(chip.tiles), enough[chip.tiles]) for chip in chips])


def pack_fullest(chips: Sequence[Chip], peak: np.ndarray, always: np.ndarray) -> Arena:
    """Packs tiles in groups, and those on their own that are the fullest, as a program is.

    Args:
        chips: what the program holds on each IPU.
        peak: the most bytes of it that live at once, int64[num_tiles].
        always: bytes that are taken beside it, int64[num_tiles].
    """
    packed = _joined([chip.pack(np.array(chip.tiles), ORDERS[0], _NEARLY) for chip in chips])
    done, full, count = np.zeros(len(peak), bool), (always + peak).max(initial=0), _FULLEST_AT_ONCE
    while len(fuller := np.flatnonzero((always + packed.size > full) & ~done)):
        tiles = np.sort(fuller[np.argsort(-(always + packed.size)[fuller], kind="stable")[:count]])
        enough = np.maximum(peak * (1 + _GAP_TO_ACCEPT), full - always)  # what cannot be the fullest is not tried again
        for chip in chips:
            here = tiles[(tiles >= chip.tiles.start) & (tiles < chip.tiles.stop)]
            if len(here):
                own = chip.pack_best(here, enough[here])
                packed.size[here], packed.wide[here] = own.size, own.wide
        done[tiles] = True
        full, count = max(full, (always + packed.size)[done].max()), 2 * count
    return packed


def _joined(arenas: Sequence[Arena]) -> Arena:
    """The arena of all IPUs."""
    return Arena(np.concatenate([one.size for one in arenas]), np.concatenate([one.wide for one in arenas]))


def _top(start: np.ndarray, end: np.ndarray, buffers: np.ndarray) -> np.ndarray:
    """Where memory ends when buffers, int64[buffers, tiles], are put between what is there, one after the other."""
    for sizes in buffers:
        address = place(start, end, sizes)
        address = np.where(sizes > 0, address, 0)
        start, end = np.column_stack((start, address)), np.column_stack((end, address + sizes))
    return end.max(1)
