"""Plans how a convolution or matrix multiplication is split over the tiles of an IPU.

Input: a `ConvSpec` and a `Target`. Output: a `Plan`: how each dimension is split, by which kind of vertex, and what
that is expected to cost. All candidate splits are costed as arrays, by the cost that is charged later: operands
received in full, the formula of the largest block, reduction of partials, syncs. What memory limits is also tried in
several steps.

What an estimate cannot know, such as the cost of gathering scattered operands, decides a trial (`contenders`).

Source of the objective and of the memory bound with its retries: poplibs `ConvPlan.cpp` (reference machine.md §2).
Limits: one IPU; steps (serial splits) of powers of two that divide one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, log, log2, prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import GROUP_CHANNELS
from ipujax.lowering.poplin.candidates import Candidates, output_order
from ipujax.lowering.poplin.cycles import ceil_div
from ipujax.lowering.poplin.partials import out_dtypes
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
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes, even_cuts, frozen

MATMUL_STEP_AXES = (OUT_CHANNELS, FIELD)  # columns and rows of the result
_STEPS = (2, 4, 8, 16)
_LITTLE_SLOWER = 1.05  # what is worth a trial of `contenders`: that many times the cycles of the best
_RELATIVE_STEP = 0.01  # of plans expected to differ by less, the one of fewest tiles is the contender


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Expected cycles of a plan by what they are spent on; they add up."""

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
    """How a convolution is split over tiles.

    Args:
        spec: what a step computes.
        kind: the vertices that compute it.
        splits: blocks of each dimension.
        grains: what boundaries of blocks are multiples of.
        cost: expected cycles.
        temp_bytes: operands, results and gathered windows on the fullest tile while it computes.
        memory_bound_met: whether `temp_bytes` is within the proportion of tile memory that was asked for.
        memory_binds: whether a larger proportion would give a faster plan.
        steps: how often it is done, one after the other; everything else is of one step.
        step_axis: position in `Dims` of the dimension that steps divide evenly.
        is_loop: whether steps are a loop, of less code, or follow one another, of fewer cycles.
        join_cycles: expected cycles of bringing the results of the steps together.
        pieces: contiguous parts, at least, in which a tile receives operands that lie somewhere, in a step.
        lays_linearly: whether the operands it places are spread evenly over its tiles, else block by block.
        own_grid: its blocks and their tiles, where they are not even blocks on the first tiles.
    """

    spec: ConvSpec
    kind: VertexKind
    splits: Dims[int]
    grains: Dims[int]
    cost: PlanCost
    temp_bytes: int
    memory_bound_met: bool
    memory_binds: bool
    steps: int = 1
    step_axis: int = 0
    is_loop: bool = True
    join_cycles: int = 0
    lays_linearly: bool = False
    pieces: int = 0
    own_grid: Grid | None = None

    @property
    def total_cycles(self) -> int:
        """Expected cycles of all steps."""
        return self.steps * self.cost.total_cycles + self.join_cycles

    @property
    def likely_least_cycles(self) -> int:
        """What it is hardly ever charged less than.

        Half of the operands may lie where they are used, or reach two tiles of a bus at once; one partial result may
        lie where all are combined.
        """
        here = self.cost.exchange_cycles // 2 + self.cost.reduce_exchange_cycles // self.slots
        return self.total_cycles - self.steps * here

    @property
    def tiles_used(self) -> int:
        return prod(self.splits)

    @property
    def slots(self) -> int:
        """Partial results of each output element."""
        return self.splits.in_channels * prod(self.splits.kernel)

    def grid(self) -> Grid:
        """The blocks of a step, axes in the order of `Dims`; the same object for equal plans."""
        return _grid(self) if self.own_grid is None else self.own_grid


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Blocks and their tiles; equal only to itself, so that what is derived from it can be cached.

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
    counts, rank = list(plan.splits), len(plan.splits.field)
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
    """Plans `groups` products of [m, k] by [k, n]: rows are the field, columns output channels.

    Args:
        groups: independent products.
        m: rows of the left operand.
        k: inner dimension.
        n: columns of the right operand.
        dtype: of the left operand.
        target: the machine.
        rhs_dtype: of the right operand, default `dtype`.
        out_dtype: of the result, default `dtype`.
        partials_dtype: of partial results, default float32 for narrower floats, else `out_dtype`.
        lhs_is_free: whether the plan decides where the left operand lies.
        rhs_is_free: the same of the right operand.
        lhs_memory: how the left operand is kept, as `ConvSpec` has it.
        rhs_memory: the same of the right operand.
        available_memory_proportion: of a tile's memory, default the target's; 0 asks for the least memory.
    """
    lhs_dtype = np.dtype(dtype)
    rhs_dtype = np.dtype(dtype if rhs_dtype is None else rhs_dtype)
    out_dtype, partials_dtype = out_dtypes(lhs_dtype if out_dtype is None else out_dtype, partials_dtype)
    dtypes = lhs_dtype, rhs_dtype, out_dtype, partials_dtype
    free = lhs_is_free, rhs_is_free
    kept = lhs_memory, rhs_memory
    spec = ConvSpec(Dims(1, groups, n, k, (m,), (1,)), (m,), (1,), (1,), (1,), *dtypes, *free, *kept)
    return plan_convolution(spec, target, available_memory_proportion, MATMUL_STEP_AXES)


