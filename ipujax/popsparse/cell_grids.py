"""Grids of cells of a block-sparse matrix, their products, and estimated cycles, by which planners compare grids.

A cell has rows of blocks of the dense operand and of the result.

Columns of blocks are cut into bands, and in each band rows of blocks into parts; columns of the dense operand are
divided too. A cell is a part of a band: one tile has its blocks, its rows of the operand, and its sums, for one part
of the columns. A row of the result is the sum of its rows in the cells of all bands, which a second step adds up.

Input: loads (blocks of each row and column). Output: a `Grid`, and arrays in its order.
Source: Li et al. 2023, "PopSparse"; poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`.

Products are of buckets of blocks, for static and dynamic patterns. A bucket is [size] blocks of one cell; `row` and
`slot`, [cells, size], are their rows of blocks of the operand and of the result, by their places in the cell. A slot
past the last leaves a block out. Arrays of NumPy are constants, those of JAX meta-information that comes with the
blocks.

Cycles, for an IPU of Mk2, are those of exchange, products, and the addition of terms, and of bytes if a tile lacks the
memory. Limits: a tile exchanges all its bytes at its own rate, and what all grids pay is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.popops.vertices.reducers import reduce_cycles
from ipujax.lowering.popsparse import block_products, dynamic_cycles, sampled_products, static_cycles
from ipujax.lowering.rules import codelet_call_p, take_rows
from ipujax.runtime.target import Target, preset

Span = tuple[int, int]  # first row of blocks, and the one behind the last


_BUCKET_GRAIN = 4  # blocks: numbers of 16 bits in a vector, so that the lists of each bucket are whole vectors


def whole_bucket(blocks: int) -> int:
    """Return the blocks of a bucket with room for some: its lists begin and end with a vector."""
    return -(-blocks // _BUCKET_GRAIN) * _BUCKET_GRAIN


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
    """Add the sums of all cells by row of the result: cells of several bands of columns have terms of one row.

    [column parts · cells, rows of blocks, block, columns] → [m, n].
    """
    _, width, block, columns = sums.shape
    cells = sums.reshape(grid.column_parts, grid.cells, width, block, columns)
    by_row = cells.transpose(1, 2, 0, 3, 4).reshape(-1, grid.column_parts, block, columns)
    numbers = term_places(grid.writes, grid.shape[0])
    # The place behind the last stands for a missing term, zeros.
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


_SUMS = np.dtype(np.float32)


def bucket_product(
    grid: Grid, blocks: jax.Array, x: jax.Array, row: Any, slot: Any, terms: Any, most_blocks: int | None = None
) -> jax.Array:
    """Multiply blocks [cells · size, block, block] by x [k, n] → [m, n]; terms of several bands are of dtype `terms`.

    In a dynamic pattern at most `most_blocks` of a bucket are multiplied; None is a static pattern.
    """
    cells = grid.cells
    size = row.size // cells
    block = blocks.shape[-1]
    operands = rows_of_cells(grid, grid.reads, x, block)
    dtype = blocks.dtype if grid.bands == 1 else terms
    number = number_type(grid)
    sums = _call(
        block_products(blocks.dtype, number, grid.writes.width, dtype, most_blocks),
        grid.column_parts,
        [blocks.reshape(cells, size, block, block), operands, _numbers(row, number), _numbers(slot, number)],
        ((grid.writes.width, *operands.shape[2:]), dtype),
        {1},
    )
    return add_terms(grid, sums).astype(x.dtype)


def bucket_samples(
    grid: Grid, block: int, left: jax.Array, right: jax.Array, row: Any, slot: Any, most_blocks: int | None = None
) -> jax.Array:
    """Return the blocks [cells · size, block, block] of left [m, n] · right [k, n]ᵀ, zeros for slots past the last."""
    cells = grid.cells
    dtype = left.dtype
    size = row.size // cells
    rows = [rows_of_cells(grid, cell_rows, y, block) for cell_rows, y in ((grid.writes, left), (grid.reads, right))]
    number = number_type(grid)
    is_whole = grid.column_parts == 1
    samples = _call(
        sampled_products(dtype, number, dtype if is_whole else _SUMS, most_blocks),
        grid.column_parts,
        [*rows, _numbers(slot, number), _numbers(row, number)],
        ((size, block, block), dtype if is_whole else _SUMS),
        {0, 1},
    )
    blocks = samples.reshape(grid.column_parts, cells * size, block, block)
    return blocks[0] if is_whole else blocks.sum(0).astype(dtype)


def number_type(grid: Grid) -> np.dtype[Any]:
    """Dtype of the meta-information: the narrowest unsigned one, of at least 16 bits as in PopLibs."""
    return np.dtype(np.uint16 if max(grid.reads.width, grid.writes.width) < 1 << 16 else np.uint32)


def _numbers(numbers: Any, dtype: Any) -> Any:
    return jnp.asarray(numbers, dtype)


def _call(codelet: Any, parts: int, operands: list[Any], out: tuple[Any, Any], divided: set[int]) -> jax.Array:
    """Calls a codelet for each part of the columns and each cell; operands but those `divided` are common to parts."""
    rows = [x if n in divided else jnp.concatenate([x] * parts) for n, x in enumerate(operands)]
    params = {"codelet": codelet, "stacked": (True,) * len(rows), "num_vertices": rows[0].shape[0], "tiles": None}
    (result,) = codelet_call_p.bind(*rows, outs=(out,), **params)
    return jnp.asarray(result)


MK2: Target = preset("mk2")
MOST_CELLS = MK2.tiles_per_ipu
# A vertex has the offset of a row of the operand as 16 bits: in bytes where blocks have one element, else in 8 bytes a
# row of the block. Source: poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`, `getPartition`, and
# `FullyConnectedPlan.cpp`, `addMetaInfoRangeLimits`.
_MOST_OFFSET = np.iinfo(np.uint16).max
_OFFSET_UNIT_BYTES = 8
_MEMORY_SHARE = 0.6  # of a tile, for one product; the default of PopLibs' `availableMemoryProportion`


@dataclass(frozen=True, slots=True)
class CellSizes:
    """Sizes of the largest cell of a grid, and of the sums of all cells."""

    block: int
    blocks: int
    reads: int  # rows of blocks of the operand
    writes: int  # rows of blocks of the result that have blocks
    columns: int  # of the operand
    terms: int  # of the row of the result with most, one for each cell that has blocks of it
    result_share: float  # elements of the result a tile


def estimated_cost(
    sizes: CellSizes, dtype: Any, sums: Any, most_blocks: Sequence[int] | None = None
) -> tuple[bool, float]:
    """Return a key that orders plans: (False, cycles) of a plan that fits a tile, else (True, bytes of the cell).

    Args:
        sizes: sizes of the grid.
        dtype: dtype of the operands.
        sums: dtype of terms.
        most_blocks: of a dynamic pattern, the blocks that a cell multiplies in each step of propagation.
    """
    width = np.dtype(dtype).itemsize
    sums_width = np.dtype(sums).itemsize
    operand = sizes.reads * sizes.block * sizes.columns * width
    bucket = sizes.blocks * sizes.block**2 * width
    partials = sizes.writes * sizes.block * sizes.columns * sums_width
    cell_bytes = operand + bucket + partials
    offset_unit_bytes = 1 if sizes.block == 1 else _OFFSET_UNIT_BYTES * sizes.block
    if cell_bytes > _MEMORY_SHARE * MK2.bytes_per_tile or operand > _MOST_OFFSET * offset_unit_bytes:
        return True, cell_bytes
    formula = static_cycles if most_blocks is None else dynamic_cycles
    steps = most_blocks or [sizes.blocks]
    products = sum(
        int(formula(MK2, dtype, sizes.block, min(sizes.writes, blocks), blocks, sizes.columns)) for blocks in steps
    )
    exchange = (operand + len(steps) * bucket) / MK2.exchange_bytes_per_cycle
    if sizes.terms == 1:
        return False, exchange + products
    # A tile sends the terms that it has, and receives those of its share of the result.
    moved_terms = max(partials, sizes.result_share * sizes.terms * sums_width)
    adding = int(reduce_cycles("add", sums, np.array(ceil(sizes.result_share)), np.array(sizes.terms), MK2))
    superstep = MK2.internal_sync_cycles + MK2.exchange_startup_cycles + moved_terms / MK2.exchange_bytes_per_cycle
    return False, exchange + products + len(steps) * (superstep + adding)


def possible_column_parts(columns: int, limit: int) -> list[int]:
    """Return the numbers, up to `limit`, of equal parts that columns can be cut into."""
    return [n for n in range(1, min(columns, limit) + 1) if columns % n == 0]


def some_counts(limit: int) -> list[int]:
    """Return counts to try, the powers of √2 up to `limit` and `limit` itself: close together where they are small."""
    return sorted({min(round(2 ** (n / 2)), limit) for n in range(2 * limit.bit_length() + 1)})
