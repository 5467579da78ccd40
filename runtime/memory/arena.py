"""Layout of the memory of each tile: code from the bottom up, live variables from the top down.

    ┌───────────────┬──────────────────────────┬── free ──┬──────────────────────────┐
    │ code          │ constants, vertices,     │          │ variables and buffers,   │
    │ (bottom)      │ stack                    │          │ sharing memory     (top) │
    └───────────────┴──────────────────────────┴──────────┴──────────────────────────┘
      ordinary memory: code can be fetched from it    ┆     interleaved memory: 128-bit loads and stores

Input: `Occupancy`. Output: `Arena`, the memory that variables and buffers share on each tile. Variables that a vertex
accesses 128 bits at a time are in the interleaved region, at its top; a tile without any of them is filled from the
bottom up. The frame of a function is one block, live during its calls. `memory.chip` packs a frame on the tiles of an
IPU.
Source: two regions, code in the lower only: `Target.interleaved_offset_bytes`; partials of the AMP are interleaved in
poplibs ConvPartial1x1Out.cpp. The directions of growth are this model's choice.
Limits: a variable that should be interleaved and does not fit there is in ordinary memory, without a change of cycles,
and buffers of a step are not bound to the region. Two operands of one vertex may share a memory element.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.graph import Graph
from ipujax.runtime.memory.chip import Arena, Chip, Item, KnownArenas, pack_all, pack_fullest
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.packing import ALIGNMENT_BYTES, WIDE_ALIGNMENT_BYTES, Span, merge_spans, round_up
from ipujax.runtime.tensor import Variable


def pack_program(occupancy: Occupancy, always: np.ndarray) -> Arena:
    """Pack the live ranges of a program and its functions; `always` are bytes of each tile beside the arena."""
    wide = wide_variables(occupancy.graph)
    arenas: dict[Owner, Arena] = {}
    known = KnownArenas()
    for owner in reversed(list(occupancy.frames.liveness)):  # callees first: a call is an item of its caller
        chips = _chips_of_frame(owner, occupancy, arenas, wide)
        peak = occupancy.peak_on_ipus(owner).total
        arenas[owner] = pack_all(chips, peak, known) if owner else pack_fullest(chips, peak, always, known)
    packed = arenas[None]
    # Groups of similar tiles may be packed larger than a tile's items side by side.
    return Arena(np.minimum(packed.size, unshared_bytes(occupancy)), packed.wide)


def unshared_bytes(occupancy: Occupancy) -> np.ndarray:
    """Return an upper bound of the arena, without packing: its size if no items shared memory, int64[num_tiles]."""
    wide = wide_variables(occupancy.graph)
    arenas: dict[Owner, Arena] = {}
    for owner in reversed(list(occupancy.frames.liveness)):
        tiles = occupancy.tiles_of(owner)
        size = np.zeros(len(tiles), np.int64)
        largest_buffers = np.zeros(len(tiles), np.int64)  # buffers of different steps are never live together
        for item in _frame_items(owner, occupancy, arenas, wide):
            padding = (WIDE_ALIGNMENT_BYTES - ALIGNMENT_BYTES) * item.wide  # to an address that is aligned
            size[item.first - tiles.start : item.stop - tiles.start] += item.values + padding
        for item in _buffer_items(owner, occupancy):
            window = largest_buffers[item.first - tiles.start : item.stop - tiles.start]
            np.maximum(window, item.values, out=window)
        arenas[owner] = Arena(size + largest_buffers, np.zeros(len(tiles), np.int64))
    return arenas[None].size


def wide_variables(graph: Graph) -> frozenset[Variable]:
    """Return the variables that a vertex accesses 128 bits at a time."""
    return frozenset(
        variable
        for groups in graph.groups.values()
        for group in groups
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
        if field.interleaved
        for variable in access.tensor.variables()
    )


def _frame_items(
    owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]
) -> list[Item]:
    """Return the variables of a frame, and the frames of functions in it, as items."""
    frame = occupancy.frames.liveness[owner]
    memory = occupancy.frames.memory
    live: dict[Variable, list[Span]] = {}
    wide_places = {memory.get(variable, variable) for variable in wide}
    for interval in frame.intervals:
        live.setdefault(memory.get(interval.variable, interval.variable), []).append((interval.first, interval.last))
    items = []
    for place, spans in live.items():
        first, values = occupancy.bytes_by_tile(place)
        size = round_up(values, WIDE_ALIGNMENT_BYTES) if place in wide_places else round_up(values)
        items.append(Item(first, size, merge_spans(spans), place in wide_places))
    calls: dict[Owner, list[Span]] = {}
    for position, step in enumerate(frame.steps):
        for function in occupancy.frames.functions_during(owner, step):
            calls.setdefault(function, []).append((position, position))
    for callee, spans in calls.items():
        block = round_up(arenas[callee].size, WIDE_ALIGNMENT_BYTES)
        if len(used := np.flatnonzero(block)):
            first = occupancy.tiles_of(callee).start + int(used[0])
            values = block[int(used[0]) : int(used[-1]) + 1]
            # With one wide item in it the whole block is wide: its inner addresses are already decided.
            items.append(Item(first, values, merge_spans(spans), bool(arenas[callee].wide.any())))
    return items


def _buffer_items(owner: Owner, occupancy: Occupancy) -> list[Item]:
    """Return the buffers of each step that has any, as one item."""
    items = []
    for position, step in enumerate(occupancy.frames.liveness[owner].steps):
        if buffers := occupancy.buffers(step):
            low = min(first for _, first, _ in buffers)
            need = np.zeros(max(first + len(values) for _, first, values in buffers) - low, np.int64)
            for _, first, values in buffers:
                need[first - low : first - low + len(values)] += round_up(values)
            items.append(Item(low, need, ((position, position),), wide=False))
    return items


def _chips_of_frame(
    owner: Owner, occupancy: Occupancy, arenas: dict[Owner, Arena], wide: frozenset[Variable]
) -> list[Chip]:
    """Return the packing problem of each IPU for a frame: the items that share memory on its tiles."""
    target = occupancy.target
    items = [*_frame_items(owner, occupancy, arenas, wide), *_buffer_items(owner, occupancy)]
    chips = []
    on_ipus = occupancy.tiles_of(owner)
    for first in range(on_ipus.start, on_ipus.stop, target.tiles_per_ipu):
        tiles = range(first, first + target.tiles_per_ipu)
        on_chip = [item for item in items if item.first < tiles.stop and item.stop > tiles.start]
        # As planned: a program needs as many bytes on tiles of any size.
        interleaved_bytes = max(0, occupancy.graph.planned_tile_bytes - target.interleaved_offset_bytes)
        chips.append(Chip(tiles, on_chip, interleaved_bytes))
    return chips
