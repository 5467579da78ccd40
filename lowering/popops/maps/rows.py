"""Operations along one dimension, row by row: cumulative results, sorting, the largest of a row, any reduction.

A row is never cut, so that every result is that of `lax`; the other dimensions are cut over tiles. A single row runs on
one tile. (The rules cut rows that no tile can store: `rules/long_rows.py`.)

Rows are sorted by a bitonic network, as in the top-k of PopLibs; its heap sort, by one worker, takes over ten times as
long.

Other functions of rows are a JAX primitive on each block: any reduction, approximate top-k, changes of width. A
reduction by a user's own function need not be associative, so that a row is reduced on one tile, in the order of XLA.

Source: bitonic compare-and-swap from the PopLibs cycle estimators (reference machine.md §1.3); cumulative results have
no public figure and cost one load, one operation and one store an element (assumed); other functions a load, a store
and two cycles an operation (assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import map_linearly, total_elements
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Span, Work
from ipujax.lowering.layout.place import (
    along,
    mapped_variable,
    place_operand,
    placed_axes,
    scalar,
    tile_grid,
    whole_axis,
)
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.emulation import emulation
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Builder, Codelet, Comparison, Field
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name

# Function of `lax`, and cycles of one element.
CUMULATIVE: dict[str, tuple[Callable[..., jax.Array], int]] = {
    "cumsum": (lax.cumsum, 3),
    "cumprod": (lax.cumprod, 3),
    "cummax": (lax.cummax, 4),
    "cummin": (lax.cummin, 4),
    "cumlogsumexp": (lax.cumlogsumexp, 26),  # assumed: exp, log, and a maximum
}
_WORKER_START_CYCLES = 20  # assumed, as of a reduction
_MOVE_CYCLES = 2  # of other functions, assumed: a load and a store
_OPERATION_CYCLES = 2  # of these, assumed
_SORT_SUPERVISOR_CYCLES = 19
# Cycles of a worker before a stage, and of each pair that it compares and swaps; by float and integer keys.
_COMPARE_SWAP = {
    "keys": ((60, 13), (67, 12)),
    "values": ((35, 11), (78, 17)),  # beside the keys
    "second key": ((81, 25), (86, 27)),  # which decides between equal ones
}
_SWAP_CYCLES = 4  # of one more tensor, assumed: two loads and two stores


def cumulative(builder: Builder, x: Tensor, axis: int, kind: str, reverse: bool) -> Tensor:
    """Adds cumulative results along one dimension; returns a new tensor of the shape and dtype of `x`.

    Args:
        x: tensor with at least one element.
        axis: the dimension.
        kind: name of the primitive, a key of `CUMULATIVE`.
        reverse: whether results run from the last element of a row to the first.
    """
    codelet = _cumulative_codelet(kind, x.dtype, axis, reverse)
    result = x.shape[axis], x.dtype  # length of a row, and dtype
    (out,) = by_rows(builder, codelet, [x], [result], axis)
    return out


def sort(
    builder: Builder,
    operands: Sequence[Tensor],
    axis: int,
    num_keys: int,
    *,
    is_stable: bool,
    has_sorted_halves: bool = False,
) -> list[Tensor]:
    """Sorts rows of tensors of one shape together, as `lax.sort`; returns a new tensor for each operand.

    Args:
        operands: tensors of one shape with at least one element; the first `num_keys` are compared.
        axis: the dimension sorted.
        num_keys: number of keys.
        is_stable: whether equal keys keep their order.
        has_sorted_halves: whether each half of a row is sorted already, so that a merge is enough.
    """
    codelet = _sort_codelet(tuple(x.dtype for x in operands), axis, num_keys, is_stable, has_sorted_halves)
    results = [(x.shape[axis], x.dtype) for x in operands]  # length of a row, and dtype
    return by_rows(builder, codelet, operands, results, axis)


def top_k(builder: Builder, x: Tensor, k: int, axis: int) -> list[Tensor]:
    """Finds the largest elements of each row, as `lax.top_k`; returns new tensors of them and of their indices.

    Args:
        x: tensor with at least one element.
        k: number of elements, at least 1.
        axis: the dimension of rows.
    """
    codelet = _top_k_codelet(x.dtype, k, axis)
    return by_rows(builder, codelet, [x], [(k, x.dtype), (k, np.dtype(np.int32))], axis)


def by_rows(
    builder: Builder,
    codelet: Codelet,
    operands: Sequence[Tensor],
    results: Sequence[tuple[int, Any]],
    axis: int,
    scalars: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Runs a codelet on full rows, spread over tiles; returns a new tensor for each result.

    Args:
        builder: graph, program and debug name.
        codelet: its fields are the operands, the scalars and the results, in this order.
        operands: tensors of one shape.
        results: row length and dtype of each result, otherwise of the operands' shape.
        axis: the dimension of rows, which is not cut.
        scalars: tensors that every vertex reads as a whole.
    """
    shape = operands[0].shape
    rank = len(shape)
    # What a vertex uses of each field: along `axis` all (no axis of the index space), along others its block.
    row = tuple(Span(None if d == axis else d, n) for d, n in enumerate(shape))
    read = [FieldUse(row, source_of(builder.graph, x)) for x in operands]
    read += [FieldUse((), source_of(builder.graph, x)) for x in scalars]
    written = [FieldUse((*row[:axis], Span(None, extent), *row[axis + 1 :])) for extent, _ in results]
    work = Work(codelet, (*read, *written))

    placement = choose(builder.graph, shape, [d for d in range(rank) if d != axis], work, [*operands, *scalars])
    for tensor in operands:
        place_operand(builder.graph, tensor, row, placement)
    for tensor in scalars:
        map_linearly(builder.graph, tensor)
    return _add_rows(builder, codelet, operands, results, axis, placement, scalars)


