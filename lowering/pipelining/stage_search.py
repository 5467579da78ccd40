"""Search for the stages of pipelines that have none: the cheapest candidate cut.

Input: a jaxpr with pipelines, and the target. Output: an equal jaxpr whose pipelines have stages, with the arguments
and results of loops over layers in shards, each mapped to its stage. The most promising cuts are each lowered into a
graph of their own for an estimate of cycles and memory, which includes arguments that the results of a stage need
later, as the state of an optimiser. From the best of them single cuts are moved as long as that helps. The chosen cut
is lowered with the entire program, and has to fit the target if any candidate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from ipujax.lowering.ipus import Span, value_bytes
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import named_stages
from ipujax.lowering.passes import CallCosts
from ipujax.lowering.pipelining.cuts import all_cuts, best_cuts, cut_positions, name_stages
from ipujax.lowering.pipelining.layers import replacement, share_layers, spec_of_shards
from ipujax.lowering.pipelining.pipeline_cost import Planning, other_arguments, pipeline_cost, rough_bytes
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr, Replacement, cut, num_shards, spread, uncut
from ipujax.lowering.pipelining.segments import same_values
from ipujax.lowering.pipelining.stage_costs import SegmentedBatch, Work, segmented_batch, work_of
from ipujax.lowering.pipelining.staged import ipus_of_stages, is_staged, micro_batch_of, plan_of
from ipujax.lowering.recomputation import modes
from ipujax.lowering.schedules import SchedulePlan
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, raised_at
from ipujax.runtime.graph import Graph, Program
from ipujax.runtime.logs import Log, compilation_name, step

_LOG = Log("lowering")
_ESTIMATED = 5  # cuts that are lowered for an estimate, of a given number of stages
_ESTIMATED_OF_EACH = 2  # of each number of stages, if the number is searched too
_MEMORY_FRACTIONS = 64  # parts of a tile's memory, in which smaller limits are tried
_MEMORY_STEP = 4  # if none of them fits, the best cuts for 60/64, 56/64, … of the memory are estimated
_MAX_CANDIDATES = 256  # if there are no more cuts than this, all of them are
_MAX_PROGRAMS = 24  # cuts that are lowered with the entire program
_MAX_NEW_ESTIMATES = 24  # cuts that hill climbing estimates
_MANY_STAGES = 16  # beyond this fewer cuts are tried: lowering and the number of moves are both linear in the stages

Cuts = tuple[int, ...]  # the first segment of each stage but the first
LowerProgram = Callable[[CutJaxpr], tuple[Graph, Program]]


class ExcessAndCycles(NamedTuple):
    """Estimate of a cut: the lower the better, first by bytes above the memory of a tile, then by cycles."""

    excess_bytes: int
    cycles: int


def find_stages(
    jaxpr: ClosedJaxpr, planning: Planning, lower_program: LowerProgram, start: Sequence[Cuts] = ()
) -> tuple[CutJaxpr, tuple[Cuts, ...]]:
    """The program with stages in the pipelines that had none, and the cuts of each of them.

    Args:
        jaxpr: the program, after all passes.
        planning: how candidates are lowered.
        lower_program: lowers the entire program, with arguments and results in shards.
        start: cuts of each pipeline from which to look for better ones; all candidates are compared when empty.

    Raises:
        ArgumentError: for invalid stages, or no cut that works.
    """
    program = uncut(jaxpr)
    cuts_of_pipelines = list[Cuts]()
    while open_pipelines := [n for n, eqn in enumerate(program.jaxpr.jaxpr.eqns) if _is_open(eqn)]:
        outer = program
        search = StageSearch(outer.jaxpr, open_pipelines[0], planning)

        def lower_composed(inner: CutJaxpr, outer: CutJaxpr = outer) -> tuple[Graph, Program]:
            return lower_program(_composed(outer, inner))

        with raised_at(source_line(outer.jaxpr.jaxpr.eqns[open_pipelines[0]])):
            start_cuts = start[len(cuts_of_pipelines)] if len(cuts_of_pipelines) < len(start) else None
            if cuts_of_plan := search.given_cuts():
                cuts = cuts_of_plan
            elif start_cuts is not None and search.is_candidate(start_cuts):
                cuts = search.hill_climb(start_cuts)
            else:
                cuts = search.search(lower_composed if len(open_pipelines) == 1 else None)
        cuts_of_pipelines.append(cuts)
        program = _composed(outer, search.rewrite(cuts))
    return program, tuple(cuts_of_pipelines)


def _is_open(eqn: JaxprEqn) -> bool:
    return is_staged(eqn) and eqn.params["spec"].stages is not None


class StageSearch:
    """Candidate cuts of the pipeline at `jaxpr.eqns[number]`, each lowered once for an estimate."""

    def __init__(self, jaxpr: ClosedJaxpr, number: int, planning: Planning) -> None:
        """Refuses a pipeline whose function has stages already.

        What is computed for a cut is kept: in `_programs` the rewritten program, in `_estimates` the bytes of its
        fullest tile and its cycles.

        Args:
            jaxpr: the program.
            number: number of the pipeline's equation in it.
            planning: the target, and how candidates are lowered.
        """
        self._jaxpr = jaxpr
        self._number = number
        self._planning = planning
        micro_batch = micro_batch_of(self._eqn)
        if stages := named_stages(micro_batch.jaxpr):
            raise ArgumentError(
                f"ipu.pipeline({self._spec.name}) searches for stages, but its function has stages already",
                where=source_line(self._eqn) or None,
                expected="either stages=... or ipu.stage(i)",
                got=f"stages={self._spec.stages!r}, and stages {', '.join(map(str, sorted(stages)))} in the function",
            )
        # Modes of recomputation that occur in gradients; "auto" is chosen after the search.
        self._modes = modes(micro_batch.jaxpr.eqns, planning.recomputation)
        self.batch = segmented_batch(micro_batch, self._spec)
        self._programs: dict[Cuts, CutJaxpr] = {}
        self._estimates: dict[Cuts, tuple[int, int]] = {}

    @cached_property
    def work(self) -> Work:
        """Costs of the segments; given cuts need none."""
        return work_of(self.batch, self._planning.on_one_ipu())

    @property
    def _eqn(self) -> JaxprEqn:
        return self._jaxpr.jaxpr.eqns[self._number]

    @property
    def _spec(self) -> PipelineSpec:
        return self._eqn.params["spec"]

    @property
    def _may_recompute(self) -> bool:
        return "auto" in self._modes

    @property
    def _recomputation_is_chosen(self) -> bool:
        return bool(self._planning.recomputation.shares)

    @cached_property
    def _positions(self) -> Sequence[int]:
        return cut_positions(self.work)

    def rewrite(self, cuts: Cuts) -> CutJaxpr:
        """The program whose pipeline is cut into the stages that begin at segments `cuts`; made once for each cut."""
        if cuts not in self._programs:
            shards = name_stages(self.batch, cuts)
            spec = self._spec
            plan = plan_of(spec, len(cuts) + 1, self.batch.has_gradients, self._planning.target)
            same = same_values(shards.jaxpr.jaxpr, spec_of_shards(spec, shards))
            ipus = ipus_of_stages(self._eqn, plan, self._planning.target.num_ipus)
            costs = CallCosts.of(self._planning.target, self._planning.byte_cost)
            shards = share_layers(shards, ipus, same, costs)
            self._programs[cuts] = _with_replacement(self._jaxpr, self._number, replacement(self._eqn, shards))
        return self._programs[cuts]

    def excess_and_cycles(self, cuts: Cuts, extra_bytes: int = 0) -> ExcessAndCycles:
        """Estimate of a cut, with `extra_bytes` on its fullest tile; the first for each cut lowers the pipeline."""
        num_bytes, cycles = self._bytes_and_cycles(cuts)
        return ExcessAndCycles(max(0, num_bytes + extra_bytes - self._planning.target.bytes_per_tile), cycles)

    def _bytes_and_cycles(self, cuts: Cuts) -> tuple[int, int]:
        """Estimated bytes of the fullest tile, and cycles, of the pipeline with a cut: it is lowered alone, once."""
        if cuts not in self._estimates:
            jaxpr = self.rewrite(cuts).jaxpr
            index = self._pipeline_index(jaxpr)
            with step(_LOG, "stages", detail=f"cut {len(self._estimates) + 1} into stages"):
                estimate = pipeline_cost(jaxpr, index, self._planning)
            self._estimates[cuts] = num_bytes, cycles = estimate
            message = "%s: stages that begin at segments %s take %s cycles and about %s bytes of the fullest tile"
            _LOG.info(message, compilation_name(), cuts, f"{cycles:,}", f"{num_bytes:,}")
        return self._estimates[cuts]

    def _pipeline_index(self, jaxpr: ClosedJaxpr) -> int:
        """Index of the pipeline in the program after its other equations were cut."""
        # Cuts add other equations, but no pipelines: it is still the same one of these.
        position = [n for n, eqn in enumerate(self._jaxpr.jaxpr.eqns) if is_staged(eqn)].index(self._number)
        return [n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if is_staged(eqn)][position]

    def search(self, lower_program: LowerProgram | None = None) -> Cuts:
        """The best cut, or the best whose entire program fits if `lower_program` is given.

        While recomputation is still to be chosen, a cut that does not fit is not improved: the choice starts from it,
        and the search goes on with the chosen recomputation.
        """
        candidates = self._initial_candidates()
        recomputation_is_open = self._may_recompute and not self._recomputation_is_chosen
        # Of one schedule the first candidate, the most promising, will do; estimates of others would be for nothing.
        if recomputation_is_open and len(self._plans) == 1 and self.excess_and_cycles(candidates[0]).excess_bytes:
            return candidates[0]
        best = min(candidates, key=self.excess_and_cycles)
        if recomputation_is_open and self.excess_and_cycles(best).excess_bytes:
            return best
        if self.excess_and_cycles(best).excess_bytes:  # none fits
            further_candidates = chain(self._low_memory_candidates(), self._all_candidates(best))
            fitting = (cuts for cuts in further_candidates if not self.excess_and_cycles(cuts).excess_bytes)
            first_fitting = next(fitting, None)
            best = min(self._estimates, key=self.excess_and_cycles) if first_fitting is None else first_fitting
        best = self.hill_climb(best)
        # Recomputation that is chosen holds for the IPUs of one cut: other cuts are not compared with it.
        if lower_program is None or self._recomputation_is_chosen:
            return best
        return self._best_that_fits(best, lower_program)

    def _best_that_fits(self, best: Cuts, lower_program: LowerProgram) -> Cuts:
        """The best cut whose entire program fits, else `best`.

        The cut of least cycles that is expected to fit is lowered next, up to `_MAX_PROGRAMS`. A program needs more
        bytes than the estimate of its pipeline: those of a new cut are guessed from the ones lowered so far.
        """
        extra_bytes: dict[Cuts, int] = {}  # bytes of the entire program less the estimate
        for candidates in self._candidate_batches(best):
            while len(extra_bytes) < _MAX_PROGRAMS and (
                remaining := [cuts for cuts in candidates if cuts not in extra_bytes]
            ):
                max_extra = max(extra_bytes.values(), default=0)
                min_extra = min(extra_bytes.values(), default=0)
                if all(self.excess_and_cycles(cuts, min_extra).excess_bytes for cuts in remaining):
                    break  # none is expected to fit
                cuts = min(remaining, key=lambda candidate: self.excess_and_cycles(candidate, max_extra))
                num_bytes = rough_bytes(*lower_program(self.rewrite(cuts)))
                if num_bytes <= self._planning.target.bytes_per_tile:
                    return cuts
                estimated_bytes, _ = self._bytes_and_cycles(cuts)
                extra_bytes[cuts] = num_bytes - estimated_bytes
        return best

    def _candidate_batches(self, best: Cuts) -> Iterator[list[Cuts]]:
        """Batches of candidates in order of trial: the best, those estimated so far or of less memory, and all."""
        yield [best]
        yield [*self._estimates, *self._low_memory_candidates()]
        yield self._all_candidates(best)

    def _all_candidates(self, best: Cuts) -> list[Cuts]:
        """All cuts into as many stages as `best` has, if they are few; else none."""
        candidates = list(all_cuts(self.work, len(best) + 1, _MAX_CANDIDATES + 1))
        return candidates if len(candidates) <= _MAX_CANDIDATES else []

    def _low_memory_candidates(self) -> Iterator[Cuts]:
        """For each schedule the most promising cut for less and less memory of a tile, until none fits.

        Memory is lowered by coarse steps. Below the last that has a cut the least fraction with one is added, which is
        between two coarse ones; if all have one, that of a single coarse step is the last.
        """

        def best_for(plan: SchedulePlan, fraction: int) -> list[Cuts]:
            """A list of the one best cut for that many `_MEMORY_FRACTIONS` of a tile; empty if none fits."""
            num_bytes = self._planning.target.bytes_per_tile * fraction // _MEMORY_FRACTIONS
            try:
                return self._best_cuts(plan, num_bytes, max_cuts=1)
            except ArgumentError:  # no cut is so small
                return []

        for plan in self._plans:
            for fraction in range(_MEMORY_FRACTIONS - _MEMORY_STEP, 0, -_MEMORY_STEP):
                if not (cuts := best_for(plan, fraction)):
                    finer_fractions = range(fraction + 1, fraction + _MEMORY_STEP)
                    yield from next((cuts for finer in finer_fractions if (cuts := best_for(plan, finer))), [])
                    break
                yield from cuts

    def given_cuts(self) -> Cuts:
        """The cuts that the pipeline has; refuses those of another function."""
        cuts, count = self._spec.cuts, self.batch.num_segments
        if cuts and (max(cuts) >= count or len(cuts) + 1 != self._spec.stages):
            raise ArgumentError(
                f"the cuts of ipu.pipeline({self._spec.name}) are not those of this function",
                expected=f"{self._spec.stages} stages, of {count} segments",
                got=cuts,
            )
        return cuts

    def is_candidate(self, cuts: Cuts) -> bool:
        """True if the program has these positions to cut at."""
        return set(cuts) <= set(self._positions)

    def hill_climb(self, best: Cuts) -> Cuts:
        """The best cut reached by moving one position at a time to a neighbour (hill climbing)."""
        # Recomputation is chosen for the IPUs of one cut, so no other one is compared with it. While it is open, a cut
        # that does not fit is not improved, see `search`.
        if self._may_recompute and (self._recomputation_is_chosen or self.excess_and_cycles(best).excess_bytes):
            return best
        max_estimates = len(self._estimates) + _fewer_for_stages(_MAX_NEW_ESTIMATES, len(best) + 1)
        while len(self._estimates) < max_estimates:  # which `excess_and_cycles` of a new cut adds to
            better = min([best, *self._neighbours(best)], key=self.excess_and_cycles)
            if better == best:
                break
            best = better
        return best

    def _neighbours(self, cuts: Cuts) -> list[Cuts]:
        """Cuts of which one place is moved to the position before or after it."""
        neighbours = []
        for number, index in enumerate(map(self._positions.index, cuts)):
            for position in self._positions[max(index - 1, 0) : index + 2]:
                neighbour = (*cuts[:number], position, *cuts[number + 1 :])
                if neighbour != cuts and all(a < b for a, b in pairwise(neighbour)):
                    neighbours.append(neighbour)
        return neighbours

    @cached_property
    def _plans(self) -> list[SchedulePlan]:
        """The schedule for the given number of stages, or one for each number up to that of IPUs."""
        spec = self._spec
        training = self.batch.has_gradients
        if spec.stages != "auto":
            assert spec.stages is not None
            plan = plan_of(spec, spec.stages, training, self._planning.target)
            ipus_of_stages(self._eqn, plan, self._planning.target.num_ipus)  # refuses more stages than IPUs
            return [plan]
        plans: list[SchedulePlan] = []
        first_error = None
        for count in range(2, self._planning.target.num_ipus + 1):
            try:
                plans.append(plan_of(spec, count, training, self._planning.target))
            except ArgumentError as error:  # impossible with this number of stages
                first_error = first_error or error
        if not plans:
            raise first_error or ArgumentError(
                f"ipu.pipeline({spec.name}) cannot be cut into stages for one IPU",
                where=source_line(self._eqn) or None,
                expected="two IPUs or more for each replica",
                got=self._planning.target.num_ipus,
            )
        return plans

    def _initial_candidates(self) -> list[Cuts]:
        """Most promising cuts of all schedules, by formulas alone: fewer of each if there are several schedules."""
        max_cuts = _ESTIMATED if len(self._plans) == 1 else _ESTIMATED_OF_EACH
        candidates: list[Cuts] = []
        errors: list[ArgumentError] = []
        for plan in self._plans:
            try:
                max_cuts_of_plan = _fewer_for_stages(max_cuts, plan.num_stages)
                candidates += self._best_cuts(plan, self._planning.target.bytes_per_tile, max_cuts_of_plan)
            except ArgumentError as error:  # impossible with this number of stages
                errors.append(error)
        if not candidates:
            raise errors[0]
        return candidates

    def _best_cuts(self, plan: SchedulePlan, bytes_per_tile: int, max_cuts: int) -> list[Cuts]:
        """The most promising cuts for a schedule and so much memory of a tile, before any is lowered.

        Raises:
            ArgumentError: no cut fits.
        """
        target = self._planning.target.replace(num_ipus=1, bytes_per_tile=bytes_per_tile)
        stores_residuals = self._modes <= {"none"}
        return best_cuts(self.work, plan, target, max_cuts, self.resident, stores_residuals)

    @cached_property
    def resident(self) -> list[tuple[int, int]]:
        """Segment and bytes of each other argument, placed as if each segment were a stage."""
        program = _with_replacement(self._jaxpr, self._number, replacement(self._eqn, self.batch.shards)).jaxpr
        arguments = other_arguments(program, self._pipeline_index(program), _span_of_segments(self.batch))
        return [(home, value_bytes(var.aval)) for var, home in arguments]


def _fewer_for_stages(count: int, num_stages: int) -> int:
    """Number of candidates to try: `count`, or less for more than `_MANY_STAGES` by the square of the number of stages.

    Both the time to lower a candidate and the number of moves to try are linear in that number.
    """
    return max(1, count * _MANY_STAGES**2 // max(_MANY_STAGES, num_stages) ** 2)


def _with_replacement(jaxpr: ClosedJaxpr, number: int, pipeline: Replacement) -> CutJaxpr:
    """The program with a pipeline replaced, and values that have the rows of its operands and results cut alike."""
    eqn = jaxpr.jaxpr.eqns[number]
    atoms = zip((*eqn.outvars, *eqn.invars), (*pipeline.outputs, *pipeline.inputs), strict=True)
    seeds = {atom: bounds for atom, bounds in atoms if bounds is not None and not isinstance(atom, Literal)}
    return cut(jaxpr, spread(jaxpr.jaxpr, seeds), (), {number: pipeline})


def _span_of_segments(batch: SegmentedBatch) -> Span:
    """IPUs of a pipeline's operands and results while the stages are open: those if each segment were a stage.

    Other arguments of the program are placed beside these, to count their bytes for the stage that a segment joins.
    """
    body = batch.shards.jaxpr.jaxpr
    first_segment: dict[Var, int] = {}
    defining_segment: dict[Var, int] = {}
    for eqn, segment in zip(body.eqns, batch.segmented.segments, strict=True):
        defining_segment.update(dict.fromkeys(eqn.outvars, max(segment, 0)))  # −1: of no segment of its own
        for atom in eqn.invars:
            if segment >= 0 and not isinstance(atom, Literal):
                first_segment[atom] = min(first_segment.get(atom, segment), segment)
    results = tuple(0 if isinstance(atom, Literal) else defining_segment.get(atom, 0) for atom in body.outvars)
    return Span(tuple(map(first_segment.get, body.invars)), results)


def _composed(outer: CutJaxpr, inner: CutJaxpr) -> CutJaxpr:
    """The cut from the uncut program of `outer` to the jaxpr of `inner`, which cuts the jaxpr of `outer`."""
    bounds = _composed_bounds(outer.inputs, inner.inputs), _composed_bounds(outer.outputs, inner.outputs)
    return CutJaxpr(inner.jaxpr, *bounds, inner.sources)


def _composed_bounds(outer: Sequence[Bounds | None], inner: Sequence[Bounds | None]) -> tuple[Bounds | None, ...]:
    """Bounds in the uncut values, of cuts at `outer` whose shards are cut again at `inner`.

    Args:
        outer: bounds of each uncut value, None for one that is not cut.
        inner: bounds in each shard of these values, one after the other, counted from the first row of the shard.
    """
    remaining = iter(inner)
    composed: list[Bounds | None] = []
    for bounds in outer:
        bounds_of_shards = [next(remaining) for _ in range(num_shards(bounds))]
        if bounds is None:  # the one shard is the uncut value itself
            composed += bounds_of_shards
            continue
        ends: list[int] = []  # last bound of each new shard, in rows of the uncut value
        for (first, last), inner_bounds in zip(pairwise(bounds), bounds_of_shards, strict=True):
            ends += [last] if inner_bounds is None else [first + row for row in inner_bounds[1:]]
        composed.append((0, *ends))
    return tuple(composed)
