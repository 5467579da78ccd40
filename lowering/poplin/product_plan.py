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
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from math import ceil, log, log2, prod
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.layout import GROUP_CHANNELS
from ipujax.lowering.poplin.candidates import Candidates, CostedCandidate
from ipujax.lowering.poplin.cycles import ceil_div
from ipujax.lowering.poplin.partials import out_dtypes
from ipujax.lowering.poplin.spec import BATCH, FIELD, OUT_CHANNELS, ConvSpec, Dims, Memory, arithmetic
from ipujax.lowering.poplin.tile_plan import STEPS, Plan, PlanCost, is_plan_of, spec_of_all_steps
from ipujax.lowering.poplin.vertex_kinds import KINDS, VertexKind, grains
from ipujax.runtime.cache import remembered, remembered_and_stored
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.exchange import receive_code_bytes, receive_cycles, superstep
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes

CONVOLUTION_STEP_AXES = (BATCH, OUT_CHANNELS)
MATMUL_STEP_AXES = (OUT_CHANNELS, FIELD)  # columns and rows of the result
_MAX_TRIAL_COST = 1.05  # of the best estimated cost: plans beyond are not worth a trial; assumed
_RELATIVE_STEP = 0.01  # of plans whose costs differ by less, the one of fewest tiles is tried; assumed


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
    """Plans products of [groups, m, k] by [groups, k, n]: convolutions of a field of rows, a channel for each column.

    Args:
        groups: products of different matrices.
        m: rows of the first matrix and of the result.
        k: columns of the first and rows of the second matrix.
        n: columns of the second matrix and of the result.
        dtype: dtype of the first matrix.
        target: the machine.
        rhs_dtype: dtype of the second matrix, default `dtype`.
        out_dtype: dtype of the result, default `dtype`.
        partials_dtype: dtype of partial results, default float32 for narrower floats, else `out_dtype`.
        lhs_is_free: whether the plan maps the first matrix to tiles.
        rhs_is_free: whether the plan maps the second matrix to tiles.
        lhs_memory: memory order of the first matrix, as in `ConvSpec`.
        rhs_memory: memory order of the second matrix, as in `ConvSpec`.
        available_memory_proportion: part of a tile's memory that the plan may use, default the target's.
    """
    lhs_dtype = np.dtype(dtype)
    rhs_dtype = np.dtype(dtype if rhs_dtype is None else rhs_dtype)
    out_dtype, partials_dtype = out_dtypes(lhs_dtype if out_dtype is None else out_dtype, partials_dtype)
    spec = ConvSpec(
        Dims(batch=1, groups=groups, out_channels=n, in_channels=k, field=(m,), kernel=(1,)),
        in_field=(m,),
        strides=(1,),
        lhs_dilation=(1,),
        rhs_dilation=(1,),
        lhs_dtype=lhs_dtype,
        rhs_dtype=rhs_dtype,
        out_dtype=out_dtype,
        partials_dtype=partials_dtype,
        lhs_is_free=lhs_is_free,
        rhs_is_free=rhs_is_free,
        lhs_memory=lhs_memory,
        rhs_memory=rhs_memory,
        is_product=True,
    )
    return plan_convolution(spec, target, available_memory_proportion, MATMUL_STEP_AXES)


@remembered_and_stored(is_plan_of)
def plan_convolution(
    spec: ConvSpec,
    target: Target,
    available_memory_proportion: float | None = None,
    step_axes: tuple[int, ...] = CONVOLUTION_STEP_AXES,
    is_loop: bool = True,
) -> Plan:
    """Finds the fastest plan of a convolution within a memory bound.

    Where memory limits the plan, plans in several steps are compared too. If none fits, the bound is doubled up to
    twice a tile's memory, then dropped; `memory_bound_met` says so.

    Args:
        spec: the convolution.
        target: the machine.
        available_memory_proportion: the bound, as a part of a tile's memory; None for the target's. 0 asks for the plan
            of least memory.
        step_axes: positions in `Dims` of dimensions that steps may divide, of the field only one with windows of 1.
        is_loop: whether steps are a loop, which needs memory for its slices and its stack.
    """
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    if not 0 <= share <= 1:
        raise ArgumentError(
            "available_memory_proportion must be a proportion", expected="a number from 0 to 1", got=share
        )
    asks_for_least = share == 0

    def rank(plan: Plan) -> tuple[int, int]:
        # Bytes first, then cycles: all bytes, or those beyond the bound.
        excess = plan.temp_bytes if asks_for_least else _excess(plan, share * target.bytes_per_tile)
        return excess, plan.total_cycles

    best = _plan_step(spec, target, share)
    for axis in step_axes if best.memory_binds or asks_for_least else ():
        for plan in _plans_in_steps(spec, target, share, axis, is_loop=is_loop):
            best = min(best, plan, key=rank)
            if not plan.memory_binds:  # more steps would take more cycles
                break
    return best


