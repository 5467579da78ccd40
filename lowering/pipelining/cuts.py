"""Candidate cuts of a micro-batch into stages: contiguous ranges of its forward equations, of equal time.

Up to 256 candidates are all compared; of more, those that minimise, for m micro-batches,

    Σ t + (m − 1) · max t        over stages of time t

which is exact for stages of one ratio of forward to backward time. Candidates are ranked by the time of the schedule
with such stages. A stage whose parameters, accumulators, stashes and optimiser state exceed an IPU rules a cut out.

Source: the form of alpa's stage construction (reference parallel.md §1.2, §1.5).
Limits: no cut inside a branch; none inside a loop, except between iterations of a loop over layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, islice, pairwise
from math import comb
from typing import NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import stage_scope
from ipujax.lowering.pipelining.layers import into_shards, share_bounds
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr
from ipujax.lowering.pipelining.stage_costs import SegmentedBatch, Work
from ipujax.lowering.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Kind, SchedulePlan
from ipujax.lowering.source_info import in_scope
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import Target

_MAX_POSITIONS = 64
_MAX_CANDIDATES = 256
_RATIO_MARGIN = 1.5  # assumed: by which the formula may be off for stages of other ratios of forward to backward time


def best_cuts(
    work: Work,
    plan: SchedulePlan,
    target: Target,
    max_cuts: int,
    resident: Sequence[tuple[int, int]] = (),
    stores_residuals: bool = True,
    counts_code: bool = False,
) -> list[tuple[int, ...]]:
    """Most promising cuts, best first; a cut is the first segment of each stage but the first.

    Args:
        work: costs of the segments.
        plan: the schedule.
        target: one IPU, with its memory.
        max_cuts: how many cuts to return.
        resident: (segment, bytes) of arguments that are on the IPU of that segment all the time.
        stores_residuals: whether all values that gradients need are stored for them.
        counts_code: whether code and buffers of exchanges are counted beside arguments and residuals.

    Raises:
        ArgumentError: if there are too few places for a cut, or no cut fits.
    """
    num_stages = plan.num_stages
    count = len(work.forward_cycles)
    positions = cut_positions(work)
    if len(positions) < num_stages - 1:
        raise ArgumentError(
            "the function has too few places for cuts into stages",
            expected=f"places between forward equations for {num_stages} stages: {num_stages - 1} or more",
            got=f"{len(positions)}",
            hint="fewer stages; a loop is cut if it scans over stacked parameters, lax.scan(layer, h, params)",
        )
    # A candidate has an index into `bounds` for each cut, for which sums are known between any two bounds.
    bounds = np.array([0, *positions, count])
    resident_bytes = _resident_bytes(work, resident, bounds)
    if counts_code:
        resident_bytes = resident_bytes + target.num_tiles * exchange_bytes(work, bounds)
    stored_bytes = work.residual_bytes * stores_residuals
    # For each stage, and any two bounds, whether the segments between them fit its IPU.
    stored_bytes_between = _range_sums(stored_bytes, bounds)
    fits = [_fits_ipu(resident_bytes + in_flight * stored_bytes_between, target) for in_flight in _in_flight(plan)]

    def all_stages_fit(candidate: Sequence[int]) -> bool:
        return all(fit[a, b] for fit, (a, b) in zip(fits, _ranges(candidate, bounds), strict=True))

    def schedule_cycles(candidate: Sequence[int]) -> float:
        ranges = [(bounds[a], bounds[b]) for a, b in _ranges(candidate, bounds)]
        return _schedule_cycles(work, ranges, plan, target)

    if comb(len(positions), num_stages - 1) <= _MAX_CANDIDATES:
        combined = all_cuts(work, num_stages, _MAX_CANDIDATES)
        candidates = [tuple(positions.index(cut) + 1 for cut in cuts) for cuts in combined]  # `bounds` begin with 0
        candidates = [candidate for candidate in candidates if all_stages_fit(candidate)]
    else:
        candidates = _balanced_cuts(_stage_times(work, bounds, plan, target), fits, plan)
    if not candidates:
        raise ArgumentError(
            f"no cut into {num_stages} stages fits the memory of an IPU",
            expected=f"{target.num_tiles * target.bytes_per_tile:,} bytes for parameters, gradients, state and stashes",
            hint='more stages, smaller micro-batches, or Options(recompute="auto")',
        )
    best = sorted(candidates, key=schedule_cycles)[:max_cuts]
    return [tuple(int(bounds[end]) for end in candidate) for candidate in best]


def cut_cost(
    work: Work,
    cuts: Sequence[int],
    plan: SchedulePlan,
    target: Target,
    resident: Sequence[tuple[int, int]] = (),
    stores_residuals: bool = True,
) -> tuple[float, float]:
    """Cycles of the schedule with a cut, and bytes of the IPU that has most, with code.

    Args:
        work: costs of the segments.
        cuts: the first segment of each stage but the first.
        plan: the schedule.
        target: the machine.
        resident: (segment, bytes) of arguments that are on the IPU of that segment all the time.
        stores_residuals: whether all values that gradients need are stored for them.
    """
    bounds = np.array([0, *cuts, len(work.forward_cycles)])
    resident_bytes = _resident_bytes(work, resident, bounds) + target.num_tiles * exchange_bytes(work, bounds)
    stored_bytes = _range_sums(work.residual_bytes * stores_residuals, bounds)
    ipu_bytes = np.zeros(plan.num_ipus)
    for stage, in_flight in enumerate(_in_flight(plan)):
        # Stage n is between bounds n and n + 1.
        ipu_bytes[plan.ipus[stage]] += resident_bytes[stage, stage + 1] + in_flight * stored_bytes[stage, stage + 1]
    ranges = [(int(a), int(b)) for a, b in pairwise(bounds)]
    return _schedule_cycles(work, ranges, plan, target), float(ipu_bytes.max())


def _ranges(candidate: Sequence[int], bounds: np.ndarray) -> list[tuple[int, int]]:
    """Indices into `bounds` of the first and the end segment of each stage."""
    return list(pairwise((0, *candidate, len(bounds) - 1)))


def _balanced_cuts(times: np.ndarray, fits: Sequence[np.ndarray], plan: SchedulePlan) -> list[tuple[int, ...]]:
    """Candidates of least Σ t + (micro-batches − 1) · max t over stages of time t; best first.

    For each limit on the slowest stage's time, from the highest down, the cut of least sum: it is that for all limits
    which are not below the time of its own slowest stage. Candidates are indices of bounds, see `_cut_of_least_sum`.

    Args:
        times: cycles of the stage between any two bounds, float64[bounds, bounds].
        fits: for each stage whether its IPU holds what is between any two bounds, bool[bounds, bounds].
        plan: the schedule.
    """
    costs: dict[tuple[int, ...], float] = {}
    slowest_cycles: dict[tuple[int, ...], float] = {}
    limit = np.inf
    while (candidate := _cut_of_least_sum(np.where(times <= limit, times, np.inf), fits, plan.num_stages)) is not None:
        stage_times = [times[a, b] for a, b in pairwise((0, *candidate, len(times) - 1))]
        slowest = max(stage_times)
        costs[candidate] = float(sum(stage_times) + (plan.micro_batches - 1) * slowest)
        slowest_cycles[candidate] = slowest
        limit = np.nextafter(slowest, 0)  # the next cut has no stage as slow
    # With a slower slowest stage a cut costs at least that stage's time for each micro-batch.
    limit_cycles = _RATIO_MARGIN * min(costs.values(), default=0.0)
    near = [candidate for candidate in costs if slowest_cycles[candidate] * plan.micro_batches <= limit_cycles]
    return sorted(near, key=costs.__getitem__)[:_MAX_CANDIDATES]


def _schedule_cycles(work: Work, ranges: Sequence[tuple[int, int]], plan: SchedulePlan, target: Target) -> float:
    """Cycles of a step by the schedule.

    Args:
        work: costs of the segments of a micro-batch.
        ranges: first segment of each stage, and the one behind its last.
        plan: the schedule.
        target: one IPU, with its links to others.
    """
    cycles = np.zeros((plan.num_stages, len(Kind)))  # of one task, by its stage and kind
    for stage, ((first, end), in_flight) in enumerate(zip(ranges, _in_flight(plan), strict=True)):
        has_stash = plan.training and in_flight > 1  # values wait in a ring for the backward task
        sent_bytes = work.crossing_bytes[end] if end < len(work.crossing_bytes) else 0.0  # the last stage sends nothing
        # The bytes over a cut are those of both directions, gradients too: they count once, with the forward task.
        sending = float(sent_bytes) / target.global_exchange_bytes_per_second * target.clock_hz
        forward = float(work.forward_cycles[first:end].sum() + has_stash * work.push_cycles[first:end].sum()) + sending
        backward = float(work.backward_cycles[first:end].sum() + has_stash * work.pop_cycles[first:end].sum())
        cycles[stage, [FORWARD, BACKWARD]] = forward, backward
        # Assumed: gradients of inputs and of weights take as long as each other.
        cycles[stage, [BACKWARD_INPUT, BACKWARD_WEIGHT]] = backward / 2
    if target.global_exchange == "lockstep":  # the slowest task of each slot delays all IPUs
        slots = _tasks_of_slots(plan)
        slowest = np.maximum.reduceat(cycles[slots.stages, slots.kinds], slots.starts)
        return float(sum((slots.counts * slowest).tolist()))
    # Buffered exchange: a task begins when its IPU is free and the value of the stage before (or behind) has arrived.
    cycles_of_tasks = cycles.tolist()
    clocks = [0.0] * plan.num_ipus
    end_clocks: dict[tuple[int, int, bool], float] = {}  # by stage, micro-batch, and whether the task is backward
    for slot in plan.slots():
        for task in slot:
            ipu = plan.ipus[task.stage]
            is_backward = task.kind != FORWARD
            predecessor = (task.stage + (1 if is_backward else -1), task.micro_batch, is_backward)
            # Gradients of weights need what the same stage has already, and no stage waits for them.
            ready = 0.0 if task.kind == BACKWARD_WEIGHT else end_clocks.get(predecessor, 0.0)
            clocks[ipu] = max(clocks[ipu], ready) + cycles_of_tasks[task.stage][task.kind]
            if task.kind != BACKWARD_WEIGHT:
                end_clocks[task.stage, task.micro_batch, is_backward] = clocks[ipu]
    return max(clocks)


class _SlotTasks(NamedTuple):
    """Tasks of the distinct slots of a schedule, one slot after the other.

    Args:
        stages: stage of each task, int64[tasks].
        kinds: its kind, int64[tasks].
        starts: first task of each slot, int64[slots].
        counts: runs of each slot, int64[slots].
    """

    stages: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


# A search costs hundreds of cuts by the same few schedules.
@lru_cache(maxsize=64)
def _tasks_of_slots(plan: SchedulePlan) -> _SlotTasks:
    slots = [(block.count, slot) for block in plan.blocks for slot in block.slots]
    stages, kinds = np.array([(task.stage, task.kind) for _, slot in slots for task in slot]).T
    starts = np.cumsum([0, *(len(slot) for _, slot in slots[:-1])])
    return _SlotTasks(stages, kinds, starts, np.array([count for count, _ in slots]))


@lru_cache(maxsize=64)
def _in_flight(plan: SchedulePlan) -> tuple[int, ...]:
    """Micro-batches in the stash of each stage at once."""
    return tuple(plan.in_flight(stage) if plan.training else 1 for stage in range(plan.num_stages))


def all_cuts(work: Work, num_stages: int, limit: int) -> Iterator[tuple[int, ...]]:
    """The first `limit` of all cuts into stages."""
    return islice(combinations(cut_positions(work), num_stages - 1), limit)


def cut_positions(work: Work) -> list[int]:
    """Segments before which a cut is tried: all, or of very many the cheapest to send and some in between."""
    num_segments = len(work.forward_cycles)
    if num_segments - 1 <= _MAX_POSITIONS:
        return list(range(1, num_segments))
    segments = np.arange(1, num_segments)
    sent_bytes = work.crossing_bytes[segments]
    cheapest = segments[sent_bytes < np.sort(sent_bytes)[_MAX_POSITIONS]]  # fewer than the limit, even with ties
    elapsed = np.cumsum(work.forward_cycles + work.backward_cycles)
    # Of each of `segments`, which begin with 1, the section of equal time that it begins in.
    section = np.minimum((elapsed / elapsed[-1] * _MAX_POSITIONS).astype(int), _MAX_POSITIONS - 1)[segments - 1]
    # Sections without a cheap position near, so that no stretch of the program is without positions.
    covered = {int(index) + step for index in section[cheapest - 1] for step in (-1, 0, 1)}
    uncovered = [section == index for index in np.unique(section) if int(index) not in covered]
    in_between = (int(segments[members][sent_bytes[members].argmin()]) for members in uncovered)
    return sorted({*cheapest.tolist(), *in_between})


def _stage_times(work: Work, bounds: np.ndarray, plan: SchedulePlan, target: Target) -> np.ndarray:
    """Cycles of the stage between any two bounds, stash and sends included, float64[bounds, bounds]."""
    cycles = work.forward_cycles + work.backward_cycles + plan.training * (work.push_cycles + work.pop_cycles)
    elapsed = np.concatenate([[0], np.cumsum(cycles)])[bounds]
    times = elapsed[None, :] - elapsed[:, None]
    sent = np.append(work.crossing_bytes, 0)[bounds]
    times = times + sent[None, :] / target.global_exchange_bytes_per_second * target.clock_hz
    times[np.tril_indices(len(bounds))] = np.inf
    return times


def _range_sums(num_bytes: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums of a value per segment over the segments between any two bounds, float64[bounds, bounds]."""
    totals: np.ndarray = np.concatenate([[0], np.cumsum(num_bytes)])[bounds]
    return totals[None, :] - totals[:, None]


