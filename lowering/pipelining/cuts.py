"""Where to cut a micro-batch into stages: contiguous ranges of its forward equations, of equal time.

Input: what its equations cost (`work`), and a schedule. Output: the most promising cuts, and the jaxpr with equations
named after the stages between some. Of few ways to cut all are weighed, of many those that minimise

    Σ t + (m − 1) · max t        over stages of time t, for m micro-batches

which is exact for stages of one ratio of forward to backward time. They are ranked by the time the schedule takes with
such stages. Stages whose parameters, accumulators, stashes and optimiser's state exceed an IPU are left out.

Source: the form of alpa's stage construction (reference parallel.md §1.2, §1.5).
Limits: no cut inside a branch; none inside a loop, but between iterations of one over layers. Of very many places to
cut, 64 with the least to send are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise
from math import comb

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import stage_scope
from ipujax.lowering.pipelining.layers import into_shards, together
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr
from ipujax.lowering.pipelining.stage_costs import Work
from ipujax.lowering.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Kind, SchedulePlan
from ipujax.lowering.source_info import in_scope
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import Target

_MOST_CUTS = 64
_MOST_WEIGHED = 256  # ways to cut
_PARAMETER_COPIES = 2  # a parameter and the accumulator of its gradient


def best_cuts(
    work: Work,
    plan: SchedulePlan,
    target: Target,
    few: int,
    resident: Sequence[tuple[int, int]] = (),
    keeps_all: bool = True,
) -> list[tuple[int, ...]]:
    """The most promising ways to cut: for each the first segments of all stages but the first.

    Args:
        work: what is cut.
        plan: the schedule, for as many stages.
        target: one IPU.
        few: how many ways, at most.
        resident: what lies there besides: the segment it goes with, and bytes.
        keeps_all: whether all that gradients need is kept for them.

    Raises:
        ArgumentError: if there are fewer places to cut than needed, or no way that fits the machine.
    """
    num_stages, count, between = plan.num_stages, len(work.forward_cycles), places(work)
    if len(between) < num_stages - 1:
        raise ArgumentError(
            "there is nothing to cut",
            expected=f"places between forward equations for {num_stages} stages: {num_stages - 1} or more",
            got=f"{len(between)}",
            hint="fewer stages; of loops those over stacked parameters are cut, lax.scan(layer, h, params)",
        )
    bounds = np.array([0, *between, count])
    own, kept = _resident_bytes(work, resident, bounds), work.residual_bytes * keeps_all
    in_flight = [plan.in_flight(stage) if plan.training else 1 for stage in range(num_stages)]
    fits = [_fits(own + number * _between(kept, bounds), target) for number in in_flight]
    if comb(len(between), num_stages - 1) <= _MOST_WEIGHED:
        ways = [tuple(between.index(c) + 1 for c in cuts) for cuts in all_cuts(work, num_stages, _MOST_WEIGHED)]
        ways = [way for way in ways if all(fit[a, b] for fit, (a, b) in zip(fits, _ranges(way, bounds), strict=True))]
    else:
        ways = _balanced(_times(work, bounds, plan, target), fits, plan)
    if not ways:
        raise ArgumentError(
            f"no cut into {num_stages} stages fits the memory of an IPU",
            expected=f"{target.num_tiles * target.bytes_per_tile:,} bytes for parameters, gradients, state and stashes",
            hint='more stages, smaller micro-batches, or Options(recompute="auto")',
        )
    cost = {way: _cost(work, [(bounds[a], bounds[b]) for a, b in _ranges(way, bounds)], plan, target) for way in ways}
    return [tuple(int(bounds[c]) for c in way) for way in sorted(cost, key=cost.__getitem__)[:few]]


def _ranges(way: Sequence[int], bounds: np.ndarray) -> list[tuple[int, int]]:
    """The bounds at which each stage begins and ends."""
    return list(pairwise((0, *way, len(bounds) - 1)))


def _balanced(times: np.ndarray, fits: Sequence[np.ndarray], plan: SchedulePlan) -> list[tuple[int, ...]]:
    """The ways to cut that minimise the formula, for each time that the slowest stage may take; best first."""
    found: dict[tuple[int, ...], float] = {}
    for most in np.unique(times[np.isfinite(times)]):
        way = _least_sum(np.where(times <= most, times, np.inf), fits, plan.num_stages)
        if way is not None:
            parts = [times[a, b] for a, b in pairwise((0, *way, len(times) - 1))]
            found.setdefault(way, float(sum(parts) + (plan.micro_batches - 1) * max(parts)))
            if most * plan.micro_batches > 1.5 * min(found.values()):
                break
    return sorted(found, key=found.__getitem__)[:_MOST_WEIGHED]


def _cost(work: Work, ranges: Sequence[tuple[int, int]], plan: SchedulePlan, target: Target) -> float:
    """Cycles that a schedule takes with stages of these segments."""
    cycles: dict[tuple[int, Kind], float] = {}
    for stage, (a, b) in enumerate(ranges):
        keeps = plan.training and plan.in_flight(stage) > 1
        sent = work.crossing_bytes[b] if b < len(work.crossing_bytes) else 0.0
        sending = float(sent) / target.global_exchange_bytes_per_second * target.clock_hz
        forward = float(work.forward_cycles[a:b].sum() + keeps * work.push_cycles[a:b].sum()) + sending
        backward = float(work.backward_cycles[a:b].sum() + keeps * work.pop_cycles[a:b].sum())
        cycles |= {(stage, FORWARD): forward, (stage, BACKWARD): backward}
        cycles |= {(stage, BACKWARD_INPUT): backward / 2, (stage, BACKWARD_WEIGHT): backward / 2}
    if target.global_exchange == "lockstep":
        return sum(
            block.count * max(cycles[task.stage, task.kind] for task in slot)
            for block in plan.blocks
            for slot in block.slots
        )
    clocks, ends = [0.0] * plan.num_ipus, dict[tuple[int, int, bool], float]()
    for slot in plan.slots():
        for task in slot:
            ipu, back = plan.ipus[task.stage], task.kind != FORWARD
            before = (task.stage + (1 if back else -1), task.micro_batch, back)
            ready = 0.0 if task.kind == BACKWARD_WEIGHT else ends.get(before, 0.0)
            clocks[ipu] = max(clocks[ipu], ready) + cycles[task.stage, task.kind]
            if task.kind != BACKWARD_WEIGHT:
                ends[task.stage, task.micro_batch, back] = clocks[ipu]
    return max(clocks)


def all_cuts(work: Work, num_stages: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut, as `best_cuts` has them; the first of them where there are more than `most`."""
    return islice(combinations(places(work), num_stages - 1), most)


