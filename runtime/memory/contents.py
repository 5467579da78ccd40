"""Contents of tiles, each tile at its own peak: variables, buffers of steps, constants, code and gaps.

Input: `Occupancy`, and bytes that are always in use. Output: items with their bytes on a range of tiles, of all tiles
together, variable by variable, so this takes little longer than one tile; the items of a tile add up to
`MemoryReport.tile_bytes`. Their sums by role. As plain columns, for pages and files: `TileContents`, the largest items
of each tile, and `VariableTiles`, the tiles of each variable; most variables share a few mappings, whose bytes stand
once.
Limits: an item comes several times where tiles are fullest at different steps, each time with other tiles. Columns: of
targets with very many tiles the fullest are listed, and of each tile the largest items; of the fullest tile all. Of
variables the largest are listed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.analysis import Step
from ipujax.runtime.files.figure_kinds import BYTES, BytesByTile, runs_of
from ipujax.runtime.files.figure_records import Length
from ipujax.runtime.files.kinds import Integer, List
from ipujax.runtime.memory.frames import Owner
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import ROLES, LiveItem, role_of_variable, step_name
from ipujax.runtime.memory.packing import ALIGNMENT_BYTES, WIDE_ALIGNMENT_BYTES, round_up
from ipujax.runtime.tensor import Variable
from ipujax.runtime.tensor.roles import CONSTANTS

MAX_TILES = 4_096
MAX_ITEMS = 8  # of one tile
MAX_VARIABLES = 400
_LAYOUTS = "layouts of variables"


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
        names[position] = step_name(step).name
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
