"""Where things lie in the memory of each tile: code from the bottom up, what is live from the top down.

    ┌───────────────┬──────────────────────────┬── free ──┬──────────────────────────┐
    │ code          │ constants, vertices,     │          │ variables and buffers,   │
    │ (bottom)      │ stack                    │          │ sharing memory     (top) │
    └───────────────┴──────────────────────────┴──────────┴──────────────────────────┘
      ordinary memory: code can be fetched from it    ┆     interleaved memory: 128-bit loads and stores

Input: `Occupancy`. Output: `Arena`, the memory that variables and buffers share on each tile. Variables that a vertex
accesses 128 bits at a time lie in the interleaved region, at its top; on a tile without any of them everything
lies from the bottom up.
Each IPU is packed on its own. The frame of a function is one block, live during its calls.
Source: two regions, code in the lower only: `Target.interleaved_offset_bytes`; partials of the AMP are interleaved in
poplibs ConvPartial1x1Out.cpp. Which end things grow from is this model's choice.
Limits: what should be interleaved and finds no room there lies in ordinary memory, without a change of cycles, and
buffers of one step are not held to the region. Two operands of one vertex may lie in one memory element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.graph import Graph
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Layer, Occupancy
from ipujax.runtime.memory.packing import (
    ALIGNMENT_BYTES,
    ORDERS,
    WIDE_ALIGNMENT_BYTES,
    Order,
    Packing,
    Span,
    classes_of,
    flat,
    merge,
    pack,
    place,
    round_up,
)
from ipujax.runtime.tensor import Variable

_GAP_TO_ACCEPT = 0.01  # assumed: on tiles that lose no more than this share of their peak no other order is tried


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
class _Item:
    """What is packed: a variable, or the frame of a function."""

    first: int
    values: np.ndarray
    spans: tuple[Span, ...]
    wide: bool

    @property
    def stop(self) -> int:
        """One past the last tile."""
        return self.first + len(self.values)


def arena(occupancy: Occupancy) -> Arena:
    """Packs everything a program holds for some of the time.

    Args:
        occupancy: what there is.
    """
    wide = wide_variables(occupancy.graph)
    done: dict[Owner, Arena] = {}
    for owner in reversed(list(occupancy.frames.of)):
        done[owner] = _pack_frame(owner, occupancy, done, wide)
    return done[None]


def stacked(occupancy: Occupancy) -> np.ndarray:
    """The size of `arena` if nothing shared memory, int64[num_tiles]: never less, and found without packing."""
    wide, tiles = wide_variables(occupancy.graph), occupancy.target.num_tiles
    done: dict[Owner, Arena] = {}
    for owner in reversed(list(occupancy.frames.of)):
        size, most = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
        for item in _items(owner, occupancy, done, wide):
            padding = (WIDE_ALIGNMENT_BYTES - ALIGNMENT_BYTES) * item.wide  # to an address that is aligned
            size[item.first : item.stop] += item.values + padding
        for step in occupancy.frames.of[owner].steps:
            if found := occupancy.buffers(step):
                need = np.zeros(tiles, np.int64)
                for _, first, values in found:
                    need[first : first + len(values)] += round_up(values)
                np.maximum(most, need, out=most)
        done[owner] = Arena(size + most, np.zeros(tiles, np.int64))
    return done[None].size


def wide_variables(graph: Graph) -> frozenset[Variable]:
    """The variables that a vertex writes 128 bits at a time."""
    return frozenset(
        variable
        for groups in graph.groups.values()
        for group in groups
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
        if field.interleaved
        for variable in access.tensor.variables()
    )


def _items(owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]) -> list[_Item]:
    frame = occupancy.frames.of[owner]
    spans: dict[Variable, list[Span]] = {}
    for interval in frame.intervals:
        spans.setdefault(interval.variable, []).append((interval.first, interval.last))
    items = []
    for variable, own in spans.items():
        first, values = occupancy.held(variable)
        size = round_up(values, WIDE_ALIGNMENT_BYTES) if variable in wide else round_up(values)
        items.append(_Item(first, size, merge(own), variable in wide))
    calls: dict[Owner, list[Span]] = {}
    for position, step in enumerate(frame.steps):
        for function in occupancy.frames.during(owner, step):
            calls.setdefault(function, []).append((position, position))
    for callee, own in calls.items():
        block = round_up(arenas[callee].size, WIDE_ALIGNMENT_BYTES)
        items.append(_Item(0, block, merge(own), bool(arenas[callee].wide.any())))
    return items


def _pack_frame(owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]) -> Arena:
    target, steps = occupancy.target, occupancy.frames.of[owner].steps
    items = _items(owner, occupancy, arenas, wide)
    layers = [(position, found) for position, step in enumerate(steps) if (found := occupancy.buffers(step))]
    size = np.full(target.num_tiles, np.iinfo(np.int64).max)
    reach = np.zeros(target.num_tiles, np.int64)
    enough = occupancy.peak(owner).total * (1 + _GAP_TO_ACCEPT)
    for first in range(0, target.num_tiles, target.tiles_per_ipu):
        here = [item for item in items if item.first < first + target.tiles_per_ipu and item.stop > first]
        for order in ORDERS:
            tiles = first + np.flatnonzero((size > enough)[first : first + target.tiles_per_ipu])
            if len(tiles):
                packed = _pack_tiles(tiles, here, layers, order, target.interleaved_bytes)
                better = packed.size < size[tiles]
                size[tiles[better]], reach[tiles[better]] = packed.size[better], packed.wide[better]
    return Arena(size, reach)


def _pack_tiles(
    tiles: np.ndarray,
    items: Sequence[_Item],
    layers: Sequence[tuple[int, Sequence[Layer]]],
    order: Order,
    interleaved_bytes: int,
) -> Arena:
    """The arena of some tiles when items are placed in an order, and buffers after them."""
    sizes = np.array([_on(tiles, item.first, item.values) for item in items], np.int64).reshape(len(items), len(tiles))
    example, of_tile = classes_of(sizes)
    is_wide = np.array([item.wide for item in items], bool)
    # What must be interleaved is put on top only where that may matter: it costs gaps.
    is_first = is_wide & (sizes.sum(0).max(initial=0) > interleaved_bytes)
    packing = pack(sizes[:, example], [item.spans for item in items], is_wide, is_first, order)
    size = packing.extent()[of_tile]
    _add_buffers(size, tiles, layers, items, packing, of_tile)
    return Arena(size, packing.extent(is_wide)[of_tile])


def _on(tiles: np.ndarray, first: int, values: np.ndarray) -> np.ndarray:
    """The values of some tiles, of values that are 0 but for the tiles from `first` on."""
    number = tiles - first
    there = (number >= 0) & (number < len(values))
    return np.where(there, values[np.where(there, number, 0)], 0) if len(values) else np.zeros(len(tiles), np.int64)


def _add_buffers(
    size: np.ndarray,
    tiles: np.ndarray,
    layers: Sequence[tuple[int, Sequence[Layer]]],
    items: Sequence[_Item],
    packing: Packing,
    of_tile: np.ndarray,
) -> None:
    """Raises `size`, in place, where the buffers of a step need more memory than the packing of variables has.

    Args:
        size: of the arena on each of some tiles, int64[tiles].
        tiles: their numbers, int64[tiles].
        layers: the buffers of each step that has any.
        items: what is packed already.
        packing: where it lies.
        of_tile: the class of each tile.
    """
    of, begin, stop = flat([item.spans for item in items])
    for position, found in layers:
        buffers = np.array([_on(tiles, start, round_up(values)) for _, start, values in found])
        need = buffers.sum(0)
        if not need.any():
            continue
        live = of[(begin <= position) & (stop >= position)]
        # On top of what lives they always fit; where that is more than there is, they are put into the gaps.
        short = np.flatnonzero((need > 0) & (packing.extent(live)[of_tile] + need > size))
        if len(short):
            taken = np.ix_(of_tile[short], live)
            size[short] = np.maximum(size[short], _top(packing.start[taken], packing.end[taken], buffers[:, short]))


def _top(start: np.ndarray, end: np.ndarray, buffers: np.ndarray) -> np.ndarray:
    """Where memory ends when buffers, int64[buffers, tiles], are put between what is there, the largest first."""
    for sizes in buffers[np.argsort(-buffers.sum(1), kind="stable")]:
        address = place(start, end, sizes)
        address = np.where(sizes > 0, address, 0)
        start, end = np.column_stack((start, address)), np.column_stack((end, address + sizes))
    return end.max(1)