def places(work: Work) -> list[int]:
    """Segments before which to cut: all, or of very many those with the least to send, and some in between."""
    num_segments = len(work.forward_cycles)
    if num_segments - 1 <= _MOST_CUTS:
        return list(range(1, num_segments))
    segments = np.arange(1, num_segments)
    levels = np.sort(work.crossing_bytes[segments])
    least = segments[work.crossing_bytes[segments] < levels[_MOST_CUTS]]  # no more than are tried
    done = np.cumsum(work.forward_cycles + work.backward_cycles)
    part = np.minimum((done / done[-1] * _MOST_CUTS).astype(int), _MOST_CUTS - 1)[segments - 1]
    near = {int(p) + step for p in part[least - 1] for step in (-1, 0, 1)}
    others = {
        int(p): int(segments[part == p][work.crossing_bytes[segments[part == p]].argmin()]) for p in np.unique(part)
    }
    return sorted({*least.tolist(), *(segment for p, segment in others.items() if p not in near)})


def _times(work: Work, bounds: np.ndarray, plan: SchedulePlan, target: Target) -> np.ndarray:
    """Cycles of the stage between any two bounds, what it keeps and sends included, float64[bounds, bounds]."""
    each = work.forward_cycles + work.backward_cycles + plan.training * (work.push_cycles + work.pop_cycles)
    done = np.concatenate([[0], np.cumsum(each)])[bounds]
    times = done[None, :] - done[:, None]
    sent = np.append(work.crossing_bytes, 0)[bounds]
    times = times + sent[None, :] / target.global_exchange_bytes_per_second * target.clock_hz
    times[np.tril_indices(len(bounds))] = np.inf
    return times


