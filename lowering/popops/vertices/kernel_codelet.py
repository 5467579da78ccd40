"""Codelets of kernels, with one field for each block that is read, for each result and for each reduction.

Input: a `Kernel`. Output: its codelet. A vertex goes through the elements of its block in one loop, which applies all
steps; then each reduction goes through them once more.

Source: PopLibs' `popops::map`, which makes one codelet of an expression (`popops/ExpressionGenerator.cpp`).
Limits: PopLibs' expressions have no reductions. The cost of one is that of a vertex that only reduces, without its
launch: an accumulation is in one bundle with a load there.

Operands that are repeated by rows of no whole number of vectors take slow paths:

    an element for each row  The loop restarts at each row, at an address inside of a vector: PopLibs' C++ vertices
                             `BroadcastVectorOuterByRow1D<…, true>` and `…ByColumn1D<…, true>` take 25 worker cycles a
                             row and a partial vector at its end. Six workers share rows, or each row if it has a vector
                             for all of them.
    a row repeated           A vertex would load it inside of vectors, which PopLibs avoids: the operand is copied until
                             it is as long as the result, by the largest unit that divides a row.

Source of these: poplibs `popops/popopsCycleEstimators.cpp` (`BroadcastVectorOuterCycleEstimate`: 25 cycles a row, 7
where rows are whole vectors), `popops/ElementWise.cpp` (`binaryOpBroadcastInnerVector` refuses rows of halves that are
no whole vectors; `binaryOpBroadcastOuterVector` chooses between rows and columns),
`popops/codelets/broadcastCodelets.cpp` (external code unless rows may be misaligned).
Limits: several operations in one vertex are taken to need what one of them needs. The 7 cycles of rows of whole
vectors are not counted, nor the copies by which PopLibs repeats rows of floats in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from ipujax.lowering.layout import ceil_div, total_elements
from ipujax.lowering.popops.vertices.emulation import kind_of
from ipujax.lowering.popops.vertices.kernel import Kernel, Step
from ipujax.lowering.popops.vertices.kernel_cycles import (
    OpCount,
    kernel_cycles,
    kernel_iteration,
    kernel_language,
    kernel_parts,
)
from ipujax.lowering.popops.vertices.reducers import LAUNCH_CYCLES, SELECTING, reduce_cycles, reduce_parts
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import atom_bytes_of, atom_cycles, atom_name
from ipujax.runtime.graph import BlockShapes, Codelet, Comparison, Field, Repetition, SlowPath, SlowReason
from ipujax.runtime.target import Target, issue_round_cycles, whole_cycles
from ipujax.runtime.tensor import VECTOR_BYTES, dtype_name, element_bytes

_CODE_BYTES = 400  # assumed: one assembly codelet with its dispatch, from the size of popops objects
_CODE_BYTES_PER_STEP = 16  # assumed: an instruction in the vector loop, and one for the remainder
_CODE_BYTES_PER_REDUCTION = 200  # assumed: a third of the codelet that only reduces
_STATE_BYTES = 16  # default of `Codelet.state_bytes`, which pays for three fields
_FREE_FIELDS = 3
_POINTER_BYTES = 4  # assumed: of each further field
_TESTING_EQUALITY = frozenset(("eq", "ne"))
_ORDERING = frozenset(("lt", "le", "gt", "ge", "max", "min"))
_MAX_TITLE_NAMES = 4  # operations that the name of a codelet lists


@remembered
def kernel_codelet(kernel: Kernel) -> Codelet:
    """Codelet whose vertices compute a kernel on their blocks of its index space.

    Its fields are those of the inputs, one for each result, and one for each reduction. The kernel must have an input
    of its own rank, or a result: their blocks tell how many elements of the index space a vertex has.
    """
    input_fields = kernel.fields
    block = _index_block(kernel)
    loop = _Loop(
        counts=tuple(_count(kernel, step) for step in kernel.steps),
        read=tuple(x.dtype for x in kernel.inputs if x.axes),
        stored=kernel.result_dtypes,
        scalars=sum(not x.axes for x in kernel.inputs),
    )
    written = (*kernel.result_dtypes, *kernel.reduced_dtypes)
    fields = [Field(f"in{field}", "in", kernel.inputs[number].dtype) for number, field in input_fields.items()]
    outs = ["out"] if len(written) == 1 else [f"out{n}" for n in range(len(written))]
    fields += [Field(name, "out", dtype) for name, dtype in zip(outs, written, strict=True)]
    computing = [step for step in kernel.steps if kind_of(step.op.name) != "move"]
    code_bytes = _CODE_BYTES + _CODE_BYTES_PER_STEP * max(0, len(kernel.steps) - 1)
    return Codelet(
        _title(kernel, loop.counts),
        tuple(fields),
        partial(_compute, kernel, block),
        partial(_cycles, kernel, block, loop),
        state_bytes=_STATE_BYTES + _POINTER_BYTES * max(0, len(fields) - _FREE_FIELDS),
        code_bytes=code_bytes + _CODE_BYTES_PER_REDUCTION * len(kernel.reductions),
        takes=() if block.is_input else ("shapes",),
        moves=not kernel.reductions and not computing,
        compares=_comparison(kernel),
        flops=len(computing) + len(kernel.reductions),
        parts=partial(_parts, kernel, block, loop),
        language=kernel_language(loop.counts),
        with_axes=partial(_codelet_with_axes, kernel),
        sources=kernel.sources,
        slow_paths=partial(_slow_paths, kernel, block, loop),
        in_place=True,
    )


@dataclass(frozen=True, slots=True)
class _IndexBlock:
    """Where a vertex finds the lengths of its block of the index space.

    Args:
        field: the field whose block has them: of an input of the kernel's rank if there is one, else the first result.
        is_input: whether the field is read.
        reach: in each dimension the elements by which the field's block is longer; empty where it is not.
    """

    field: int
    is_input: bool
    reach: tuple[int, ...] = ()

    def lengths(self, field_lengths: Sequence[Any]) -> Sequence[Any]:
        """Lengths of the index space's block, from those of the field's."""
        return [n - extra for n, extra in zip(field_lengths, self.reach, strict=True)] if self.reach else field_lengths

    def elements(self, shapes: BlockShapes) -> np.ndarray:
        """Elements of the index space's block, from the lengths of the blocks of all fields."""
        return total_elements(self.lengths(shapes[self.field]))


