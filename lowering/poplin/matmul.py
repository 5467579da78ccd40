"""Matrix multiplication over tiles: [G, M, K] by [G, K, N].

Beside the plans that are free to cut are those whose vertices are on the tiles of one operand, so that it is not
exchanged: each of its blocks is multiplied by all blocks that it meets of the other one. A kind of vertex that reads
the operand in another order has no such plan: an operand is put in another order by an exchange (`rearranged`).

The plan cuts all four dimensions; each vertex multiplies a block. When K is cut, vertices write partial results,
which are then combined by `popops.reduce_partials`. Unmapped operands are mapped to the tiles that use them. A product
that does not fit at once goes in several steps, along M or N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ipujax.lowering.layout import Operand, choose_cheapest_alone, mapping_like
from ipujax.lowering.poplin.candidates import Candidates
from ipujax.lowering.poplin.operands import Result, is_free, memory_of, place_by_plan, result_variable, zeros
from ipujax.lowering.poplin.partials import check_partials
from ipujax.lowering.poplin.product_codelets import matmul_codelet
from ipujax.lowering.poplin.product_plan import plan_matmul, plan_of_candidate, trial_plans
from ipujax.lowering.poplin.rearranged import rearranged
from ipujax.lowering.poplin.serial_steps import add_in_steps
from ipujax.lowering.poplin.spec import FIELD, GROUPS, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, arithmetic
from ipujax.lowering.poplin.tile_plan import Grid, Plan, is_plan_of, record_unmet_bound, spec_of_all_steps
from ipujax.lowering.poplin.vertex_kinds import KINDS, VertexKind
from ipujax.runtime.cache import remembered, remembered_and_stored
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import (
    Access,
    Axis,
    Builder,
    Execute,
    Graph,
    Sequence as ProgramSequence,
    VertexGroup,
    element,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, frozen

# Dimensions of the operands of a product, in the order of their axes.
LHS = (GROUPS, FIELD, IN_CHANNELS)
RHS = (GROUPS, IN_CHANNELS, OUT_CHANNELS)


def blocks_of(graph: Graph, matrices: Tensor) -> Blocked | None:
    """Mapping of [groups, rows, columns] in several blocks, one a tile; None for another mapping, and without one."""
    if not graph.is_mapped(matrices):
        return None
    mapping = mapping_like(graph, matrices)
    if matrices.shape[0] == 1 and not isinstance(mapping, Blocked):  # a matrix seen as a group of one
        flat = mapping_like(graph, matrices.reshape(matrices.shape[1:]))
        mapping = _with_group(flat) if isinstance(flat, Blocked) else None
    # Several blocks, each on a tile of its own.
    if not isinstance(mapping, Blocked) or not 1 < np.unique(mapping.tile).size == mapping.tile.size:
        return None
    return mapping


@remembered
def _with_group(mapping: Blocked) -> Blocked:
    return blocked_mapping((frozen([0, 1], np.int64), *mapping.cuts), mapping.tile[None])


@remembered
def aligned_plan(
    spec: ConvSpec, dims: tuple[int, ...], blocks: Blocked, target: Target, bound_bytes: float
) -> Plan | None:
    """Fastest plan on the tiles of an operand, within a bound of memory; None if there is none.

    Its vertices are where the operand's blocks are, so that the operand is not exchanged.

    Args:
        spec: the product.
        dims: which operand, `LHS` or `RHS`: the positions in `Dims` of its dimensions.
        blocks: its mapping.
        target: the machine.
        bound_bytes: bytes of a tile that the plan may use.
    """
    grid = _aligned_grid(spec, dims, blocks)
    # One plan for each kind of vertex.
    plans = [plan for plan in _plans_on_grid(spec, dims, grid, target) if plan.temp_bytes <= bound_bytes]
    return min(plans, key=lambda plan: plan.total_cycles, default=None)


def _aligned_grid(spec: ConvSpec, dims: tuple[int, ...], blocks: Blocked) -> Grid:
    """Grid of the blocks of an operand, other dimensions of the product uncut.

    `dims` are the positions in `Dims` of the operand's dimensions.
    """
    extents = list(spec.extents)
    cuts = [blocks.cuts[dims.index(d)] if d in dims else frozen([0, n], np.int64) for d, n in enumerate(extents)]
    other_dims = [d for d in range(len(extents)) if d not in dims]
    tile = blocks.tile.reshape(blocks.tile.shape + (1,) * len(other_dims))
    tile = np.transpose(tile, np.argsort([*dims, *other_dims]))  # to the order of `Dims`
    return Grid(tuple(cuts), frozen(tile, np.int32))


def _plans_on_grid(spec: ConvSpec, dims: tuple[int, ...], grid: Grid, target: Target) -> Iterator[Plan]:
    """Plans whose vertices are on the tiles that hold an operand, so that it is not exchanged: one a kind of vertex.

    Args:
        spec: the product.
        dims: the dimensions of that operand, `LHS` or `RHS`.
        grid: the blocks of the operand on tiles, of which each vertex computes with one.
        target: the machine.
    """
    # Arrays of candidates, of which there is one.
    splits = np.array([[len(cut) - 1] for cut in grid.cuts], np.int64)
    longest = Dims.of([np.array([int(np.diff(cut).max())]) for cut in grid.cuts])
    any_cut = Dims.of((1,) * len(grid.cuts))  # the operand's cuts need not be multiples of what suits a vertex
    for kind in KINDS:
        if kind.applies(spec, arithmetic(spec, target)) and not _reads_in_other_order(kind, spec, dims, target):
            single_candidate = Candidates(
                spec,
                kind,
                target,
                grains=any_cut,
                splits=splits,
                block=longest,
                lhs_stays=dims == LHS,
                rhs_stays=dims == RHS,
            )
            plan = plan_of_candidate(single_candidate, single_candidate.smallest())
            yield replace(plan, aligned_grid=grid)


def _reads_in_other_order(kind: VertexKind, spec: ConvSpec, dims: tuple[int, ...], target: Target) -> bool:
    """True if a kind of vertex reads the operand `dims`, `LHS` or `RHS`, in another order than it is stored in."""
    reordered = rearranged(kind, spec, target)
    return reordered.lhs if dims == LHS else reordered.rhs


_G, _M, _K, _N = range(4)  # axes of the grid of `_grid`


def matmul(
    builder: Builder,
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: Any = None,
    partials_dtype: Any = None,
    precision: Any = None,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Multiplies matrices, group by group.

    Args:
        a: [G, M, K], any numeric dtype or bool.
        b: [G, K, N].
        out_dtype: dtype of the result, default that of `a`.
        partials_dtype: dtype of partial results when K is cut, default float32 for narrower floats, else `out_dtype`.
        precision: argument of `jax.lax.dot_general`.
        available_memory_proportion: part of a tile's memory that the plan may use, default the target's.

    Returns:
        A new tensor [G, M, N] of `out_dtype`.

    Raises:
        GraphError: if shapes do not match, or no codelet has such partials.
    """
    graph = builder.graph
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        got = f"{list(a.shape)} by {list(b.shape)}"
        raise GraphError(
            f"{builder.name}: shapes do not match", where=graph.origin, expected="[G, M, K] by [G, K, N]", got=got
        )
    groups, m, k = a.shape
    n = b.shape[2]
    out_dtype = np.dtype(a.dtype if out_dtype is None else out_dtype)
    check_partials(graph, a.dtype, b.dtype, out_dtype, partials_dtype, builder.name)
    if 0 in (groups, m, k, n):
        return zeros(graph, (groups, m, n), out_dtype, builder.name)
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
        # Axes as `ConvSpec` numbers those of an operand: groups, field, channels; groups, input and output channels.
        lhs_memory=memory_of(a, (1, 3, 2)),
        rhs_memory=memory_of(b, (0, 2, 1)),
        available_memory_proportion=available_memory_proportion,
    )
    operands = Operand.of(graph, a), Operand.of(graph, b)
    plan = _choose_plan(plan, operands, graph.target, available_memory_proportion, graph.byte_cost_cycles)
    record_unmet_bound(graph, plan, available_memory_proportion, builder.name)
    return _add_steps(builder, a, b, plan, precision)