def _resident_bytes(work: Work, resident: Sequence[tuple[int, int]], bounds: np.ndarray) -> np.ndarray:
    """Bytes of parameters, their gradients and `resident` arguments of the stage between any two bounds.

    float64[bounds, bounds]; `resident` has (segment, bytes) of each argument.
    """
    count = len(work.forward_cycles)
    other_bytes = np.zeros(count)
    for segment, num_bytes in resident:
        other_bytes[segment] += num_bytes
    # A parameter, and the accumulator of its gradient.
    copies = 1 + work.accumulator_share
    parameter_bytes = copies * _copied_bytes(work.parameter_bytes, count, tuple(bounds.tolist()))
    return parameter_bytes + _range_sums(other_bytes, bounds)


def exchange_bytes(work: Work, bounds: np.ndarray) -> np.ndarray:
    """Bytes of exchange code and buffers on a tile, of the stage between any two bounds, float64[bounds, bounds]."""
    places = tuple(bounds.tolist())
    code_bytes = _copied_bytes(work.code_bytes, len(work.forward_cycles), places)
    return code_bytes + _most_between(tuple(work.buffer_bytes.tolist()), places)


# A search asks for the bytes of the same segments once for each plan.
@lru_cache(maxsize=64)
def _most_between(values: tuple[float, ...], bounds: tuple[int, ...]) -> np.ndarray:
    """Largest value of the segments between any two bounds, float64[bounds, bounds]."""
    largest = np.zeros((len(bounds), len(bounds)))
    for n, first in enumerate(bounds):
        most_until = np.maximum.accumulate(np.array([0.0, *values[first:]]))
        largest[n, n:] = most_until[np.array(bounds[n:]) - first]
    largest.setflags(write=False)
    return largest