def _plans_in_steps(spec: ConvSpec, target: Target, share: float, axis: int, *, is_loop: bool) -> Iterator[Plan]:
    """Plan in each number of steps into which a dimension divides, fewest first.

    Args:
        spec: the convolution.
        target: the machine.
        share: part of a tile's memory that a plan may use.
        axis: position in `Dims` of the dimension that steps divide.
        is_loop: whether the steps are a loop, which keeps a stack of the results of all steps beside each step.
    """
    stack_bytes = _stack_bytes(spec, axis, target) if is_loop else 0
    step_share = share - stack_bytes / target.bytes_per_tile
    for steps in takewhile(partial(_divides, list(spec.extents)[axis], axis=axis), STEPS):
        # A stack that takes all of the share leaves none to a step: it then gets the share, and the bound is not met.
        plan = _plan_step(_step_spec(spec, axis, steps), target, step_share if step_share > 0 else share)
        is_met = plan.temp_bytes + stack_bytes <= share * target.bytes_per_tile
        yield replace(
            plan,
            steps=steps,
            step_axis=axis,
            is_loop=is_loop,
            join_cycles=_join_cycles(spec, target),
            temp_bytes=plan.temp_bytes + stack_bytes,
            memory_binds=plan.memory_binds or not is_met,
            memory_bound_met=plan.memory_bound_met and is_met,
        )


def _small_plans(spec: ConvSpec, target: Target) -> tuple[Plan, ...]:
    """Plans of which one may need fewest bytes, code included: the smallest in any number of steps, or the fastest."""
    axes = MATMUL_STEP_AXES if spec.is_product else CONVOLUTION_STEP_AXES
    in_steps = [plan for axis in axes for plan in _plans_in_steps(spec, target, 0.0, axis, is_loop=True)]
    plans = [_plan_step(spec, target, 1.0), _plan_step(spec, target, 0.0), *in_steps]
    return tuple(sorted(dict.fromkeys(plans), key=lambda plan: plan.total_cycles))


class _Search(NamedTuple):
    """Search for plans that are worth a trial.

    Args:
        spec: the convolution.
        best_cycles: cost of the best plan known; plans of much more are not worth a trial.
        bound_bytes: bytes of a tile that plans may use.
        convert: conversion of the plans found to plans of the convolution of `trial_plans`.
    """

    spec: ConvSpec
    best_cycles: float
    bound_bytes: float
    convert: Callable[[Plan], Plan]


