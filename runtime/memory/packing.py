"""Packing of items with different live ranges into the same memory: an address for each item, on many tiles at once.

Input: bytes of each item on each tile, and its live range. Output: its address on each tile, such that no two items
that are live at the same step share a byte. An item has one address over its whole live range.

Items are placed one after the other in a sequence, each at the lowest address where it fits. Largest first leaves small
gaps; longest-lived first leaves none where live ranges are nested or disjoint; earliest first leaves none among items
of one size. All three are tried, and after each the item that ended up on top is placed before all others, as
allocators for small accelerators do.
Source: first fit and the left-edge algorithm for dynamic storage allocation; Poplar & PopLibs user guide, "Memory use":
"variables can be overlapped with others, because they are not live at the same time".
Limits: a heuristic, as the problem is NP-hard; the result is never below the peak live bytes, and the `gap` of the
memory profile is the difference.
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
    """Addresses of items, int64[classes, items]; a class is tiles with the same bytes of every item.

    Args:
        start: address of each item, 0 where there are no bytes of it.
        end: address behind it.
    """

    start: np.ndarray
    end: np.ndarray

    def extent(self, items: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the largest end of some items in each class, int64[classes]."""
        return self.end[:, items].max(1, initial=0)


def round_up(num_bytes: np.ndarray, alignment_bytes: int = ALIGNMENT_BYTES) -> np.ndarray:
    """Round sizes up to multiples of an alignment, in bytes."""
    return -(-num_bytes // alignment_bytes) * alignment_bytes


def live_together(spans: Sequence[Sequence[Span]]) -> np.ndarray:
    """Return the bits of which items share a step with each item, uint8[items, ⌈items / 8⌉]; spans are in order."""
    span_item = np.repeat(np.arange(len(spans)), [len(item) for item in spans])
    first_step, last_step = np.array([span for item in spans for span in item], np.int64).reshape(-1, 2).T
    rows = np.zeros((len(spans), -(-len(spans) // 8)), np.uint8)
    for row, item in zip(rows, spans, strict=True):
        low, high = np.array(item, np.int64).T
        # The first of the item's spans that does not end before a span.
        number = high.searchsorted(first_step)
        meets = (number < len(high)) & (low[np.minimum(number, len(high) - 1)] <= last_step)
        is_live = np.zeros(len(spans), bool)
        is_live[span_item[meets]] = True
        row[:] = np.packbits(is_live)
    return rows


def pack(sizes: np.ndarray, together: np.ndarray, wide: np.ndarray, sequence: np.ndarray) -> Packing:
    """Place items in the order of `sequence`, each at the lowest address where it fits."""
    # Sizes are bytes with padding, int64[items, classes of tiles]; `together` are bits of `live_together`; `wide` items
    # are accessed 128 bits at a time.
    items, classes = sizes.shape
    keys = _allocate_keys((items, classes), int((sizes.sum(0) + items * WIDE_ALIGNMENT_BYTES).max(initial=0)))
    start, end = _halves(keys)  # views: an item is placed by writing its row of each
    placed = np.zeros(items, bool)
    for item in sequence:
        nonempty = np.flatnonzero(sizes[item])
        is_live = np.unpackbits(together[item], count=items).view(bool)
        live_with = keys[np.flatnonzero(is_live & placed)]  # whole rows: much faster than some elements of each
        obstacles = np.ascontiguousarray((live_with if len(nonempty) == classes else live_with.take(nonempty, 1)).T)
        alignment = WIDE_ALIGNMENT_BYTES if wide[item] else ALIGNMENT_BYTES
        address = _lowest_fit(obstacles, sizes[item, nonempty], alignment)
        start[item, nonempty] = address
        end[item, nonempty] = address + sizes[item, nonempty]
        placed[item] = True
    return Packing(start.T.astype(np.int64), end.T.astype(np.int64))


def sort_items(sizes: np.ndarray, spans: Sequence[Sequence[Span]], order: Order) -> np.ndarray:
    """Return the numbers of the items, of bytes [items, tiles], in the order of placement, int64[items]."""
    life = np.array([sum(high - low + 1 for low, high in item) for item in spans], np.int64)
    begin = np.array([item[0][0] for item in spans], np.int64)
    size = sizes.max(1, initial=0)
    keys = {"longest": (-size, -life), "earliest": (-life, begin), "largest": (-life, -size)}
    return np.lexsort(keys[order])  # by the last key first


def move_to_front(items: np.ndarray | int, sequence: np.ndarray) -> np.ndarray:
    """Move some items of a sequence before all others; both keep their order."""
    is_front = np.isin(sequence, items)
    return np.concatenate((sequence[is_front], sequence[~is_front]))


def _allocate_keys(shape: tuple[int, ...], max_bytes: int) -> np.ndarray:
    """Return zeros whose halves hold start and end, and which sort by start: int64 where both fit, else complex128."""
    return np.zeros(shape, np.int64 if max_bytes <= np.iinfo(np.int32).max else np.complex128)


def _halves(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the starts and of the ends in keys."""
    is_integer = keys.dtype == np.int64
    pairs = keys.view(np.int32 if is_integer else np.float64).reshape(*keys.shape, 2)
    # The start is the half that decides the order: of an integer the upper one, of a complex number the real part.
    start = 1 if is_integer and sys.byteorder == "little" else 0
    return pairs[..., start], pairs[..., 1 - start]


def _lowest_fit(keys: np.ndarray, size: np.ndarray, alignment_bytes: int) -> np.ndarray:
    """Return the lowest address at which an item of `size` bytes fits between others, int64[tiles]."""
    # `keys` are starts, multiples of 8, and ends of the others, 0 if without bytes; [tiles, others], sorted in place.
    keys.sort(1)
    start, end = _halves(keys)
    # Lower end of the gap below each of the others, and of the free memory above all: the largest end so far.
    below = np.zeros((end.shape[0], end.shape[1] + 1), end.dtype)
    np.maximum.accumulate(end, axis=1, out=below[:, 1:])
    if alignment_bytes != ALIGNMENT_BYTES:
        below = round_up(below, alignment_bytes)
    fits = np.ones(below.shape, bool)
    np.less_equal(below[:, :-1] + size[:, None].astype(end.dtype), start, out=fits[:, :-1])
    return below[np.arange(len(below)), fits.argmax(1)].astype(np.int64)


def group_equal_tiles(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a tile of each class of tiles equal in the bytes of all items, int64[classes], and each tile's class."""
    tiles = sizes.shape[1]
    # A random sum for each tile, modulo 2**64: only tiles of one sum are compared in full.
    weights = np.random.default_rng(0).integers(1, 2**63, len(sizes), dtype=np.uint64)
    sums = (sizes.astype(np.uint64) * weights[:, None]).sum(0, dtype=np.uint64)
    _, example, of_tile = np.unique(sums, return_index=True, return_inverse=True)
    if not (sizes[:, example[of_tile]] == sizes).all():
        return np.arange(tiles), np.arange(tiles)
    return example, of_tile


def group_similar_tiles(sizes: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the maxima of groups of similar tiles, int64[items, groups], and the group of each tile, int64[tiles]."""
    # A packing of a group's maxima fits each of its tiles. `tolerance` is the share of a tile's bytes by which the
    # maxima may differ from it when it joins.
    example, of_tile = group_equal_tiles(sizes)
    if not tolerance:
        return sizes[:, example], of_tile
    kind, of_item = group_equal_tiles(sizes.T)  # items of one mapping are equal: sums over kinds are short
    of_class = np.zeros(len(example), np.int64)
    class_sizes = sizes[np.ix_(kind, example)].T
    count = np.bincount(of_item, minlength=len(kind))
    total = class_sizes @ count
    maxima = np.zeros_like(class_sizes)
    groups = 0
    # Fullest first: the classes that join later hardly raise the maxima of a group.
    for n in np.argsort(-total, kind="stable"):
        differs = np.abs(maxima[:groups] - class_sizes[n]) @ count
        if groups and differs.min() <= tolerance * total[n]:
            of_class[n] = differs.argmin()
        else:
            of_class[n] = groups
            groups += 1
        group_maxima = maxima[of_class[n]]
        np.maximum(group_maxima, class_sizes[n], out=group_maxima)
    return maxima[:groups, of_item].T, of_class[of_tile]


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the fewest spans that cover the same steps, in order."""
    merged: list[Span] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:  # adjacent steps too
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)
