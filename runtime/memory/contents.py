"""Contents of many tiles at once, each at its own peak: the largest items of each.

Input: items with live ranges, and those that are always live. Output: `TileContents`, plain columns. All tiles
whose peak is at one step are read together, so this takes little longer than one tile.
Limits: of targets with very many tiles the fullest are listed, and of each tile the largest items; of the fullest tile
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.analysis import Step
from ipujax.runtime.files.field_types import Length
from ipujax.runtime.files.figure_kinds import BYTES
from ipujax.runtime.files.kinds import Integer, List
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import LiveItem, step_name
from ipujax.runtime.memory.role_bytes import role_of_variable
from ipujax.runtime.tensor import Variable
from ipujax.runtime.tensor.roles import CONSTANTS

MAX_TILES = 4_096
MAX_ITEMS = 8  # of one tile


@dataclass(frozen=True, slots=True, eq=False)
class TileContents:
    """The largest items on tiles.

    Args:
        items: name, category and source line of each different item.
        steps: names of steps.
        tiles: numbers of the listed tiles, rising, int64[tiles].
        peak: index in `steps` of the step at which each of them is fullest, int64[tiles].
        tile: tile of each row, int64[rows]; rows are sorted by tile, then largest first.
        item: index in `items`, int64[rows].
        num_bytes: bytes of the item on the tile, int64[rows].
    """

    items: Annotated[tuple[tuple[str, str, str], ...], Length("named items")]
    steps: Annotated[tuple[str, ...], Length("peak steps")]
    tiles: Annotated[np.ndarray, List(Integer(below="tiles"), "listed tiles")]
    peak: Annotated[np.ndarray, List(Integer(below="peak steps"), "listed tiles")]
    tile: Annotated[np.ndarray, List(Integer(below="tiles"), "rows of tiles")]
    item: Annotated[np.ndarray, List(Integer(below="named items"), "rows of tiles")]
    num_bytes: Annotated[np.ndarray, List(BYTES, "rows of tiles")]


_ItemOnTiles = tuple[LiveItem, np.ndarray, np.ndarray]  # item, numbers of the tiles with bytes of it, bytes there


def tile_contents(
    occupancy: Occupancy,
    constants: Iterable[Variable],
    always: Mapping[str, np.ndarray],
    tile_bytes: np.ndarray,
    max_tiles: int = MAX_TILES,
    max_items: int = MAX_ITEMS,
) -> TileContents:
    """Return the largest items at the peak of the `max_tiles` fullest tiles, `max_items` each, all of the fullest."""
    tiles = np.sort(np.argsort(-tile_bytes, kind="stable")[:max_tiles])
    numbers: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for live_item, item_tiles, sizes in _all_items(occupancy, constants, always, tiles):
        number = numbers.setdefault((live_item.name, live_item.category, str(live_item.origin)), len(numbers))
        rows.append((item_tiles, np.full(len(item_tiles), number), sizes))
    tile, item, num_bytes = (np.concatenate([row[k] for row in rows]) for k in range(3))
    order = np.lexsort((item, -num_bytes, tile))
    tile, item, num_bytes = tile[order], item[order], num_bytes[order]
    first_row = np.searchsorted(tile, tile)  # of the tile of each row
    is_listed = (np.arange(len(tile)) - first_row < max_items) | (tile == tile_bytes.argmax())
    # Names of items of which no row is listed are dropped: numbers are dense again.
    used, item = np.unique(item[is_listed], return_inverse=True)
    names = tuple(numbers)
    steps: dict[str, int] = {}
    peak = np.array([steps.setdefault(name, len(steps)) for name in _peak_steps(occupancy, tiles)], np.int64)
    return TileContents(
        tuple(names[n] for n in used.tolist()),
        tuple(steps),
        tiles,
        peak,
        tile[is_listed],
        item,
        num_bytes[is_listed],
    )


def _all_items(
    occupancy: Occupancy, constants: Iterable[Variable], always: Mapping[str, np.ndarray], tiles: np.ndarray
) -> Iterator[_ItemOnTiles]:
    yield from _live_items(occupancy, None, tiles)
    for variable in constants:
        yield from _cut(LiveItem.of(variable, 0, "constant", CONSTANTS), tiles, 0, occupancy.total([variable]))
    for name, sizes in always.items():
        yield from _cut(LiveItem.always(0, name), tiles, 0, sizes)


def _live_items(occupancy: Occupancy, owner: Owner, tiles: np.ndarray) -> Iterator[_ItemOnTiles]:
    """Yield the items of a frame, and of the frames in it, on some tiles at the peak of each."""
    frame = occupancy.frames.liveness[owner]
    positions = occupancy.peak(owner).position[tiles]
    for position in np.unique(positions).tolist() if frame.steps else ():
        # Tiles that are fullest at one step are read together, which is why this is fast.
        at_step = tiles[positions == position]
        step = frame.steps[position]
        for variable in frame.live_at(position):
            item = LiveItem.of(variable, 0, "variable", role_of_variable(occupancy, variable))
            yield from _cut(item, at_step, *occupancy.bytes_by_tile(variable))
        for name, first, sizes in occupancy.buffers(step):
            yield from _cut(LiveItem.buffer(step, 0, name), at_step, first, sizes)
        for function in occupancy.frames.functions_during(owner, step):
            yield from _live_items(occupancy, function, at_step)


def _cut(item: LiveItem, tiles: np.ndarray, first: int, sizes: np.ndarray) -> Iterator[_ItemOnTiles]:
    """Yield an item on those of some tiles that have bytes of it, if any; `sizes` are of tiles from `first` on."""
    inside = tiles[(tiles >= first) & (tiles < first + len(sizes))]
    nonempty = inside[sizes[inside - first] > 0]
    if len(nonempty):
        yield item, nonempty, np.asarray(sizes[nonempty - first], np.int64)


def _peak_steps(occupancy: Occupancy, tiles: np.ndarray) -> list[str]:
    """Return the name of the step at which each of some tiles is fullest; of a call, the function's name."""
    steps = occupancy.frames.liveness[None].steps
    positions = occupancy.peak(None).position[tiles].tolist()
    names: dict[int, str] = {}
    for position in set(positions):
        step: Step | None = steps[position] if steps else None
        names[position] = step_name(step)[0]
    return [names[position] for position in positions]