@lru_cache(maxsize=64)
def _copied_bytes(users_of: tuple[tuple[tuple[int, ...], int], ...], count: int, bounds: tuple[int, ...]) -> np.ndarray:
    """Bytes of what each stage that uses it has a copy of, of the stage between any two bounds.

    Args:
        users_of: segments that use each, in order, and its bytes.
        count: number of segments.
        bounds: the bounds.
    """
    # Indexed by previous user + 1 and user + 1, a copy counts in a stage that contains the user and not the previous.
    copies = np.zeros((count + 1, count + 1))
    for users, num_bytes in users_of:
        for previous_user, user in pairwise((-1, *users)):
            copies[previous_user + 1, user + 1] += num_bytes
    # For a stage [a, b), user u and previous user v: v < a <= u < b.
    copy_sums = np.cumsum(np.cumsum(copies, 0), 1)
    low, high = np.array(bounds)[:, None], np.array(bounds)[None, :]
    sums: np.ndarray = copy_sums[low, high] - copy_sums[low, low]
    sums.setflags(write=False)
    return sums


def _fits_ipu(num_bytes: np.ndarray, target: Target) -> np.ndarray:
    """Elementwise test for byte counts that an IPU holds."""
    fits: np.ndarray = num_bytes <= target.num_tiles * target.bytes_per_tile
    return fits


