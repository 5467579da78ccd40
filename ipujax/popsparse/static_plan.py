"""Plan of the products of a static pattern: a grid whose bands and parts have about equally many blocks each.

Every choice of column parts, bands and parts of rows is tried on the pattern itself, so that the cost is that of its
fullest cell. Input: pattern, most cells, columns of the dense operand, dtype. Output: a `StaticPlan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.popsparse.cell_grids import Grid, balanced_spans, first_rows
from ipujax.popsparse.plan_costs import CellSizes, column_parts, estimated_cost, some_counts
from ipujax.runtime.cache import remembered


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """Buckets of equal size, one a cell, as large as the fullest; a free place has a slot past the last."""

    grid: Grid
    order: np.ndarray  # [cells, size], numbers of blocks
    place: np.ndarray  # [blocks], where each block is in `order`
    row: np.ndarray  # [cells, size], rows of blocks of the operand, counted from `first_rows` of the cell
    slot: np.ndarray  # [cells, size], rows of blocks of the result, counted from `first_rows` of the cell


@remembered
def static_plan(pattern: BlockPattern, most_cells: int, num_columns: int, dtype: Any) -> StaticPlan:
    """Return the plan of fewest estimated cycles, or of fewest bytes if no grid fits the memory of a tile."""
    share = pattern.shape[0] * num_columns / most_cells

    def cost(candidate: tuple[Grid, int]) -> tuple[bool, float]:
        grid, most_blocks = candidate
        columns = num_columns // grid.column_parts
        sizes = CellSizes(pattern.block, most_blocks, grid.most_reads, grid.most_writes, columns, grid.terms, share)
        return estimated_cost(sizes, dtype, dtype)

    grid, _ = min(_candidates(pattern, most_cells, num_columns), key=cost)
    return _with_blocks(pattern, grid)


def _candidates(pattern: BlockPattern, most_cells: int, num_columns: int) -> Iterator[tuple[Grid, int]]:
    """Yield grids, each with the number of blocks of its fullest cell."""
    num_rows, num_reads = (n // pattern.block for n in pattern.shape)
    rows = np.array(pattern.rows)
    columns = np.array(pattern.columns)
    for bands in some_counts(min(num_reads, most_cells)):
        spans = balanced_spans(np.bincount(columns, minlength=num_reads), bands)
        loads = np.bincount(_part(spans, columns) * num_rows + rows, minlength=bands * num_rows).reshape(bands, -1)
        for parts in column_parts(num_columns, most_cells // bands):
            row_parts = min(most_cells // (bands * parts), num_rows)
            writes = [balanced_spans(band, row_parts) for band in loads]
            starts = np.array([[start for start, _ in cuts] for cuts in writes]) + np.arange(bands)[:, None] * num_rows
            most_blocks = int(np.add.reduceat(loads.ravel(), starts.ravel()).max())
            reads = tuple(span for span in spans for _ in range(row_parts))
            yield Grid(reads, tuple(span for cuts in writes for span in cuts), bands, parts), most_blocks


def _with_blocks(pattern: BlockPattern, grid: Grid) -> StaticPlan:
    rows = np.array(pattern.rows)
    columns = np.array(pattern.columns)
    parts = len(grid.reads) // grid.terms
    band = _part(list(grid.reads[::parts]), columns)
    cell = np.empty(len(rows), int)
    for term in range(grid.terms):
        is_term = band == term
        cell[is_term] = term * parts + _part(list(grid.writes[term * parts : (term + 1) * parts]), rows[is_term])
    order = np.lexsort((columns, rows, cell))
    load = np.bincount(cell, minlength=len(grid.reads))
    starts = np.cumsum(load) - load
    size = int(load.max())
    # A cell with fewer blocks has some of the next one, left out: consecutive blocks are one piece.
    numbers = np.minimum(starts[:, None] + np.arange(size), len(rows) - 1)
    blocks = order[numbers]
    is_block = np.arange(size) < load[:, None]
    slot = np.where(is_block, rows[blocks] - first_rows(grid.writes)[:, None], grid.most_writes)
    row = np.where(is_block, columns[blocks] - first_rows(grid.reads)[:, None], 0)
    place = np.empty(len(rows), int)
    place[order] = cell[order] * size + np.arange(len(rows)) - starts[cell[order]]
    return StaticPlan(grid, blocks, place, row, slot)


def _part(spans: list[tuple[int, int]], numbers: np.ndarray) -> np.ndarray:
    """Return the span that each number is in, int[numbers]."""
    return np.searchsorted([stop for _, stop in spans], numbers, side="right")