def _index_block(kernel: Kernel) -> _IndexBlock:
    input_fields = kernel.fields
    for number, field in input_fields.items():
        if len(kernel.inputs[number].axes) == kernel.rank:
            return _IndexBlock(field, is_input=True, reach=kernel.inputs[number].reach)
    return _IndexBlock(len(input_fields), is_input=False)


@dataclass(frozen=True, slots=True)
class _Loop:
    """The loop of a vertex over the elements of its block, which applies all steps.

    Args:
        counts: features of each step.
        read: dtypes of the inputs that it loads.
        stored: dtypes of the values that it stores.
        scalars: inputs of one element, loaded once before it.
    """

    counts: tuple[OpCount, ...]
    read: tuple[Any, ...]
    stored: tuple[Any, ...]
    scalars: int

    @property
    def is_run(self) -> bool:
        """False for a kernel that only reduces its inputs."""
        return bool(self.counts or self.stored)


def _compute(
    kernel: Kernel, block: _IndexBlock, *arrays: jax.Array, shapes: Sequence[tuple[int, ...]] = ()
) -> jax.Array | tuple[jax.Array, ...]:
    """Results and reductions of a block; `shapes`, those of the results, are given where no input has its lengths."""
    shape = block.lengths(arrays[block.field].shape) if block.is_input else shapes[0]
    results = kernel.evaluate(arrays, tuple(shape))
    return results[0] if len(results) == 1 else tuple(results)


