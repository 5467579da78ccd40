"""Grids of cells of a block-sparse matrix: the rows of blocks of the dense operand and of the result of each cell.

Columns of blocks are cut into bands, and in each band rows of blocks into parts; columns of the dense operand are
divided too. A cell is a part of a band: one tile has its blocks, its rows of the operand, and its sums, for one part
of the columns. A row of the result is the sum of its rows in the cells of all bands, which a second step adds up.

Input: loads (blocks of each row and column). Output: a `Grid`, and arrays in its order.
Source: Li et al. 2023, "PopSparse"; poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.rules import take_rows

Span = tuple[int, int]  # first row of blocks, and the one behind the last


@dataclass(frozen=True, slots=True, eq=False)
class CellRows:
    """Rows of blocks of a dense matrix that each cell has, as many for all cells."""

    rows: np.ndarray  # int[cells, width], each cell's in order
    is_used: np.ndarray  # bool[cells, width], False for a row that only makes up the width

    @classmethod
    def of_spans(cls, spans: Sequence[Span]) -> CellRows:
        """Return the rows of a span for each cell; those behind or before it make up the width of the longest span."""
        start, stop = np.array(spans).T[:, :, None]
        width = int((stop - start).max())
        rows = np.minimum(start, stop.max() - width) + np.arange(width)
        return cls(rows, (rows >= start) & (rows < stop))

    @classmethod
    def of_blocks(cls, cell: np.ndarray, row: np.ndarray, count: int) -> CellRows:
        """Return the rows in which each of `count` cells has blocks; `cell` and `row` are those of each block."""
        limit = int(row.max()) + 1
        cells, rows = np.divmod(np.unique(cell * limit + row), limit)
        load = np.bincount(cells, minlength=count)
        order = np.arange(load.max())
        first = np.cumsum(load) - load
        numbers = first[:, None] + np.minimum(order, load[:, None] - 1)
        return cls(rows[numbers], order < load[:, None])

    @property
    def width(self) -> int:
        """Rows of blocks of each cell."""
        return self.rows.shape[1]

    @property
    def last(self) -> np.ndarray:
        """Last row of each cell, int[cells]."""
        return np.asarray(np.where(self.is_used, self.rows, -1).max(1))

    def place(self, cell: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the places, counted from 0, of rows among the rows of cells: int[blocks], as `cell` and `row`."""
        limit = int(self.rows.max()) + 1
        flat = np.flatnonzero(self.is_used)
        keys = (np.arange(len(self.rows))[:, None] * limit + self.rows).ravel()[flat]
        return flat[np.searchsorted(keys, cell * limit + row)] % self.width

    def ordered(self, order: Sequence[int]) -> CellRows:
        """Return the rows of the cells with the numbers `order`, in that order."""
        return CellRows(self.rows[np.asarray(order)], self.is_used[np.asarray(order)])


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Cells in order of bands."""

    shape: tuple[int, int]  # of the matrix, in blocks
    reads: CellRows  # rows of blocks of the operand
    writes: CellRows  # rows of blocks of the result
    bands: int
    column_parts: int  # parts of the columns of the operand

    @property
    def cells(self) -> int:
        """Cells of one part of the columns."""
        return len(self.reads.rows)

    def transposed(self) -> Grid:
        """The grid of the transposed matrix, if all bands have the same parts of rows."""
        parts = self.cells // self.bands
        order = [band * parts + part for part in range(parts) for band in range(self.bands)]
        writes, reads = (cell_rows.ordered(order) for cell_rows in (self.reads, self.writes))
        return Grid(self.shape[::-1], reads, writes, parts, self.column_parts)


def even_spans(length: int, parts: int) -> list[Span]:
    """Parts of a length that differ by at most one."""
    cuts = [length * n // parts for n in range(parts + 1)]
    return list(pairwise(cuts))


def balanced_spans(loads: np.ndarray, parts: int) -> list[Span]:
    """Parts of a range with about the same load each; none is empty."""
    length = len(loads)
    total = np.concatenate([[0], np.cumsum(loads)])
    cuts = np.searchsorted(total, total[-1] * np.arange(1, parts) / parts)
    cuts = np.maximum.accumulate(np.maximum(cuts - np.arange(1, parts), 0)) + np.arange(1, parts)
    cuts = np.minimum(cuts, length - parts + np.arange(1, parts))
    bounds = [0, *cuts.tolist(), length]
    return list(pairwise(bounds))


def rows_of_cells(grid: Grid, cell_rows: CellRows, x: jax.Array, block: int) -> jax.Array:
    """Return the rows of blocks of each cell, for each part of the columns.

    [m, n] → [column parts · cells, rows of blocks, block, columns of a part].
    """
    columns = x.shape[1] // grid.column_parts
    parts = x.reshape(-1, block, grid.column_parts, columns).transpose(2, 0, 1, 3)
    numbers = np.arange(grid.column_parts)[:, None, None] * parts.shape[1] + cell_rows.rows
    rows = take_rows(parts.reshape(-1, block, columns), numbers)
    return rows.reshape(grid.column_parts * grid.cells, cell_rows.width, block, columns)


def add_terms(grid: Grid, sums: jax.Array) -> jax.Array:
    """Add the sums of all cells by row of the result.

    [column parts · cells, rows of blocks, block, columns] → [m, n].
    """
    _, width, block, columns = sums.shape
    cells = sums.reshape(grid.column_parts, grid.cells, width, block, columns)
    by_row = cells.transpose(1, 2, 0, 3, 4).reshape(-1, grid.column_parts, block, columns)
    numbers = term_places(grid.writes, grid.shape[0])
    if (numbers == len(by_row)).any():
        by_row = jnp.concatenate([by_row, jnp.zeros((1, *by_row.shape[1:]), by_row.dtype)])
    terms = take_rows(by_row, numbers).reshape(*numbers.shape, grid.column_parts, block, columns)
    total = terms[0] if len(terms) == 1 else jax.lax.reduce(terms, np.zeros((), terms.dtype), jax.lax.add, (0,))
    return total.transpose(0, 2, 1, 3).reshape(-1, grid.column_parts * columns)


def term_places(cell_rows: CellRows, num_rows: int) -> np.ndarray:
    """Return the place, cell · width + place in the cell, of each term of a row: int[most terms, num_rows].

    A row of fewer terms than the one of most is filled up with the place behind the last.
    """
    places = np.flatnonzero(cell_rows.is_used)
    rows = cell_rows.rows.ravel()[places]
    order = np.argsort(rows, kind="stable")
    count = np.bincount(rows, minlength=num_rows)
    term = np.arange(len(rows)) - (np.cumsum(count) - count)[rows[order]]
    numbers = np.full((max(1, int(count.max())), num_rows), cell_rows.is_used.size)
    numbers[term, rows[order]] = places[order]
    return numbers
