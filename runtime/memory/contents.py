"""Contents of many tiles at once, each at its own peak: the largest items of each; and the tiles of variables.

Input: items with live ranges, and those that are always live. Output: `TileContents`, plain columns. From the variables
of a graph with their mappings: `VariableTiles`; most variables share a few mappings, whose bytes stand once.
Limits: of targets with very many tiles the fullest are listed, and of each tile the largest items; of the fullest tile
all. Of variables the largest are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.analysis import Step
from ipujax.runtime.files.figure_kinds import BYTES, BytesByTile, runs_of
from ipujax.runtime.files.figure_records import Length
from ipujax.runtime.files.kinds import Integer, List
from ipujax.runtime.memory.at_peak import items_at_peak
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import LiveItem, role_of_variable, step_name
from ipujax.runtime.tensor import Variable

MAX_TILES = 4_096
MAX_ITEMS = 8  # of one tile
MAX_VARIABLES = 400
_LAYOUTS = "layouts of variables"


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


def tile_contents(
    occupancy: Occupancy,
    constants: Iterable[Variable],
    always: Mapping[LiveItem, np.ndarray],
    tile_bytes: np.ndarray,
    max_tiles: int = MAX_TILES,
    max_items: int = MAX_ITEMS,
) -> TileContents:
    """Return the largest items at the peak of the `max_tiles` fullest tiles, `max_items` each, all of the fullest."""
    tiles = np.sort(np.argsort(-tile_bytes, kind="stable")[:max_tiles])
    numbers: dict[tuple[str, str, str], int] = {}
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    is_listed = np.zeros(len(tile_bytes), bool)
    is_listed[tiles] = True
    for live_item, first, sizes in items_at_peak(occupancy, constants, always, is_listed):
        number = numbers.setdefault((live_item.name, live_item.category, str(live_item.origin)), len(numbers))
        nonempty = np.flatnonzero(sizes)
        rows.append((first + nonempty, np.full(len(nonempty), number), sizes[nonempty]))
    tile, item, num_bytes = (np.concatenate([row[k] for row in rows]) for k in range(3))
    order = np.lexsort((item, -num_bytes, tile))
    tile, item, num_bytes = tile[order], item[order], num_bytes[order]
    first_row = np.searchsorted(tile, tile)  # of the tile of each row
    is_row = (np.arange(len(tile)) - first_row < max_items) | (tile == tile_bytes.argmax())
    # Names of items of which no row is listed are dropped: numbers are dense again.
    used, item = np.unique(item[is_row], return_inverse=True)
    names = tuple(numbers)
    steps: dict[str, int] = {}
    peak = np.array([steps.setdefault(name, len(steps)) for name in _peak_steps(occupancy, tiles)], np.int64)
    return TileContents(
        tuple(names[n] for n in used.tolist()),
        tuple(steps),
        tiles,
        peak,
        tile[is_row],
        item,
        num_bytes[is_row],
    )


def _peak_steps(occupancy: Occupancy, tiles: np.ndarray) -> list[str]:
    """Return the name of the step at which each of some tiles is fullest; of a call, the function's name."""
    steps = occupancy.frames.liveness[None].steps
    positions = occupancy.peak(None).position[tiles].tolist()
    names: dict[int, str] = {}
    for position in set(positions):
        step: Step | None = steps[position] if steps else None
        names[position] = step_name(step)[0]
    return [names[position] for position in positions]


@dataclass(frozen=True, slots=True)
class MappedVariable:
    """Variable on tiles.

    Args:
        name: with dtype and shape.
        role: one of `memory.ROLES`.
        line: of source.
        num_bytes: on all tiles.
        layout: position in `VariableTiles.layouts`.
    """

    name: str
    role: str
    line: str
    num_bytes: int
    layout: Annotated[int, Integer(below=_LAYOUTS)]


@dataclass(frozen=True, slots=True, eq=False)
class VariableTiles:
    """The largest variables with the tiles that they are on.

    Args:
        variables: largest first.
        layouts: bytes on each tile, int64[num_tiles] each.
    """

    variables: tuple[MappedVariable, ...]
    layouts: Annotated[tuple[BytesByTile, ...], Length(_LAYOUTS)]

    @property
    def runs_of_layouts(self) -> list[str]:
        """The layouts as runs of equal numbers, see `runtime.files.figure_kinds`."""
        return list(map(runs_of, self.layouts))


def variable_tiles(occupancy: Occupancy, max_variables: int = MAX_VARIABLES) -> VariableTiles:
    """Return the `max_variables` largest variables of a graph with the bytes of each tile."""
    pieces = [(variable, *occupancy.bytes_by_tile(variable)) for variable in occupancy.graph.variables]
    sizes = np.array([values.sum() for _, _, values in pieces], np.int64)
    numbers: dict[tuple[int, bytes], int] = {}
    layouts: list[np.ndarray] = []
    variables: list[MappedVariable] = []
    for row in np.argsort(-sizes, kind="stable")[:max_variables].tolist():
        variable, first, values = pieces[row]
        number = numbers.setdefault((first, values.tobytes()), len(layouts))
        if number == len(layouts):
            on_tiles = np.zeros(occupancy.target.num_tiles, np.int64)
            on_tiles[first : first + len(values)] = values
            layouts.append(on_tiles)
        role = role_of_variable(occupancy, variable)
        variables.append(MappedVariable(repr(variable), role, str(variable.origin), int(sizes[row]), number))
    return VariableTiles(tuple(variables), tuple(layouts))
