"""Packing of what lives at different times into the same memory: an address for every item, on many tiles at once.

Input: the bytes of each item on each tile, and the steps during which it lives. Output: its address on each tile, such
that no two items that live at the same step share a byte. An item has one address for all the steps it lives.

Items are placed one after the other, those that must lie first before the others, each at the lowest address where it
fits. Largest first leaves small gaps; longest-lived first, lives that contain each other or do not meet stack up
without any; earliest first, items of one size leave none. Which is best is found by trying, and by
placing again and again what came to lie on top before all else, as allocators for small accelerators do.
Source: first fit and the left-edge algorithm for dynamic storage allocation; Poplar & PopLibs user guide, "Memory use":
"variables can be overlapped with others, because they are not live at the same time".
Limits: a heuristic, as the problem is NP-hard; the result is at least the peak of what lives, and the `gap` of the
memory profile says by how much it is more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

ALIGNMENT_BYTES = 8  # published: a 64-bit load; `in` of poplibs ConvPartial1x1Out.cpp is aligned to 8 bytes
WIDE_ALIGNMENT_BYTES = 16  # published: a 128-bit load; `out` of the same vertex is aligned to 16 bytes

Span = tuple[int, int]  # first and last step, both included
Order = Literal["largest", "longest", "earliest"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where items lie; arrays are int64[classes, items], a class being tiles that hold the same bytes of every item.

    Args:
        start: address of each item, 0 where there are no bytes of it.
        end: address behind it.
    """

    start: np.ndarray
    end: np.ndarray

    def extent(self, items: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The address behind the last of some items in each class, int64[classes]."""
        return self.end[:, items].max(1, initial=0)


def round_up(num_bytes: np.ndarray, alignment_bytes: int = ALIGNMENT_BYTES) -> np.ndarray:
    """Sizes with the padding that alignment needs."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


def pack(sizes: np.ndarray, spans: Sequence[Sequence[Span]], wide: np.ndarray, sequence: np.ndarray) -> Packing:
    """Finds an address for each item.

    Args:
        sizes: bytes of each item in each class of tiles, padding included, int64[items, classes].
        spans: the steps during which each item lives, of one item without overlap.
        wide: which items are accessed 128 bits at a time, bool[items].
        sequence: the items in the order in which they are placed, int64[items].
    """
    items, classes = sizes.shape
    keys = _no_keys((items, classes), int((sizes.sum(0) + items * WIDE_ALIGNMENT_BYTES).max(initial=0)))
    start, end = _halves(keys)
    of, begin, stop = flat(spans)
    placed = np.zeros(items, bool)
    for item in sequence:
        where = np.flatnonzero(sizes[item])
        meets = np.zeros(items, bool)
        for low, high in spans[item]:
            meets[of[(begin <= high) & (stop >= low)]] = True
        others = keys[np.flatnonzero(meets & placed)]  # whole rows: much faster than their parts one by one
        there = np.ascontiguousarray((others if len(where) == classes else others.take(where, 1)).T)
        unit = WIDE_ALIGNMENT_BYTES if wide[item] else ALIGNMENT_BYTES
        address = _lowest(there, sizes[item, where], unit)
        start[item, where], end[item, where] = address, address + sizes[item, where]
        placed[item] = True
    return Packing(start.T.astype(np.int64), end.T.astype(np.int64))


def in_order(sizes: np.ndarray, spans: Sequence[Sequence[Span]], order: Order) -> np.ndarray:
    """The items in the order in which to place them, int64[items].

    Args:
        sizes: bytes of each item on each tile, int64[items, tiles].
        spans: the steps during which each item lives.
        order: which is placed before which: longest-lived, earliest, or largest first.
    """
    life = np.array([sum(high - low + 1 for low, high in own) for own in spans], np.int64)
    begin, size = np.array([own[0][0] for own in spans], np.int64), sizes.max(1, initial=0)
    keys = {"longest": (-size, -life), "earliest": (-life, begin), "largest": (-life, -size)}
    return np.lexsort(keys[order])


def first(items: np.ndarray | int, sequence: np.ndarray) -> np.ndarray:
    """A sequence in which some items go before all others; both keep their order."""
    is_first = np.isin(sequence, items)
    return np.concatenate((sequence[is_first], sequence[~is_first]))


def flat(spans: Sequence[Sequence[Span]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The item, the first and the last step of each span."""
    of = np.repeat(np.arange(len(spans)), [len(own) for own in spans])
    begin = np.array([low for own in spans for low, _ in own], np.int64)
    stop = np.array([high for own in spans for _, high in own], np.int64)
    return of, begin, stop


def _no_keys(shape: tuple[int, ...], most_bytes: int) -> np.ndarray:
    """Room for addresses and ends in pairs that sort as one number, all 0: int64 where both fit, else complex128."""
    return np.zeros(shape, np.int64 if most_bytes <= np.iinfo(np.int32).max else np.complex128)


def _halves(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of the addresses and of the ends in keys."""
    small = keys.dtype == np.int64
    low, high = np.moveaxis(keys.view(np.int32 if small else np.float64).reshape(*keys.shape, 2), -1, 0)
    upper_is_last = sys.byteorder == "little"
    return (high, low) if small and upper_is_last else (low, high)


def _lowest(keys: np.ndarray, size: np.ndarray, alignment_bytes: int) -> np.ndarray:
    """The lowest address at which one more item fits between those that are there.

    Args:
        keys: their addresses, multiples of 8, and ends; what has no bytes starts and ends at 0; sorted, in place.
        size: bytes of the new item, int64[tiles].
        alignment_bytes: what its address is a multiple of.

    Returns:
        int64[tiles].
    """
    keys.sort(1)
    start, end = _halves(keys)
    below = np.zeros((end.shape[0], end.shape[1] + 1), end.dtype)  # how far memory is taken below each gap, and on top
    np.maximum.accumulate(end, axis=1, out=below[:, 1:])
    if alignment_bytes != ALIGNMENT_BYTES:
        below = round_up(below, alignment_bytes)
    fits = np.ones(below.shape, bool)
    np.less_equal(below[:, :-1] + size[:, None].astype(end.dtype), start, out=fits[:, :-1])
    return below[np.arange(len(below)), fits.argmax(1)].astype(np.int64)


def classes_of(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the tiles that hold the same bytes of every item.

    Args:
        sizes: int64[items, tiles].

    Returns:
        One tile of each class, int64[classes], and the class of each tile, int64[tiles].
    """
    tiles = sizes.shape[1]
    # A random sum for each tile, modulo 2**64: only tiles of one sum are compared in full.
    weights = np.random.default_rng(0).integers(1, 2**63, len(sizes), dtype=np.uint64)
    sums = (sizes.astype(np.uint64) * weights[:, None]).sum(0, dtype=np.uint64)
    _, example, of_tile = np.unique(sums, return_index=True, return_inverse=True)
    if not (sizes[:, example[of_tile]] == sizes).all():
        return np.arange(tiles), np.arange(tiles)
    return example, of_tile


def groups_of(sizes: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Finds groups of tiles that hold nearly the same: what fits what any of a group holds fits all of it.

    Args:
        sizes: bytes of each item on each tile, int64[items, tiles].
        tolerance: share of what a tile holds by which its group may differ when the tile joins it.

    Returns:
        The most that a tile of each group holds of each item, int64[items, groups], and the group of each tile,
        int64[tiles].
    """
    example, of_tile = classes_of(sizes)
    if not tolerance:
        return sizes[:, example], of_tile
    kind, of_item = classes_of(sizes.T)  # few, as most items are spread alike
    held, count = sizes[np.ix_(kind, example)].T, np.bincount(of_item, minlength=len(kind))
    total, most, of_class, groups = held @ count, np.zeros_like(held), np.zeros(len(held), np.int64), 0
    for one in np.argsort(-total, kind="stable"):
        differs = np.abs(most[:groups] - held[one]) @ count
        if groups and differs.min() <= tolerance * total[one]:
            of_class[one] = differs.argmin()
        else:
            of_class[one], groups = groups, groups + 1
        joined = most[of_class[one]]
        np.maximum(joined, held[one], out=joined)
    return most[:groups, of_item].T, of_class[of_tile]


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same steps as few spans, in order."""
    merged: list[Span] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)