@remembered
def plan_convolution(
    spec: ConvSpec,
    target: Target,
    available_memory_proportion: float | None = None,
    step_axes: tuple[int, ...] = (BATCH, OUT_CHANNELS),
    is_loop: bool = True,
) -> Plan:
    """Finds the fastest split of a convolution within a memory bound.

    If memory is what limits it, doing the work in several steps is tried too. If nothing fits, the bound is doubled up
    to twice a tile's memory, then dropped; the plan says so.

    Args:
        spec: what is computed; every extent at least 1.
        target: the machine.
        available_memory_proportion: of a tile's memory, default the target's; 0 asks for the least memory.
        step_axes: positions in `Dims` of dimensions that steps may divide; of the field only one with windows of 1.
        is_loop: whether steps are a loop, which needs memory for what it slices and stacks.

    Raises:
        ArgumentError: a proportion below 0 or above 1.
    """
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if not 0 <= share <= 1:
        raise ArgumentError("available_memory_proportion is no proportion", expected="a number from 0 to 1", got=share)
    best = _plan_step(spec, target, share)
    for axis in step_axes:
        for steps in _STEPS:
            if not best.memory_binds or share == 0 or not _divides(list(spec.extents)[axis], steps, axis):
                break
            stacks = _stack_bytes(spec, axis, target) if is_loop else 0
            left = share - stacks / target.bytes_per_tile
            plan = _plan_step(_one_step(spec, axis, steps), target, left if left > 0 else share)
            plan = replace(plan, steps=steps, step_axis=axis, is_loop=is_loop, join_cycles=_join_cycles(spec, target))
            fits = plan.temp_bytes + stacks <= share * target.bytes_per_tile
            binds, met = plan.memory_binds or not fits, plan.memory_bound_met and fits
            plan = replace(plan, temp_bytes=plan.temp_bytes + stacks, memory_binds=binds, memory_bound_met=met)
            best = min(best, plan, key=lambda p: (_excess(p, share * target.bytes_per_tile), p.total_cycles))
            if not plan.memory_binds:
                break
    return best


# What is planned, the cycles of its dearest plan, its memory bound in bytes, and what is made of each plan.
_Search = tuple[ConvSpec, float, float, Callable[[Plan], Plan]]


