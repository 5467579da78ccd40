"""Products of buckets of blocks, on the cells of a grid, for static and dynamic patterns.

A bucket is [size] blocks of one cell; `row` and `slot`, [cells, size], are their rows of blocks of the operand and of
the result, by their places in the cell. A slot past the last leaves a block out. Arrays of NumPy are constants,
those of JAX meta-information that comes with the blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.popsparse import block_products, sampled_products
from ipujax.lowering.rules import codelet_call_p
from ipujax.popsparse.cell_grids import Grid, add_terms, rows_of_cells

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
