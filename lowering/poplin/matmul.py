"""Matrix multiplication over tiles: [G, M, K] by [G, K, N].

The plan cuts all four dimensions; each vertex multiplies a block. When K is cut, vertices write partial results,
which are then combined by `popops.reduce_partials`. Operands that have no tile mapping yet are put where they are
used. What does not fit at once is done in several steps, along M or N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.poplin.aligned import LHS, OUT, RHS, boxes_of, plan_where
from ipujax.lowering.poplin.bounds import report_unmet_bound
from ipujax.lowering.poplin.codelets import matmul_codelet
from ipujax.lowering.poplin.few_examples import FEWEST_EXAMPLES, batch_axis, cut_down, operands_of, with_batch
from ipujax.lowering.poplin.following import THINNESS_WEIGHT, Operation, elementwise_cycles_on, least_cycles
from ipujax.lowering.poplin.joint import Later, joint_plan, later_cycles, spread_plans
from ipujax.lowering.poplin.operands import is_free, joined, parts, place_operand, repeated, result_variable, zeros
from ipujax.lowering.poplin.partials import combine
from ipujax.lowering.poplin.plan import (
    MATMUL_STEP_AXES,
    Grid,
    Plan,
    contenders,
    of_all_steps,
    plan_convolution,
    plan_matmul,
)
from ipujax.lowering.poplin.spec import FIELD, GROUPS, IN_CHANNELS, OUT_CHANNELS, ConvSpec
from ipujax.lowering.poplin.trial import Judge, Operand, cheapest
from ipujax.lowering.poputil.thinness import thinness_weight
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import MIN_BYTES_PER_TILE
from ipujax.runtime.program import Copy, Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import element_bytes
from ipujax.runtime.vertices import Access, Axis, VertexGroup, element

_G, _M, _K, _N = range(4)


def matmul(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: ProgramSequence,
    name: str,
    *,
    out_dtype: Any = None,
    partials_dtype: Any = None,
    precision: Any = None,
    available_memory_proportion: float | None = None,
    later: Later | None = None,
    laid_as: Tensor | None = None,
    on_result: tuple[Operation, ...] = (),
) -> Tensor:
    """Multiplies matrices, group by group.

    Args:
        graph: graph to add to.
        a: [G, M, K], any numeric dtype or bool.
        b: [G, K, N].
        prog: program the compute sets are added to.
        name: debug name.
        out_dtype: dtype of the result, default that of `a`.
        partials_dtype: dtype of partial results when K is cut, default float32 for narrower floats, else `out_dtype`.
        precision: as `jax.lax.dot_general` takes it.
        available_memory_proportion: of a tile's memory the plan may use, default the target's.
        later: what follows, if this is the forward pass of a dense layer or the update of its weights.
        laid_as: of an update, the weights in the order of the result; it says nothing while they lie nowhere.
        on_result: the elementwise operations that follow on arrays of the result's shape: name, arrays, scalars read.

    Returns:
        A new tensor [G, M, N] of `out_dtype`.

    Raises:
        GraphError: if shapes do not match.
    """
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        got = f"{list(a.shape)} by {list(b.shape)}"
        raise GraphError(f"{name}: shapes do not match", where=graph.origin, expected="[G, M, K] by [G, K, N]", got=got)
    (groups, m, k), n = a.shape, b.shape[2]
    out_dtype = np.dtype(a.dtype if out_dtype is None else out_dtype)
    if 0 in (groups, m, k, n):
        return zeros(graph, (groups, m, n), out_dtype, name)
    plan = plan_matmul(
        groups,
        m,
        k,
        n,
        a.dtype,
        graph.target,
        rhs_dtype=b.dtype,
        out_dtype=out_dtype,
        partials_dtype=partials_dtype,
        lhs_is_free=is_free(graph, a),
        rhs_is_free=is_free(graph, b),
        available_memory_proportion=available_memory_proportion,
    )
    wanted = [laid_as.reshape((groups, m, n))] if laid_as is not None and graph.is_mapped(laid_as) else []
    operands = tuple(Operand.of(graph, x) for x in (a, b, *wanted))
    plan = _planned(plan, operands, _Surroundings(graph.target, available_memory_proportion, later, on_result))
    report_unmet_bound(graph, plan, available_memory_proportion, name)
    return _in_steps(graph, a, b, plan, precision, prog, name)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a plan is chosen for beside its operands: the machine, its memory for the product, and what follows."""

    target: Target
    available_memory_proportion: float | None
    later: Later | None
    on_result: tuple[Operation, ...]