@remembered
def contenders(
    best: Plan, target: Target, available_memory_proportion: float | None, byte_price: float
) -> tuple[Plan, ...]:
    """The plans worth a trial, in the order of what they are hardly ever charged less than.

    An estimate cannot know what gathering scattered operands on a tile costs. So the plan of fewest tiles for each
    level of expected cycles, up to a little more than the best, is tried: with its operands laid block by block and, if
    it may place them, linearly. Of a plan in steps these are plans of one step, done as often, and plans in one.

    Args:
        best: the plan `plan_convolution` makes; alone when the least memory is asked for.
        target: the machine.
        available_memory_proportion: as there; they meet the bound that the best one meets.
        byte_price: cycles that a byte of exchange code is worth.
    """
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if share == 0:
        return (best,)
    spec, bound = of_all_steps(best), share * target.bytes_per_tile
    bound *= 2 ** _doublings(best, bound)
    piece_cycles = byte_price * INSTRUCTION_BYTES * target.exchange_fragment_cycles
    one_step = best.cost.total_cycles + piece_cycles * best.pieces  # no plan worth a trial takes much more
    all_steps = best.join_cycles + best.steps * one_step
    searches: list[_Search] = [(spec, all_steps, bound, lambda plan: plan)]
    if spec.lhs_is_free or spec.rhs_is_free:
        placed = replace(spec, lhs_is_free=False, rhs_is_free=False)
        searches.append((placed, all_steps, bound, lambda plan: replace(plan, spec=spec, lays_linearly=True)))
    plans = [best]
    if best.steps > 1:
        plans.append(plan_convolution(spec, target, share, (best.step_axis,), is_loop=False))
        stacks = _stack_bytes(spec, best.step_axis, target)
        searches.append((best.spec, one_step, bound - stacks, lambda plan: _in_steps_of(best, plan, stacks)))
    for in_groups in (False, True):
        for planned, most, room, made in searches:
            plans += map(made, _frugal(planned, target, most, room, in_groups, piece_cycles))
    return tuple(sorted(dict.fromkeys(plans), key=lambda plan: plan.likely_least_cycles))


def _frugal(
    spec: ConvSpec, target: Target, worst: float, bound_bytes: float, in_groups: bool, piece_cycles: float
) -> list[Plan]:
    """The plan of fewest tiles for each relative step of expected cycles, up to little more than `worst`."""
    how = arithmetic(spec, target)
    most = int(_LITTLE_SLOWER * worst)  # in more cycles no plan is cheaper, even with one piece
    plans = [
        _plan(candidates, *choice)
        for candidates in (Candidates.of(kind, spec, target, in_groups) for kind in KINDS if kind.applies(spec, how))
        for choice in candidates.frugal(bound_bytes, most, piece_cycles)
    ]
    front: list[Plan] = []

    def priced(plan: Plan) -> float:
        return plan.cost.total_cycles + piece_cycles * plan.pieces

    dearest = _LITTLE_SLOWER * min(map(priced, plans), default=0.0)
    for plan in sorted(plans, key=lambda plan: (priced(plan), *_rank(plan), plan.tiles_used)):
        if priced(plan) <= dearest and (not front or plan.tiles_used < front[-1].tiles_used):
            front.append(plan)
    steps = {int(log(priced(plan)) / _RELATIVE_STEP): plan for plan in front}
    return list(steps.values())


def _in_steps_of(best: Plan, plan: Plan, stack_bytes: int) -> Plan:
    """A plan of one step, done as often as the best is."""
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
    """How often the memory bound must be doubled for a plan to meet it."""
    return next(n for n in count() if plan.temp_bytes <= bound_bytes * 2**n)


def _divides(extent: int, steps: int, axis: int) -> bool:
    """Whether a dimension can be done in equal steps, which keep groups of channels whole."""
    in_groups = axis == OUT_CHANNELS and extent % GROUP_CHANNELS == 0
    return extent % (steps * GROUP_CHANNELS if in_groups else steps) == 0


def _excess(plan: Plan, bound_bytes: float) -> int:
    """By how much a plan exceeds the memory bound, in quarters of a doubling."""
    return max(0, ceil(4 * log2(max(1, plan.temp_bytes) / max(1.0, bound_bytes))))


def _one_step(spec: ConvSpec, axis: int, steps: int) -> ConvSpec:
    """One of several equal parts of a convolution along one dimension."""
    extents = list(spec.extents)
    extents[axis] //= steps
    in_field = (extents[FIELD],) if axis == FIELD else spec.in_field
    return replace(spec, extents=Dims.of(extents), in_field=in_field)


