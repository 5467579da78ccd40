"""Memory for reports: of all tiles, and of each step of a program.

Input: `Figures`, and the liveness section of a profile. Output: `MemoryView`, arrays and texts: chips as grids, roles,
categories, and the contents of each tile; `LivenessView`: live bytes by step, and the largest variables at each.
Limits: neighbours in a grid have neighbouring numbers, which need not be neighbours on the silicon. In long programs,
of a group of neighbouring steps the one with most live bytes is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ipujax.runtime.memory import (
    ALWAYS_ROLES,
    FIXED,
    GAPS,
    BreakdownRow,
    LiveBytes,
    LiveItem,
    TileContents,
    VariableTiles,
)
from ipujax.runtime.memory.live_item import readable_item
from ipujax.runtime.profile import Figures
from ipujax.runtime.tensor import readable_name

MAX_STEPS = 3_000
MAX_VARIABLES = 6  # of one step
MAX_RANGES = 2_000

Item = tuple[str, int, str]  # name, bytes, line


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Item with the steps at which it is live.

    Args:
        item: name, bytes and line.
        is_always: it is live during the whole run.
        first: first step, from 0, in the order of the program.
        last: last step.
    """

    item: Item
    is_always: bool
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class LivenessView:
    """Bytes of all tiles together, step by step in program order.

    Args:
        always: always-live items, largest first.
        always_bytes: of all of them.
        variables: the other items that are among the largest of some step.
        names: of the steps.
        live_bytes: at each step, always-live bytes included, int64[steps].
        largest: numbers in `variables` of the largest at each step.
        num_steps: of the program; those in the view are fewer in long programs.
        ranges: of all items, largest first; at most `MAX_RANGES`.
    """

    always: tuple[Item, ...]
    always_bytes: int
    variables: tuple[Item, ...]
    names: tuple[str, ...]
    live_bytes: np.ndarray
    largest: tuple[tuple[int, ...], ...]
    num_steps: int
    ranges: tuple[LiveRange, ...]


