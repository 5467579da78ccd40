"""Slow paths of elementwise vertices whose operands are repeated by rows of no whole number of vectors.

    an element for each row  The loop restarts at each row, at an address inside of a vector: PopLibs' C++ vertices
                             `BroadcastVectorOuterByRow1D<…, true>` and `…ByColumn1D<…, true>` take 25 worker cycles a
                             row and a partial vector at its end. Six workers share rows, or each row if it has a vector
                             for all of them.
    a row repeated           A vertex would load it inside of vectors, which PopLibs avoids: the operand is copied until
                             it is as long as the result, by the largest unit that divides a row.

Source: poplibs `popops/popopsCycleEstimators.cpp` (`BroadcastVectorOuterCycleEstimate`: 25 cycles a row, 7 where rows
are whole vectors), `popops/ElementWise.cpp` (`binaryOpBroadcastInnerVector` refuses rows of halves that are no whole
vectors; `binaryOpBroadcastOuterVector` chooses between rows and columns), `popops/codelets/broadcastCodelets.cpp`
(external code unless rows may be misaligned).
Limits: several operations in one vertex are taken to need what one of them needs. The 7 cycles of rows of whole vectors
are not counted, nor the copies by which PopLibs repeats rows of floats in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.layout import ceil_div, total_elements
from ipujax.runtime.exchange import atom_bytes_of, atom_cycles, atom_name
from ipujax.runtime.graph import Repetition, SlowPath, SlowReason
from ipujax.runtime.target import Target, issue_round_cycles, whole_cycles
from ipujax.runtime.tensor import VECTOR_BYTES, element_bytes

_ROW_CYCLES = 25  # of a worker, for each row that may begin inside of a vector


def row_slow_paths(
    repetitions: Sequence[tuple[Repetition | None, Any]],
    block: Sequence[np.ndarray],
    iteration: tuple[float, int],
    target: Target,
) -> list[SlowPath]:
    """Slow paths of an elementwise vertex whose operands are repeated by rows that are no whole vectors.

    An operand of one element a row makes the loop restart at each row; one that repeats a row is copied to full size
    before the loop, slowly if its rows are unaligned.

    Args:
        repetitions: how each operand is repeated (None for one that is not), and its dtype.
        block: lengths of the vertex's block along the axes of the index space, int64 arrays.
        iteration: cycles of one iteration of the vertex's loop, and the elements of the iteration.
        target: the machine.

    Returns:
        Each path with its reason, which reports show, and the cycles that it adds.
    """
    paths = []
    cycles, vector = iteration
    # Operands with an element a row whose rows are no whole vectors, by elements of a row.
    rows = {r.row: r for r, _ in repetitions if r is not None and r.repeats == "elements" and r.row % vector}
    if rows:  # one loop serves all operands: it restarts at the shortest of their rows
        row = min(rows)
        extra = _restarting_cycles(rows[row], block, cycles, vector, target)
        paths.append(SlowPath(SlowReason("C++", row, vector), extra))  # PopLibs' vertex for that is not in assembly
    elements = total_elements(block)
    for repetition, dtype in repetitions:
        if repetition is not None and repetition.repeats == "rows":
            width = element_bytes(dtype)
            atom = atom_bytes_of(repetition.row * width)  # the largest unit of copies that divides a row
            if atom < VECTOR_BYTES:
                what = f"repeated rows are copied {atom_name(atom)}"
                copying = np.ceil(atom_cycles(elements * width, atom)).astype(np.int64)
                paths.append(SlowPath(SlowReason(what, repetition.row, VECTOR_BYTES // width), copying))
    return paths


def _restarting_cycles(
    repetition: Repetition, block: Sequence[np.ndarray], cycles: float, vector: int, target: Target
) -> np.ndarray:
    """Tile cycles that a loop which restarts at each row takes more than one unbroken loop over a block.

    Args:
        repetition: the operand that has one element for each row.
        block: lengths of the block along the axes of the index space, int64 arrays.
        cycles: cycles of an iteration.
        vector: elements of an iteration.
        target: the machine.
    """
    elements = total_elements(block)
    columns = np.minimum(repetition.row, elements)  # elements of a row
    if repetition.axes:
        columns = total_elements([block[axis] for axis in repetition.axes])
    rows = ceil_div(elements, np.maximum(1, columns))
    workers = target.worker_contexts
    # Workers share short rows, or each row if it has a vector for all of them.
    by_row = columns < workers * vector
    outer: Any = np.where(by_row, ceil_div(rows, workers), rows)
    iterations: Any = np.where(by_row, ceil_div(columns, vector), ceil_div(ceil_div(columns, workers), vector))
    unbroken_iterations = ceil_div(ceil_div(elements, vector), workers)
    worker = outer * _ROW_CYCLES + whole_cycles((outer * iterations - unbroken_iterations) * cycles)
    return np.asanyarray(issue_round_cycles(target) * np.maximum(0, worker))
