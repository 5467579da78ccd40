"""Estimates of plans: cycles of a step and bytes of the fullest tile, before a plan is compiled.

Input: a traced step, the machine, a plan. Output: an `Estimate`. Of few numbers of rows, and of one for each number of
shards, a micro-batch is lowered, on one IPU (`lowering/pipelining/stage_costs`); all plans share these costs:

    pipeline     best cut into stages, by the clock of the schedule; without stages the sum of all segments
    sums         gradients over `data`, by the rounds of a collective on the links of all replicas
    update       bytes of the values that the update makes, over the tiles of the stages
    host         a transfer for each micro-batch, offloaded arguments in and out

    gathers      of what loops store in parts on the shards, once a micro-batch

    bytes        of the stage that has most: parameters, accumulators, other arguments, values in flight, and the code
                 and buffers of exchanges

Limits: temporary values of a stage and the code of the update are not known before it is compiled. `Calibration` learns
from the plans that are: the ratio of cycles, and the bytes beside, of plans of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.gcl import estimated_cycles
from ipujax.lowering.jaxpr import PIPELINE, value_bytes
from ipujax.lowering.partition import estimate as partition_estimate
from ipujax.lowering.passes import ready
from ipujax.lowering.pipelining import Planning, StageSearch, Work, best_cuts, cut_cost, exchange_bytes
from ipujax.lowering.primitives import record_of
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.rules import Lowering
from ipujax.lowering.schedules import SchedulePlan, as_schedule, default_schedule, schedule_plan
from ipujax.plan_search.accumulation import SplitStep
from ipujax.plan_search.search_plan import Plan, TracedStep, applied, split_of
from ipujax.plan_search.serial_parts import LargeValue
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target

_OVERHEAD_CYCLES = 1000  # assumed: start-up, exchange and sync of an operation of the update
_BESIDE_BYTES = 40_000  # assumed, until a plan is compiled: vertex code and temporary values on the fullest tile
_BESIDE_SHARE = 0.15  # assumed: of a tile's memory, for vertex code and temporary values, in the choice of a cut
_ANCHORS, _ANCHOR_RATIO = 3, 4  # numbers of rows whose micro-batches are lowered: the fewest, 4 and 16 times as many
_FIXED_SHARE = 0.1  # assumed: of cycles, below which those of more rows are in proportion, and not lowered
_FEWEST_ANCHORS = 2  # for a plan that may be ruled out
_MOST_STAGES = 2  # of the pipeline that is costed: segments do not depend on it


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated cost of a plan.

    Args:
        cycles: cycles of one step.
        tile_bytes: bytes of the fullest tile.
        cuts: first segment of each stage but the first.
        num_segments: segments of the micro-batch that is cut.
    """

    cycles: float
    tile_bytes: float
    cuts: tuple[int, ...] = ()
    num_segments: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatchCosts:
    """Costs of a micro-batch of some rows, on one IPU of each shard.

    Args:
        work: costs of its segments.
        resident: segment and bytes of each argument that it does not read.
        gradient_bytes: bytes of the sums that it is a term of.
        update_cycles: cycles of the update on one IPU.
    """

    work: Work
    resident: tuple[tuple[int, int], ...]
    gradient_bytes: int
    update_cycles: float

    @property
    def cycles(self) -> float:
        """Cycles of the micro-batch on one IPU."""
        return float(self.work.forward_cycles.sum() + self.work.backward_cycles.sum())


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step's micro-batches, each found once.

    Args:
        traced: the step.
        is_batch: for each leaf of the arguments whether it is of the batch.
        target: the machine.
        is_split: whether the step is micro-batches and an update.
        least_rows: fewest rows of a micro-batch of all plans.
        large: largest value of a micro-batch.
        options: options of plans.
        stored_row_bytes: bytes that loops of a micro-batch store for others, for each row.
        costs_of_rows: costs by rows of a micro-batch and number of shards.
        errors_of_rows: errors of those that cannot be.
        segments_of_rows: segments of a micro-batch, by its rows, number of shards, parts of its largest values, and
            whether what loops store is split over shards.
        schedules: plans of schedules, by name and numbers of stages and micro-batches.
    """

    traced: TracedStep
    is_batch: tuple[bool, ...]
    target: Target
    is_split: bool = True
    least_rows: int = 1
    large: LargeValue = LargeValue()
    options: Options = Options()
    stored_row_bytes: float = 0.0
    costs_of_rows: dict[tuple[int, int], MicroBatchCosts] = field(default_factory=dict)
    errors_of_rows: dict[tuple[int, int], IpuError] = field(default_factory=dict)
    segments_of_rows: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)
    schedules: dict[tuple[str | None, int, int], SchedulePlan] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return next(aval.shape[0] for aval, flag in zip(self.traced.avals, self.is_batch, strict=True) if flag)

    def of_plan(self, plan: Plan, most_anchors: int = _ANCHORS) -> MicroBatchCosts:
        """Return the costs of a plan's micro-batch, from at most so many that are lowered."""
        rows = self.rows // (plan.data * plan.micro_batches)
        if plan.shards == 1:
            return self._of_rows(rows, most_anchors)
        return self._of_shards(rows, plan.shards, plan.specs, most_anchors)

    def _of_shards(self, rows: int, shards: int, specs: Mapping[str, Any], most_anchors: int) -> MicroBatchCosts:
        """Costs of rows on one of several shards, of which one micro-batch is lowered: the fewest rows for each.

        Others have as many times its cycles and bytes as an equal share of their rows has on one IPU alone.
        """
        divisors = _parts_of(self.rows)
        anchor = next((n for n in divisors if n >= self.least_rows * shards), divisors[-1])
        costs = self._of_anchor(anchor, shards, specs)
        small, many = (self._of_rows(n / shards, most_anchors).work for n in (anchor, rows))
        changes = dict[str, Any]()
        for name in _BY_ROWS:
            total = float(getattr(small, name).sum())
            changes[name] = getattr(costs.work, name) * (float(getattr(many, name).sum()) / total if total else 1.0)
        return replace(costs, work=replace(costs.work, **changes))

    def _of_rows(self, rows: float, most_anchors: int) -> MicroBatchCosts:
        """Costs of rows on one IPU, on the line through those of two anchors; those of an anchor are lowered."""
        powers = (self.least_rows * _ANCHOR_RATIO**n for n in range(most_anchors))
        divisors = _parts_of(self.rows)
        anchors = [n for n in powers if n in divisors] or [divisors[-1]]
        if rows > max(anchors[:2]) and self._is_in_proportion(anchors[:2]):
            anchors = anchors[:2]
        if rows in anchors:
            return self._of_anchor(int(rows), 1, {})
        if len(anchors) == 1:
            anchors += [n for n in divisors if n > anchors[0]][:1]
        last = min(max(1, sum(n < rows for n in anchors)), len(anchors) - 1)
        points = anchors[max(0, last - 1) : last + 1]
        return _on_line(rows, [(n, self._of_anchor(n, 1, {})) for n in points])

    def _is_in_proportion(self, anchors: Sequence[int]) -> bool:
        """Return True if cycles that do not depend on the number of rows are few at the last of two anchors."""
        if len(anchors) == 1:
            return False
        (first, low), (last, high) = ((n, self._of_anchor(n, 1, {}).cycles) for n in anchors)
        fixed_cycles = high - (high - low) / (last - first) * last
        return fixed_cycles < _FIXED_SHARE * high

    def _of_anchor(self, rows: int, shards: int, specs: Mapping[str, Any]) -> MicroBatchCosts:
        """Return the costs of a micro-batch that is lowered, once for all plans: these have equal specs."""
        # One that cannot be lowered is not tried again for each plan.
        if (rows, shards) in self.errors_of_rows:
            raise self.errors_of_rows[rows, shards]
        if (rows, shards) not in self.costs_of_rows:
            try:
                self.costs_of_rows[rows, shards] = self._lowered(rows, shards, specs)
            except IpuError as error:
                self.errors_of_rows[rows, shards] = error
                raise
        return self.costs_of_rows[rows, shards]

    def _rough(self, plan: Plan) -> Estimate:
        """Estimate of a step that is not split: an equal share of its work on each IPU."""
        one_ipu = partition_estimate(self.traced.jaxpr, self.target)
        return Estimate(one_ipu.cycles / plan.num_ipus, one_ipu.num_bytes / self.target.tiles_per_ipu / plan.num_ipus)

    def cuts_of_program(self, plan: Plan, estimate: Estimate) -> tuple[int, ...]:
        """Return the cuts of an estimate for the plan's own micro-batch, which may have other segments.

        Costs of its rows may be those of other rows, and so of other operations: then each stage keeps its share of the
        segments.
        """
        if not estimate.cuts:
            return ()
        rows = self.rows // (plan.data * plan.micro_batches)
        key = rows, plan.shards, plan.serial, plan.shard_stored
        if key not in self.segments_of_rows:
            try:
                _, search = self._micro_batch(rows, plan.shards, plan.serial, plan.specs, plan.shard_stored)
            except IpuError:
                return estimate.cuts  # the plan is compiled with these, which names the error
            self.segments_of_rows[key] = search.batch.num_segments
        count = self.segments_of_rows[key]
        if count == estimate.num_segments or count <= len(estimate.cuts):  # too few for its stages: refused
            return estimate.cuts
        last = len(estimate.cuts) - 1
        cuts = [0]
        for n, cut in enumerate(estimate.cuts):
            shared = round(cut * count / estimate.num_segments)
            cuts.append(min(max(shared, cuts[-1] + 1), count - 1 - (last - n)))
        return tuple(cuts[1:])

    def _micro_batch(
        self, rows: int, shards: int, parts: int, specs: Mapping[str, Any], shard_stored: bool = False
    ) -> tuple[SplitStep, StageSearch]:
        """Return the step in micro-batches of so many rows, the largest values in parts, and the segments of one."""
        micro_batches = self.rows // rows
        plan = Plan(1, shards, _MOST_STAGES, micro_batches, schedule="gpipe", serial=parts, shard_stored=shard_stored)
        plan = replace(plan, specs=specs if shards > 1 else {})
        split = split_of(plan, self.traced, self.is_batch)
        assert split is not None, "a step without micro-batches is estimated whole"

        def step(*leaves: Any) -> Any:
            return applied(plan, self.traced, split, self.is_batch, [False] * len(leaves), leaves)

        trace = jax_jit(step).trace(*self.traced.avals)
        function = unwrapped(ready(trace.jaxpr, is_cut=True))
        (number,) = (n for n, eqn in enumerate(function.jaxpr.jaxpr.eqns) if eqn.primitive.name == PIPELINE)
        options = self.options
        byte_cost = BYTE_COST_CYCLES if options.byte_cost is None else options.byte_cost
        share = options.available_memory_proportion
        share = self.target.available_memory_proportion if share is None else share
        machine = self.target.replace(num_ipus=_MOST_STAGES, available_memory_proportion=share)
        planning = Planning(machine, partial(Lowering, options=options), byte_cost, replicas=shards)
        return split, StageSearch(function.jaxpr, number, planning)

    def _lowered(self, rows: int, shards: int, specs: Mapping[str, Any]) -> MicroBatchCosts:
        """Lower a micro-batch of so many rows, and return its costs and those of the update."""
        split, search = self._micro_batch(rows, shards, self.large.parts(rows, shards, self.target), specs)
        update = [eqn for eqn in split.update.jaxpr.eqns if record_of(eqn).cost != "view"]
        update_bytes = sum(value_bytes(var.aval) for eqn in update for var in eqn.outvars)
        tile_bytes = update_bytes / shards / self.target.tiles_per_ipu
        cycles = len(update) * _OVERHEAD_CYCLES + tile_bytes / self.target.store_bytes_per_cycle
        gradients = sum(
            value_bytes(aval) for aval, flag in zip(split.micro_batch.out_avals, split.is_sum, strict=True) if flag
        )
        return MicroBatchCosts(search.work, tuple(search.resident), gradients // shards, cycles)

    def least_cycles(self, plan: Plan) -> float:
        """Return less than the cycles of any cut of a plan into stages, whatever it does to save memory.

        No cut is better than equal stages that never wait, and a micro-batch goes through all stages one after the
        other; of gradients, which a schedule may split, through those of inputs, assumed to be half of them. Costs of
        many rows are extrapolated from few, as lowering many takes longest.
        """
        if not self.is_split:
            return 0.0
        work = self.of_plan(plan, _FEWEST_ANCHORS).work
        forward, backward = float(work.forward_cycles.sum()), float(work.backward_cycles.sum())
        return max(plan.micro_batches * (forward + backward) / plan.stages, forward + backward / 2)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimated cost of a plan.

        Raises:
            IpuError: the plan is impossible.
        """
        if not self.is_split:
            return self._rough(plan)
        costs = self.of_plan(plan)
        state_bytes = sum(num_bytes for _, num_bytes in costs.resident)
        kept_share = (0 if plan.offload else 1) / (plan.data if plan.shard_state else 1)
        resident = [(segment, int(num_bytes * kept_share)) for segment, num_bytes in costs.resident]
        schedule = None if plan.stages == 1 else self._schedule(plan, costs.work.has_gradients)
        cycles, ipu_bytes, cuts = _pipeline_cost(plan, costs.work, resident, schedule, self.target)
        stored_bytes = self.stored_row_bytes * self.rows / (plan.data * plan.micro_batches)
        if plan.stages == 1 and plan.recompute != "none":
            # What a loop over layers stores is not computed again: its layers are one step of a recomputation.
            ipu_bytes += stored_bytes / (plan.shards if plan.shard_stored else 1)
        if plan.shard_stored:
            gather_cycles = estimated_cycles(
                self.target, (tuple(range(plan.shards)),), max(1, int(stored_bytes)), False
            )
            cycles += plan.micro_batches / plan.stages * gather_cycles
        cycles += costs.update_cycles / plan.stages / (plan.data if plan.shard_state else 1)
        if plan.data > 1:
            # Replicas of one shard are as many IPUs apart as there are shards.
            ranks = tuple(range(0, plan.data * plan.shards, plan.shards))
            cycles += estimated_cycles(
                self.target, (ranks,), max(1, costs.gradient_bytes // plan.stages), reduces_all=True
            )
        # A batch over a mesh is loaded at once, before the first micro-batch.
        transfers = plan.micro_batches if plan.data * plan.shards == 1 else 1
        cycles += self.target.host_latency_seconds * self.target.clock_hz * (transfers + 1)
        if plan.offload:
            moved_bytes = 2 * state_bytes / plan.stages / (plan.data if plan.shard_state else 1)
            cycles += moved_bytes / self.target.streaming_bytes_per_second * self.target.clock_hz
        num_segments = len(costs.work.forward_cycles)
        return Estimate(float(cycles), float(ipu_bytes / self.target.tiles_per_ipu), cuts, num_segments)

    def _schedule(self, plan: Plan, training: bool) -> SchedulePlan:
        key = plan.schedule, plan.stages, plan.micro_batches
        if key not in self.schedules:
            numbers = plan.stages, plan.micro_batches, training
            if plan.schedule is None:
                schedule = default_schedule(self.target.global_exchange, *numbers)
            else:
                schedule = as_schedule(plan.schedule)
            self.schedules[key] = schedule_plan(schedule, *numbers)
        return self.schedules[key]


@remembered_small
def _parts_of(rows: int) -> tuple[int, ...]:
    """Rows of the micro-batches of a batch; one part has no sums over parts."""
    return tuple(n for n in range(1, rows) if rows % n == 0)


# Fields of `Work` that depend on the number of rows.
_BY_ROWS = (
    *("forward_cycles", "backward_cycles", "push_cycles", "pop_cycles"),
    *("crossing_bytes", "residual_bytes", "buffer_bytes"),
)


def _on_line(rows: float, points: Sequence[tuple[int, MicroBatchCosts]]) -> MicroBatchCosts:
    """Costs of a number of rows on the line through one or two others."""
    (first_rows, first), (last_rows, last) = points[0], points[-1]
    changes = dict[str, Any]()
    for name in _BY_ROWS:
        low, high = getattr(first.work, name), getattr(last.work, name)
        # Another number of rows may have other segments: then all costs are in proportion to rows.
        if first_rows == last_rows or low.shape != high.shape:
            changes[name] = high * (rows / last_rows)
        else:
            slope = (high - low) / (last_rows - first_rows)
            changes[name] = np.maximum(high + slope * (rows - last_rows), 0)
    return replace(last, work=replace(last.work, **changes))


class _PipelineCost(NamedTuple):
    """Cycles of all micro-batches, bytes of the IPU that has most, and the cut into stages."""

    cycles: float
    ipu_bytes: float
    cuts: tuple[int, ...]


def _pipeline_cost(
    plan: Plan, work: Work, resident: Sequence[tuple[int, int]], schedule: SchedulePlan | None, target: Target
) -> _PipelineCost:
    """Cost of a plan's micro-batches with the best cut into stages; without a schedule they are on one IPU."""
    count = plan.micro_batches
    stores_residuals = plan.recompute == "none"
    one_ipu = target.replace(num_ipus=1)
    if schedule is None:
        cycles = count * float(work.forward_cycles.sum() + work.backward_cycles.sum())
        values = float(work.residual_bytes.sum()) * stores_residuals
        # Without micro-batches a gradient is used as soon as it is computed.
        copies = 1 + work.accumulator_share * (count > 1)
        parameters = copies * sum(num_bytes for _, num_bytes in work.parameter_bytes)
        bounds = np.array([0, len(work.forward_cycles)])
        exchanges = one_ipu.num_tiles * float(exchange_bytes(work, bounds)[0, 1])
        arguments = sum(num_bytes for _, num_bytes in resident)
        return _PipelineCost(cycles, values + parameters + exchanges + arguments, ())
    # A cut that fills tiles with values alone leaves no room for code; without any other it says how much is missing.
    free = one_ipu.replace(bytes_per_tile=int(one_ipu.bytes_per_tile * (1 - _BESIDE_SHARE)))
    for machine, counts_code in ((free, True), (free, False), (one_ipu, False)):
        try:
            (cut, *_) = best_cuts(work, schedule, machine, 1, resident, stores_residuals, counts_code)
            break
        except ArgumentError:
            if machine is one_ipu:
                raise
    cycles, ipu_bytes = cut_cost(work, cut, schedule, one_ipu, resident, stores_residuals)
    return _PipelineCost(cycles, ipu_bytes, cut)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections of estimates by the plans that are compiled.

    Args:
        ratios: logarithms of compiled cycles over estimated ones, by kind of plan.
        beside: bytes of the fullest tile beyond the estimated ones, by kind of plan.
    """

    ratios: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    beside: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)

    def learn(self, plan: Plan, estimate: Estimate, cycles: int | None, tile_bytes: int) -> None:
        """Add a compiled plan."""
        for key in _kinds(plan):
            if cycles:
                self.ratios.setdefault(key, []).append(log(cycles / max(1.0, estimate.cycles)))
            self.beside.setdefault(key, []).append(tile_bytes - estimate.tile_bytes)

    def corrected(self, plan: Plan, estimate: Estimate) -> Estimate:
        """Return an estimate, corrected by the plans of the nearest kind."""
        ratio = next((float(np.mean(self.ratios[key])) for key in _kinds(plan) if key in self.ratios), 0.0)
        beside = next((float(np.mean(self.beside[key])) for key in _kinds(plan) if key in self.beside), _BESIDE_BYTES)
        corrected_bytes = max(0.0, estimate.tile_bytes + beside)
        return replace(estimate, cycles=estimate.cycles * exp(ratio), tile_bytes=corrected_bytes)


def _savings_of(plan: Plan) -> tuple[bool, ...]:
    return bool(plan.offload), plan.shard_state, plan.shard_stored


def _kinds(plan: Plan) -> list[tuple[Any, ...]]:
    """Kinds of a plan, from the narrowest to that of all plans with stages, or without."""
    return [
        (plan.stages, plan.shards, plan.data > 1, plan.schedule, *_savings_of(plan)),
        (plan.stages, plan.shards > 1, plan.data > 1),
        (plan.stages > 1, plan.shards > 1),
        (plan.stages > 1,),
    ]
