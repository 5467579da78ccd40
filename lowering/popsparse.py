"""Codelets of block-sparse products, and their cycles.

A vertex has a bucket: some blocks, and the rows of dense operands that they meet.

A block names its row of blocks of each dense operand by a number within the bucket. A number past the last row leaves
the block out. Sums of a vertex are float32; a vertex uses all workers of its tile.
Source: Li et al. 2023, "PopSparse: Accelerated block sparse matrix multiplication on IPU" (buckets, meta-information,
both forms).

Sampled products compute blocks by vector operations of one worker each, or by all workers on the AMP; the latter needs
both dense operands transposed on the tile, and a multiple of its inputs as columns. The faster method counts, as in
PopLibs. Source: poplibs `lib/popsparse/PerformanceEstimation.hpp`, `sparseDenseGradWElementwiseMultiply`,
`sparseDenseBlockMultiplyGradW`, `sparseDenseBlockMultiplyGradWAmp` and `getBlockTransposeGradWCycles`, with float
partials and one bucket of one subgroup. Rates of the AMP and of loads are those of Mk2; only the
number of workers follows the target.

Cycles are those of one tile, of a static and of a dynamic pattern. Input: rows of blocks and blocks of a bucket,
columns of the dense operand, as int64 arrays over any grid. Output: tile cycles, int64 arrays of that grid.

Source: poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`, `matmulComputeCycles` (static), and
`lib/popsparse/PerformanceEstimation.hpp`, `sparseDenseBlockMultiply` and `sparseDenseElementwiseMultiply` (dynamic).
Limits: rates of the AMP and of loads are those of Mk2; only workers and loads of weights follow the target.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.poplin.cycles import Count, ceil_div
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import dtype_name

# Static codelets, by bytes of an element and block: worker cycles for the vertex, and for each row of blocks.
_STATIC_WORKER_CYCLES = {
    (2, 4): (17, 1),
    (2, 8): (13, 1),
    (2, 16): (13, 1),
    (4, 4): (13, 1),
    (4, 8): (13, 4),
    (4, 16): (16, 4),
}
# Dynamic codelets with float partials: worker cycles for the vertex, for each block, and for each column of a block.
_DYNAMIC_WORKER_CYCLES = {
    (2, 4): (26, 19, 2), (2, 8): (20, 23, 4), (2, 16): (23, 24, 4),
    (4, 4): (26, 14, 4), (4, 8): (23, 23, 8),
}  # fmt: skip
# Rows of a block that a dynamic codelet with float partials multiplies at once, as it uses 8 AMP units: that of half,
# `Block16x16SparseDenseMatMul_half_float.S`, loads and multiplies 8 rows of a block, then the other 8. Only codelets of
# half partials use 16 units.
_ROWS_OF_PASS = 8


def static_cycles(target: Target, dtype: Any, block: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Tile cycles of a vertex that multiplies a bucket, the blocks of a sparse matrix on a tile, with a dense operand.

    The pattern of blocks is static: known when the program is compiled.
    Source of the numbers: poplibs `lib/popsparse/StaticMatMulPartitioner.cpp`, `matmulComputeCycles`.

    Args:
        target: the machine.
        dtype: dtype of the operands, half or float.
        block: rows and columns of a block.
        rows: rows of blocks in the bucket.
        blocks: blocks of the bucket.
        columns: columns of the dense operand.
    """
    size = np.dtype(dtype).itemsize
    round_cycles = issue_round_cycles(target)
    if block == 1:
        worker_rows = ceil_div(rows, target.worker_contexts)
        return np.asanyarray(round_cycles * _static_element_cycles(size, worker_rows, ceil_div(blocks, rows), columns))
    worker_start, row_start = _STATIC_WORKER_CYCLES[size, block]  # of the vertex, of each row of blocks
    load = ceil_div(block * block * size, target.amp_weight_load_bytes_per_cycle)
    worker = _static_block_cycles(size, block, ceil_div(columns, target.worker_contexts))
    # Of the supervisor: 30 for the vertex, 17 for each row of blocks, 16 for each block beside loading its weights.
    cycles = 30 + worker_start * round_cycles + rows * (row_start * round_cycles + 17)
    return np.asanyarray(cycles + blocks * (16 + load + worker * round_cycles))


