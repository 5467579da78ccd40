"""Cycles of the codelets of block-sparse products, against counts of PopLibs' assembly."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.lowering.popsparse import dynamic_cycles
from ipujax.runtime.target import preset


def test_dynamic_blocks_of_16_in_half_take_two_passes() -> None:
    """Source: poplibs `Block16x16SparseDenseMatMul_half_float.S`, 8 of 16 rows of a block a pass."""
    mk2 = preset("mk2")
    one, two = (int(dynamic_cycles(mk2, np.float16, 16, 1, blocks, 60)) for blocks in (1, 2))
    passes, columns_of_worker, workers = 2, 10, 6
    weights = 16 * 16 * 2 // mk2.amp_weight_load_bytes_per_cycle
    assert two - one == weights + 3 + 12 * passes + workers * passes * (24 + 4 * columns_of_worker)


@pytest.mark.parametrize("columns", [4, 60])
def test_dynamic_float_blocks_of_16_are_four_of_8(columns: int) -> None:
    """Source: poplibs `FullyConnectedUtils.cpp`, `getBlockDimensionsToUse`."""
    mk2 = preset("mk2")
    large, small = (
        int(dynamic_cycles(mk2, np.float32, block, rows, blocks, columns))
        for block, rows, blocks in ((16, 3, 7), (8, 6, 28))
    )
    assert large == small