def _add_rows(
    builder: Builder,
    codelet: Codelet,
    operands: Sequence[Tensor],
    results: Sequence[tuple[int, Any]],
    axis: int,
    placement: Blocked,
    scalars: Sequence[Tensor],
) -> list[Tensor]:
    """Adds vertices on entire rows by a placement; returns a new tensor for each result.

    Args:
        builder: graph, program and debug name.
        codelet: its fields are the operands, the scalars and the results, in this order.
        operands: tensors of one shape.
        results: row length and dtype of each result; rows of another length than the operands' get an axis of it.
        axis: the dimension of rows, which is not cut.
        placement: blocks of the operands, and their tiles.
        scalars: tensors that every vertex reads as a whole.
    """
    shape = operands[0].shape
    rank = len(shape)
    other_lengths = sorted({length for length, _ in results if length != shape[axis]})
    axes = placed_axes(placement) + [whole_axis(f"row{n}", n) for n in other_lengths]
    accesses = [*(along(x, range(rank)) for x in operands), *map(scalar, scalars)]
    outs = []
    for length, dtype in results:
        row_axis = axis if length == shape[axis] else rank + other_lengths.index(length)  # other lengths are last
        out_shape = (*shape[:axis], length, *shape[axis + 1 :])
        dims = [None if d == axis else d for d in range(rank)]  # axes of the placement: rows are whole
        outs.append(mapped_variable(builder.graph, out_shape, dtype, builder.name, dims, placement))
        accesses.append(along(outs[-1], [row_axis if d == axis else d for d in range(rank)]))
    tile = tile_grid(placement, len(other_lengths))
    add_vertices(builder, codelet, axes, accesses, tile)
    return outs


