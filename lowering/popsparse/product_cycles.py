"""Cycles of the codelets of block-sparse products on one tile, of a static and of a dynamic pattern.

Input: rows of blocks and blocks of a bucket, columns of the dense operand, as int64 arrays over any grid. Output: tile
cycles, int64 arrays of that grid.

Source: poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`, `matmulComputeCycles` (static), and
`lib/popsparse/PerformanceEstimation.hpp`, `sparseDenseBlockMultiply` and `sparseDenseElementwiseMultiply` (dynamic).
Limits: rates of the AMP and of loads are those of Mk2; only workers and loads of weights follow the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.lowering.poplin.cycles import Count, ceil_div
from ipujax.runtime.target import Target, issue_round_cycles

# Static codelets, by bytes of an element and block: worker cycles for the vertex, and for each row of blocks.
_STATIC_STARTS = {
    (2, 4): (17, 1),
    (2, 8): (13, 1),
    (2, 16): (13, 1),
    (4, 4): (13, 1),
    (4, 8): (13, 4),
    (4, 16): (16, 4),
}
# Dynamic codelets with float partials: worker cycles for the vertex, for each block, and for each column of a block.
_DYNAMIC_STARTS = {
    (2, 4): (26, 19, 2), (2, 8): (20, 23, 4), (2, 16): (23, 24, 4),
    (4, 4): (26, 14, 4), (4, 8): (23, 23, 8),
}  # fmt: skip
# AMP units of the dynamic codelet of half with float partials, `Block16x16SparseDenseMatMul_half_float.S`: it loads and
# multiplies 8 rows of a block, then the other 8. Only codelets of half partials use 16 units.
_HALF_UNITS = 8


def static_cycles(target: Target, dtype: Any, block: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Tile cycles of a bucket of a static pattern."""
    size = np.dtype(dtype).itemsize
    round_cycles = issue_round_cycles(target)
    if block == 1:
        worker_rows = ceil_div(rows, target.worker_contexts)
        return np.asanyarray(round_cycles * _static_element_cycles(size, worker_rows, ceil_div(blocks, rows), columns))
    start, row_start = _STATIC_STARTS[size, block]
    load = ceil_div(block * block * size, target.amp_weight_load_bytes_per_cycle)
    worker = _static_block_cycles(size, block, ceil_div(columns, target.worker_contexts))
    cycles = 30 + start * round_cycles + rows * (row_start * round_cycles + 17)
    return np.asanyarray(cycles + blocks * (16 + load + worker * round_cycles))


def _static_block_cycles(size: int, block: int, columns: Count) -> Count:
    """Worker cycles of one block."""
    later = np.asarray(columns) - 1
    if size == 4:
        return {4: 12 + 4 * later, 8: 19 + 8 * later, 16: 2 * np.where(later == 0, 29, 37 + 8 * later)}[block]
    return {4: np.where(later < 2, 8, 14) + later, 8: 14 + 2 * later, 16: 19 + 4 * later}[block]


def _static_element_cycles(size: int, rows: Count, blocks: Count, columns: Count) -> Count:
    """Worker cycles of rows with `blocks` elements each."""
    later, columns = np.asarray(blocks) - 1, np.asarray(columns)
    if size == 4:
        general = 31 + rows * (12 + columns // 4 * (10 + 3 * later) + (columns % 4 != 0) * (10 + 2 * later))
        four = 30 + rows * (6 + 3 * later)
        return np.where(columns == 2, 29 + rows * (5 + 2 * later), np.where(columns == 4, four, general))
    general = 33 + rows * (11 + columns // 8 * (14 + 3 * later) + (columns % 8 != 0) * (9 + 2 * later))
    eight = 31 + rows * (8 + 3 * later)
    return np.where(columns == 4, 31 + rows * (7 + 2 * later), np.where(columns == 8, eight, general))


def codelet_parts(size: int, block: int) -> int:
    """Return into how many parts codelets of dynamic patterns cut each side of a block; `size` in bytes an element."""
    # Blocks of 16 float elements have no codelet of their own. Source: poplibs `lib/popsparse/FullyConnectedUtils.cpp`,
    # `getBlockDimensionsToUse`.
    return 2 if (size, block) == (4, 16) else 1


def dynamic_cycles(target: Target, dtype: Any, block: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Tile cycles of a full bucket of a dynamic pattern, one subgroup of it for the tile."""
    size = np.dtype(dtype).itemsize
    round_cycles = issue_round_cycles(target)
    if block == 1:
        worker_rows = ceil_div(rows, target.worker_contexts)
        worker = _dynamic_element_cycles(size, worker_rows, ceil_div(blocks, rows), columns)
        return np.asanyarray(30 + 47 + 46 + round_cycles * worker)
    parts = codelet_parts(size, block)
    block, rows, blocks = block // parts, parts * np.asarray(rows), parts**2 * np.asarray(blocks)
    start, block_start, column_cycles = _DYNAMIC_STARTS[size, block]
    loads = ceil_div(block, _HALF_UNITS) if block == 16 else 1
    load = ceil_div(block * block * size, target.amp_weight_load_bytes_per_cycle)
    inner = loads * (block_start + column_cycles * ceil_div(columns, target.worker_contexts))
    return np.asanyarray(40 + 46 + 56 + 2 + blocks * (load + 3 + 12 * loads) + round_cycles * (start + blocks * inner))


def _dynamic_element_cycles(size: int, rows: Count, blocks: Count, columns: Count) -> Count:
    """Cycles of a worker on blocks of one element: loops over vectors of columns, then the columns that remain."""
    blocks, columns = np.asarray(blocks), np.asarray(columns)
    if size == 4:
        general = (columns >= 4) * (12 + columns // 4 * 3 * blocks) + (columns & 2 > 0) * (
            8 + columns // 2 * 2 * blocks
        )
        general = general + (columns & 1) * (8 + 2 * blocks) + np.where(columns & 3, 3, 1)
        inner = np.where(columns == 4, 3 * blocks, np.where(columns == 2, 2 * blocks, general))
        return np.where(columns == 4, 25, 30) + rows * (np.where(columns == 2, 11, 13) + inner)
    general = (columns >= 8) * (16 + columns // 8 * 3 * blocks) + (columns & 4 > 0) * (13 + 2 * blocks)
    general = general + (columns & 3 > 0) * (11 + 2 * blocks * (columns & 3))
    inner = np.where(columns == 8, 3 * blocks, np.where(columns == 4, 2 * blocks, general))
    return np.where(columns == 8, 28, 33) + rows * (np.where(columns == 8, 15, 12) + inner)
