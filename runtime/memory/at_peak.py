"""Items of tiles, each tile at its own peak: variables, buffers of steps, constants, code and gaps.

Input: `Occupancy`, and bytes that are always in use. Output: items with their bytes on a range of tiles. All tiles are
read together, variable by variable, so this takes little longer than one tile. The items of a tile add up to
`MemoryReport.tile_bytes`.
Limits: an item comes several times where tiles are fullest at different steps, each time with other tiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import ROLES, LiveItem, role_of_variable
from ipujax.runtime.memory.packing import ALIGNMENT_BYTES, WIDE_ALIGNMENT_BYTES, round_up
from ipujax.runtime.tensor import Variable
from ipujax.runtime.tensor.roles import CONSTANTS

ItemOnTiles = tuple[LiveItem, int, np.ndarray]  # item, first tile, bytes of each tile from there on


def items_at_peak(
    occupancy: Occupancy, constants: Iterable[Variable], always: Mapping[LiveItem, np.ndarray], selected: np.ndarray
) -> Iterator[ItemOnTiles]:
    """Yield all items of the selected tiles at the peak of each; other tiles have 0 bytes.

    Args:
        occupancy: items with live ranges.
        constants: the constants of the program.
        always: bytes of items without a live range, int64[num_tiles] each.
        selected: the tiles, bool[num_tiles].
    """
    yield from live_items_at_peak(occupancy, None, selected)
    for variable in constants:
        item = LiveItem.of(variable, 0, "constant", CONSTANTS)
        yield from _on_selected(item, *occupancy.bytes_by_tile(variable), selected)
    for item, sizes in always.items():
        yield from _on_selected(item, 0, sizes, selected)


def live_items_at_peak(occupancy: Occupancy, owner: Owner, selected: np.ndarray) -> Iterator[ItemOnTiles]:
    """Yield the variables and buffers of a frame, and of the frames in it, on the selected tiles."""
    frame = occupancy.frames.liveness[owner]
    position = occupancy.peak(owner).position
    peaks = np.unique(position[selected]).tolist()
    for interval in frame.intervals:
        n = bisect_left(peaks, interval.first)
        if n == len(peaks) or peaks[n] > interval.last:
            continue  # most variables are live at no peak
        first, sizes = occupancy.bytes_by_tile(interval.variable)
        at_step = position[first : first + len(sizes)]
        is_live = (at_step >= interval.first) & (at_step <= interval.last)
        if (values := sizes * is_live * selected[first : first + len(sizes)]).any():
            variable = interval.variable
            yield LiveItem.of(variable, 0, "variable", role_of_variable(occupancy, variable)), first, values
    for number in peaks if frame.steps else ():
        step = frame.steps[number]
        at_step = selected & (position == number)
        for name, first, sizes in occupancy.buffers(step):
            yield from _on_selected(LiveItem.buffer(step, 0, name), first, sizes, at_step)
        # Tiles that are fullest during a call have the callee's items, each at its peak within the callee.
        for function in occupancy.frames.functions_during(owner, step):
            yield from live_items_at_peak(occupancy, function, at_step)


def _on_selected(item: LiveItem, first: int, sizes: np.ndarray, selected: np.ndarray) -> Iterator[ItemOnTiles]:
    values = sizes * selected[first : first + len(sizes)]
    if values.any():
        yield item, first, values


def alignment_bytes(occupancy: Occupancy, wide: frozenset[Variable]) -> np.ndarray:
    """Return the bytes by which the live items of each tile are padded at its peak, int64[num_tiles].

    Args:
        occupancy: items with live ranges.
        wide: variables that are accessed 128 bits at a time.
    """
    tiles = occupancy.target.num_tiles
    padding = np.zeros(tiles, np.int64)
    for item, first, sizes in live_items_at_peak(occupancy, None, np.ones(tiles, bool)):
        unit = WIDE_ALIGNMENT_BYTES if item.variable in wide else ALIGNMENT_BYTES
        padding[first : first + len(sizes)] += round_up(sizes, unit) - sizes
    return padding


def bytes_by_role(items: Iterable[ItemOnTiles], num_tiles: int) -> dict[str, np.ndarray]:
    """Return the bytes of each tile by role, int64[num_tiles] each; roles without bytes are left out."""
    roles = {role: np.zeros(num_tiles, np.int64) for role in ROLES}
    for item, first, sizes in items:
        roles[item.role][first : first + len(sizes)] += sizes
    return {role: values for role, values in roles.items() if values.any()}