def _static_block_cycles(size: int, block: int, columns: Count) -> Count:
    """Worker cycles of one block; `size` in bytes an element, `columns` are the worker's."""
    later = np.asarray(columns) - 1
    if size == 4:
        return {4: 12 + 4 * later, 8: 19 + 8 * later, 16: 2 * np.where(later == 0, 29, 37 + 8 * later)}[block]
    return {4: np.where(later < 2, 8, 14) + later, 8: 14 + 2 * later, 16: 19 + 4 * later}[block]


def _static_element_cycles(size: int, rows: Count, blocks: Count, columns: Count) -> Count:
    """Worker cycles of rows with `blocks` elements each; PopLibs has faster loops for some small numbers of columns."""
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
    """Tile cycles of `static_cycles` for a dynamic pattern, whose blocks are named by operands when the program runs.

    The bucket is full, and has one subgroup of blocks, all for this tile. Arguments are the machine; the dtype of the
    operands; rows and columns of a block; rows of blocks and blocks in the bucket; columns of the dense operand.

    Source of the numbers: poplibs `lib/popsparse/PerformanceEstimation.hpp`, `sparseDenseBlockMultiply` and
    `sparseDenseElementwiseMultiply`.
    """
    size = np.dtype(dtype).itemsize
    round_cycles = issue_round_cycles(target)
    if block == 1:
        worker_rows = ceil_div(rows, target.worker_contexts)
        worker = _dynamic_element_cycles(size, worker_rows, ceil_div(blocks, rows), columns)
        # Of the supervisor: 30 for the vertex, 47 to look at the subgroup and 46 for one of this tile.
        return np.asanyarray(30 + 47 + 46 + round_cycles * worker)
    # There are codelets of few block sizes: a larger block is several of theirs along each side.
    parts = codelet_parts(size, block)
    block, rows, blocks = block // parts, parts * np.asarray(rows), parts**2 * np.asarray(blocks)
    worker_start, block_start, column_cycles = _DYNAMIC_WORKER_CYCLES[size, block]
    passes = ceil_div(block, _ROWS_OF_PASS)  # over a block, each with weights of its own: 2 for blocks of 16, else 1
    load = ceil_div(block * block * size, target.amp_weight_load_bytes_per_cycle)
    worker_block = passes * (block_start + column_cycles * ceil_div(columns, target.worker_contexts))
    # Of the supervisor: 40 for the vertex, 46 to look at the subgroup and 56 for one of this tile, 2 for the rows; for
    # each block 3, and 12 a pass, beside loading its weights.
    supervisor = 40 + 46 + 56 + 2 + blocks * (load + 3 + 12 * passes)
    return np.asanyarray(supervisor + round_cycles * (worker_start + blocks * worker_block))