def _planned(plan: Plan, operands: tuple[Operand, ...], around: _Surroundings) -> Plan:
    """The plan that is chosen, of a layer with few examples for a few more."""
    spec, later, target = of_all_steps(plan), around.later, around.target
    if later is not None:
        axis = batch_axis(later)
        if list(spec.extents)[axis] <= FEWEST_EXAMPLES:
            more = with_batch(spec, axis, FEWEST_EXAMPLES)
            free = plan_convolution(more, target, around.available_memory_proportion, MATMUL_STEP_AXES)
            larger = operands_of(more, operands, later, target)
            chosen = _chosen(free, larger, around)
            if free.memory_bound_met and chosen.steps == 1:
                return cut_down(chosen, spec, axis)
    return _chosen(plan, operands, around)


@lru_cache(maxsize=4096)
def _chosen(plan: Plan, operands: tuple[Operand, ...], around: _Surroundings) -> Plan:
    """The plan, or one that turns out cheaper for operands that lie and are seen as these, and what follows."""
    target, share, later = around.target, around.available_memory_proportion, around.later
    plans, spec = list(contenders(plan, target, share)), of_all_steps(plan)
    share = target.available_memory_proportion if share is None else share
    bound_bytes = share * target.bytes_per_tile
    if share > 0:
        plans += _where_they_lie(spec, target, bound_bytes, operands)
    judge: Judge = partial(_with_followers, around.on_result)
    least_after = least_cycles(_result_size(spec), spec.out_dtype, around.on_result, target)
    if later is not None and later.is_update:
        judge, least_after = partial(_with_elementwise, later), 0
        plans += spread_plans(spec, target, bound_bytes) if share > 0 else ()
    elif later is not None and share > 0 and (spec.lhs_is_free, spec.rhs_is_free)[later.side]:
        joint = joint_plan(spec, later, target, bound_bytes)
        apart = later_cycles(spec, later, None, target, bound_bytes)
        plans += [] if joint is None else [joint[0]]
        least_after += apart if joint is None else min(apart, joint[1])
        judge = partial(_with_later_passes, spec, later, bound_bytes, judge)

    def add(graph: Graph, tensors: Sequence[Tensor], plan: Plan, prog: ProgramSequence) -> Tensor:
        a, b, *wanted = tensors
        out = _in_steps(graph, a, b, plan, None, prog, "trial")
        for tensor in wanted:
            prog.add(Copy(out, tensor, "wanted"))
        return out

    plans = [replace(plan, keeps_rows=bool(around.on_result)) for plan in plans]
    return cheapest(plans, operands, add, target, judge, least_after)


def _result_size(spec: ConvSpec) -> int:
    return spec.extents.groups * spec.extents.field[0] * spec.extents.out_channels


def _with_later_passes(
    spec: ConvSpec,
    later: Later,
    bound_bytes: float,
    judge: Judge,
    graph: Graph,
    tensors: Sequence[Tensor],
    out: Tensor,
    cycles: int,
) -> int:
    """Cycles of a forward pass with those expected of the others, with the weights where it has put them."""
    matrix = tensors[1] if later.side else tensors[0].transpose((0, 2, 1))
    others = later_cycles(spec, later, boxes_of(graph, matrix), graph.target, bound_bytes)
    return judge(graph, tensors, out, cycles) + others


def _with_followers(
    on_result: tuple[Operation, ...], graph: Graph, tensors: Sequence[Tensor], out: Tensor, cycles: int
) -> int:
    """Cycles of a product with those expected of the elementwise operations on arrays that lie as its result does."""
    del tensors
    (variable,) = out.variables()
    return cycles + elementwise_cycles_on(graph.mappings[variable], out.size, out.dtype, on_result, graph.target)


def _with_elementwise(later: Later, graph: Graph, tensors: Sequence[Tensor], out: Tensor, cycles: int) -> int:
    """Cycles of an update with those expected of the elementwise operations on arrays that lie as its result does."""
    del tensors
    (variable,), target = out.variables(), graph.target
    mapping, out_bytes = graph.mappings[variable], out.size * element_bytes(out.dtype)
    num_tiles = int(np.count_nonzero(mapping.elements_per_tile(target.num_tiles)))
    following = elementwise_cycles_on(mapping, out.size, out.dtype, later.elementwise, target)
    return int(cycles * thinness_weight(num_tiles, out_bytes, target, THINNESS_WEIGHT)) + following


