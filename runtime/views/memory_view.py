"""The memory of all tiles, as a report shows it: chips as grids, roles, categories, and what is on each tile.

Input: `Figures`. Output: `MemoryView`, arrays and texts.
Limits: neighbours in a grid have neighbouring numbers, which is not how tiles lie on a real chip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.memory import ALWAYS_ROLES, FIXED, GAPS, LiveBytes, LiveItem, TileContents
from ipujax.runtime.profile import Figures

MOST_TILES = 4_096  # whose categories are listed
_ASPECT = 2.5  # columns to rows of one chip
_CHIPS_BESIDE = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """What bytes are for.

    Args:
        name: of the category.
        when: "always", "at the peak" or "unused".
        fullest: bytes on the fullest tile.
        total: bytes on all tiles.
        most: bytes on the tile that has most of it.
    """

    name: str
    when: str
    fullest: int
    total: int
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """The memory of one replica.

    Args:
        tile_bytes: bytes of each tile, int64[tiles].
        bytes_per_tile: what a tile has.
        num_ipus: chips.
        columns: of the grid of one chip.
        rows: of the grid of one chip.
        categories: what bytes are for, most on the fullest tile first.
        roles: what values the bytes hold, in the order of `memory.ROLES`; empty where a saved profile has none.
        listed: the tiles that `by_category`, `by_role` and `contents` know, int64[listed].
        by_category: bytes of each category on these tiles, in the order of `categories`, int64[categories, listed].
        by_role: bytes of each role on them, in the order of `roles`, int64[roles, listed].
        fullest: all that the fullest tile holds at its peak, largest first.
        live: how full the fullest tile is at each step; None where a saved profile does not have it.
        contents: the largest things on tiles; None where a saved profile does not have them.
        missing: why there are no contents, or no roles.
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
    live: LiveBytes | None
    contents: TileContents | None
    missing: str

    def chip_origin(self, ipu: int) -> tuple[int, int]:
        """Column and row of the first tile of a chip, in cells.

        Args:
            ipu: its number.
        """
        down, beside = divmod(ipu, _CHIPS_BESIDE)
        return beside * (self.columns + 2), down * (self.rows + 3)

    def cell(self, tile: int) -> tuple[float, float]:
        """Middle of the cell of a tile, in cells to the right of and below the first tile of the first chip.

        Args:
            tile: its number.
        """
        ipu, number = divmod(tile, len(self.tile_bytes) // self.num_ipus)
        row, column = divmod(number, self.columns)
        left, top = self.chip_origin(ipu)
        return left + column + 0.5, top + row + 0.5

    def chip(self, ipu: int) -> tuple[np.ndarray, np.ndarray]:
        """Tile numbers and bytes of one chip as grids, the first tile in the last row; −1 and NaN where none is.

        Args:
            ipu: its number.

        Returns:
            int32[rows, columns], float32[rows, columns].
        """
        per_ipu, cells = len(self.tile_bytes) // self.num_ipus, self.rows * self.columns
        numbers, sizes = np.full(cells, -1, np.int32), np.full(cells, np.nan, np.float32)
        numbers[:per_ipu] = np.arange(ipu * per_ipu, (ipu + 1) * per_ipu)
        sizes[:per_ipu] = self.tile_bytes[ipu * per_ipu : (ipu + 1) * per_ipu]
        return numbers.reshape(self.rows, self.columns)[::-1], sizes.reshape(self.rows, self.columns)[::-1]


def memory_view(profile: Figures) -> MemoryView:
    """The memory of a profile.

    Args:
        profile: of a run.
    """
    memory, target = profile.memory, profile.target
    worst = memory.worst_tile
    categories = _rows(memory.by_category, worst)
    categories.sort(key=lambda row: (-row.fullest, -row.total))
    listed = np.sort(np.argsort(-memory.tile_bytes, kind="stable")[:MOST_TILES])
    columns = min(target.tiles_per_ipu, round((target.tiles_per_ipu * _ASPECT) ** 0.5))
    missing = list[str]()
    roles = _known(lambda: memory.by_role, missing) or {}
    live, contents = _known(lambda: memory.live_bytes, missing), _known(lambda: memory.contents, missing)
    role_rows = _rows(roles, worst)
    return MemoryView(
        memory.tile_bytes,
        target.bytes_per_tile,
        target.num_ipus,
        columns,
        -(-target.tiles_per_ipu // columns),
        tuple(categories),
        tuple(role_rows),
        listed,
        _of_listed(memory.by_category, categories, listed),
        _of_listed(roles, role_rows, listed),
        memory.largest,
        live,
        contents,
        "; ".join(missing),
    )


def _known(figure: Callable[[], T], missing: list[str]) -> T | None:
    """A figure that files of older versions lack; what they lack is added to `missing`."""
    try:
        return figure()
    except ProfileError as error:
        missing.append(error.what)
        return None


def _rows(layers: Mapping[str, np.ndarray], worst: int) -> list[CategoryRow]:
    return [
        CategoryRow(name, _when(name), int(layer[worst]), int(layer.sum()), int(layer.max()))
        for name, layer in layers.items()
        if layer.any()
    ]


def _of_listed(layers: Mapping[str, np.ndarray], rows: Sequence[CategoryRow], listed: np.ndarray) -> np.ndarray:
    """Bytes of some layers on some tiles, int64[rows, listed]."""
    return np.array([layers[row.name][listed] for row in rows], np.int64).reshape(len(rows), len(listed))


def _when(category: str) -> str:
    if category in ("gap", GAPS):
        return "unused"
    return "always" if category in (*FIXED, *ALWAYS_ROLES) else "at the peak"
