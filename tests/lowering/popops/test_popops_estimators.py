"""Cycles of indexing, reductions, searches and sorts against PopLibs' estimators, worked out by hand.

Source: graphcore/poplibs at 7eac0f2; each case names file and function, and its arithmetic is that of the source. A
launch, `Target.supervisor_overhead_cycles`, comes before each vertex here, which PopLibs does not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ipujax.lowering.popops.indexing.indexing_cycles import (
    gather_cycles,
    pooling_cycles,
    region_slice_cycles,
    scatter_cycles,
    slice_cycles,
)
from ipujax.lowering.popops.maps.rows import _compare_swap_cycles
from ipujax.lowering.popops.reductions.arg_reduce import _rows_search_cycles
from ipujax.lowering.popops.vertices.reducers import reduce_cycles
from ipujax.runtime.target import PRESETS

MK2 = PRESETS["mk2"]
LAUNCH = MK2.supervisor_overhead_cycles
WORKERS = 6


def count(n: float) -> np.ndarray:
    return np.asarray(n)


@pytest.mark.parametrize(
    ("lookups", "elements", "dtype", "worker"),
    [
        # popops/PerformanceEstimation.cpp, getMultiSliceCycleEstimate: 30, then 19 and the copy of a row each.
        (60, 40, np.float32, 30 + 10 * (19 + 20 * 2)),  # two floats in two cycles
        (60, 40, np.float16, 30 + 10 * (19 + 20 * 2)),  # as many halves
        (60, 3, np.float16, 30 + 10 * (19 + 2 * 2)),
        (60, 40, np.int8, 30 + 10 * (19 + 10 * 3)),  # four bytes in three
        (1, 480, np.float32, 30 + 19 + 40 * 2),  # splitSingleRegion: workers share the row
        (1, 3, np.float16, 30 + 19 + 2 * 2),  # but not one of half words
    ],
)
def test_gathers_copy_by_words(lookups: int, elements: int, dtype: Any, worker: int) -> None:
    cycles = gather_cycles(count(lookups), count(1.0), count(elements), dtype, MK2)
    assert cycles == LAUNCH + WORKERS * worker


def test_slices_of_bytes() -> None:
    """popops/popopsCycleEstimators.cpp, getDynamicSlice1DEstimate and DynamicSlice2D: is8bit."""
    shared = slice_cycles(count(5), count(240), np.int8, MK2)
    assert shared == 11 + 14 + WORKERS * (76 + (72 + 2 * 10) * 5)
    assert region_slice_cycles(count(5), count(240), np.int8, MK2) == pytest.approx(27 + (50 + 2 * 60) * 5 + 13, abs=4)


@pytest.mark.parametrize(
    ("kind", "elements", "dtype", "worker"),
    [
        # popops/PerformanceEstimation.cpp, getMultiUpdateOpCycleEstimate, with a scale: 10 of 600 are in range.
        ("add", 40, np.float32, 3 + 29 + 6 + 10 * (11 + 39 * 3) + 590 * 5),
        ("add", 40, np.float16, 3 + 30 + 4 + 10 * (12 + 1 + 19 * 3) + 590 * 5),
        ("add", 2, np.float32, 38 + 10 * 8 + 590 * 5),
        ("add", 4, np.float16, 37 + 10 * 9 + 590 * 5),
        # Without an operation: getMultiSliceCycleEstimate; 30 of a slice, which is 1 more than of an update.
        ("move", 40, np.float32, 30 + 10 * (19 + 20 * 2) + 590 * 8),
    ],
)
def test_every_worker_of_a_scatter_goes_through_all_indices(kind: Any, elements: int, dtype: Any, worker: int) -> None:
    """popops/DynamicSlice.cpp, updateFirstStageComputeCycles: workers share the rows of the table, not the updates."""
    share = count(0.1)  # of 120 rows a tile has 12, a worker 2
    cycles = scatter_cycles(kind, count(600), share, count(12), count(elements), dtype, MK2)
    assert cycles == LAUNCH + WORKERS * worker


def test_updates_of_half_words_are_added_in_cpp() -> None:
    """popops/PerformanceEstimation.cpp, getMultiUpdateOpCycleEstimate: subWordWritesRequired, 20 cycles an element."""
    cycles = scatter_cycles("add", count(6), count(1.0), count(6), count(3), np.float16, MK2, in_words=False)
    assert cycles == pytest.approx(LAUNCH + WORKERS * (37 + 13 + 20 * 3 + 5 * 5), abs=WORKERS * 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_largest_numbers_are_found_as_fast_as_sums(dtype: Any) -> None:
    """popops/reduction/CycleEstimationFunctions.cpp, getOpCyclesPerVector: 1; ReductionSpecial3.S has load and max."""
    outputs, reduced = np.array([8, 64, 4096]), np.array([300])
    largest, total = (reduce_cycles(monoid, dtype, outputs, reduced, MK2) for monoid in ("max", "add"))
    assert np.array_equal(largest, total)
    vectors = 4096 * dtype(0).itemsize // 8
    assert largest[-1] == pytest.approx(vectors * 300, rel=0.05)  # a vector a worker's cycle: a tile's, of six workers


def test_logic_of_bools_is_compiled() -> None:
    """popops/reduction/CycleEstimationFunctions.cpp, getCyclesEstimateForReduce: 24 and the operation, an element."""
    one, two = reduce_cycles("and", np.dtype(np.bool_), count(6), np.array([8_000, 16_000]), MK2)
    assert two - one == WORKERS * 25 * 8_000


@pytest.mark.parametrize(
    ("dtype", "rows", "length", "by_worker", "cycles"),
    [
        # popnn/popnnCycleEstimators.cpp, ReduceMaxClassGather: shares of at least 32, and of a sixth of a row.
        (np.float32, 5, 600, False, 5 * (9 + 6 * (17 + 99 * 3 + 13))),
        (np.float16, 5, 100, False, 5 * (9 + 6 * (17 + 31 * 3 + 13))),
        (np.int32, 1, 600, False, 9 + 6 * (22 + 25 + 100 * 6)),
        # ReduceMaxClassSparse, by one worker.
        (np.float32, 12, 30, True, 6 * 2 * (5 + 2 + 3 + 3 + 1 + 29 * 3 + 3 + 6 + 4)),
    ],
)
def test_searches(dtype: Any, rows: int, length: int, by_worker: bool, cycles: int) -> None:
    got = _rows_search_cycles(np.dtype(dtype), count(rows), count(length), MK2, rows_of_workers=by_worker)
    assert got == LAUNCH + cycles


@pytest.mark.parametrize(
    ("keys", "tensors", "dtype", "cycles"),
    [
        # popops/popopsCycleEstimators.cpp, CompareAndSwapKeyValueCycleEstimate: overhead, an item, and its first pass.
        (1, 1, np.float32, (40 + 17 + 3, 13)),
        (1, 1, np.int32, (42 + 22 + 3, 12)),
        (1, 2, np.float32, (23 + 4 + 11 + 8 - 11, 11)),  # the first pair takes 8
        (1, 2, np.int32, (43 + 30 + 5, 17)),
        (2, 2, np.float32, (45 + 30 + 6, 25)),
        (2, 2, np.int32, (49 + 30 + 7, 27)),
    ],
)
def test_pairs_of_a_sort(keys: int, tensors: int, dtype: Any, cycles: tuple[int, int]) -> None:
    assert _compare_swap_cycles(keys, tensors, np.dtype(dtype)) == cycles


@pytest.mark.parametrize(("element", "row"), [(3, 4), (5, 7)])
def test_pooling(element: int, row: int) -> None:
    """popnn/PerformanceEstimation.hpp, getPoolingCycles: of a maximum, and of its gradient.

    A worker has two rows of 20 results of 64 halves, 16 vectors each, in windows of 3 x 3.
    """
    lengths = [np.array([n]) for n in (1, 12, 20, 64)]
    cycles = pooling_cycles(np.dtype(np.float16), (1, 3, 3, 1), lengths, 9, element, MK2)
    start, cleared = 4 + 2 + 2 + 7 + 2 + 2 + 5 + 1 + 2 + 2 + 1 + 3 + 6 + 1, 2 * 16 * 20
    vectors = 2 * 9 * 16 * (2 + row + element * 19 + 1)
    assert cycles == pytest.approx(
        7 + 6 + WORKERS * (start + cleared + vectors + 2 * (13 + 9 * (20 + 1 + 1 + 3))), rel=0.02
    )