def _row_count_and_length(shapes: BlockShapes, axis: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = shapes[0]
    return total_elements([n for d, n in enumerate(lengths) if d != axis]), lengths[axis]


def _rows_in_block(axis: int, shapes: BlockShapes, target: Target) -> np.ndarray:
    """`parts` of a codelet that goes through each row of its block in order."""
    del target
    return _row_count_and_length(shapes, axis)[0]


def _pairs_in_block(axis: int, shapes: BlockShapes, target: Target) -> np.ndarray:
    """`parts` of a codelet that compares pairs of elements along the rows of its block."""
    del target
    rows, length = _row_count_and_length(shapes, axis)
    return rows * -(-length // 2)


@remembered
def _cumulative_codelet(kind: str, dtype: Any, axis: int, reverse: bool) -> Codelet:
    """Codelet of cumulative results along `axis`, of primitive `kind`; a row is the sequential work of one worker."""
    fun, element_cycles = CUMULATIVE[kind]

    def compute(x: jax.Array) -> jax.Array:
        return fun(x, axis=axis, reverse=reverse)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        rows, length = _row_count_and_length(shapes, axis)
        # Of dtypes without instructions of their own: times as many cycles, and those of casts, for each element.
        emulated = emulation(dtype, "multiply" if kind == "cumprod" else "add", target)
        loop = -(-rows // target.worker_contexts) * length * (emulated.factor * element_cycles + emulated.cast_cycles)
        return target.supervisor_overhead_cycles + issue_round_cycles(target) * (_WORKER_START_CYCLES + loop)

    fields = (Field("in", "in", dtype), Field("out", "out", dtype))
    title = f"popops::{kind.title()}<{dtype_name(dtype)}>"
    compares: Comparison = "order" if kind in ("cummax", "cummin") else "nothing"
    parts = partial(_rows_in_block, axis)
    return Codelet(  # sizes: assumed
        title, fields, compute, cycles, state_bytes=24, code_bytes=300, compares=compares, parts=parts, language="C++"
    )


@remembered
def _sort_codelet(
    dtypes: tuple[Any, ...], axis: int, num_keys: int, is_stable: bool, has_sorted_halves: bool
) -> Codelet:
    """Codelet of a bitonic sort of rows along `axis` by the first `num_keys` of several operands, of these dtypes.

    Rows with sorted halves need the last level only.
    """

    def compute(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.sort(blocks, dimension=axis, is_stable=is_stable, num_keys=num_keys))

    # A stable sort takes the position as a second key; equal keys without values cannot be told apart.
    keys = max(num_keys, 2) if is_stable and len(dtypes) > 1 else num_keys

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        rows, length = _row_count_and_length(shapes, axis)
        levels = np.ceil(np.log2(np.maximum(length, 2))).astype(np.int64)
        # Level n has n stages; rows with sorted halves need the last level alone.
        stages = levels if has_sorted_halves else levels * (levels + 1) // 2
        pairs = -(-rows * -(-length // 2) // target.worker_contexts)  # of a stage, for a worker
        compared = [emulation(dtype, "add", target) for dtype in dtypes[:num_keys]]
        start, compare_swap = _compare_swap_cycles(keys, len(dtypes), dtypes[0])
        pair = max(x.factor * compare_swap + x.cast_cycles for x in compared)
        stage = _SORT_SUPERVISOR_CYCLES + issue_round_cycles(target) * (start + pairs * pair)
        return target.supervisor_overhead_cycles + stages * stage

    def comparisons(shapes: BlockShapes) -> np.ndarray:
        """Comparisons that a sort needs, as XLA counts them: one an element for each level of merging."""
        rows, length = _row_count_and_length(shapes, axis)
        levels = 1 if has_sorted_halves else np.ceil(np.log2(np.maximum(length, 2))).astype(np.int64)
        return np.asarray(rows * length * levels)

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate(dtypes)]
    fields += [Field(f"out{n}", "out", dtype) for n, dtype in enumerate(dtypes)]
    title = f"popops::{'Merge' if has_sorted_halves else 'Sort'}<{dtype_name(dtypes[0])}>"
    return Codelet(
        title,
        tuple(fields),
        compute,
        cycles,
        state_bytes=32,  # assumed, as the size of the code
        code_bytes=700,
        compares="order",
        flops=comparisons,
        parts=partial(_pairs_in_block, axis),
        language="C++",
    )


def _compare_swap_cycles(keys: int, tensors: int, dtype: Any) -> tuple[int, int]:
    """Cycles of a worker before a stage of a sort, and those to compare and swap a pair in a number of tensors."""
    row = "keys" if tensors == 1 else "values" if keys == 1 else "second key"
    start, pair = _COMPARE_SWAP[row][not jnp.issubdtype(dtype, jnp.inexact)]
    return start, pair + _SWAP_CYCLES * max(0, tensors - 2)


@remembered
def _top_k_codelet(dtype: Any, k: int, axis: int) -> Codelet:
    """Codelet of the `k` largest elements of each row with their indices, by a partial bitonic sort."""

    def compute(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.top_k(x, k, axis=axis))

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        rows, length = _row_count_and_length(shapes, axis)
        levels = int(np.ceil(np.log2(max(2, k))))
        # Bitonic sorts of runs of k, whose level n has n stages of half as many pairs as elements; then a merge that
        # halves the number of runs again and again: one more pass over the row (assumed).
        pairs = rows * (-(-length // 2) * (levels * (levels + 1) // 2) + length)
        emulated = emulation(dtype, "add", target)
        _, compare_swap = _compare_swap_cycles(1, 2, dtype)
        pair = compare_swap * emulated.factor + emulated.cast_cycles
        # Workers share the pairs; where they are fewer than issue slots, the other slots are idle.
        return _SORT_SUPERVISOR_CYCLES + -(-pair * pairs * issue_round_cycles(target) // target.worker_contexts)

    fields = (Field("in", "in", dtype), Field("values", "out", dtype), Field("indices", "out", np.dtype(np.int32)))
    return Codelet(
        f"popops::TopK<{dtype_name(dtype)}>",
        fields,
        compute,
        cycles,
        state_bytes=32,  # assumed, as the size of the code
        code_bytes=900,
        compares="order",
        language="C++",
    )


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
