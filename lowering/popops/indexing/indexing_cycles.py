"""Cycle costs of slices, gathers and scatters on one tile.

Source: poplibs `popops/popopsCycleEstimators.cpp` and `popops/PerformanceEstimation.cpp` (reference machine.md A4,
§1.3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.lowering.popops.vertices.emulation import Kind, emulation
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes

# Dynamic slice and update slice, supervisor form.
_SLICE_SUPERVISOR_CYCLES = 14
_SLICE_WORKER_CYCLES = 39
_SLICE_ROW_CYCLES = 24
_SLICE_VECTOR_CYCLES = 2
# multiSlice: one index in range copies a row, one out of range costs the comparison only.
_GATHER_WORKER_CYCLES = 30
_GATHER_IN_RANGE_CYCLES = 19
_GATHER_VECTOR_CYCLES = 2
_GATHER_OUT_OF_RANGE_CYCLES = 8
# multiUpdate with an operation.
_SCATTER_WORKER_CYCLES = 33
_SCATTER_IN_RANGE_CYCLES = 12
_SCATTER_ATOM_CYCLES = 3
_SCATTER_OUT_OF_RANGE_CYCLES = 5


def vectors(elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Vector instructions for a number of elements."""
    return -(-elements * element_bytes(dtype) // target.vector_width_bytes)


def slice_cycles(rows: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Tile cycles of copying rows of contiguous elements from or to a dynamic index of a tensor; int64 arrays."""
    workers = target.worker_contexts
    copies = -(-vectors(row_elements, dtype, target) // workers)
    loop = (_SLICE_ROW_CYCLES + _SLICE_VECTOR_CYCLES * copies) * rows
    return target.supervisor_overhead_cycles + _SLICE_SUPERVISOR_CYCLES + workers * (_SLICE_WORKER_CYCLES + loop)


def gather_cycles(
    lookups: np.ndarray, share: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target
) -> np.ndarray:
    """Tile cycles of looking up rows; `share` is the expected part of the look-ups that fall in the tile's rows."""
    # `share` assumes that indices are uniform: rows of the tile over rows of the table.
    row = _GATHER_IN_RANGE_CYCLES + _GATHER_VECTOR_CYCLES * vectors(row_elements, dtype, target)
    return _by_range(_GATHER_WORKER_CYCLES, row, _GATHER_OUT_OF_RANGE_CYCLES, lookups, share, target)


def scatter_cycles(
    kind: Kind, lookups: np.ndarray, share: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target
) -> np.ndarray:
    """Tile cycles of combining rows with rows of a table by an operation of a kind; arguments as `gather_cycles`."""
    emulated = emulation(dtype, kind, target)
    row = _SCATTER_IN_RANGE_CYCLES + _SCATTER_ATOM_CYCLES * emulated.factor * vectors(row_elements, dtype, target)
    row = row + emulated.cast_cycles * row_elements
    return _by_range(_SCATTER_WORKER_CYCLES, row, _SCATTER_OUT_OF_RANGE_CYCLES, lookups, share, target)


def _by_range(
    start_cycles: int, in_range: np.ndarray, out_of_range: int, lookups: np.ndarray, share: np.ndarray, target: Target
) -> np.ndarray:
    workers = target.worker_contexts
    worker_lookups = -(-lookups // workers)
    hits = np.ceil(worker_lookups * share).astype(np.int64)
    loop = start_cycles + hits * in_range + (worker_lookups - hits) * out_of_range
    return np.asarray(target.supervisor_overhead_cycles + workers * loop, np.int64)
