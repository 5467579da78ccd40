"""Estimated cycles of a block-sparse product by its grid, for an IPU of Mk2, by which planners compare grids.

Input: sizes of the largest cell. Output: cycles of exchange, products, and the addition of terms; bytes if a tile lacks
the memory. Limits: a tile exchanges all its bytes at its own rate, and what all grids pay is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles
from ipujax.lowering.popsparse import dynamic_cycles, static_cycles
from ipujax.runtime.target import Target, preset

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
