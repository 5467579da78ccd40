"""Row functions that are a JAX primitive on each block: any reduction, approximate top-k, changes of width.

Input and output as `rows.by_rows`, which cuts everything but the row. A reduction by a user's own function need not be
associative, so that a row is reduced on one tile, in the order of XLA.

Source of the costs: none public; a load, a store and two cycles an operation of the function (assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.maps.rows import by_rows
from ipujax.lowering.popops.vertices.emulation import emulation
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Builder, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import Tensor, dtype_name

_WORKER_START_CYCLES = 20  # assumed, as of a reduction
_MOVE_CYCLES = 2  # assumed: a load and a store
_OPERATION_CYCLES = 2  # assumed

RowFunction = Callable[..., Sequence[jax.Array]]


def reduce_by_function(
    builder: Builder,
    operands: Sequence[Tensor],
    starts: Sequence[Tensor],
    axes: Sequence[int],
    fun: RowFunction,
    operations: int,
) -> list[Tensor]:
    """Reduces tensors of one shape together by any function, each to a new tensor of the shape without `axes`.

    Args:
        operands: tensors of one shape with at least one element.
        starts: scalar that the reduction of each operand starts with.
        axes: dimensions to reduce.
        fun: hashable function of blocks and starts, to the blocks reduced over their last dimension.
        operations: number of operations of `fun` for one element.
    """
    # A view with the reduced dimensions joined at its end: a row for each element of the results.
    shape = operands[0].shape
    result_dims = [d for d in range(len(shape)) if d not in axes]
    sizes = tuple(shape[d] for d in result_dims)
    rows = [x.transpose((*result_dims, *axes)).reshape((*sizes, prod(shape[d] for d in axes))) for x in operands]
    dtypes = tuple(x.dtype for x in operands)
    # Starts have the dtypes of their operands.
    codelet = _row_codelet("Reduce", fun, (*dtypes, *dtypes), dtypes, len(operands), operations, reduces=True)
    results = [(1, dtype) for dtype in dtypes]  # length of a row, and dtype
    outs = by_rows(builder, codelet, rows, results, axis=len(result_dims), scalars=starts)
    return [out.reshape(sizes) for out in outs]


def each_row(
    builder: Builder,
    title: str,
    x: Tensor,
    axis: int,
    fun: RowFunction,
    results: Sequence[tuple[int, Any]],
    operations: int = 1,
) -> list[Tensor]:
    """Applies a function to each row along `axis` of a tensor with at least one element; returns new tensors.

    Args:
        builder: graph, program and debug name.
        title: name of the codelet.
        x: the tensor.
        axis: the dimension of rows, which is not cut.
        fun: hashable function of a block, to blocks of the results.
        results: length of the rows of each result, and its dtype.
        operations: number of operations of `fun` for one element of `x`.
    """
    out_dtypes = tuple(dtype for _, dtype in results)
    codelet = _row_codelet(title, fun, (x.dtype,), out_dtypes, num_operands=1, operations=operations, reduces=False)
    return by_rows(builder, codelet, [x], results, axis)


@remembered
def _row_codelet(
    title: str,
    fun: RowFunction,
    dtypes: tuple[Any, ...],
    out_dtypes: tuple[Any, ...],
    num_operands: int,
    operations: int,
    *,
    reduces: bool,
) -> Codelet:
    """Codelet of a function of rows, the last dimension of blocks.

    Args:
        title: name of the codelet.
        fun: the function.
        dtypes: dtypes of the operands, then of their starts.
        out_dtypes: dtypes of the results.
        num_operands: number of operands.
        operations: number of operations for one element.
        reduces: whether it reduces each row to one element, so that a worker has entire rows; else it has any elements.
    """

    def compute(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        results = fun(*blocks)
        # A reduced row has one element, in a last dimension of its own.
        return tuple(lax.expand_dims(y, (y.ndim,)) for y in results) if reduces else tuple(results)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        # A vertex shares its rows among the workers, as long as there are that many.
        elements = total_elements(shapes[0]) * num_operands
        length = shapes[0][-1] if reduces else np.ones((), np.int64)
        share = -(-(elements // np.maximum(length, 1)) // target.worker_contexts) * length
        emulated = emulation(dtypes[0], "add" if operations else "move", target)
        element_cycles = _MOVE_CYCLES + _OPERATION_CYCLES * operations * emulated.factor + emulated.cast_cycles
        worker = _WORKER_START_CYCLES + share * element_cycles
        return target.supervisor_overhead_cycles + issue_round_cycles(target) * worker

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        """Rows or elements of the blocks of all operands, which workers share, as `cycles` counts them."""
        del target
        elements = total_elements(shapes[0]) * num_operands
        return elements // np.maximum(shapes[0][-1], 1) if reduces else elements

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate(dtypes)]
    fields += [Field(f"out{n}", "out", dtype) for n, dtype in enumerate(out_dtypes)]
    operates = bool(operations)
    title = f"popops::{title}<{dtype_name(out_dtypes[0])}>"
    return Codelet(
        title,
        tuple(fields),
        compute,
        cycles,
        state_bytes=32,  # assumed, as the size of the code
        code_bytes=600,
        moves=not operates,
        # A user's function may test equality, for which the engine computes its operands once, see `Codelet.compares`.
        compares="equality" if operates else "nothing",
        parts=parts,
        language="C++",
    )
