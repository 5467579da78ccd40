"""Cycles of sampled products, against PopLibs' estimates written out for one bucket of even rows."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.lowering.popsparse import sampled_cycles
from ipujax.runtime.target import preset

MK2 = preset("mk2")
WORKERS = 6
SUPERVISOR = 37 + 38 + 26


def cycles(dtype: type, block: int, rows: int, reads: int, blocks: int, columns: int) -> int:
    return int(sampled_cycles(MK2, dtype, block, rows, reads, blocks, columns))


@pytest.mark.parametrize(
    ("dtype", "columns", "start", "row", "element"),
    [
        (np.float16, 8, 28 + 2, 11, 5),
        (np.float16, 4, 28 + 4, 10, 4),
        (np.float16, 15, 28 + 7, 8, 11 + 3 + 3 + 4),
        (np.float32, 4, 28 + 2, 9, 5),
        (np.float32, 2, 28 + 4, 7, 4),
        (np.float32, 11, 28 + 6, 9, 9 + 5 + 1),
    ],
)
def test_elements(dtype, columns, start, row, element):
    """Source: `sparseDenseGradWElementwiseMultiply`; of 12 rows of 5 elements each worker has 2 rows."""
    worker = start + 2 * (row + 5 * element)
    assert cycles(dtype, 1, 12, 7, 60, columns) == SUPERVISOR + WORKERS * worker


@pytest.mark.parametrize(
    ("dtype", "block", "start", "row", "block_start", "column"),
    [
        (np.float16, 4, 26, 9, 33, 6),
        (np.float16, 8, 26, 9, 113, 24),
        (np.float16, 16, 27, 9, 505, 96),
        (np.float32, 4, 27, 9, 45, 12),
        (np.float32, 8, 24, 7, 208, 48),
    ],
)
def test_vectors_where_columns_are_no_multiple_of_the_inputs_of_the_amp(dtype, block, start, row, block_start, column):
    """Source: `sparseDenseBlockMultiplyGradW` with float partials; of 6 rows of 4 blocks each worker has one row."""
    worker = start + row + 4 * (block_start + 20 * column - 2 * column)
    assert cycles(dtype, block, 6, 3, 24, 18) == SUPERVISOR + WORKERS * worker


@pytest.mark.parametrize(
    ("dtype", "block", "inputs", "load", "first", "saved", "transposed"),
    [
        (np.float16, 8, 16, 16, 27, 4, 46),
        (np.float16, 16, 16, 32, 32, 4, 92),
        (np.float32, 8, 8, 16, 33, 2, 48),
    ],
)
def test_the_amp_with_many_columns(dtype, block, inputs, load, first, saved, transposed):
    """Source: `sparseDenseBlockMultiplyGradWAmp` and `getBlockTransposeGradWCycles`; 6 rows of 4 blocks, 12 reads."""
    passes = 8
    rows, each = 6, 4
    supervisor = SUPERVISOR + 23 + (rows - 1) * 8
    of_block = 15 + (passes - 1) * 4 + passes * (8 + load)
    supervisor += rows * (32 + (each - 1) * 10 + each * of_block)
    worker = 5 + rows * each * (first * passes - (passes - 1) * saved)
    transposes = sum(18 + WORKERS * (34 + n * (3 + passes * (3 + transposed))) for n in (1, 2))
    expected = supervisor + WORKERS * worker + transposes
    vector = cycles(dtype, block, rows, 12, rows * each, passes * inputs - 1)
    assert cycles(dtype, block, rows, 12, rows * each, passes * inputs) == expected < vector


@pytest.mark.parametrize("columns", [18, 64])
def test_float_blocks_of_16_are_four_of_8(columns):
    """Source: `getBlockDimensionsToUse`."""
    assert cycles(np.float32, 16, 6, 5, 24, columns) == cycles(np.float32, 8, 12, 10, 96, columns)