def _is_choice(chosen: Plan, plan: Plan, operands: tuple[Operand, ...], target: Target, *_: Any) -> bool:
    """Return whether a stored plan can be a choice for another plan's products."""
    return is_plan_of(chosen, spec_of_all_steps(plan), target)


@remembered_and_stored(_is_choice)
def _choose_plan(
    plan: Plan,
    operands: tuple[Operand, ...],
    target: Target,
    available_memory_proportion: float | None,
    cycles_per_byte: float,
) -> Plan:
    """Chooses by trial the cheapest plan for operands of these views and mappings.

    Args:
        plan: the best by the estimate, which leaves out what views and mappings cost.
        operands: the two operands.
        target: the machine.
        available_memory_proportion: part of a tile's memory that plans may use, None for the target's.
        cycles_per_byte: cost of a byte of memory.
    """
    plans = list(trial_plans(plan, target, available_memory_proportion, cycles_per_byte))
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if share > 0:  # 0 asks for the plan of least memory
        plans += _aligned_plans(spec_of_all_steps(plan), target, share * target.bytes_per_tile, operands)

    def add(builder: Builder, tensors: Sequence[Tensor], plan: Plan) -> Tensor:
        a, b = tensors
        # The precision changes results alone, not the cost.
        return _add_steps(Builder(builder.graph, builder.prog, "trial"), a, b, plan, precision=None)

    bounds = [plan.lower_bound_cycles for plan in plans]
    return choose_cheapest_alone(plans, bounds, operands, add, target, cycles_per_byte, asks_for_least=share == 0)