@remembered
def trial_plans(
    best: Plan, target: Target, available_memory_proportion: float | None, cycles_per_byte: float
) -> tuple[Plan, ...]:
    """Plans worth a trial, in the order of their lower bounds, `best` among them; for a proportion of 0 small ones.

    A trial adds a plan to a scratch graph and costs that. The estimate leaves out the cost of gathering scattered
    operands on a tile. So the plan of fewest tiles for each level of estimated cycles, up to a little more than the
    best, is tried: with its operands mapped block by block and, if they are unmapped, linearly. For a plan in steps
    these are plans with equal steps, plans in one, and the best plan whose steps are not a loop: it needs no stack, but
    code for each step.

    Args:
        best: the plan of `plan_convolution`.
        target: the machine.
        available_memory_proportion: as of `plan_convolution`.
        cycles_per_byte: cost of a byte of exchange code.
    """
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    spec = spec_of_all_steps(best)
    if share == 0:
        return _small_plans(spec, target)
    bound = share * target.bytes_per_tile
    bound *= 2 ** _doublings(best, bound)  # a bound that no plan meets has been raised
    fragment_cycles = cycles_per_byte * receive_code_bytes(1, target)
    step_cycles = best.cost.total_cycles + fragment_cycles * best.fragments
    all_cycles = best.join_cycles + best.steps * step_cycles
    # A search: a convolution, the best cost known, the bound of memory, and how its plans become plans for `spec`.
    searches = [_Search(spec, all_cycles, bound, lambda plan: plan)]
    if spec.lhs_is_free or spec.rhs_is_free:
        mapped = replace(spec, lhs_is_free=False, rhs_is_free=False)
        searches.append(_Search(mapped, all_cycles, bound, lambda plan: replace(plan, spec=spec, maps_linearly=True)))
    plans = [best]
    if best.steps > 1:
        plans.append(plan_convolution(spec, target, share, (best.step_axis,), is_loop=False))
        stack_bytes = _stack_bytes(spec, best.step_axis, target)
        in_steps = partial(_in_steps_of, best, stack_bytes=stack_bytes)
        searches.append(_Search(best.spec, step_cycles, bound - stack_bytes, in_steps))
    for in_groups in (False, True):  # whether plans cut no group of channels
        for search in searches:
            plans += map(search.convert, _trade_off(search, target, fragment_cycles, in_groups=in_groups))
    by_program: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        by_program.setdefault(_program_key(plan), plan)
    return tuple(sorted(by_program.values(), key=lambda plan: plan.lower_bound_cycles))


def _program_key(plan: Plan) -> tuple[object, ...]:
    """All of a plan that its program depends on: the cuts, which those in groups of channels often equal."""
    cuts = tuple(cut.tobytes() for cut in plan.grid().cuts)
    return replace(plan, grains=Dims.of([1] * len(cuts))), cuts


def _trade_off(search: _Search, target: Target, fragment_cycles: float, *, in_groups: bool) -> list[Plan]:
    """Plan of fewest tiles for each relative step of estimated cycles, up to little more than the best cost known.

    The cost of a plan is that of its cycles and, of each exchange fragment, `fragment_cycles`. With `in_groups` plans
    cut no group of channels. `search` has the convolution, the best cost known and the bound of memory.
    """
    max_cycles = int(_MAX_TRIAL_COST * search.best_cycles)  # in more cycles no plan is cheaper, even with one fragment
    kinds = _kinds_and_grains(search.spec, target, in_groups=in_groups)
    bounds = search.bound_bytes, max_cycles, fragment_cycles
    plans = [plan for kind, grain in kinds for plan in _unbeaten_plans(kind, grain, search.spec, target, *bounds)]
    curve: list[Plan] = []  # by rising cost and falling number of tiles

    def cost(plan: Plan) -> float:
        return plan.cost.total_cycles + fragment_cycles * plan.fragments

    max_cost = _MAX_TRIAL_COST * min(map(cost, plans), default=0.0)
    for plan in sorted(plans, key=lambda plan: (cost(plan), *_cycles_then_bytes(plan), plan.tiles_used)):
        if cost(plan) <= max_cost and (not curve or plan.tiles_used < curve[-1].tiles_used):
            curve.append(plan)
    # Levels of cost on a logarithmic scale; of a level's plans the last, of fewest tiles.
    plan_of_level = {int(log(cost(plan)) / _RELATIVE_STEP): plan for plan in curve}
    return list(plan_of_level.values())


@remembered
def _unbeaten_plans(
    kind: VertexKind,
    grain: Dims[int],
    spec: ConvSpec,
    target: Target,
    bound_bytes: float,
    max_cycles: int,
    fragment_cycles: float,
) -> tuple[Plan, ...]:
    """Plans of one kind of vertex of which none is better in both cycles and bytes, see `Candidates.trade_off`.

    It is remembered, since a search with `in_groups` often has the same grains as one without.
    """
    candidates = Candidates.of(kind, spec, target, grain).within(bound_bytes, max_cycles)
    choices = candidates.trade_off(bound_bytes, max_cycles, fragment_cycles)
    return tuple(plan_of_candidate(candidates, choice) for choice in choices)