def liveness_view(profile: Figures) -> LivenessView:
    """Return the liveness of a program, at most `MAX_STEPS` steps of it."""
    live = profile.liveness
    steps = list(_steps(live["programs"]))
    size = max(1, -(-len(steps) // MAX_STEPS))
    groups = (steps[n : n + size] for n in range(0, len(steps), size))
    peaks = [max(group, key=lambda step: int(step["liveBytes"])) for group in groups]
    numbers: dict[int, int] = {}  # positions in `variables` by number in the section
    largest = tuple(
        tuple(numbers.setdefault(n, len(numbers)) for n in step["liveVariables"][:MAX_VARIABLES]) for step in peaks
    )
    return LivenessView(
        tuple(map(_item, live["alwaysLiveVariables"])),
        live["alwaysLiveBytes"],
        tuple(_item(live["notAlwaysLiveVariables"][n]) for n in numbers),
        tuple(readable_name(step.get("name") or step["type"]) for step in peaks),
        np.array([live["alwaysLiveBytes"] + step["liveBytes"] for step in peaks], np.int64),
        largest,
        len(steps),
        _ranges(live, steps),
    )


def _ranges(live: dict[str, Any], steps: Sequence[dict[str, Any]]) -> tuple[LiveRange, ...]:
    """Return the largest items with their first and last steps."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}  # in the order of first steps
    for number, step in enumerate(steps):
        last.update(dict.fromkeys(step["liveVariables"], number))
    for number, step in reversed(list(enumerate(steps))):
        first.update(dict.fromkeys(step["liveVariables"], number))
    rows = [LiveRange(_item(item), True, 0, len(steps) - 1) for item in live["alwaysLiveVariables"]]
    variables = live["notAlwaysLiveVariables"]
    rows += [LiveRange(_item(variables[n]), False, first[n], last[n]) for n in last]
    return tuple(sorted(rows, key=lambda row: -row.item[1])[:MAX_RANGES])


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "liveBytes" in node:
        yield node
    for child in node.get("children", ()):
        yield from _steps(child)


def _item(item: dict[str, Any]) -> Item:
    return readable_item(item["name"]), item["bytes"], item["origin"]


MAX_TILES = 4_096  # whose categories are listed: the page of a pod would be too large
_ASPECT = 2.5  # columns to rows of one chip
_CHIPS_A_ROW = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """Bytes of a category or role.

    Args:
        name: of the category.
        when: "always", "at the peak" or "unused".
        fullest: bytes on the fullest tile.
        total: bytes on all tiles.
        largest: bytes on the tile with most of this category.
    """

    name: str
    when: str
    fullest: int
    total: int
    largest: int


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """Memory of one replica.

    Args:
        tile_bytes: bytes of each tile, int64[tiles].
        bytes_per_tile: capacity of a tile.
        num_ipus: chips.
        columns: of the grid of one chip.
        rows: of the grid of one chip.
        categories: most on the fullest tile first.
        roles: in the order of `memory.ROLES`; empty where a saved profile has none.
        listed: the tiles of `by_category`, `by_role` and `contents`, int64[listed].
        by_category: bytes of each category on these tiles, in the order of `categories`, int64[categories, listed].
        by_role: bytes of each role on them, in the order of `roles`, int64[roles, listed].
        fullest: items on the fullest tile at its peak, largest first.
        breakdown: rows of all that is in memory at the peak, and their sum.
        live: bytes of the fullest tile at each step.
        contents: the largest items of tiles.
        variables: the largest variables with their tiles.
    """

    tile_bytes: np.ndarray
    bytes_per_tile: int
    num_ipus: int
    columns: int
    rows: int
    categories: tuple[CategoryRow, ...]
    roles: tuple[CategoryRow, ...]
    listed: np.ndarray
    by_category: np.ndarray
    by_role: np.ndarray
    fullest: tuple[LiveItem, ...]
    breakdown: tuple[BreakdownRow, ...]
    live: LiveBytes
    contents: TileContents
    variables: VariableTiles

    def chip_origin(self, ipu: int) -> tuple[int, int]:
        """Return column and row of the first tile of a chip, in cells; gaps between chips have room for labels."""
        chip_row, chip_column = divmod(ipu, _CHIPS_A_ROW)
        return chip_column * (self.columns + 2), chip_row * (self.rows + 3)

    def cell(self, tile: int) -> tuple[float, float]:
        """Return the middle of a tile's cell, in cells to the right of and below the first tile of the first chip."""
        ipu, number = divmod(tile, len(self.tile_bytes) // self.num_ipus)
        row, column = divmod(number, self.columns)
        x, y = self.chip_origin(ipu)
        return x + column + 0.5, y + row + 0.5

    def chip(self, ipu: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tile numbers int32[rows, columns] and bytes float32[rows, columns] of a chip, −1 and NaN without tile.

        The last row has the first tile, because the origin of a chart's image is at the bottom.
        """
        per_ipu = len(self.tile_bytes) // self.num_ipus
        num_cells = self.rows * self.columns
        numbers = np.full(num_cells, -1, np.int32)
        sizes = np.full(num_cells, np.nan, np.float32)
        numbers[:per_ipu] = np.arange(ipu * per_ipu, (ipu + 1) * per_ipu)
        sizes[:per_ipu] = self.tile_bytes[ipu * per_ipu : (ipu + 1) * per_ipu]
        return numbers.reshape(self.rows, self.columns)[::-1], sizes.reshape(self.rows, self.columns)[::-1]


def memory_view(profile: Figures) -> MemoryView:
    """Return the memory of a profile, with the contents of its fullest tiles."""
    memory = profile.memory
    target = profile.target
    worst = memory.worst_tile
    categories = _rows(memory.by_category, worst)
    categories.sort(key=lambda row: (-row.fullest, -row.total))
    listed = np.sort(np.argsort(-memory.tile_bytes, kind="stable")[:MAX_TILES])
    columns = min(target.tiles_per_ipu, round((target.tiles_per_ipu * _ASPECT) ** 0.5))
    role_rows = _rows(memory.by_role, worst)
    return MemoryView(
        memory.tile_bytes,
        target.bytes_per_tile,
        target.num_ipus,
        columns,
        -(-target.tiles_per_ipu // columns),
        tuple(categories),
        tuple(role_rows),
        listed,
        _bytes_on_tiles(memory.by_category, categories, listed),
        _bytes_on_tiles(memory.by_role, role_rows, listed),
        memory.largest,
        memory.breakdown.largest(),
        memory.live_bytes,
        replace(
            memory.contents,
            items=tuple((readable_item(name), kind, line) for name, kind, line in memory.contents.items),
            steps=tuple(map(readable_name, memory.contents.steps)),
        ),
        replace(
            memory.variables,
            variables=tuple(replace(row, name=readable_item(row.name)) for row in memory.variables.variables),
        ),
    )


def _rows(categories: Mapping[str, np.ndarray], worst: int) -> list[CategoryRow]:
    return [
        CategoryRow(name, _lifetime(name), int(tile_bytes[worst]), int(tile_bytes.sum()), int(tile_bytes.max()))
        for name, tile_bytes in categories.items()
        if tile_bytes.any()
    ]


def _bytes_on_tiles(
    categories: Mapping[str, np.ndarray], rows: Sequence[CategoryRow], listed: np.ndarray
) -> np.ndarray:
    # Reshaped, since an array of no rows would have one dimension.
    return np.array([categories[row.name][listed] for row in rows], np.int64).reshape(len(rows), len(listed))


def _lifetime(category: str) -> str:
    if category in ("gap", GAPS):
        return "unused"
    return "always" if category in (*FIXED, *ALWAYS_ROLES) else "at the peak"
