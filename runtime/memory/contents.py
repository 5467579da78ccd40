"""What lies on many tiles at once, each at its own peak: the largest things of each.

Input: what tiles hold for some of the time, and always. Output: `TileContents`, plain columns, which also make
JSON-able data and are made of it. All tiles that are fullest at one step are looked at together, so this takes little
longer than one tile.
Limits: of targets with very many tiles the fullest are listed, and of each tile the largest things; of the fullest tile
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.analysis import Step
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import LiveItem, step_name
from ipujax.runtime.memory.role_bytes import role_of_variable
from ipujax.runtime.tensor import Variable
from ipujax.runtime.tensor.roles import CONSTANTS

MOST_TILES = 4_096
MOST_ITEMS = 8  # of one tile


@dataclass(frozen=True, slots=True, eq=False)
class TileContents:
    """The largest things on tiles.

    Args:
        items: name, category and line of everything that is named, each once.
        steps: names of steps.
        tiles: the tiles that are listed, rising, int64[tiles].
        peak: the step at which each of them is fullest, as its number, int64[tiles].
        tile: the tile of each row, int64[rows]; by tile, largest first.
        item: what it is, as its number, int64[rows].
        num_bytes: its bytes, int64[rows].
    """

    items: tuple[tuple[str, str, str], ...]
    steps: tuple[str, ...]
    tiles: np.ndarray
    peak: np.ndarray
    tile: np.ndarray
    item: np.ndarray
    num_bytes: np.ndarray

    def data(self) -> dict[str, Any]:
        """The columns as JSON-able data."""
        numbers = {name: getattr(self, name).tolist() for name in _NUMBERS}
        return {"items": [list(item) for item in self.items], "steps": list(self.steps), **numbers}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> TileContents:
        """The contents of such data.

        Args:
            data: as `data` makes it.

        Raises:
            KeyError, TypeError, ValueError: data of something else.
        """
        items = tuple((str(name), str(category), str(line)) for name, category, line in data["items"])
        numbers = {name: np.array(data[name], np.int64) for name in _NUMBERS}
        for one, other in (("tiles", "peak"), ("tile", "item"), ("tile", "num_bytes")):
            if numbers[one].shape != numbers[other].shape:
                raise ValueError(f"{one} and {other} differ in length")
        return cls(items, tuple(data["steps"]), **numbers)


_NUMBERS = ("tiles", "peak", "tile", "item", "num_bytes")
_Piece = tuple[LiveItem, np.ndarray, np.ndarray]  # what it is, the tiles that have it, and its bytes there


def tile_contents(
    occupancy: Occupancy,
    constants: Iterable[Variable],
    always: Mapping[str, np.ndarray],
    tile_bytes: np.ndarray,
    most_tiles: int = MOST_TILES,
    most_items: int = MOST_ITEMS,
) -> TileContents:
    """The largest things on each tile at its peak.

    Args:
        occupancy: what is there for some of the time.
        constants: what is always there.
        always: further bytes that are always there, by category, int64[num_tiles] each.
        tile_bytes: bytes of each tile, int64[num_tiles].
        most_tiles: how many tiles; the fullest.
        most_items: how many things of each tile but the fullest, of which all are listed.
    """
    tiles = np.sort(np.argsort(-tile_bytes, kind="stable")[:most_tiles])
    items: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for what, there, sizes in _pieces(occupancy, constants, always, tiles):
        number = items.setdefault((what.name, what.category, str(what.origin)), len(items))
        rows.append((there, np.full(len(there), number), sizes))
    tile, item, num_bytes = (np.concatenate([row[k] for row in rows]) for k in range(3))
    order = np.lexsort((item, -num_bytes, tile))
    tile, item, num_bytes = tile[order], item[order], num_bytes[order]
    first = np.searchsorted(tile, tile)
    kept = (np.arange(len(tile)) - first < most_items) | (tile == tile_bytes.argmax())
    used, item = np.unique(item[kept], return_inverse=True)
    names = tuple(items)
    steps: dict[str, int] = {}
    peak = np.array([steps.setdefault(name, len(steps)) for name in _peak_steps(occupancy, tiles)], np.int64)
    return TileContents(
        tuple(names[n] for n in used.tolist()), tuple(steps), tiles, peak, tile[kept], item, num_bytes[kept]
    )


def _pieces(
    occupancy: Occupancy, constants: Iterable[Variable], always: Mapping[str, np.ndarray], tiles: np.ndarray
) -> Iterator[_Piece]:
    """Everything on some tiles."""
    yield from _live_pieces(occupancy, None, tiles)
    for variable in constants:
        yield from _piece(LiveItem.of(variable, 0, "constant", CONSTANTS), tiles, 0, occupancy.total([variable]))
    for name, sizes in always.items():
        yield from _piece(LiveItem.always(0, name), tiles, 0, sizes)


def _live_pieces(occupancy: Occupancy, owner: Owner, tiles: np.ndarray) -> Iterator[_Piece]:
    """What a frame has on some tiles, each at its peak, and the frames it makes room for."""
    frame, positions = occupancy.frames.liveness[owner], occupancy.peak(owner).position[tiles]
    for position in np.unique(positions).tolist() if frame.steps else ():
        here, step = tiles[positions == position], frame.steps[position]
        for variable in frame.live_at(position):
            what = LiveItem.of(variable, 0, "variable", role_of_variable(occupancy, variable))
            yield from _piece(what, here, *occupancy.bytes_by_tile(variable))
        for name, first, sizes in occupancy.buffers(step):
            yield from _piece(LiveItem.buffer(step, 0, name), here, first, sizes)
        for function in occupancy.frames.functions_during(owner, step):
            yield from _live_pieces(occupancy, function, here)


def _piece(what: LiveItem, tiles: np.ndarray, first: int, sizes: np.ndarray) -> Iterator[_Piece]:
    """One thing on those of some tiles that have any of it; `sizes` are those of tiles from `first` on."""
    inside = tiles[(tiles >= first) & (tiles < first + len(sizes))]
    there = inside[sizes[inside - first] > 0]
    if len(there):
        yield what, there, np.asarray(sizes[there - first], np.int64)


def _peak_steps(occupancy: Occupancy, tiles: np.ndarray) -> list[str]:
    """The name of the step at which each of some tiles is fullest; a call goes by its function's name."""
    steps, positions = occupancy.frames.liveness[None].steps, occupancy.peak(None).position[tiles].tolist()
    names: dict[int, str] = {}
    for position in set(positions):
        step: Step | None = steps[position] if steps else None
        names[position] = step_name(step)[0]
    return [names[position] for position in positions]
