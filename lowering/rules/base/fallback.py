"""Fallback for primitives without a tile-parallel rule: vertices that call the JAX primitive itself.

Input: an equation's context and operands. Output: its results. Independent problems, along batch dimensions and
the columns of right-hand sides, are spread over tiles like any index space. A single problem is one vertex on one
tile with complete operands, so that XLA computes exactly the numbers of plain JAX; operands and results are mapped
linearly, and the profile lists it under `fallbacks`, as it does problems that need more than half a tile each and
borrow memory. Successive fallbacks take different tiles. A primitive whose work is unknown is unpriced: its vertices
take no cycles, and the profile says so.
Limits: costs are estimates from element counts, `assumed` throughout; the memory plan detects a vertex that
exceeds its tile.

Operations of StableHLO without a counterpart in JAX are one vertex too, priced where their work is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.layout import linear_mapping, map_linearly
from ipujax.lowering.popops import (
    FieldUse,
    Work,
    along,
    choose,
    mapped_variable,
    place_operand,
    placed_axes,
    source_of,
    spans,
    tile_grid,
    total_elements,
    whole_axis,
)
from ipujax.lowering.primitives import record_of
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import BlockShapes, Codelet, Execute, Field, Graph, VertexGroup
from ipujax.runtime.logs import Log
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, element_bytes, even_cuts

Shape = tuple[int, ...]
Dims = tuple[int | None, ...]  # for each dimension of a tensor its axis of problems; None for one inside of a problem
_LOG = Log("lowering")
_TILE_STRIDE = 617  # prime, so that successive fallbacks walk over all tiles
_INSTRUCTIONS_PER_ELEMENT = 4  # assumed: load, compute, store, count; a C++ codelet issues one instruction a cycle
_CODE_BYTES = 4096  # assumed


def has_work(name: str) -> bool:
    """True for a primitive whose operations are counted."""
    return record_of(name).problem.work is not None


def fallback(ctx: Context, *operands: Tensor, is_priced: bool = True) -> list[Tensor]:
    """Runs an equation's primitive on one tile, or independent problems each on a tile; one new tensor a result.

    For primitives without a rule of their own, so that every program runs.

    Args:
        ctx: the equation.
        operands: a tensor for each of its operands.
        is_priced: whether its work is known, one operation an element where nothing says more; of a vertex of unknown
            work only the overhead counts, and reports say so.
    """
    graph = ctx.graph
    name = ctx.primitive.name
    label = ctx.params.get("label", name)
    for aval in ctx.out_avals:
        check_is_array(aval, f"a result of {name}", graph.origin)
    shapes = [*(x.shape for x in operands), *(tuple(aval.shape) for aval in ctx.out_avals)]
    # For each dimension of operands and results the axis of problems that it follows; None for one inside of a problem.
    problems, dims = _independent_problems(name, ctx.params, shapes, len(operands))
    codelet = _fallback_codelet(ctx, operands, shapes, dims, label, is_priced=is_priced)
    placement, is_spread = _place_problems(graph, codelet, problems, operands, shapes, dims)
    outs = []
    for aval, tensor_dims in zip(ctx.out_avals, dims[len(operands) :], strict=True):
        if is_spread:
            outs.append(mapped_variable(graph, aval.shape, aval.dtype, ctx.name, tensor_dims, placement))
        else:
            linear = linear_mapping(graph, prod(aval.shape), aval.dtype)
            outs.append(graph.add_variable(aval.shape, aval.dtype, ctx.name, linear))
    if outs and not any(x.size for x in outs):
        return outs
    for x, tensor_dims in zip(operands, dims, strict=False):  # `dims` go on with the results
        if is_spread:
            place_operand(graph, x, spans(x.shape, tensor_dims), placement)
        map_linearly(graph, x)  # where nothing has mapped it yet
    compute_set = graph.add_compute_set(ctx.name)
    if not is_spread:
        if label not in graph.notes.fallbacks.values():
            _LOG.info("%s has no tile-parallel rule: it runs on one tile (%s)", label, graph.origin)
        graph.notes.fallbacks[compute_set] = label
    graph.add_vertices(compute_set, _vertex_group(graph, codelet, [*operands, *outs], dims, placement))
    ctx.prog.add(Execute(compute_set))
    return outs


def _independent_problems(
    name: str, params: Mapping[str, Any], shapes: Sequence[Shape], num_operands: int
) -> tuple[Shape, list[Dims]]:
    """Independent problems that an equation consists of, such as the matrices of a batch.

    The axes of problems are the leading, batch dimensions of all tensors, which are common to them, then that of the
    columns of the last operand and the only result, if the primitive solves each column by itself. A primitive that is
    not known to be batched, or without elements, is a single problem.

    Args:
        name: primitive.
        params: its parameters.
        shapes: shapes of operands and results.
        num_operands: number of operands.

    Returns:
        Number of problems along each axis; and for each tensor the axis that each dimension follows, None for one
        inside of a problem.
    """
    problem = record_of(name).problem
    if problem.rank is None or not all(map(prod, shapes)):
        return (1,), [(None,) * len(shape) for shape in shapes]
    batch = len(shapes[0]) - problem.rank(params)
    problems = shapes[0][:batch]
    dims = [(*range(batch), *(None,) * (len(shape) - batch)) for shape in shapes]
    if problem.columns is not None:
        column = problem.columns(params)
        for n in (num_operands - 1, len(shapes) - 1):
            dims[n] = tuple(batch if d - len(shapes[n]) == column else dim for d, dim in enumerate(dims[n]))
        problems += (shapes[-1][column],)
    return problems or (1,), dims


def _place_problems(
    graph: Graph,
    codelet: Codelet,
    problems: Shape,
    operands: Sequence[Tensor],
    shapes: Sequence[Shape],
    dims: Sequence[Dims],
) -> tuple[Blocked, bool]:
    """Tiles of the independent problems of a fallback.

    Args:
        graph: the graph.
        codelet: codelet of a vertex, which solves one or several problems.
        problems: number of problems along each axis.
        operands: tensors of the operands.
        shapes: shapes of operands and results.
        dims: for each dimension of these the axis of problems that it follows; None for one inside of a problem.

    Returns:
        The tiles; and whether operands and results are mapped to the tiles of their problems, which they are where
        those of one vertex take at most half a tile. A single problem runs on one tile, and they stay where they are.
    """
    if prod(problems) == 1:
        # Compute sets of single vertices are on different tiles, so that none is filled by all of them: a stride for
        # each compute set so far.
        tile = len(graph.groups) * _TILE_STRIDE % graph.target.tiles_per_ipu
        return blocked_mapping([even_cuts(1, 1)] * len(problems), np.full((1,) * len(problems), tile, np.int32)), False
    rows = tuple(tuple(spans(shape, tensor_dims)) for shape, tensor_dims in zip(shapes, dims, strict=True))
    read = [FieldUse(row, source_of(graph, x)) for row, x in zip(rows, operands, strict=False)]
    written = [FieldUse(row) for row in rows[len(operands) :]]
    work = Work(codelet, (*read, *written))
    placement = choose(graph, problems, range(len(problems)), work, operands)
    longest = np.array([np.diff(cut).max() for cut in placement.cuts])
    elements = [prod(int(span.lengths(longest)) for span in row) for row in rows]
    block_bytes = sum(n * element_bytes(field.dtype) for n, field in zip(elements, codelet.fields, strict=True))
    return placement, block_bytes <= graph.target.bytes_per_tile // 2


def check_is_array(aval: Any, name: str, where: object = None) -> None:
    """Refuses values that change while a program runs, the references of `jax.new_ref`; `where`: the user's line."""
    if not isinstance(aval, jax.core.ShapedArray):
        raise GraphError(
            f"{name} is not an array",
            where=where,
            expected="an array: values of a program never change",
            got=aval,
            hint="make it a carry of the loop, or an argument and a result of the function",
        )