def _kinds_and_grains(spec: ConvSpec, target: Target, *, in_groups: bool = False) -> list[tuple[VertexKind, Dims[int]]]:
    arith = arithmetic(spec, target)
    return [(kind, grains(kind, spec, target, in_groups=in_groups)) for kind in KINDS if kind.applies(spec, arith)]


def _in_steps_of(best: Plan, plan: Plan, stack_bytes: int) -> Plan:
    """`plan`, which is of one step, with the steps of `best`; `stack_bytes` are those of the loop's stack, on a tile.

    Whether memory binds is taken from `best`, since `plan` was searched within the same bound.
    """
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
    receiving = receive_cycles(share, shared_bytes=0, receives=0, target=target)
    return int(superstep(target, receiving_cycles=receiving).total_cycles)


@remembered
def _plan_step(spec: ConvSpec, target: Target, share: float) -> Plan:
    """Fastest plan in one step within `share` of a tile's memory; if there is none, within the next larger bound.

    Bounds are `share`, its doubles, then none; `memory_bound_met` says whether the first one is met. A share of 0 asks
    for the plan of least memory.
    """
    by_kind = [Candidates.of(kind, spec, target, grain) for kind, grain in _kinds_and_grains(spec, target)]
    if share == 0:
        plans = [plan_of_candidate(candidates, candidates.smallest()) for candidates in by_kind]
        return min(plans, key=lambda plan: (plan.temp_bytes, plan.cost.total_cycles))
    by_kind.sort(key=lambda candidates: candidates.min_bound_cycles)
    unbounded = _fastest(by_kind, float("inf"))
    assert unbounded is not None, "without a memory bound every plan fits"
    if unbounded.temp_bytes <= share * target.bytes_per_tile:
        return unbounded
    bounds = enumerate(_memory_bounds(share * target.bytes_per_tile, target.bytes_per_tile))
    fitting = ((number, _fastest(by_kind, bound)) for number, bound in bounds)  # lazily: the first is taken
    # Without a plan in any bound: the unbounded one, which does not meet the bound (number 0) either.
    times_raised, best = next(((number, plan) for number, plan in fitting if plan is not None), (1, unbounded))
    return replace(best, memory_bound_met=times_raised == 0, memory_binds=True)


def _fastest(by_kind: Sequence[Candidates], bound_bytes: float) -> Plan | None:
    """Fastest plan of all kinds of vertices within a memory bound, of equals the smaller; None if none fits.

    `by_kind` is in the order of lower bounds, so that an early plan rules out most candidates of later kinds.
    """
    best: Plan | None = None
    for candidates in by_kind:
        # Only candidates that may be as fast as the best of the other kinds.
        choice = candidates.fastest(bound_bytes, best.cost.total_cycles if best else None)
        plan = None if choice is None else plan_of_candidate(candidates, choice)
        if plan is not None and (best is None or _cycles_then_bytes(plan) < _cycles_then_bytes(best)):
            best = plan
    return best


def plan_of_candidate(candidates: Candidates, choice: CostedCandidate) -> Plan:
    """One of the candidates of a kind of vertex as a plan in one step; in arrays of candidates it is a column."""
    number = choice.number
    return Plan(
        spec=candidates.spec,
        kind=candidates.kind,
        splits=Dims.of([int(n) for n in candidates.splits[:, number]]),
        grains=candidates.grains,
        cost=PlanCost(*(int(n) for n in choice.cost_parts)),
        temp_bytes=int(candidates.temp_bytes[number]),
        fragments=int(candidates.fragments[number]),
    )


def _cycles_then_bytes(plan: Plan) -> tuple[int, int]:
    return plan.cost.total_cycles, plan.temp_bytes


def _memory_bounds(bound: float, bytes_per_tile: int) -> Iterator[float]:
    """A bound, and its doubles up to the first of twice a tile's memory."""
    yield bound
    while bound < 2 * bytes_per_tile:
        bound *= 2
        yield bound
