"""Where things lie in the memory of each tile: code from the bottom up, what is live from the top down.

    ┌───────────────┬──────────────────────────┬── free ──┬──────────────────────────┐
    │ code          │ constants, vertices,     │          │ variables and buffers,   │
    │ (bottom)      │ stack                    │          │ sharing memory     (top) │
    └───────────────┴──────────────────────────┴──────────┴──────────────────────────┘
      ordinary memory: code can be fetched from it    ┆     interleaved memory: 128-bit loads and stores

Input: `Occupancy`. Output: `Arena`, the memory that variables and buffers share on each tile. Variables that a vertex
accesses 128 bits at a time lie in the interleaved region, at its top; on a tile without any of them everything
lies from the bottom up.
The frame of a function is one block, live during its calls. `memory.chip` packs a frame on the tiles of an IPU.
Source: two regions, code in the lower only: `Target.interleaved_offset_bytes`; partials of the AMP are interleaved in
poplibs ConvPartial1x1Out.cpp. Which end things grow from is this model's choice.
Limits: what should be interleaved and finds no room there lies in ordinary memory, without a change of cycles, and
buffers of one step are not held to the region. Two operands of one vertex may lie in one memory element.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.graph import Graph
from ipujax.runtime.memory.chip import Arena, Chip, Item, pack_all, pack_fullest
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.packing import ALIGNMENT_BYTES, WIDE_ALIGNMENT_BYTES, Span, merge, round_up
from ipujax.runtime.tensor import Variable


def arena(occupancy: Occupancy, always: np.ndarray) -> Arena:
    """Packs everything a program holds for some of the time.

    Args:
        occupancy: what there is.
        always: bytes that are taken all the time, which say what tiles are the fullest, int64[num_tiles].
    """
    wide = wide_variables(occupancy.graph)
    done: dict[Owner, Arena] = {}
    for owner in reversed(list(occupancy.frames.of)):
        chips, peak = _chips(owner, occupancy, done, wide), occupancy.peak(owner).total
        done[owner] = pack_all(chips, peak) if owner else pack_fullest(chips, peak, always)
    packed, most = done[None], stacked(occupancy)
    return Arena(np.minimum(packed.size, most), packed.wide)


def stacked(occupancy: Occupancy) -> np.ndarray:
    """The size of `arena` if nothing shared memory, int64[num_tiles]: never less, and found without packing."""
    wide, tiles = wide_variables(occupancy.graph), occupancy.target.num_tiles
    done: dict[Owner, Arena] = {}
    for owner in reversed(list(occupancy.frames.of)):
        size, most = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
        for item in _items(owner, occupancy, done, wide):
            padding = (WIDE_ALIGNMENT_BYTES - ALIGNMENT_BYTES) * item.wide  # to an address that is aligned
            size[item.first : item.stop] += item.values + padding
        for item in _buffers(owner, occupancy):
            np.maximum(most[item.first : item.stop], item.values, out=most[item.first : item.stop])
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


def _items(owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]) -> list[Item]:
    frame = occupancy.frames.of[owner]
    spans: dict[Variable, list[Span]] = {}
    for interval in frame.intervals:
        spans.setdefault(interval.variable, []).append((interval.first, interval.last))
    items = []
    for variable, own in spans.items():
        first, values = occupancy.held(variable)
        size = round_up(values, WIDE_ALIGNMENT_BYTES) if variable in wide else round_up(values)
        items.append(Item(first, size, merge(own), variable in wide))
    calls: dict[Owner, list[Span]] = {}
    for position, step in enumerate(frame.steps):
        for function in occupancy.frames.during(owner, step):
            calls.setdefault(function, []).append((position, position))
    for callee, own in calls.items():
        block = round_up(arenas[callee].size, WIDE_ALIGNMENT_BYTES)
        if len(used := np.flatnonzero(block)):  # of many IPUs most functions use one
            first, stop = int(used[0]), int(used[-1]) + 1
            items.append(Item(first, block[first:stop], merge(own), bool(arenas[callee].wide.any())))
    return items


def _buffers(owner: Owner, occupancy: Occupancy) -> list[Item]:
    """The buffers of each step that has any, as one item."""
    items = []
    for position, step in enumerate(occupancy.frames.of[owner].steps):
        if found := occupancy.buffers(step):
            low = min(first for _, first, _ in found)
            need = np.zeros(max(first + len(values) for _, first, values in found) - low, np.int64)
            for _, first, values in found:
                need[first - low : first - low + len(values)] += round_up(values)
            items.append(Item(low, need, ((position, position),), wide=False))
    return items


def _chips(owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]) -> list[Chip]:
    target = occupancy.target
    items = [*_items(owner, occupancy, arenas, wide), *_buffers(owner, occupancy)]
    chips = []
    for first in range(0, target.num_tiles, target.tiles_per_ipu):
        tiles = range(first, first + target.tiles_per_ipu)
        here = [item for item in items if item.first < tiles.stop and item.stop > tiles.start]
        chips.append(Chip(tiles, here, target.interleaved_bytes))
    return chips
