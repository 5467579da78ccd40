"""Cycle costs of slices, gathers and scatters on one tile.

Source: poplibs `popops/popopsCycleEstimators.cpp` and `popops/PerformanceEstimation.cpp` (reference machine.md A4,
§1.3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.lowering.popops.vertices.emulation import Kind, emulation
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import element_bytes

# Dynamic slice and update slice, supervisor form, "1d".
_SLICE_SUPERVISOR_CYCLES = 14
_SLICE_WORKER_CYCLES = 39
_SLICE_ROW_CYCLES = 24
# The form of one worker, "2d": a vertex with one region, and a row of it; floats are loaded and stored at once.
_REGION_CYCLES = 23 + 13
_REGION_ROW_CYCLES = 31
_REGION_FLOAT_ROW_CYCLES = 29
# multiSlice: one index in range copies a row, one out of range costs the comparison only.
_GATHER_WORKER_CYCLES = 30
_GATHER_IN_RANGE_CYCLES = 19
_GATHER_OUT_OF_RANGE_CYCLES = 8
# multiUpdate with an operation: an atom of the table and one of the update are loaded, and the result is stored.
_SCATTER_WORKER_CYCLES = 33
_SCATTER_IN_RANGE_CYCLES = 12
_SCATTER_OUT_OF_RANGE_CYCLES = 5


def vectors(elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Vector instructions for a number of elements."""
    return -(-elements * element_bytes(dtype) // target.vector_width_bytes)


def slice_cycles(rows: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Tile cycles of copying rows of contiguous elements from or to a dynamic index of a tensor; int64 arrays."""
    copies = -(-vectors(row_elements, dtype, target) // target.worker_contexts)
    loop = (_SLICE_ROW_CYCLES + whole_cycles(_access_cycles(1, target) * copies)) * rows
    workers = issue_round_cycles(target) * (_SLICE_WORKER_CYCLES + loop)
    return target.supervisor_overhead_cycles + _SLICE_SUPERVISOR_CYCLES + workers


def region_slice_cycles(rows: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Worker cycles of copying rows as `slice_cycles` does, by one worker alone; int64 arrays."""
    if element_bytes(dtype) == 4:
        vector = larger(load_cycles(target.vector_width_bytes, target), store_cycles(target.vector_width_bytes, target))
        row_cycles = _REGION_FLOAT_ROW_CYCLES
    else:
        vector, row_cycles = _access_cycles(1, target), _REGION_ROW_CYCLES
    row = row_cycles + whole_cycles(vector * vectors(row_elements, dtype, target))
    cycles: np.ndarray = _REGION_CYCLES + row * rows
    return cycles


def _access_cycles(loads: int, target: Target) -> Any:
    """Cycles to load a number of vectors and to store one: two copy a vector, three combine it with another."""
    loading = load_cycles(loads * target.vector_width_bytes, target)
    return loading + store_cycles(target.vector_width_bytes, target)


def gather_cycles(
    lookups: np.ndarray, share: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target
) -> np.ndarray:
    """Tile cycles of a vertex that copies the rows of its block of a table to which its indices point.

    Args:
        lookups: number of look-ups that the tile goes through.
        share: expected part of the look-ups that fall in the tile's rows and so are copied: of uniform indices, the
            tile's part of all rows.
        row_elements: elements of a row.
        dtype: their dtype.
        target: the machine.
    """
    copying = whole_cycles(_access_cycles(1, target) * vectors(row_elements, dtype, target))
    hit_cycles = _GATHER_IN_RANGE_CYCLES + copying
    return _lookup_cycles(_GATHER_WORKER_CYCLES, hit_cycles, _GATHER_OUT_OF_RANGE_CYCLES, lookups, share, target)


def scatter_cycles(
    kind: Kind, lookups: np.ndarray, share: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target
) -> np.ndarray:
    """Tile cycles of a vertex that combines updates with the rows of its block of a table to which indices point.

    Args:
        kind: kind of the operation that combines them.
        lookups: number of updates that the tile goes through.
        share: expected part of them that fall in the tile's rows.
        row_elements: elements of an update.
        dtype: their dtype.
        target: the machine.
    """
    emulated = emulation(dtype, kind, target)
    atoms = vectors(row_elements, dtype, target)
    updating = whole_cycles(_access_cycles(2, target) * emulated.factor * atoms)
    hit_cycles = _SCATTER_IN_RANGE_CYCLES + updating + emulated.cast_cycles * row_elements
    return _lookup_cycles(_SCATTER_WORKER_CYCLES, hit_cycles, _SCATTER_OUT_OF_RANGE_CYCLES, lookups, share, target)


def _lookup_cycles(
    start_cycles: int, hit_cycles: np.ndarray, miss_cycles: int, lookups: np.ndarray, share: np.ndarray, target: Target
) -> np.ndarray:
    """Tile cycles of workers that share look-ups, of which a share hits rows of the tile."""
    worker_lookups = -(-lookups // target.worker_contexts)
    hits = np.ceil(worker_lookups * share).astype(np.int64)
    loop = start_cycles + hits * hit_cycles + (worker_lookups - hits) * miss_cycles
    return np.asanyarray(target.supervisor_overhead_cycles + issue_round_cycles(target) * loop)
