"""Cycle cost of reductions on one tile.

The cheaper of two forms: accumulating rows of outputs ("strided", poplibs `ReduceAdd` single input) and running along
contiguous partials of one output ("continuous"). Source: poplibs `getReduceCycleEstimate` and
`popops/reduction/CycleEstimationFunctions.cpp` (reference machine.md §1.2, §1.3). Rows of outputs that are no whole
vectors are not accumulated in strides (`popops/reduction/ReductionConnection.cpp`,
`getReductionVertexSpecialisation`): the default vertex fetches each partial by itself, and its remainder.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops.vertices.emulation import Kind, emulation
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, whole_cycles
from ipujax.runtime.tensor import element_bytes

LAUNCH_CYCLES = 33  # of the supervisor, once a vertex
_WORKER_CYCLES = 20
_OUTER_LOOP_CYCLES = 8  # 7 to 10 in the source
_CONTINUOUS_OUTPUT_CYCLES = 12
_CONTINUOUS_CYCLES = 17
_LEAST_VECTOR_CYCLES = 0.5  # poplibs' accumulators take 128 bits, two vectors, in one instruction (f32v4acc, f16v8acc)
# Cycles a vector beyond the instruction that loads and combines it, of sums, and of largest and smallest numbers
# (`popops/codelets/asm/ReductionSpecial3.S`, `ContinuousReductionNoAcc.S`): products are assumed to need one.
# Poplibs combines look-ups of blocks of rows ("only") by adding them up.
_EXTRA_CYCLES = {"mul": 1}
_LOGIC = frozenset(("and", "or", "xor"))
_LOGIC_CYCLES = 25  # an element: a codelet in C++ (`getCyclesEstimateForReduce`); poplibs has it for booleans only
_KINDS: dict[str, Kind] = {"mul": "multiply"}


def reduce_cycles(monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Tile cycles to reduce `reduced` elements into each of `outputs` results.

    Args:
        monoid: "add", "max", …
        dtype: dtype of operand and results.
        outputs: results of the vertex, int64 array.
        reduced: elements reduced into each result, int64 array.
    """
    # PopLibs takes the cheapest form.
    strided, by_output, by_part = _cycles_by_form(monoid, dtype, outputs, reduced, target)
    return np.minimum(strided, np.minimum(by_output, by_part))


def least_reduced_cycles(monoid: str, dtype: Any, target: Target) -> float:
    """Tile cycles to reduce one element, in whichever form and however it is split: its share of a vector."""
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    round_share = float(issue_round_cycles(target)) / target.worker_contexts
    return round_share * float(_vector_cycles(monoid, dtype, vector, target)) / vector


def smallest_reduction_cycles(monoid: str, dtype: Any, target: Target) -> float:
    """Tile cycles of the smallest vertex that reduces."""
    return float(reduce_cycles(monoid, dtype, np.asarray(1), np.asarray(1), target))


def reduce_parts(monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Parts that workers share in the cheapest form: rows of outputs, outputs, or the vectors reduced into each.

    `outputs` are the results of the vertex, `reduced` the elements reduced into each, int64 arrays.
    """
    strided, by_output, by_part = _cycles_by_form(monoid, dtype, outputs, reduced, target)
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    continuous = np.where(by_part < by_output, ceil_div(reduced, vector), outputs)
    return np.where(strided <= np.minimum(by_output, by_part), ceil_div(outputs, 2 * vector), continuous)


def default_vertex_cycles(dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Tile cycles to sum rows by PopLibs' default vertex, which takes rows of any length and alignment.

    Each of `reduced` rows, of `outputs` elements of a dtype, is added to the results; workers share them evenly.
    Source: `getCyclesEstimateForReduce` of the estimation functions, for sums.
    """
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))  # elements
    wide = 2 * vector  # elements of an accumulator
    levels = wide.bit_length() - 1  # powers of 2 below its width
    # The source's numbers. For each accumulator: zeroing, 2 cycles for each element of a vector that is stored, and its
    # loop; in the loop, for each row, a pointer, a load with its call, and an accumulation.
    start = 33 + 24 + 2 * levels
    worker = outputs // wide * (5 + (2 * vector + 1) + 1 + reduced * (10 + 6 + 3))
    # Outputs beyond whole accumulators: at most one remainder of each power of 2.
    for level in range(levels):
        has_remainder = outputs // 2**level % 2
        worker = worker + has_remainder * (5 + 2 * 2**level + reduced * (10 + 6))
    return np.asanyarray(
        LAUNCH_CYCLES + issue_round_cycles(target) * (start + ceil_div(worker, target.worker_contexts))
    )


def _vector_cycles(monoid: str, dtype: Any, vector: int, target: Target) -> Any:
    """Cycles of a worker to accumulate a vector of elements."""
    if monoid in _LOGIC:
        return _LOGIC_CYCLES * vector
    emulated = emulation(dtype, _KINDS.get(monoid, "add"), target)
    extra = _EXTRA_CYCLES.get(monoid, 0) + (1 if emulated.width in ("int", "byte", "double") else 0)
    loading = larger(_LEAST_VECTOR_CYCLES, load_cycles(target.vector_width_bytes, target))
    return emulated.factor * (loading + extra) + emulated.cast_cycles * vector


def _cycles_by_form(
    monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tile cycles of a reduction in each of PopLibs' forms: of `reduced` elements into each of `outputs` results.

    First strided: the elements of one result are a row apart, and whole vectors of neighbouring results accumulate.
    Then continuous, where the elements of a result are neighbours: workers share the results; or those of each result.
    """
    workers = target.worker_contexts
    round_cycles = issue_round_cycles(target)
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    vector_cycles = _vector_cycles(monoid, dtype, vector, target)
    accumulators = 2 * vector
    loads = accumulators // vector
    rows = ceil_div(ceil_div(outputs, accumulators), workers)
    row_cycles = whole_cycles(loads * vector_cycles * reduced) + _OUTER_LOOP_CYCLES
    strided = LAUNCH_CYCLES + round_cycles * (_WORKER_CYCLES + rows * row_cycles)
    output_cycles = whole_cycles(-(-reduced // vector) * vector_cycles)
    by_output = -(-outputs // workers) * (_CONTINUOUS_OUTPUT_CYCLES + output_cycles)
    # Then the parts are combined, one for each slot of a round: six workers are not slower than five.
    by_part = outputs * (_CONTINUOUS_OUTPUT_CYCLES + whole_cycles(output_cycles / workers)) + round_cycles
    start = LAUNCH_CYCLES + round_cycles * _CONTINUOUS_CYCLES
    return strided, start + round_cycles * by_output, start + round_cycles * by_part