def _dynamic_element_cycles(size: int, rows: Count, blocks: Count, columns: Count) -> Count:
    """Cycles of a worker of a dynamic pattern on blocks of one element: loops over vectors of columns, then the others.

    Source of the numbers: poplibs `lib/popsparse/PerformanceEstimation.hpp`, `sparseDenseElementwiseMultiply`.

    Args:
        size: bytes of an element.
        rows: rows of the worker.
        blocks: blocks of a row.
        columns: columns of the dense operand; special loops are for one vector, or half of one.
    """
    blocks, columns = np.asarray(blocks), np.asarray(columns)
    if size == 4:
        fours = (columns >= 4) * (12 + columns // 4 * 3 * blocks)
        twos = (columns & 2 > 0) * (8 + columns // 2 * 2 * blocks)
        ones = (columns & 1) * (8 + 2 * blocks)
        general = fours + twos + ones + np.where(columns & 3, 3, 1)
        inner = np.where(columns == 4, 3 * blocks, np.where(columns == 2, 2 * blocks, general))
        return np.where(columns == 4, 25, 30) + rows * (np.where(columns == 2, 11, 13) + inner)
    eights = (columns >= 8) * (16 + columns // 8 * 3 * blocks)
    fours = (columns & 4 > 0) * (13 + 2 * blocks)
    ones = (columns & 3 > 0) * (11 + 2 * blocks * (columns & 3))
    general = eights + fours + ones
    inner = np.where(columns == 8, 3 * blocks, np.where(columns == 4, 2 * blocks, general))
    return np.where(columns == 8, 28, 33) + rows * (np.where(columns == 8, 15, 12) + inner)


_SUPERVISOR_CYCLES = 37 + 38 + 26  # start, and search of the tile's subgroup in its bucket
# By bytes of an element and block: worker cycles of the vertex, of each row of blocks, block, and column of a block.
_VECTOR_CYCLES = {
    (2, 4): (26, 9, 33, 6),
    (2, 8): (26, 9, 9 + 8 * 13, 24),
    (2, 16): (27, 9, 505, 96),
    (4, 4): (27, 9, 45, 12),
    (4, 8): (24, 7, 8 + 8 * 25, 48),
}
# Blocks of one element, by bytes: worker cycles of the vertex and of each row; for few columns also of each element.
_ELEMENT_WORKER_CYCLES = {2: (35, 8), 4: (34, 9)}
_SHORT_ELEMENT_CYCLES = {2: {8: (30, 11, 5), 4: (32, 10, 4)}, 4: {4: (30, 9, 5), 2: (32, 7, 4)}}
_AMP_COLUMNS = {2: 16, 4: 8}  # of one pass, by bytes of an element
# By bytes of an element and block: cycles of a pass to load weights, worker cycles of the first pass of a block and of
# each later one. For blocks of 4 it is slower for any columns.
_AMP_CYCLES = {(2, 8): (16, 27, 23), (2, 16): (32, 32, 28), (4, 8): (16, 33, 31)}
_AMP_WORKER_CYCLES = 5
_AMP_RUN_CYCLES = 8


def sampled_cycles(
    target: Target, dtype: Any, block: int, rows: Count, reads: Count, blocks: Count, columns: Count
) -> np.ndarray:
    """Tile cycles of a vertex that computes the blocks of a product of two dense matrices that a sparse pattern needs.

    Such products are the gradient of the blocks of a sparse matrix. The fewer cycles of vectors and of the AMP count.

    Args:
        target: the machine.
        dtype: of the operands, half or float.
        block: rows and columns of a block.
        rows: rows of blocks of the left operand.
        reads: rows of blocks of the right operand.
        blocks: blocks of the result.
        columns: columns of both operands, which products add over.
    """
    size = np.dtype(dtype).itemsize
    if block == 1:
        return _element_cycles(target, size, rows, blocks, columns)
    parts = codelet_parts(size, block)
    block, blocks = block // parts, parts**2 * np.asarray(blocks)
    rows, reads = (parts * np.asarray(count) for count in (rows, reads))
    vector = _vector_cycles(target, size, block, rows, blocks, columns)
    if (size, block) not in _AMP_CYCLES:
        return vector
    amp = _amp_cycles(target, size, block, rows, blocks, columns)
    transposed = sum(_transpose_cycles(target, size, block, operand, columns) for operand in (rows, reads))
    is_no_whole_pass = np.asarray(columns) % _AMP_COLUMNS[size] != 0  # the AMP takes whole passes alone
    return np.where(is_no_whole_pass, vector, np.minimum(vector, amp + transposed))


def _element_cycles(target: Target, size: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Cycles of `sampled_cycles` on blocks of one element of `size` bytes: a dot product over `columns` for each.

    `rows` are the rows of the left operand; each has some of the `blocks`. PopLibs has faster loops for some small
    numbers of columns.
    """
    columns = np.asarray(columns)
    if size == 4:
        element = 9 + columns // 2 + columns % 2
    else:
        element = 11 + columns // 4 + 3 * (columns // 2 % 2) + 4 * (columns % 2)
    start, row = _ELEMENT_WORKER_CYCLES[size]  # of the vertex, of each row
    worker = _worker_cycles(target, rows, blocks, start, row, element)
    for count, (short_start, short_row, short_element) in _SHORT_ELEMENT_CYCLES[size].items():
        short = _worker_cycles(target, rows, blocks, short_start, short_row, short_element)
        worker = np.where(columns == count, short, worker)
    return np.asanyarray(_SUPERVISOR_CYCLES + issue_round_cycles(target) * worker)


def _vector_cycles(target: Target, size: int, block: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Cycles by vector operations of workers that share rows and blocks."""
    start, row, block_start, column = _VECTOR_CYCLES[size, block]
    worker = _worker_cycles(target, rows, blocks, start, row, block_start + column * np.asarray(columns))
    return np.asanyarray(_SUPERVISOR_CYCLES + issue_round_cycles(target) * worker)


def _worker_cycles(
    target: Target, rows: Count, blocks: Count, start: int, row: int, block: int | np.ndarray
) -> np.ndarray:
    """Cycles of a worker: `start`, `row` for each of its rows of blocks, and `block` for each of its blocks."""
    workers = target.worker_contexts
    return np.asanyarray(start + row * ceil_div(rows, workers) + block * ceil_div(blocks, workers))


def _amp_cycles(target: Target, size: int, block: int, rows: Count, blocks: Count, columns: Count) -> np.ndarray:
    """Cycles of `sampled_cycles` on the AMP, the matrix unit, which takes `_AMP_COLUMNS` columns of a block a pass.

    `size` is the bytes of an element, `block` the rows and columns of a block, `rows` and `blocks` those of the vertex.
    """
    rows, blocks = np.asarray(rows), np.asarray(blocks)
    load, first_pass, later_pass = _AMP_CYCLES[size, block]
    passes = ceil_div(columns, _AMP_COLUMNS[size])
    worker = _AMP_WORKER_CYCLES + blocks * (first_pass + (passes - 1) * later_pass)
    # Of the supervisor: 23 for the first row and 8 for a later one; 32 for the first block of a row and 10 for a later
    # one; 15 for the first pass of a block and 4 for a later one, beside the loading and running of each.
    row_cycles = 23 + 8 * (rows - 1) + rows * (32 - 10)
    block_cycles = 10 + 15 + 4 * (passes - 1) + passes * (_AMP_RUN_CYCLES + load)
    supervisor = _SUPERVISOR_CYCLES + row_cycles + blocks * block_cycles
    return np.asanyarray(supervisor + issue_round_cycles(target) * worker)


def _transpose_cycles(target: Target, size: int, block: int, rows: Count, columns: Count) -> np.ndarray:
    """Cycles to transpose rows of blocks of a dense operand on the tile."""
    passes = ceil_div(columns, _AMP_COLUMNS[size])
    vector = 12 * block // 2 if size == 4 else 23 * block // 4
    # Of a worker: 34 once, 3 for each row, 3 for each pass beside its vectors; below, 18 of the supervisor. Source:
    # poplibs `getBlockTransposeGradWCycles`.
    worker = 34 + ceil_div(rows, target.worker_contexts) * (3 + passes * (3 + vector))
    return np.asanyarray(18 + issue_round_cycles(target) * worker)


_MULTIPLY_ADD = 2  # operations of one multiply-add


@remembered
def block_products(dtype: Any, index_dtype: Any, slots: int, out_dtype: Any, most_blocks: int | None = None) -> Codelet:
    """Codelet of a block-sparse matrix times a dense one: products of blocks, summed by the slot of each block.

    A slot is a row of blocks of the result. Fields: blocks [blocks, b, b], x [rows, b, n], row [blocks] and slot
    [blocks] of dtype `index_dtype`; out [slots, b, n].
    A block is left out by a slot past the last, whatever its row: its product is computed, and added to no slot.

    Args:
        dtype: dtype of the operands.
        index_dtype: integer dtype of the rows and slots that blocks name.
        slots: number of slots.
        out_dtype: dtype of the result; sums are float32.
        most_blocks: for a dynamic pattern the most blocks that are not left out; None for a static one.
    """

    def compute(blocks: jax.Array, x: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
        operands = jnp.take(x, row.astype(np.int32), axis=0, mode="clip")  # that of a block left out may be past x
        products = jnp.einsum("bmk,bkn->bmn", blocks, operands, preferred_element_type=jnp.float32)
        return jax.ops.segment_sum(products, slot.astype(np.int32), num_segments=slots).astype(out_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (blocks, _, _), (_, _, n), *_ = shapes = _not_empty(shapes)
        block = int(np.max(shapes[0][1]))
        if most_blocks is None:
            return static_cycles(target, dtype, block, np.minimum(slots, blocks), blocks, n)
        used = np.minimum(most_blocks, blocks)
        return dynamic_cycles(target, dtype, block, np.minimum(slots, used), used, n)

    fields = (
        Field("blocks", "in", dtype),
        Field("x", "in", dtype),
        Field("row", "in", index_dtype),
        Field("slot", "in", index_dtype),
        Field("out", "out", out_dtype),
    )
    name = f"popsparse::{'Static' if most_blocks is None else 'Dynamic'}BlockProducts<{dtype_name(dtype)}>"
    return Codelet(name, fields, compute, cycles, flops=_block_flops)


def _not_empty(shapes: BlockShapes) -> BlockShapes:
    """Shapes of fields with an element at least: the formulas of PopLibs have no vertex without blocks."""
    return tuple(tuple(np.maximum(1, length) for length in shape) for shape in shapes)


@remembered
def sampled_products(dtype: Any, index_dtype: Any, out_dtype: Any, most_blocks: int | None = None) -> Codelet:
    """Codelet of those blocks of a product of dense matrices that a sparse pattern has: the gradient of sparse blocks.

    Blocks that are left out are zero. Fields: left [slots, b, n], right [rows, b, n], slot and row [blocks] of dtype
    `index_dtype`; out [blocks, b, b].

    Args:
        dtype: dtype of the operands.
        index_dtype: integer dtype of the slots and rows that blocks name; a number past the last leaves the block out.
        out_dtype: dtype of the result; sums are float32.
        most_blocks: the most blocks that are not left out; None for all.
    """

    def compute(left: jax.Array, right: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
        operands = (
            jnp.take(y, numbers.astype(np.int32), axis=0, mode="fill", fill_value=0)
            for y, numbers in ((left, slot), (right, row))
        )
        return jnp.einsum("bmn,bkn->bmk", *operands, preferred_element_type=jnp.float32).astype(out_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (rows, _, n), (reads, _, _), *_, (blocks, _, _) = shapes = _not_empty(shapes)
        block = int(np.max(shapes[-1][1]))
        used = blocks if most_blocks is None else np.minimum(most_blocks, blocks)
        return sampled_cycles(target, dtype, block, np.minimum(rows, used), np.minimum(reads, used), used, n)

    fields = (
        Field("left", "in", dtype),
        Field("right", "in", dtype),
        Field("slot", "in", index_dtype),
        Field("row", "in", index_dtype),
        Field("out", "out", out_dtype),
    )
    return Codelet(f"popsparse::SampledProducts<{dtype_name(dtype)}>", fields, compute, cycles, flops=_sampled_flops)


def _block_flops(shapes: BlockShapes) -> np.ndarray:
    (blocks, m, k), (_, _, n), *_ = shapes
    return np.asanyarray(_MULTIPLY_ADD * blocks * m * k * n)


def _sampled_flops(shapes: BlockShapes) -> np.ndarray:
    (_, _, n), *_, (blocks, m, k) = shapes
    return np.asanyarray(_MULTIPLY_ADD * blocks * m * k * n)