def _where_they_lie(spec: ConvSpec, target: Target, bound_bytes: float, operands: Sequence[Operand]) -> Iterator[Plan]:
    """The plans in which one operand is not exchanged, or the result is computed where it is wanted."""
    graph = Graph(target)
    for operand, dims in zip(operands, (LHS, RHS, OUT), strict=False):
        boxes = None if operand.mapping is None else boxes_of(graph, operand.add_to(graph))
        plan = None if boxes is None else plan_where(spec, dims, boxes, target, bound_bytes)
        if plan is not None:
            yield plan


def _in_steps(
    graph: Graph, a: Tensor, b: Tensor, plan: Plan, precision: Any, prog: ProgramSequence, name: str
) -> Tensor:
    """Maps the operands and adds all steps of a plan."""
    step_axis = _N if plan.step_axis == OUT_CHANNELS else _M
    cuts, tile = repeated(_grid(plan), step_axis, plan.steps)
    least = [_least_block_bytes(plan, (axis, IN_CHANNELS)) for axis in (FIELD, OUT_CHANNELS)]
    place_operand(graph, a, plan, [cuts[axis] for axis in (_G, _M, _K)], tile, least[0])
    place_operand(graph, b, plan, [cuts[axis] for axis in (_G, _K, _N)], np.transpose(tile, (_G, _K, _N, _M)), least[1])
    if plan.steps == 1:
        return _step(graph, a, b, plan, precision, prog, name)
    rows = parts(a, 1, plan.steps) if step_axis == _M else [a] * plan.steps
    columns = parts(b, 2, plan.steps) if step_axis == _N else [b] * plan.steps
    results = [
        _step(graph, left, right, plan, precision, prog, f"{name}/step{number}")
        for number, (left, right) in enumerate(zip(rows, columns, strict=True))
    ]
    return joined(graph, results, 1 if step_axis == _M else 2, prog, name)


def _least_block_bytes(plan: Plan, axes: tuple[int, int]) -> int:
    """What a block of an operand of these axes is worth a tile from: as large a part as of what it was planned for."""
    planned = plan.planned_spec or plan.spec
    ratio = prod(Fraction(list(plan.spec.extents)[axis], list(planned.extents)[axis]) for axis in axes)
    return int(ratio * MIN_BYTES_PER_TILE)


def _step(graph: Graph, a: Tensor, b: Tensor, plan: Plan, precision: Any, prog: ProgramSequence, name: str) -> Tensor:
    """Adds one step of a plan."""
    out = _add_products(graph, a, b, plan, precision, prog, name)
    if plan.slots == 1:
        return out
    row = out.shape[-1] if plan.keeps_rows else None
    return combine(graph, out, plan.spec.out_dtype, prog, name, plan.tiles_used, row)


@lru_cache(maxsize=4096)
def _grid(plan: Plan) -> Grid:
    """The blocks along G, M, K, N."""
    grid, axes = plan.grid(), (GROUPS, FIELD, IN_CHANNELS, OUT_CHANNELS)
    rest = [axis for axis in range(grid.tile.ndim) if axis not in axes]
    tile = np.transpose(grid.tile, (*axes, *rest))[..., 0, 0]
    return Grid(tuple(grid.cuts[axis] for axis in axes), tile)


def _add_products(
    graph: Graph, a: Tensor, b: Tensor, plan: Plan, precision: Any, prog: ProgramSequence, name: str
) -> Tensor:
    """Adds the compute set of the products; returns the result, or its partials [slots, G, M, N]."""
    grid = _grid(plan)
    cuts = grid.cuts
    out, slot = result_variable(graph, plan, grid, (_G, _M, _N), (_K,), name)
    axes = (Axis("g", cuts[_G]), Axis("m", cuts[_M]), Axis("k", cuts[_K], "reduce"), Axis("n", cuts[_N]))
    accesses = (
        Access(a, (element(_G), element(_M), element(_K))),
        Access(b, (element(_G), element(_K), element(_N))),
        Access(out, (*slot, element(_G), element(_M), element(_N))),
    )
    codelet = matmul_codelet(plan.kind, plan.spec.code, out.dtype, precision)
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, grid.tile, origin=graph.origin))
    prog.add(Execute(compute_set))
    return out
