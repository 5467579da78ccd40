"""Grids of cells of a block-sparse matrix: the rows of blocks of the dense operand and of the result of each cell.

Columns of blocks are cut into bands, and in each band rows of blocks into parts; columns of the dense operand are
divided too. A cell is a part of a band: one tile has its blocks, its rows of the operand, and its sums, for one part
of the columns. Bands are the terms of a sum that a second step adds up.

Input: loads (blocks of each row and column). Output: a `Grid`, and arrays in its order.
Source: Li et al. 2023, "PopSparse"; poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.rules import take_rows_p

Span = tuple[int, int]  # first row of blocks, and the one behind the last


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells in order of terms, those of a term in order of rows of the result, which they cover once."""

    reads: tuple[Span, ...]  # rows of blocks of the operand that a cell reads
    writes: tuple[Span, ...]  # rows of blocks of the result that it has sums of
    terms: int
    column_parts: int  # parts of the columns of the operand

    @property
    def most_reads(self) -> int:
        """Rows of the operand of the largest cell."""
        return max(stop - start for start, stop in self.reads)

    @property
    def most_writes(self) -> int:
        """Rows of the result of the largest cell."""
        return max(stop - start for start, stop in self.writes)

    def transposed(self) -> Grid:
        """The grid of the transposed matrix, if all bands have the same parts of rows."""
        parts = len(self.reads) // self.terms
        order = [term * parts + part for part in range(parts) for term in range(self.terms)]
        reads, writes = (tuple(side[n] for n in order) for side in (self.writes, self.reads))
        return Grid(reads, writes, parts, self.column_parts)


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


def first_rows(spans: tuple[Span, ...]) -> np.ndarray:
    """Return the first row of blocks that each cell reads: all cells read as many rows as the longest span has."""
    # A shorter span is read with some rows beside it, which no block of the cell uses.
    width = max(stop - start for start, stop in spans)
    count = max(stop for _, stop in spans)
    return np.array([min(start, count - width) for start, _ in spans])


def rows_of_cells(grid: Grid, spans: tuple[Span, ...], x: jax.Array, block: int) -> jax.Array:
    """Return the rows of blocks of each span, for each part of the columns.

    [m, n] → [column parts · cells, rows of blocks, block, columns of a part].
    """
    width = max(stop - start for start, stop in spans)
    columns = x.shape[1] // grid.column_parts
    parts = x.reshape(-1, block, grid.column_parts, columns).transpose(2, 0, 1, 3)
    numbers = (
        np.arange(grid.column_parts)[:, None, None] * parts.shape[1] + first_rows(spans)[:, None] + np.arange(width)
    )
    rows = take(parts.reshape(-1, block, columns), numbers)
    return rows.reshape(grid.column_parts * len(spans), width, block, columns)


def add_terms(grid: Grid, sums: jax.Array) -> jax.Array:
    """Add the partial results of all bands: [column parts · cells, rows of blocks, block, columns] → [m, n]."""
    _, slots, block, columns = sums.shape
    cells = sums.reshape(grid.column_parts, len(grid.writes), slots, block, columns)
    by_row = cells.transpose(1, 2, 0, 3, 4).reshape(-1, grid.column_parts, block, columns)
    starts = np.arange(len(grid.writes)) * slots - first_rows(grid.writes)
    numbers = np.concatenate([first + np.arange(*span) for first, span in zip(starts, grid.writes, strict=True)])
    terms = take(by_row, numbers).reshape(grid.terms, -1, grid.column_parts, block, columns)
    total = terms[0] if grid.terms == 1 else jax.lax.reduce(terms, np.zeros((), terms.dtype), jax.lax.add, (0,))
    return total.transpose(0, 2, 1, 3).reshape(-1, grid.column_parts * columns)


def take(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """Return rows of an array by constant numbers, as a view."""
    (view,) = take_rows_p.bind(x, rows=tuple(rows.ravel().tolist()))
    return jnp.asarray(view)
