"""Planner of convolutions and matrix multiplications: how they are split over the tiles of an IPU.

Input: a `ConvSpec` and a `Target`. Output: a `Plan`: the blocks of each dimension, the kind of vertex, and the
estimated cost. All candidate splits are costed as arrays, by the cost model of the profile: operands received in full,
the formula of the largest block, reduction of partials, syncs. Where memory limits a plan, several steps are candidates
too.

Costs that the estimate leaves out, such as that of gathering scattered operands, are decided by trial (`trial_plans`).

Source of the objective and of the memory bound with its retries: poplibs `ConvPlan.cpp` (reference machine.md §2).
Limits: one IPU; steps (serial splits) of powers of two that divide one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from math import ceil, log, log2, prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import GROUP_CHANNELS
from ipujax.lowering.poplin.candidates import Candidates, output_order
from ipujax.lowering.poplin.cycles import ceil_div
from ipujax.lowering.poplin.partials import out_dtypes
from ipujax.lowering.poplin.rearranged import rearranged
from ipujax.lowering.poplin.spec import (
    BATCH,
    FIELD,
    GROUPS,
    IN_CHANNELS,
    OUT_CHANNELS,
    ConvSpec,
    Dims,
    Memory,
    arithmetic,
)
from ipujax.lowering.poplin.vertex_kinds import KINDS, VertexKind
from ipujax.runtime.cache import remembered, remembered_and_stored
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.exchange import receive_code_bytes, receive_cycles, superstep
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes, even_cuts, frozen

MATMUL_STEP_AXES = (OUT_CHANNELS, FIELD)  # columns and rows of the result
_STEPS = (2, 4, 8, 16)
_MAX_GRAIN = 2**20  # far beyond the blocks of any AMP
_MAX_COUNT = 2**53  # of cycles, bytes or fragments
_MAX_TRIAL_COST = 1.05  # of the best estimated cost: plans beyond are not worth a trial; assumed
_RELATIVE_STEP = 0.01  # of plans whose costs differ by less, the one of fewest tiles is tried; assumed


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Estimated cycles of a plan by category; they add up."""

    exchange_cycles: int
    compute_cycles: int
    reduce_exchange_cycles: int
    reduce_compute_cycles: int
    sync_cycles: int

    @property
    def total_cycles(self) -> int:
        return (
            self.exchange_cycles
            + self.compute_cycles
            + self.reduce_exchange_cycles
            + self.reduce_compute_cycles
            + self.sync_cycles
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Split of a convolution over tiles."""

    spec: ConvSpec  # the convolution of one step
    kind: VertexKind
    splits: Dims[int]  # blocks of each dimension
    grains: Dims[int]  # multiples that the cuts of each dimension are
    cost: PlanCost  # estimated cycles of one step
    temp_bytes: int  # operands, results and gathered windows on the fullest tile of a step
    memory_bound_met: bool  # whether `temp_bytes` is within the requested proportion of tile memory
    memory_binds: bool  # whether a larger proportion would give a faster plan
    steps: int = 1  # number of steps, one after the other
    step_axis: int = 0  # position in `Dims` of the dimension that steps divide evenly
    is_loop: bool = True  # whether steps are a loop, of less code, or follow one another, of fewer cycles
    join_cycles: int = 0  # estimated cycles to copy the results of the steps to one variable
    # Whether the plan maps unmapped operands linearly to its tiles, else block by block
    maps_linearly: bool = False
    # Whether the mapped activations are first copied, in groups of channels, to equal parts of all tiles
    spreads_lhs: bool = False
    # Lower bound of the exchange fragments in which a tile receives mapped operands, in a step
    fragments: int = 0
    # Blocks on the tiles of an operand; None for even blocks on the first tiles
    aligned_grid: Grid | None = None

    @property
    def total_cycles(self) -> int:
        """Estimated cycles of all steps."""
        return self.steps * self.cost.total_cycles + self.join_cycles

    @property
    def lower_bound_cycles(self) -> int:
        """Lower-bound estimate of the plan's cost in cycles."""
        # Half of the operands may already be on the tiles that use them, or reach two tiles of a bus at once; one
        # partial result may be on the tile that combines them all.
        avoidable = self.cost.exchange_cycles // 2 + self.cost.reduce_exchange_cycles // self.slots
        return self.total_cycles - self.steps * avoidable

    @property
    def tiles_used(self) -> int:
        return prod(self.splits)

    @property
    def slots(self) -> int:
        """Partial results of each output element."""
        return self.splits.in_channels * prod(self.splits.kernel)

    def code(self, target: Target) -> ConvSpec:
        """Convolution that a codelet of the plan computes, without extents."""
        moved = rearranged(self.kind, self.spec, target)
        return replace(self.spec.code, rearranged=replace(moved, result=moved.result and self.slots == 1))

    def grid(self) -> Grid:
        """Blocks of a step, axes in the order of `Dims`; one object for equal plans."""
        return _grid(self) if self.aligned_grid is None else self.aligned_grid


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Blocks and their tiles; equal only to itself, so that values derived from it can be cached.

    Args:
        cuts: boundaries along each axis, int64[blocks + 1].
        tile: tile of each block, int32, one dimension an axis.
    """

    cuts: tuple[np.ndarray, ...]
    tile: np.ndarray


@remembered
def _grid(plan: Plan) -> Grid:
    rows = zip(plan.spec.extents, plan.splits, plan.grains, strict=True)
    cuts = tuple(even_cuts(extent, blocks, grain) for extent, blocks, grain in rows)
    counts = list(plan.splits)
    rank = len(plan.splits.field)
    order = [GROUPS, IN_CHANNELS, *range(FIELD + rank, FIELD + 2 * rank), *output_order(plan.kind, rank)]
    numbers = np.arange(prod(counts)).reshape([counts[axis] for axis in order])
    return Grid(cuts, frozen(np.transpose(numbers, np.argsort(order)), np.int32))


def plan_matmul(
    groups: int,
    m: int,
    k: int,
    n: int,
    dtype: Any,
    target: Target,
    *,
    rhs_dtype: Any = None,
    out_dtype: Any = None,
    partials_dtype: Any = None,
    lhs_is_free: bool = False,
    rhs_is_free: bool = False,
    lhs_memory: Memory = (),
    rhs_memory: Memory = (),
    available_memory_proportion: float | None = None,
) -> Plan:
    """Plans products of [groups, m, k] by [groups, k, n]: rows are the field, columns output channels."""
    lhs_dtype = np.dtype(dtype)
    rhs_dtype = np.dtype(dtype if rhs_dtype is None else rhs_dtype)
    out_dtype, partials_dtype = out_dtypes(lhs_dtype if out_dtype is None else out_dtype, partials_dtype)
    dtypes = lhs_dtype, rhs_dtype, out_dtype, partials_dtype
    operands = lhs_is_free, rhs_is_free, lhs_memory, rhs_memory
    spec = ConvSpec(Dims(1, groups, n, k, (m,), (1,)), (m,), (1,), (1,), (1,), *dtypes, *operands, is_product=True)
    return plan_convolution(spec, target, available_memory_proportion, MATMUL_STEP_AXES)


def is_plan_of(plan: Plan, spec: ConvSpec, target: Target, *_: Any, **__: Any) -> bool:
    """Return whether a stored plan can be one of a convolution, whatever else it was chosen by."""
    rank = len(spec.in_field)
    dims = (plan.spec.extents, plan.splits, plan.grains)
    has_rank = all(len(x.field) == len(x.kernel) == rank for x in dims) and len(plan.spec.in_field) == rank
    if not has_rank or plan.steps not in (1, *_STEPS) or not 0 <= plan.step_axis < 4 + 2 * rank:
        return False
    extents = list(plan.spec.extents)
    blocks = list(plan.splits)
    counts = [getattr(plan.cost, item.name) for item in fields(plan.cost)]
    counts += [plan.temp_bytes, plan.join_cycles, plan.fragments]
    return (
        min(extents) >= 1
        and spec_of_all_steps(plan) == spec
        and plan.kind.applies(plan.spec, arithmetic(plan.spec, target))
        and all(1 <= n <= extent for n, extent in zip(blocks, extents, strict=True))
        and 1 <= min(plan.grains) <= max(plan.grains) <= _MAX_GRAIN
        and plan.tiles_used <= target.tiles_per_ipu
        and 0 <= min(counts) <= max(counts) <= _MAX_COUNT
        and (plan.aligned_grid is None or _is_grid(plan.aligned_grid, extents, blocks, target))
    )


def _is_grid(grid: Grid, extents: Sequence[int], blocks: Sequence[int], target: Target) -> bool:
    """Return whether a grid has so many blocks of these extents, on tiles of the target."""
    if len(grid.cuts) != len(extents) or grid.tile.dtype != np.int32 or grid.tile.shape != tuple(blocks):
        return False
    rows = zip(grid.cuts, extents, blocks, strict=True)
    are_cuts = all(
        cut.dtype == np.int64
        and cut.shape == (count + 1,)
        and (cut[0], cut[-1]) == (0, extent)
        and bool((np.diff(cut) > 0).all())
        for cut, extent, count in rows
    )
    return are_cuts and bool(grid.tile.min() >= 0 and grid.tile.max() < target.num_tiles)


@remembered_and_stored(is_plan_of)
def plan_convolution(
    spec: ConvSpec,
    target: Target,
    available_memory_proportion: float | None = None,
    step_axes: tuple[int, ...] = (BATCH, OUT_CHANNELS),
    is_loop: bool = True,
) -> Plan:
    """Finds the fastest plan of a convolution within a memory bound; a proportion of 0 asks for the least memory."""
    # Where memory limits the plan, plans in several steps are compared too. If none fits, the bound is doubled up to
    # twice a tile's memory, then dropped; `memory_bound_met` says so. `step_axes` are positions in `Dims` of dimensions
    # that steps may divide, of the field only one with windows of 1. A loop needs memory for its slices and its stack.
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if not 0 <= share <= 1:
        raise ArgumentError(
            "available_memory_proportion must be a proportion", expected="a number from 0 to 1", got=share
        )
    asks_for_least = share == 0

    def rank(plan: Plan) -> tuple[int, int]:
        excess_bytes = plan.temp_bytes if asks_for_least else _excess(plan, share * target.bytes_per_tile)
        return excess_bytes, plan.total_cycles

    best = _plan_step(spec, target, share)
    for axis in step_axes if best.memory_binds or asks_for_least else ():
        for steps in _STEPS:
            if not _divides(list(spec.extents)[axis], steps, axis):
                break
            stacks = _stack_bytes(spec, axis, target) if is_loop else 0
            step_share = share - stacks / target.bytes_per_tile
            plan = _plan_step(_step_spec(spec, axis, steps), target, step_share if step_share > 0 else share)
            plan = replace(plan, steps=steps, step_axis=axis, is_loop=is_loop, join_cycles=_join_cycles(spec, target))
            is_met = plan.temp_bytes + stacks <= share * target.bytes_per_tile
            plan = replace(
                plan,
                temp_bytes=plan.temp_bytes + stacks,
                memory_binds=plan.memory_binds or not is_met,
                memory_bound_met=plan.memory_bound_met and is_met,
            )
            best = min(best, plan, key=rank)
            if not plan.memory_binds:
                break
    return best


# Convolution, bound of its cycles, bound of its memory in bytes, and conversion of its plans.
_Search = tuple[ConvSpec, float, float, Callable[[Plan], Plan]]


@remembered
def trial_plans(
    best: Plan, target: Target, available_memory_proportion: float | None, cycles_per_byte: float
) -> tuple[Plan, ...]:
    """Plans worth a trial, in the order of their lower bounds, with those of `best`, the plan of `plan_convolution`."""
    # The estimate leaves out the cost of gathering scattered operands on a tile. So the plan of fewest tiles for each
    # level of estimated cycles, up to a little more than the best, is tried: with its operands mapped block by block
    # and, if they are unmapped, linearly. For a plan in steps these are plans with equal steps, and plans in one.
    # `cycles_per_byte` is the cost of a byte of exchange code.
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if share == 0:
        return (best,)
    spec = spec_of_all_steps(best)
    bound = share * target.bytes_per_tile
    bound *= 2 ** _doublings(best, bound)
    fragment_cycles = cycles_per_byte * receive_code_bytes(1, target)
    step_cycles = best.cost.total_cycles + fragment_cycles * best.fragments  # no plan worth a trial takes much more
    all_cycles = best.join_cycles + best.steps * step_cycles
    searches: list[_Search] = [(spec, all_cycles, bound, lambda plan: plan)]
    if spec.lhs_is_free or spec.rhs_is_free:
        mapped = replace(spec, lhs_is_free=False, rhs_is_free=False)
        searches.append((mapped, all_cycles, bound, lambda plan: replace(plan, spec=spec, maps_linearly=True)))
    plans = [best]
    if best.steps > 1:
        plans.append(plan_convolution(spec, target, share, (best.step_axis,), is_loop=False))
        stacks = _stack_bytes(spec, best.step_axis, target)
        searches.append((best.spec, step_cycles, bound - stacks, lambda plan: _in_steps_of(best, plan, stacks)))
    for in_groups in (False, True):
        for searched, max_cycles, bound_bytes, convert in searches:
            plans += map(convert, _trade_off(searched, target, max_cycles, bound_bytes, in_groups, fragment_cycles))
    return tuple(sorted(dict.fromkeys(plans), key=lambda plan: plan.lower_bound_cycles))


def _trade_off(
    spec: ConvSpec, target: Target, best_cycles: float, bound_bytes: float, in_groups: bool, fragment_cycles: float
) -> list[Plan]:
    """Plan of fewest tiles for each relative step of estimated cycles, up to little more than `best_cycles`."""
    max_cycles = int(_MAX_TRIAL_COST * best_cycles)  # in more cycles no plan is cheaper, even with one fragment
    plans = [
        _plan_of(candidates, *choice)
        for all_candidates in _candidates(spec, target, in_groups)
        for candidates in [all_candidates.within(bound_bytes, max_cycles)]
        for choice in candidates.trade_off(bound_bytes, max_cycles, fragment_cycles)
    ]
    curve: list[Plan] = []

    def cost(plan: Plan) -> float:
        return plan.cost.total_cycles + fragment_cycles * plan.fragments

    max_cost = _MAX_TRIAL_COST * min(map(cost, plans), default=0.0)
    for plan in sorted(plans, key=lambda plan: (cost(plan), *_rank(plan), plan.tiles_used)):
        if cost(plan) <= max_cost and (not curve or plan.tiles_used < curve[-1].tiles_used):
            curve.append(plan)
    # Of a step's plans the last, of fewest tiles.
    steps = {int(log(cost(plan)) / _RELATIVE_STEP): plan for plan in curve}
    return list(steps.values())


def _candidates(spec: ConvSpec, target: Target, in_groups: bool = False) -> Iterator[Candidates]:
    arith = arithmetic(spec, target)
    return (Candidates.of(kind, spec, target, in_groups) for kind in KINDS if kind.applies(spec, arith))


def _in_steps_of(best: Plan, plan: Plan, stack_bytes: int) -> Plan:
    """Plan of one step, repeated in the steps of `best`."""
    return replace(
        plan,
        temp_bytes=plan.temp_bytes + stack_bytes,
        memory_bound_met=best.memory_bound_met,
        memory_binds=best.memory_binds,
        steps=best.steps,
        step_axis=best.step_axis,
        join_cycles=best.join_cycles,
    )


def _doublings(plan: Plan, bound_bytes: float) -> int:
    """Number of doublings of the memory bound for a plan to meet it."""
    return next(n for n in count() if plan.temp_bytes <= bound_bytes * 2**n)


def _divides(extent: int, steps: int, axis: int) -> bool:
    """True if a dimension divides into equal steps, which keep groups of channels whole."""
    in_groups = axis == OUT_CHANNELS and extent % GROUP_CHANNELS == 0
    return extent % (steps * GROUP_CHANNELS if in_groups else steps) == 0


def _excess(plan: Plan, bound_bytes: float) -> int:
    """Excess of a plan over the memory bound, in quarters of a doubling."""
    return max(0, ceil(4 * log2(max(1, plan.temp_bytes) / max(1.0, bound_bytes))))


def _step_spec(spec: ConvSpec, axis: int, steps: int) -> ConvSpec:
    """Convolution of one of several equal steps along one dimension."""
    extents = list(spec.extents)
    extents[axis] //= steps
    in_field = (extents[FIELD],) if axis == FIELD else spec.in_field
    return replace(spec, extents=Dims.of(extents), in_field=in_field)


def spec_of_all_steps(plan: Plan) -> ConvSpec:
    """Convolution of all steps of a plan together."""
    extents = list(plan.spec.extents)
    extents[plan.step_axis] *= plan.steps
    in_field = (extents[FIELD],) if plan.steps > 1 and plan.step_axis == FIELD else plan.spec.in_field
    return replace(plan.spec, extents=Dims.of(extents), in_field=in_field)


def _stack_bytes(spec: ConvSpec, axis: int, target: Target) -> int:
    """Bytes on a tile of the operand that steps divide, in the order in which it is sliced, and of all results."""
    e = spec.extents
    inputs = e.batch * prod(spec.in_field) * e.groups * e.in_channels * element_bytes(spec.lhs_dtype)
    weights = e.groups * e.in_channels * e.out_channels * prod(e.kernel) * element_bytes(spec.rhs_dtype)
    results = e.batch * e.groups * e.out_channels * prod(e.field) * element_bytes(spec.out_dtype)
    return int(ceil_div((weights if axis == OUT_CHANNELS else inputs) + results, target.tiles_per_ipu))


def _join_cycles(spec: ConvSpec, target: Target) -> int:
    extents = spec.extents
    outputs = prod((extents.batch, extents.groups, extents.out_channels, *extents.field))
    share = ceil_div(outputs * element_bytes(spec.out_dtype), target.tiles_per_ipu)
    return int(superstep(target, receive_cycles(share, 0, 0, target)).total_cycles)


@remembered
def _plan_step(spec: ConvSpec, target: Target, share: float) -> Plan:
    """Fastest plan in one step within `share` of a tile's memory; if there is none, within the next larger bound."""
    by_kind = list(_candidates(spec, target))
    if share == 0:
        plans = [_plan_of(candidates, *candidates.smallest()) for candidates in by_kind]
        return min(plans, key=lambda plan: (plan.temp_bytes, plan.cost.total_cycles))
    by_kind.sort(key=lambda candidates: candidates.min_bound_cycles)
    unbounded = _fastest(by_kind, float("inf"))
    assert unbounded is not None, "without a memory bound every plan fits"
    if unbounded.temp_bytes <= share * target.bytes_per_tile:
        return unbounded
    bounds = enumerate(_memory_bounds(share * target.bytes_per_tile, target.bytes_per_tile))
    fitting = ((number, _fastest(by_kind, bound)) for number, bound in bounds)  # lazily: the first is taken
    times_raised, best = next(((number, plan) for number, plan in fitting if plan is not None), (1, unbounded))
    return replace(best, memory_bound_met=times_raised == 0, memory_binds=True)


def _fastest(by_kind: Sequence[Candidates], bound_bytes: float) -> Plan | None:
    """Fastest plan of all kinds of vertices within a memory bound."""
    best: Plan | None = None
    for candidates in by_kind:
        choice = candidates.fastest(bound_bytes, best.cost.total_cycles if best else None)
        plan = None if choice is None else _plan_of(candidates, *choice)
        if plan is not None and (best is None or _rank(plan) < _rank(best)):
            best = plan
    return best


def _plan_of(candidates: Candidates, number: int, cost_parts: np.ndarray) -> Plan:
    """One of the candidates, which are columns of arrays, as a plan."""
    splits = Dims.of([int(n) for n in candidates.splits[:, number]])
    temp_bytes = int(candidates.temp_bytes[number])
    cost = PlanCost(*(int(n) for n in cost_parts))
    fragments = int(candidates.fragments[number])
    return Plan(
        candidates.spec,
        candidates.kind,
        splits,
        candidates.grains,
        cost,
        temp_bytes,
        memory_bound_met=True,
        memory_binds=False,
        fragments=fragments,
    )


def _rank(plan: Plan) -> tuple[int, int]:
    return plan.cost.total_cycles, plan.temp_bytes


def _memory_bounds(bound: float, bytes_per_tile: int) -> Iterator[float]:
    yield bound
    while bound < 2 * bytes_per_tile:
        bound *= 2
        yield bound
