"""Cycle costs, on one tile, of the operations that read or write parts of a tensor: slices, gathers, scatters, pooling.

Source: poplibs `popops/popopsCycleEstimators.cpp` and `popops/PerformanceEstimation.cpp` (reference machine.md A4,
§1.3); `popops/DynamicSlice.cpp`, `updateFirstStageComputeCycles`, for how the workers of a scatter share a table;
`popops/codelets/asm/SliceCopyFunction.S` and `MultiUpdateOp.S` for what a loop loads and stores at once;
`popnn/PerformanceEstimation.hpp`, `getPoolingCycles`.
Limits of pooling: dtypes without vectors, and functions other than sums and extremes, are taken to cost the same; a row
of results is along the last dimension that windows reach along, all behind it are channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.vertices.elementwise_cycles import WIDTH_BYTES
from ipujax.lowering.popops.vertices.emulation import Kind, emulation
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import element_bytes

# Dynamic slice and update slice, supervisor form, "1d".
_SLICE_SUPERVISOR_CYCLES = 14
_SLICE_WORKER_CYCLES = 39
_SLICE_ROW_CYCLES = 24
_BYTES_SLICE_WORKER_CYCLES = 76
_BYTES_SLICE_ROW_CYCLES = 72
# The form of one worker, "2d": a vertex with one region, and a row of it; floats are loaded and stored at once.
_REGION_CYCLES = 23 + 13
_REGION_ROW_CYCLES = 31
_REGION_FLOAT_ROW_CYCLES = 29
_REGION_BYTES_ROW_CYCLES = 50
# multiSlice, and multiUpdate without an operation: one index in range copies a row, others cost the comparison only.
_COPY_WORKER_CYCLES = 30
_COPY_IN_RANGE_CYCLES = 19
_COPY_OUT_OF_RANGE_CYCLES = 8
# multiUpdate with an operation: an atom of the table and one of the update are loaded, and the result is stored. Of
# elements of a word and of less: a worker, an index in range beside its atoms, and rows that have a loop of their own.
_SCATTER_WORKER_CYCLES = 38, 37
_SCATTER_IN_RANGE_CYCLES = 8, 10
_SCATTER_SHORT_ROWS = {2: 8, 4: 16}, {2: 9}  # words of a row, and cycles of an index in range
_SCATTER_OUT_OF_RANGE_CYCLES = 5
_SUB_WORD_CYCLES = 20  # of an element of an update whose row is no whole number of words
# Pooling, and its gradient: cycles of a worker for a vector of results and an element of their windows.
POOLING_CYCLES = 3
GRADIENT_CYCLES = 5
_VECTORS_ROW_CYCLES = 5  # beside these, of a row of vectors
_ROW_CYCLES = 24  # and of a row of all channels
_POOLING_WORKER_CYCLES = 45
WORD_BYTES = 4  # the least that a tile stores


def vectors(elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Vector instructions for a number of elements."""
    return -(-elements * element_bytes(dtype) // target.vector_width_bytes)


def slice_cycles(rows: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Tile cycles of copying rows of contiguous elements from or to a dynamic index of a tensor; int64 arrays."""
    start = _SLICE_WORKER_CYCLES
    row_start = _SLICE_ROW_CYCLES
    units = vectors(row_elements, dtype, target)
    if element_bytes(dtype) == 1:  # copied by words
        start = _BYTES_SLICE_WORKER_CYCLES
        row_start = _BYTES_SLICE_ROW_CYCLES
        units = -(-row_elements // WORD_BYTES)
    loop = (row_start + whole_cycles(_access_cycles(1, target) * -(-units // target.worker_contexts))) * rows
    workers = issue_round_cycles(target) * (start + loop)
    return target.supervisor_overhead_cycles + _SLICE_SUPERVISOR_CYCLES + workers


def region_slice_cycles(rows: np.ndarray, row_elements: np.ndarray, dtype: Any, target: Target) -> np.ndarray:
    """Worker cycles of copying rows as `slice_cycles` does, by one worker alone; int64 arrays."""
    units = vectors(row_elements, dtype, target)
    vector = _access_cycles(1, target)
    row_cycles = _REGION_ROW_CYCLES
    if element_bytes(dtype) == 4:
        vector = larger(load_cycles(target.vector_width_bytes, target), store_cycles(target.vector_width_bytes, target))
        row_cycles = _REGION_FLOAT_ROW_CYCLES
    elif element_bytes(dtype) == 1:  # copied by words
        row_cycles = _REGION_BYTES_ROW_CYCLES
        units = -(-row_elements // WORD_BYTES)
    row = row_cycles + whole_cycles(vector * units)
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

    Workers share the look-ups; the row of a single one, if it is whole words.

    Args:
        lookups: number of look-ups that the tile goes through.
        share: expected part of the look-ups that fall in the tile's rows and so are copied: of uniform indices, the
            tile's part of all rows.
        row_elements: elements of a row.
        dtype: their dtype.
        target: the machine.
    """
    worker_lookups = -(-lookups // target.worker_contexts)
    hits = np.ceil(worker_lookups * share).astype(np.int64)
    return _copying_cycles(lookups, worker_lookups, hits, row_elements, dtype, target)


def scatter_cycles(
    kind: Kind,
    lookups: np.ndarray,
    share: np.ndarray,
    rows: np.ndarray,
    row_elements: np.ndarray,
    dtype: Any,
    target: Target,
    *,
    in_words: bool = True,
) -> np.ndarray:
    """Tile cycles of a vertex that combines updates with the rows of its block of a table to which indices point.

    Workers share the rows of the block, so that no two write one: each goes through the indices of all updates.

    Args:
        kind: kind of the operation that combines them; "move" for updates that replace the rows.
        lookups: number of updates that the tile goes through.
        share: expected part of them that fall in the tile's rows.
        rows: rows of the block.
        row_elements: elements of an update.
        dtype: their dtype.
        target: the machine.
        in_words: whether a row is combined by the word, else by the element, in C++, as rows of half a word must be.
    """
    rows = np.maximum(rows, 1)
    hits = np.ceil(lookups * share * -(-rows // target.worker_contexts) / rows).astype(np.int64)
    if kind == "move":
        return _copying_cycles(lookups, lookups, hits, row_elements, dtype, target)
    emulated = emulation(dtype, kind, target)
    narrow = element_bytes(dtype) < WORD_BYTES
    # Emulated elements are combined as those that they are unpacked to, which may be wider.
    width = max(element_bytes(dtype), WIDTH_BYTES[emulated.width])
    words = -(-row_elements * width // WORD_BYTES)
    by_word = whole_cycles(_access_cycles(2, target) * emulated.factor * words)
    hit_cycles = _SCATTER_IN_RANGE_CYCLES[narrow] + (by_word if in_words else _SUB_WORD_CYCLES * row_elements)
    for short, cycles in _SCATTER_SHORT_ROWS[narrow].items() if in_words and emulated.factor == 1 else ():
        hit_cycles = np.where(words == short, cycles, hit_cycles)
    hit_cycles = hit_cycles + emulated.cast_cycles * row_elements
    worker = _SCATTER_WORKER_CYCLES[narrow] + hits * hit_cycles + (lookups - hits) * _SCATTER_OUT_OF_RANGE_CYCLES
    return np.asanyarray(target.supervisor_overhead_cycles + issue_round_cycles(target) * worker)


def _copying_cycles(
    lookups: np.ndarray,
    worker_lookups: np.ndarray,
    hits: np.ndarray,
    row_elements: np.ndarray,
    dtype: Any,
    target: Target,
) -> np.ndarray:
    """Tile cycles of copying rows between a block of a table and look-ups.

    Args:
        lookups: number of look-ups that the tile goes through.
        worker_lookups: those of them that a worker goes through.
        hits: those of these that point to its rows, and so are copied.
        row_elements: elements of a row.
        dtype: their dtype.
        target: the machine.
    """
    width = element_bytes(dtype)
    # Elements of less than a word are copied a word at a time, of one byte with an instruction more.
    unit_bytes = target.vector_width_bytes if width >= WORD_BYTES else WORD_BYTES
    units = -(-row_elements * width // unit_bytes)
    is_shared = (lookups == 1) & (row_elements * width % WORD_BYTES == 0)
    units = np.where(is_shared, -(-units // target.worker_contexts), units)
    copying = whole_cycles((_access_cycles(1, target) + (width == 1)) * units)
    loop = hits * (_COPY_IN_RANGE_CYCLES + copying) + (worker_lookups - hits) * _COPY_OUT_OF_RANGE_CYCLES
    worker = _COPY_WORKER_CYCLES + np.where(is_shared, _COPY_IN_RANGE_CYCLES + copying, loop)
    return np.asanyarray(target.supervisor_overhead_cycles + issue_round_cycles(target) * worker)


def pooling_cycles(
    dtype: Any, sizes: Sequence[int], lengths: Sequence[np.ndarray], depth: int, vector_cycles: int, target: Target
) -> np.ndarray:
    """Tile cycles of pooling, forward or backward.

    A worker goes through the elements of a window one after the other, and for each through a row of results, 64 bits
    of channels at once.

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
    worker = _POOLING_WORKER_CYCLES + worker + -(-rows // np.maximum(1, channel_vectors)) * depth * _ROW_CYCLES
    return np.asanyarray(target.supervisor_overhead_cycles + issue_round_cycles(target) * worker)


def _row_dim(sizes: Sequence[int]) -> int:
    """Dimension along which a worker goes through results: the last one that windows reach along."""
    return max((d for d, size in enumerate(sizes) if size > 1), default=0)


def rows_of_vectors(dtype: Any, sizes: Sequence[int], lengths: Sequence[np.ndarray], target: Target) -> np.ndarray:
    """Rows of 64 bits of channels of a block of results, which workers share."""
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    return np.asarray(-(-total_elements(lengths) // np.maximum(1, lengths[_row_dim(sizes)] * vector)))
