"""Products with block-sparse matrices of a static pattern: sparse by dense, and blocks of dense by dense,
and softmax of rows.

Blocks are dealt to buckets, one a tile, by a grid whose cells have about equally many (`static_plan`). A bucket reads
its rows of `x`, and has the sums of its rows of blocks; sums of several bands of columns are added last, in the dtype
of the operands, as PopLibs does.

To plan, columns of blocks are cut into bands of about equal loads, and the blocks of a band, in order of rows, into
cells that differ by at most one block and may share a row, or into cells of whole rows. Numbers of bands and of parts
of the dense operand's columns are tried on the pattern itself.

Limits: no bucket has less room than the fullest.

The softmax of rows is over the elements that have values. Blocks of a row are put side by side, with −∞ behind rows of
fewer blocks than the longest, so that tiles share rows.
Limits: memory is that of rows as long as the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.arguments import whole_number
from ipujax.lowering.rules import take_rows
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.popsparse.cell_grids import (
    MOST_CELLS,
    CellRows,
    CellSizes,
    Grid,
    Span,
    balanced_spans,
    bucket_product,
    bucket_samples,
    estimated_cost,
    possible_column_parts,
    some_counts,
    whole_bucket,
)
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError


def static_softmax(pattern: BlockPattern, values: jax.Array) -> jax.Array:
    """The softmax of each row of a block-sparse matrix, elements without values left out; differentiable.

    Args:
        pattern: which blocks of the matrix have values.
        values: the blocks, [blocks, block, block], of float32 or float16.

    Returns:
        Blocks of the same shape and dtype; the elements of each row add up to 1. Sums are float32.

    Raises:
        ArgumentTypeError: another dtype, or `pattern` is not a BlockPattern.
        ArgumentValueError: a shape that does not match the pattern.
    """
    if not isinstance(pattern, BlockPattern):
        raise ArgumentTypeError("static_softmax: pattern", expected="a BlockPattern", got=type(pattern).__name__)
    if (dtype := getattr(values, "dtype", type(values).__name__)) not in (np.float32, np.float16):
        raise ArgumentTypeError("static_softmax: values", expected="an array of float32 or float16", got=dtype)
    expected = (pattern.num_blocks, pattern.block, pattern.block)
    if values.shape != expected:
        raise ArgumentValueError("static_softmax: values", expected=expected, got=values.shape)
    if not pattern.num_blocks:
        return values
    rows = _side_by_side(pattern, -np.inf, values).astype(jnp.float32)
    return _in_order(pattern, jax.nn.softmax(rows, (1, 3)).astype(values.dtype))


# Both are linear and each other's transpose, so that gradients of any order are views too.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _side_by_side(pattern: BlockPattern, fill: float, blocks: jax.Array) -> jax.Array:
    """[blocks, b, b] → [rows of blocks with values, most blocks of a row, b, b]."""
    numbers, _ = _blocks_of_rows(pattern)
    filled = jnp.concatenate([blocks, jnp.full((1, *blocks.shape[1:]), fill, blocks.dtype)])
    return take_rows(filled, numbers).reshape(*numbers.shape, *blocks.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_order(pattern: BlockPattern, rows: jax.Array) -> jax.Array:
    """The blocks of `_side_by_side` in the order of the pattern."""
    _, places = _blocks_of_rows(pattern)
    return take_rows(rows.reshape(-1, *rows.shape[2:]), places)


_side_by_side.defvjp(
    lambda pattern, fill, blocks: (_side_by_side(pattern, fill, blocks), None),
    lambda pattern, fill, _, g: (_in_order(pattern, g),),
)
_in_order.defvjp(
    lambda pattern, rows: (_in_order(pattern, rows), None),
    lambda pattern, _, g: (_side_by_side(pattern, 0.0, g),),
)


@remembered
def _blocks_of_rows(pattern: BlockPattern) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of each row that has any, int[rows, most blocks], and each block's place in this flat table.

    A row of fewer blocks is filled up with the number behind the last block, where callers append an empty one.
    """
    count = pattern.num_blocks
    order = np.lexsort((np.array(pattern.columns), np.array(pattern.rows)))
    _, row, lengths = np.unique(np.array(pattern.rows)[order], return_inverse=True, return_counts=True)
    numbers = np.full((len(lengths), int(lengths.max())), count)
    place = row * numbers.shape[1] + np.arange(count) - (np.cumsum(lengths) - lengths)[row]
    numbers.flat[place] = order
    return numbers, place[np.argsort(order)]


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """Buckets of equal size, one a cell, as large as the fullest; a free place has a slot past the last."""

    grid: Grid
    order: np.ndarray  # [cells, size], numbers of blocks
    place: np.ndarray  # [blocks], where each block is in `order`
    row: np.ndarray  # [cells, size], rows of blocks of the operand, as places in the cell
    slot: np.ndarray  # [cells, size], rows of blocks of the result, as places in the cell


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut a matrix into cells."""

    bands: list[Span]  # of columns of blocks
    row_parts: int  # cells of a band
    has_whole_rows: bool  # True if no cells of a band share a row; then their numbers of blocks differ more
    column_parts: int


@remembered
def static_plan(pattern: BlockPattern, most_cells: int, num_columns: int, dtype: Any) -> StaticPlan:
    """Return the plan of fewest estimated cycles, or of fewest bytes if no grid fits the memory of a tile."""
    cut, _ = min(
        possible_cuts(pattern, most_cells, num_columns), key=lambda choice: estimated_cost(choice[1], dtype, dtype)
    )
    return plan_of_cut(pattern, cut)


def possible_cuts(pattern: BlockPattern, most_cells: int, num_columns: int) -> Iterator[tuple[Cut, CellSizes]]:
    """Yield ways to cut the matrix, each with the sizes of its largest cell."""
    num_rows, num_reads = (n // pattern.block for n in pattern.shape)
    rows = np.array(pattern.rows)
    columns = np.array(pattern.columns)
    share = pattern.shape[0] * num_columns / most_cells
    for num_bands in some_counts(min(num_reads, most_cells)):
        bands = balanced_spans(np.bincount(columns, minlength=num_reads), num_bands)
        most_reads = max(stop - start for start, stop in bands)
        loads = np.bincount(_part(bands, columns) * num_rows + rows, minlength=num_bands * num_rows)
        loads = loads.reshape(num_bands, num_rows)
        for column_parts in possible_column_parts(num_columns, most_cells // num_bands):
            part = num_columns // column_parts
            for has_whole_rows, most_parts in ((False, int(loads.sum(1).max())), (True, num_rows)):
                row_parts = min(most_cells // (num_bands * column_parts), most_parts)
                most = _largest_cell(loads, row_parts, has_whole_rows)
                sizes = CellSizes(pattern.block, most.blocks, most_reads, most.writes, part, most.terms, share)
                yield Cut(bands, row_parts, has_whole_rows, column_parts), sizes


class _LargestCell(NamedTuple):
    """Most blocks and most rows of the result of a cell, and most cells that have blocks of one row."""

    blocks: int
    writes: int
    terms: int


def _largest_cell(loads: np.ndarray, row_parts: int, has_whole_rows: bool) -> _LargestCell:
    """Return the sizes that all cells get; `loads`: blocks of each row in each band, int[bands, rows]."""
    band, row = np.nonzero(loads)
    load = loads[band, row]
    if has_whole_rows:
        cell = band * row_parts + _parts_of_rows(loads, row_parts)[band, row]
        blocks = np.bincount(cell, weights=load).max()
        return _LargestCell(whole_bucket(int(blocks)), int(np.bincount(cell).max()), int(np.bincount(row).max()))
    total = loads.sum(1)
    stop = loads.cumsum(1)[band, row]
    first, last = (rank * row_parts // total[band] for rank in (stop - load, stop - 1))
    # A row is in the cells first … last of its band; one more place ends those of the last cell.
    starts, ends = (
        np.bincount(band * (row_parts + 1) + place, minlength=len(loads) * (row_parts + 1))
        for place in (first, last + 1)
    )
    writes = np.cumsum(starts - ends).max()
    terms = np.bincount(row, weights=last - first + 1).max()
    return _LargestCell(whole_bucket(-(-int(total.max()) // row_parts)), int(writes), int(terms))


def _parts_of_rows(loads: np.ndarray, row_parts: int) -> np.ndarray:
    """Return the part of whole rows that each row of a band is in, int[bands, rows]; parts have about equal loads."""
    spans = np.array([balanced_spans(band, row_parts) for band in loads])
    return np.array([np.repeat(np.arange(len(cuts)), cuts[:, 1] - cuts[:, 0]) for cuts in spans])


def plan_of_cut(pattern: BlockPattern, cut: Cut) -> StaticPlan:
    """Return the plan whose cells are those of a cut."""
    rows = np.array(pattern.rows)
    columns = np.array(pattern.columns)
    num_rows, num_reads = (n // pattern.block for n in pattern.shape)
    num_cells = len(cut.bands) * cut.row_parts
    band = _part(cut.bands, columns)
    order = np.lexsort((columns, rows, band))
    loads = np.bincount(band * num_rows + rows, minlength=len(cut.bands) * num_rows).reshape(-1, num_rows)
    if cut.has_whole_rows:
        part = _parts_of_rows(loads, cut.row_parts)[band, rows]
    else:
        total = loads.sum(1)
        rank = np.empty(len(rows), int)
        rank[order] = np.arange(len(rows)) - (np.cumsum(total) - total)[band[order]]
        part = rank * cut.row_parts // total[band]
    cell = band * cut.row_parts + part
    reads = CellRows.of_spans([span for span in cut.bands for _ in range(cut.row_parts)])
    writes = CellRows.of_blocks(cell, rows, num_cells)
    load = np.bincount(cell, minlength=num_cells)
    starts = np.cumsum(load) - load
    size = whole_bucket(int(load.max()))
    # A cell with fewer blocks has some of the next one, left out: consecutive blocks are one piece.
    numbers = np.minimum(starts[:, None] + np.arange(size), len(rows) - 1)
    blocks = order[numbers]
    is_block = np.arange(size) < load[:, None]
    slot = np.where(is_block, writes.place(cell, rows)[blocks], writes.width)
    row = np.where(is_block, reads.place(cell, columns)[blocks], 0)
    place = np.empty(len(rows), int)
    place[order] = cell[order] * size + np.arange(len(rows)) - starts[cell[order]]
    grid = Grid((num_rows, num_reads), reads, writes, len(cut.bands), cut.column_parts)
    return StaticPlan(grid, blocks, place, row, slot)


def _part(spans: list[Span], numbers: np.ndarray) -> np.ndarray:
    """Return the span that each number is in, int[numbers]."""
    return np.searchsorted([stop for _, stop in spans], numbers, side="right")


_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


def static_matmul(pattern: BlockPattern, values: jax.Array, x: jax.Array, *, buckets: int = MOST_CELLS) -> jax.Array:
    """The product of a block-sparse matrix with a dense one; differentiable in `values` and `x`, any number of times.

    Args:
        pattern: which blocks of the [m, k] matrix have values.
        values: the blocks, [blocks, block, block], of float32 or float16.
        x: dense matrix, [k, n], of the same dtype.
        buckets: most buckets that blocks and columns are cut into, one a tile.

    Returns:
        [m, n], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or `pattern` is not a BlockPattern.
        ArgumentValueError: shapes that do not match the pattern, or fewer than one bucket.
    """
    _check("static_matmul", pattern, buckets, values, x)
    blocks = (pattern.num_blocks, pattern.block, pattern.block)
    if values.shape != blocks or x.ndim != 2 or x.shape[0] != pattern.shape[1]:
        expected = f"values {blocks} and x ({pattern.shape[1]}, n)"
        raise ArgumentValueError("static_matmul: shapes", expected=expected, got=f"{values.shape} and {x.shape}")
    if not pattern.num_blocks or not x.shape[1]:
        return jnp.zeros((pattern.shape[0], x.shape[1]), x.dtype)
    return _product(pattern, buckets, values, x)


def static_sampled_matmul(
    pattern: BlockPattern, left: jax.Array, right: jax.Array, *, buckets: int = MOST_CELLS
) -> jax.Array:
    """The blocks of a pattern of the product of two dense matrices; differentiable any number of times.

    Args:
        pattern: which blocks of the [m, k] product are computed.
        left: dense matrix, [m, n], of float32 or float16.
        right: dense matrix, [n, k], of the same dtype.
        buckets: most buckets that blocks are cut into, one a tile.

    Returns:
        The blocks, [blocks, block, block], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or `pattern` is not a BlockPattern.
        ArgumentValueError: shapes that do not match the pattern, or fewer than one bucket.
    """
    _check("static_sampled_matmul", pattern, buckets, left, right)
    m, k = pattern.shape
    if left.ndim != 2 or right.ndim != 2 or left.shape != (m, right.shape[0]) or right.shape[1] != k:
        expected = f"({m}, n) and (n, {k})"
        raise ArgumentValueError(
            "static_sampled_matmul: shapes", expected=expected, got=f"{left.shape} and {right.shape}"
        )
    if not pattern.num_blocks or not left.shape[1]:
        return jnp.zeros((pattern.num_blocks, pattern.block, pattern.block), left.dtype)
    return _sampled(pattern, buckets, left, right.T)


def _check(name: str, pattern: Any, buckets: int, a: jax.Array, b: jax.Array) -> None:
    if not isinstance(pattern, BlockPattern):
        raise ArgumentTypeError(f"{name}: pattern", expected="a BlockPattern", got=type(pattern).__name__)
    dtypes = [getattr(x, "dtype", type(x).__name__) for x in (a, b)]
    if dtypes[0] != dtypes[1] or dtypes[0] not in _DTYPES:
        raise ArgumentTypeError(
            f"{name}: operands", expected="arrays, both float32, or both float16", got=f"{dtypes[0]}, {dtypes[1]}"
        )
    whole_number(f"{name}: buckets", buckets, 1, "a whole number, at least 1")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(pattern: BlockPattern, buckets: int, values: jax.Array, x: jax.Array) -> jax.Array:
    plan = static_plan(pattern, buckets, x.shape[1], values.dtype)
    return bucket_product(plan.grid, take_rows(values, plan.order), x, plan.row, plan.slot, values.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sampled(pattern: BlockPattern, buckets: int, left: jax.Array, right: jax.Array) -> jax.Array:
    """The blocks of a pattern of left · rightᵀ: [m, n], [k, n] → [blocks, block, block]."""
    plan = static_plan(pattern, buckets, left.shape[1], left.dtype)
    blocks = bucket_samples(plan.grid, pattern.block, left, right, plan.row, plan.slot)
    return take_rows(blocks, plan.place)


def _product_backward(pattern: BlockPattern, buckets: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, x = saved
    gradient = _product(pattern.transposed(), buckets, values.swapaxes(1, 2), g)
    return _sampled(pattern, buckets, g, x), gradient


def _sampled_backward(pattern: BlockPattern, buckets: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    left, right = saved
    return _product(pattern, buckets, g, right), _product(pattern.transposed(), buckets, g.swapaxes(1, 2), left)


def _saving(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pattern, buckets, a, b: (fun(pattern, buckets, a, b), (a, b))


_product.defvjp(_saving(_product), _product_backward)
_sampled.defvjp(_saving(_sampled), _sampled_backward)