def _cycles(kernel: Kernel, block: _IndexBlock, loop: _Loop, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Tile cycles of a vertex of a kernel: of one loop that applies all steps, then of a loop for each reduction.

    `shapes` are the lengths of the block of each field, as of `Codelet.cycles`.
    """
    elements = block.elements(shapes)
    total = np.asarray(0)
    if loop.is_run:
        loaded = (*loop.read, *_unaligned(kernel, target))
        total = total + kernel_cycles(loop.counts, loaded, loop.stored, elements, target, loop.scalars)
    for monoid, dtype, outputs in _reductions(kernel, shapes):
        total = total + reduce_cycles(monoid, dtype, outputs, elements // np.maximum(1, outputs), target)
    launches = loop.is_run + len(kernel.reductions)  # those counted above; the vertex is launched once
    return total - (launches - 1) * LAUNCH_CYCLES


def _parts(kernel: Kernel, block: _IndexBlock, loop: _Loop, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Parts that workers can do at once, of each block: the most of its loop and of its reductions."""
    elements = block.elements(shapes)
    largest = np.asarray(0)
    if loop.is_run:
        loaded = (*loop.read, *_unaligned(kernel, target))
        largest = kernel_parts(loop.counts, loaded, loop.stored, elements, target)
    for monoid, dtype, outputs in _reductions(kernel, shapes):
        largest = np.maximum(largest, reduce_parts(monoid, dtype, outputs, elements // np.maximum(1, outputs), target))
    return largest


def _reductions(kernel: Kernel, shapes: BlockShapes) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Monoid, dtype and number of results of each reduction, whose fields are behind those of inputs and results."""
    first_field = len(kernel.fields) + len(kernel.results)
    for reduction, dtype, shape in zip(kernel.reductions, kernel.reduced_dtypes, shapes[first_field:], strict=True):
        yield reduction.monoid, dtype, total_elements(shape)


def _slow_paths(
    kernel: Kernel,
    block: _IndexBlock,
    loop: _Loop,
    shapes: BlockShapes,
    repetitions: Sequence[Repetition | None],
    target: Target,
) -> Sequence[SlowPath]:
    """Loops slower than `_cycles` that a vertex of a kernel takes for inputs repeated by unaligned rows.

    `shapes` are the lengths of the block of each field, `repetitions` how each field is repeated along them, None for
    one that is not: see `Codelet.slow_paths`.
    """
    if not loop.is_run:  # a loop over single elements takes as long for rows of any alignment
        return []
    dtypes = (kernel.inputs[number].dtype for number in kernel.fields)
    rows = list(zip(repetitions, dtypes, strict=False))  # without the repetitions of results, which are the last
    iteration = kernel_iteration(loop.counts, loop.read, loop.stored, target)
    return row_slow_paths(rows, block.lengths(shapes[block.field]), iteration, target)


def _codelet_with_axes(kernel: Kernel, sources: Sequence[Sequence[int]]) -> Codelet | None:
    """Codelet of the kernel on other axes, see `Codelet.with_axes`."""
    other = kernel.with_axes(sources)
    return None if other is None else kernel_codelet(other)


def _comparison(kernel: Kernel) -> Comparison:
    """Kind of comparison of values in a kernel, as of `Codelet.compares`: "equality", "order" or "nothing".

    The engine computes compared values once, so that they round alike.
    """
    steps = [step for step in kernel.steps if len({x for x in step.operands if isinstance(x, int)}) > 1]
    names = {step.op.name for step in steps}
    if not names.isdisjoint(_TESTING_EQUALITY):
        return "equality"
    selects = any(reduction.monoid in SELECTING for reduction in kernel.reductions)
    return "order" if selects or not names.isdisjoint(_ORDERING) else "nothing"


def _unaligned(kernel: Kernel, target: Target) -> list[Any]:
    """Dtypes of the inputs that begin inside a vector: each takes a second load (assumed)."""
    parts = [x for x in kernel.inputs if x.begins]
    return [x.dtype for x in parts if x.begins[-1] * element_bytes(x.dtype) % target.vector_width_bytes]


def _count(kernel: Kernel, step: Step) -> OpCount:
    """Features of a step that its cycles depend on."""
    op = step.op
    tensors = [x for x in step.operands if isinstance(x, int)]
    # A comparison computes in the dtype of its operands, a cast of an integer in that of the integer.
    operand_dtype = kernel.dtype_of(tensors[-1] if tensors else step.operands[-1])
    from_integer = op.name == "convert_element_type" and not jax.numpy.issubdtype(operand_dtype, np.inexact)
    dtype = operand_dtype if op.out_dtype == np.bool_ or from_integer else op.out_dtype
    return OpCount(op.name, dtype, len(tensors), len(step.operands) - len(tensors))


def _title(kernel: Kernel, counts: Sequence[OpCount]) -> str:
    """Name of the codelet: that of its only step, else a map of the first steps and reductions."""
    names = [step.op.name.title().replace("_", "") for step in kernel.steps]
    names += [f"Reduce{reduction.monoid.title()}" for reduction in kernel.reductions]
    dtype = dtype_name(counts[-1].dtype if counts else kernel.inputs[-1].dtype)
    if len(names) == 1 and not kernel.reductions:
        return f"popops::{names[0]}<{dtype}>"
    omitted = len(names) - _MAX_TITLE_NAMES
    listed = [*names[:_MAX_TITLE_NAMES], f"{omitted} more"] if omitted > 1 else names
    return f"popops::Map<{dtype}>({', '.join(listed)})"


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
                reason = f"repeated rows are copied {atom_name(atom)}"
                copying = np.ceil(atom_cycles(elements * width, atom)).astype(np.int64)
                paths.append(SlowPath(SlowReason(reason, repetition.row, VECTOR_BYTES // width), copying))
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