def _vertex_group(
    graph: Graph, codelet: Codelet, tensors: Sequence[Tensor], dims: Sequence[Dims], placement: Blocked
) -> VertexGroup:
    """Vertices of a fallback, connected to their problems' part of each tensor.

    Args:
        graph: the graph.
        codelet: codelet of a vertex.
        tensors: operands, then results.
        dims: for each dimension of each tensor the axis of problems that it follows; None for one inside of a problem.
        placement: problems of each vertex, and its tile.
    """
    pairs = [(x, tensor_dims) for x, tensor_dims in zip(tensors, dims, strict=True) if x.size]
    # A vertex has a dimension inside of a problem whole, so that only its extent matters: after the axes of problems
    # there is one axis for all dimensions of an extent.
    extents = sorted({n for x, tensor_dims in pairs for n, d in zip(x.shape, tensor_dims, strict=True) if d is None})
    axes = placed_axes(placement) + [whole_axis(f"n{n}", n) for n in extents]
    num_problem_axes = len(placement.cuts)
    axis_of_extent = {n: num_problem_axes + position for position, n in enumerate(extents)}
    accesses = tuple(
        along(x, [axis_of_extent[n] if d is None else d for n, d in zip(x.shape, tensor_dims, strict=True)])
        for x, tensor_dims in pairs
    )
    return VertexGroup(codelet, tuple(axes), accesses, tile_grid(placement, len(extents)), origin=graph.origin)


