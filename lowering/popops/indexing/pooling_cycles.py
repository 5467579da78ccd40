"""Cycle costs of pooling on one tile, forward and backward.

A worker goes through the elements of a window one after the other, and for each through a row of results, 64 bits of
channels at once.
Source: poplibs `popnn/PerformanceEstimation.hpp`, `getPoolingCycles`.
Limits: dtypes without vectors, and functions other than sums and extremes, are taken to cost the same; the row is the
last dimension that windows reach along, all behind it are channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.vertices.emulation import emulation
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import element_bytes

# Cycles of a worker for a vector of results and an element of their windows; beside these for a row of vectors, and for
# a row of all channels.
POOLING_CYCLES, GRADIENT_CYCLES, _VECTORS_ROW_CYCLES, _ROW_CYCLES = 3, 5, 5, 24
_START_CYCLES = 45  # of a worker


def pooling_cycles(
    dtype: Any, sizes: Sequence[int], lengths: Sequence[np.ndarray], depth: int, vector_cycles: int, target: Target
) -> np.ndarray:
    """Tile cycles of pooling, forward or backward.

    Args:
        dtype: dtype of the results.
        sizes: elements of a window along each dimension.
        lengths: those of the block of windows, int64 arrays.
        depth: elements of a window, of all operands.
        vector_cycles: cycles of a worker for a vector and an element of its window.
        target: the machine.
    """
    emulated = emulation(dtype, "add", target)
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    rows = -(-rows_of_vectors(dtype, sizes, lengths, target) // target.worker_contexts)
    row_dim = _row_dim(sizes)
    channel_vectors = -(-total_elements(lengths[row_dim + 1 :]) // vector)
    element = vector_cycles * emulated.factor + emulated.cast_cycles * vector
    # Results are cleared, a vector a cycle; then rows of vectors are added for each element of their windows.
    worker = rows * (lengths[row_dim] * (1 + depth * element) + depth * _VECTORS_ROW_CYCLES)
    worker = _START_CYCLES + worker + -(-rows // np.maximum(1, channel_vectors)) * depth * _ROW_CYCLES
    return np.asanyarray(target.supervisor_overhead_cycles + issue_round_cycles(target) * worker)


def _row_dim(sizes: Sequence[int]) -> int:
    """Dimension along which a worker goes through results: the last one that windows reach along."""
    return max((d for d, size in enumerate(sizes) if size > 1), default=0)


def rows_of_vectors(dtype: Any, sizes: Sequence[int], lengths: Sequence[np.ndarray], target: Target) -> np.ndarray:
    """Rows of 64 bits of channels of a block of results, which workers share."""
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    return np.asarray(-(-total_elements(lengths) // np.maximum(1, lengths[_row_dim(sizes)] * vector)))