def _between(num_bytes: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums of what each segment has over the segments between any two bounds, float64[bounds, bounds]."""
    done: np.ndarray = np.concatenate([[0], np.cumsum(num_bytes)])[bounds]
    return done[None, :] - done[:, None]


def _resident_bytes(work: Work, others: Sequence[tuple[int, int]], bounds: np.ndarray) -> np.ndarray:
    """Bytes that are there all the time with the segments between any two bounds, float64[bounds, bounds].

    A parameter is in each stage that uses it.
    """
    count = len(work.forward_cycles)
    first = np.zeros(count)
    for segment, size in others:
        first[segment] += size
    again = np.zeros((count + 1, count + 1))  # by the user before, from 1, and a user: counted if the former is outside
    for users, size in work.parameter_bytes:
        for before, user in pairwise((-1, *users)):
            again[before + 1, user + 1] += _PARAMETER_COPIES * size
    # Between a and b is a user u behind another, v, that is not: v < a <= u < b.
    counted = np.cumsum(np.cumsum(again, 0), 1)
    resident = counted[bounds[:, None], bounds[None, :]] - counted[bounds[:, None], bounds[:, None]]
    return resident + _between(first, bounds)


def _fits(num_bytes: np.ndarray, target: Target) -> np.ndarray:
    """Whether an IPU holds so many bytes, elementwise."""
    fitting: np.ndarray = num_bytes <= target.num_tiles * target.bytes_per_tile
    return fitting


def _least_sum(times: np.ndarray, fits: Sequence[np.ndarray], num_stages: int) -> tuple[int, ...] | None:
    """The bounds that end all stages but the last, with the least sum of times; None if there are none."""
    size = len(times)
    total = np.where(fits[0][0], times[0], np.inf)
    choice: list[np.ndarray] = []
    for stage in range(1, num_stages):
        through = total[:, None] + np.where(fits[stage], times, np.inf)
        choice.append(through.argmin(0))
        total = through.min(0)
    if not np.isfinite(total[size - 1]):
        return None
    cuts, at = [], size - 1
    for chosen in reversed(choice):
        at = int(chosen[at])
        cuts.append(at)
    return tuple(reversed(cuts))


def named(work: Work, cuts: Sequence[int]) -> CutJaxpr:
    """The micro-batch with its equations named after the stages between cuts, and its loops over layers cut there."""
    stage_of = {key: int(np.searchsorted(cuts, n, "right")) for key, n in work.shard_segments().items() if n >= 0}
    loops: dict[int, Bounds] = {}
    for n, finest in work.loops.items():
        changes = [b for a, b in pairwise(finest[:-1]) if stage_of[n, a] != stage_of[n, b]]
        loops |= {n: (0, *changes, finest[-1])} if changes else {}
    found = into_shards(work.whole, work.whole_spec, together(work.whole.jaxpr, loops))
    eqns = []
    for eqn, source in zip(found.jaxpr.jaxpr.eqns, found.sources, strict=True):
        stage = None if source is None else stage_of.get((source.number, source.first))
        eqns.append(eqn if stage is None else in_scope(eqn, stage_scope(stage)))
    return replace(found, jaxpr=ClosedJaxpr(found.jaxpr.jaxpr.replace(eqns=eqns), found.jaxpr.consts))