def _fallback_codelet(
    ctx: Context,
    operands: Sequence[Tensor],
    shapes: Sequence[Shape],
    dims: Sequence[Dims],
    label: str,
    *,
    is_priced: bool,
) -> Codelet:
    """Codelet that calls the primitive; its cycles are estimated from operations an element of its largest block.

    Args:
        ctx: the equation.
        operands: a tensor for each operand.
        shapes: shapes of operands and results.
        dims: for each dimension of these the axis of problems that it follows; None for one inside of a problem.
        label: name in reports.
        is_priced: whether its work is known; else only the overhead of a vertex counts, and reports say so.
    """
    primitive = ctx.primitive
    params = dict(ctx.params)
    num_operands = len(operands)
    dtypes = [x.dtype for x in (*operands, *ctx.out_avals)]
    connected = [n for n, shape in enumerate(shapes) if prod(shape)]  # tensors without elements have no edge

    def compute(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        remaining = iter(blocks)
        arrays = [next(remaining) if n in connected else jnp.zeros(shapes[n], dtypes[n]) for n in range(num_operands)]
        result = primitive.bind(*arrays, **primitive.get_bind_params(params))
        results = result if primitive.multiple_results else [result]
        return tuple(value for n, value in enumerate(results, num_operands) if n in connected)

    # An opaque call of a library names the primitive whose work its own is like.
    work = _estimated_work(params.get("work_of", primitive.name), params, shapes, dims, connected)

    def operations(blocks: BlockShapes) -> np.ndarray:
        if not is_priced:
            return np.zeros((), np.int64)
        if params.get("flops") is not None:  # known for an operation of StableHLO
            return np.asarray(params["flops"], np.int64)
        elements = [total_elements(blocks[n]) for n in work.counted_fields]
        largest = np.maximum.reduce(np.broadcast_arrays(*elements)) if elements else np.zeros(())
        return np.ceil(work.operations_per_element * largest).astype(np.int64)

    def cycles(blocks: BlockShapes, target: Target) -> np.ndarray:
        return target.supervisor_overhead_cycles + _INSTRUCTIONS_PER_ELEMENT * operations(blocks)

    fields = [
        Field(f"in{n}", "in", dtypes[n]) if n < num_operands else Field(f"out{n - num_operands}", "out", dtypes[n])
        for n in connected
    ]
    return Codelet(
        f"ipujax::Fallback<{label}>",
        tuple(fields),
        compute,
        cycles,
        state_bytes=64,  # assumed: pointers and lengths of the fields
        code_bytes=_CODE_BYTES,
        compares="equality",  # assumed of an unknown primitive: its operands are computed once, so they round alike
        flops=operations,
        language="C++",
        is_priced=is_priced,
    )


class _Work(NamedTuple):
    """Estimated operations of a vertex: so many for each element of the largest block of some fields, by number."""

    operations_per_element: float
    counted_fields: list[int]


def _estimated_work(
    name: str, params: Mapping[str, Any], shapes: Sequence[Shape], dims: Sequence[Dims], connected: Sequence[int]
) -> _Work:
    """Estimated operations of a vertex that calls a primitive, by the sizes of its blocks, for its cycles.

    Elements of all fields count, but of a primitive that solves each column of its last operand by itself those of this
    operand and the result alone.

    Args:
        name: primitive.
        params: its parameters.
        shapes: shapes of operands and results.
        dims: for each dimension of these the axis of problems that it follows; None for one inside of a problem.
        connected: for each field of the codelet the number of its tensor, among operands and results.
    """
    problem = record_of(name).problem
    problem_shape = [n for n, d in zip(shapes[0], dims[0], strict=True) if d is None] if shapes else []
    # The size of a problem as `Problem.work` defines it.
    size = prod(problem_shape) if name == "fft" else min(problem_shape, default=1)
    with_columns = (len(shapes) - 2, len(shapes) - 1) if problem.columns is not None else ()
    fields_with_columns = [field for field, n in enumerate(connected) if n in with_columns]
    operations = 1.0 if problem.work is None else problem.work(size)
    return _Work(max(1.0, operations), fields_with_columns or list(range(len(connected))))


def module_operation_rule(
    ctx: Context, *operands: Tensor, work_of: str, flops: int | None, **params: Any
) -> list[Tensor]:
    """Runs the operation as one vertex."""
    return fallback(ctx, *operands, is_priced=bool(work_of) or flops is not None)


def opaque_call_rule(ctx: Context, *operands: Tensor, **params: Any) -> list[Tensor]:
    """Runs a call whose body is unknown as one vertex, without a price; its first operand is what it captured."""
    return fallback(ctx, *operands, is_priced=False)


RULES: dict[str, Rule] = {"module_operation": module_operation_rule, "opaque_call": opaque_call_rule}