def _cut_of_least_sum(times: np.ndarray, fits: Sequence[np.ndarray], num_stages: int) -> tuple[int, ...] | None:
    """Bounds, by index, at which all stages but the last end, of least sum of times; None if no cut fits.

    Args:
        times: cycles of the stage between any two bounds, float64[bounds, bounds]; inf where there can be none.
        fits: for each stage whether its IPU holds what is between any two bounds, bool[bounds, bounds].
        num_stages: number of stages.
    """
    size = len(times)
    ends = np.arange(size)
    # Dynamic programming over stages: total[b] is the least sum of times of the stages that end at bound b.
    total = np.where(fits[0][0], times[0], np.inf)
    choices: list[np.ndarray] = []
    for stage in range(1, num_stages):
        through = total[:, None] + np.where(fits[stage], times, np.inf)  # [begin of the stage, end of it]
        choices.append(through.argmin(0))  # for each end the best begin
        total = through[choices[-1], ends]
    if not np.isfinite(total[size - 1]):
        return None
    cuts = []
    end = size - 1
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return tuple(reversed(cuts))


def name_stages(batch: SegmentedBatch, cuts: Sequence[int]) -> CutJaxpr:
    """The micro-batch with equations named after the stages of a cut, and loops over layers split at the cuts."""
    # By (number of the uncut equation, first row of the shard); those that belong to their users (−1) get a stage with
    # these, when the pipeline is partitioned.
    stage_of = {
        shard: int(np.searchsorted(cuts, segment, "right"))  # number of cuts up to the segment
        for shard, segment in batch.shard_segments().items()
        if segment >= 0
    }
    loops: dict[int, Bounds] = {}
    for n, bounds in batch.loops.items():
        # Of the finest bounds those between shards of different stages.
        changes = [b for a, b in pairwise(bounds[:-1]) if stage_of[n, a] != stage_of[n, b]]
        loops |= {n: (0, *changes, bounds[-1])} if changes else {}
    shards = into_shards(batch.jaxpr, batch.spec, share_bounds(batch.jaxpr.jaxpr, loops))
    eqns = []
    for eqn, source in zip(shards.jaxpr.jaxpr.eqns, shards.sources, strict=True):
        stage = None if source is None else stage_of.get((source.number, source.first))
        eqns.append(eqn if stage is None else in_scope(eqn, stage_scope(stage)))
    return replace(shards, jaxpr=ClosedJaxpr(shards.jaxpr.jaxpr.replace(eqns=eqns), shards.jaxpr.consts))