def _aligned_plans(spec: ConvSpec, target: Target, bound_bytes: float, operands: Sequence[Operand]) -> Iterator[Plan]:
    """Plans of a product on the tiles of one of its operands, which then is not exchanged: at most one for each.

    An operand has such a plan if it is mapped in several blocks, each on a tile of its own.
    """
    graph = Graph(target)
    for operand, dims in zip(operands, (LHS, RHS), strict=True):
        blocks = None if operand.mapping is None else blocks_of(graph, operand.add_to(graph))
        plan = None if blocks is None else aligned_plan(spec, dims, blocks, target, bound_bytes)
        if plan is not None:
            yield plan


def _add_steps(builder: Builder, a: Tensor, b: Tensor, plan: Plan, precision: Any) -> Tensor:
    """Maps the operands of a product by its plan, and adds all steps, in which parts of it are computed in turn.

    Operands are [G, M, K] and [G, K, N], the result is [G, M, N].
    """
    graph = builder.graph
    grid = _grid(plan)  # axes G, M, K, N
    reordered = rearranged(plan.kind, plan.spec, graph.target)
    # The operand that steps divide stays unmapped here: it is mapped for slicing.
    by_columns = plan.step_axis == OUT_CHANNELS
    is_one_step = plan.steps == 1
    if is_one_step or by_columns:
        # The tiles with the dimensions of the operand first, then the one whose blocks share it: N, below M.
        place_by_plan(graph, a, plan, [grid.cuts[axis] for axis in (_G, _M, _K)], grid.tile, is_reordered=reordered.lhs)
    if is_one_step or not by_columns:
        tile = np.transpose(grid.tile, (_G, _K, _N, _M))
        place_by_plan(graph, b, plan, [grid.cuts[axis] for axis in (_G, _K, _N)], tile, is_reordered=reordered.rhs)
    if is_one_step:
        return _add_step(builder, a, b, plan, precision)

    def add_step(part: Tensor, body: ProgramSequence) -> Tensor:
        lhs, rhs = (a, part) if by_columns else (part, b)
        return _add_step(builder.into(body), lhs, rhs, plan, precision)

    # Steps divide the columns of the second operand, dimension 2, or the rows of the first, 1, and so those of the
    # result. In all three tensors dimension 2 are the channels, by which tensors are stored.
    operand, dim = (b, 2) if by_columns else (a, 1)
    return add_in_steps(
        builder, operand, plan.steps, add_step, dim=dim, channel=2, out_dim=dim, out_channel=2, is_loop=plan.is_loop
    )


def _add_step(builder: Builder, a: Tensor, b: Tensor, plan: Plan, precision: Any) -> Tensor:
    """Adds one step of a plan."""
    return _add_products(builder, a, b, plan, precision).combine_partials(builder, plan)


@remembered
def _grid(plan: Plan) -> Grid:
    """Blocks of a plan along the dimensions of a product, G, M, K and N; a plan has them along a convolution's."""
    grid = plan.grid()
    axes = (GROUPS, FIELD, IN_CHANNELS, OUT_CHANNELS)
    single = [axis for axis in range(grid.tile.ndim) if axis not in axes]  # batch and kernel, of one block
    tile = np.transpose(grid.tile, (*axes, *single))[..., 0, 0]
    return Grid(tuple(grid.cuts[axis] for axis in axes), tile)


def _add_products(builder: Builder, a: Tensor, b: Tensor, plan: Plan, precision: Any) -> Result:
    """Adds the compute set of the products; returns the tensor that they write, [G, M, N].

    Where K is cut, vertices write partial results, in a slot for each block of K.
    """
    graph = builder.graph
    grid = _grid(plan)
    cuts = grid.cuts
    out = result_variable(graph, plan, grid, out_axes=(_G, _M, _N), reduced=(_K,), channel=_N, name=builder.name)
    # K is reduced: vertices that differ along it write different slots.
    axes = (Axis("g", cuts[_G]), Axis("m", cuts[_M]), Axis("k", cuts[_K], "reduce"), Axis("n", cuts[_N]))
    accesses = (
        Access(a, (element(_G), element(_M), element(_K))),
        Access(b, (element(_G), element(_K), element(_N))),
        Access(out.tensor, (*out.slot, element(_G), element(_M), element(_N))),
    )
    codelet = matmul_codelet(plan.kind, plan.code(graph.target), out.tensor.dtype, precision)
    compute_set = graph.add_compute_set(builder.name)
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, grid.tile, origin=graph.origin))
    builder.prog.add(Execute(compute_set))
    return out