def of_all_steps(plan: Plan) -> ConvSpec:
    """The convolution that all steps of a plan do together."""
    extents = list(plan.spec.extents)
    extents[plan.step_axis] *= plan.steps
    in_field = (extents[FIELD],) if plan.steps > 1 and plan.step_axis == FIELD else plan.spec.in_field
    return replace(plan.spec, extents=Dims.of(extents), in_field=in_field)


def _stack_bytes(spec: ConvSpec, axis: int, target: Target) -> int:
    """What a tile has of the operand that steps divide, in the order in which it is sliced, and of all results."""
    e = spec.extents
    inputs = e.batch * prod(spec.in_field) * e.groups * e.in_channels * element_bytes(spec.lhs_dtype)
    weights = e.groups * e.in_channels * e.out_channels * prod(e.kernel) * element_bytes(spec.rhs_dtype)
    results = e.batch * e.groups * e.out_channels * prod(e.field) * element_bytes(spec.out_dtype)
    return int(ceil_div((weights if axis == OUT_CHANNELS else inputs) + results, target.tiles_per_ipu))


def _join_cycles(spec: ConvSpec, target: Target) -> int:
    extents = spec.extents
    outputs = prod((extents.batch, extents.groups, extents.out_channels, *extents.field))
    share = ceil_div(outputs * element_bytes(spec.out_dtype), target.tiles_per_ipu)
    exchange = target.exchange_startup_cycles + ceil_div(share, target.exchange_bytes_per_cycle)
    return int(target.internal_sync_cycles + exchange)


@remembered
def _plan_step(spec: ConvSpec, target: Target, share: float) -> Plan:
    """The best plan in one step."""
    how = arithmetic(spec, target)
    found = [Candidates.of(kind, spec, target) for kind in KINDS if kind.applies(spec, how)]
    if share == 0:
        plans = [_plan(c, *c.smallest()) for c in found]
        return min(plans, key=lambda plan: (plan.temp_bytes, plan.cost.total_cycles))
    found.sort(key=lambda candidates: candidates.least_cycles)
    free = _fastest(found, float("inf"))
    assert free is not None, "without a memory bound every plan fits"
    if free.temp_bytes <= share * target.bytes_per_tile:
        return free
    bounds = enumerate(_memory_bounds(share * target.bytes_per_tile, target.bytes_per_tile))
    fitting = ((number, _fastest(found, bound)) for number, bound in bounds)
    number, best = next(((number, plan) for number, plan in fitting if plan is not None), (1, free))
    return replace(best, memory_bound_met=number == 0, memory_binds=True)


def _fastest(found: Sequence[Candidates], bound_bytes: float) -> Plan | None:
    """The fastest plan of all kinds of vertices within a memory bound."""
    best: Plan | None = None
    for candidates in found:
        choice = candidates.fastest(bound_bytes, best.cost.total_cycles if best else None)
        plan = None if choice is None else _plan(candidates, *choice)
        if plan is not None and (best is None or _rank(plan) < _rank(best)):
            best = plan
    return best


def _plan(candidates: Candidates, number: int, parts: np.ndarray) -> Plan:
    splits = Dims.of([int(n) for n in candidates.splits[:, number]])
    temp_bytes = int(candidates.temp_bytes[number])
    cost = PlanCost(*(int(n) for n in parts))
    pieces, (spec, kind, grains) = int(candidates.pieces[number]), (candidates.spec, candidates.kind, candidates.grains)
    return Plan(spec, kind, splits, grains, cost, temp_bytes, True, False, pieces=pieces)


def _rank(plan: Plan) -> tuple[int, int]:
    return plan.cost.total_cycles, plan.temp_bytes


def _memory_bounds(bound: float, bytes_per_tile: int) -> Iterator[float]:
    yield bound
    while bound < 2 * bytes_per_tile:
        bound *= 2
        yield bound
