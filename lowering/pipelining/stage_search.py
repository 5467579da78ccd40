"""Finds stages for pipelines that have none: the best of the ways to cut them.

Input: a jaxpr with pipelines, and the machine. Output: an equal jaxpr whose pipelines have stages, with the arguments
and results of loops over layers in shards, each to lie with its stage. The most promising cuts are each lowered into a
graph of their own and charged by the cost model, memory included: also that of arguments which a stage's results need
later, as the state of an optimiser. From the best of them single cuts are moved as long as that helps. What is chosen
is lowered with all around it, and has to fit the machine if any of those that are tried does.

Limits: if what is chosen does not fit, the best cuts for less memory are tried, and all if they are no more than 256;
no more than 24 are lowered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise

from ipujax.lowering.ipus import MakeLowering, Span, value_bytes
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import named_stages
from ipujax.lowering.pipelining.charge import beside, charged, rough_bytes
from ipujax.lowering.pipelining.cuts import all_cuts, best_cuts, named, places
from ipujax.lowering.pipelining.layers import replacement, spec_of_shards
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr, Replacement, cut, num_shards, spread, uncut
from ipujax.lowering.pipelining.segments import same_values
from ipujax.lowering.pipelining.shared_layers import share_layers
from ipujax.lowering.pipelining.stage_costs import Work, work_of
from ipujax.lowering.pipelining.staged import ipus_of_stages, is_staged, micro_batch_of, plan_of
from ipujax.lowering.recomputation import KEEP_ALL, Recomputation, modes
from ipujax.lowering.schedules import SchedulePlan
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, raised_at
from ipujax.runtime.graph import Graph, Program
from ipujax.runtime.logs import Log, step, subject
from ipujax.runtime.target import Target

_LOG = Log("lowering")
_TRIED = 5  # cuts that are lowered for a given number of stages
_TRIED_OF_EACH = 2  # where the number is open too
_MEMORY_PARTS, _MEMORY_STEP = 64, 4  # if none of those fits, the best for 60/64, 56/64, … of the memory are
_MOST_TRIED = 256  # and then all, if they are no more
_MOST_WHOLE = 24  # cuts that are lowered with all around them
_MOST_MOVES = 24  # cuts that are tried to make the best of these better
_MANY_STAGES = 16  # of more, fewer cuts are tried: a cut takes time linear in the stages, and there are as many moves

Cuts = tuple[int, ...]  # the first segment of each stage but the first
LowerWhole = Callable[[CutJaxpr], tuple[Graph, Program]]


def find_stages(
    jaxpr: ClosedJaxpr,
    target: Target,
    make: MakeLowering,
    whole: LowerWhole,
    byte_price: float,
    recomputation: Recomputation = KEEP_ALL,
    start: Sequence[Cuts] = (),
) -> tuple[CutJaxpr, tuple[Cuts, ...]]:
    """Finds stages for the pipelines that have none.

    Args:
        jaxpr: what is compiled, after all passes.
        target: the machine of one replica.
        make: makes what lowers equations into a graph.
        whole: lowers what is compiled, with arguments and results in shards.
        byte_price: cycles that a byte on the fullest tile is worth.
        recomputation: what gradients compute again.
        start: the cuts of each of them from which to look for better ones; all are weighed when empty.

    Returns:
        The jaxpr with stages, and the cuts of each pipeline.

    Raises:
        ArgumentError: for stages that make no sense, or none to be found.
    """
    found, chosen = uncut(jaxpr), list[Cuts]()
    while waiting := [n for n, eqn in enumerate(found.jaxpr.jaxpr.eqns) if _is_open(eqn)]:
        search, outer = Search(found.jaxpr, waiting[0], target, make, byte_price, recomputation), found

        def whole_of(inner: CutJaxpr, outer: CutJaxpr = outer) -> tuple[Graph, Program]:
            return whole(_composed(outer, inner))

        with raised_at(source_line(outer.jaxpr.jaxpr.eqns[waiting[0]])):
            known = start[len(chosen)] if len(chosen) < len(start) else None
            if known is not None and search.is_way(known):
                cuts = search.climbed(known)
            else:
                cuts = search.chosen(whole_of if len(waiting) == 1 else None)
        chosen.append(cuts)
        found = _composed(outer, search.rewritten(cuts))
    return found, tuple(chosen)


def _is_open(eqn: JaxprEqn) -> bool:
    return is_staged(eqn) and eqn.params["spec"].stages is not None


class Search:
    """Ways to cut a pipeline, each lowered and charged once.

    Args:
        jaxpr: what is compiled.
        number: which of its equations is the pipeline.
        target: the machine of one replica.
        make: makes what lowers equations into a graph.
        byte_price: cycles that a byte on the fullest tile is worth.
        recomputation: what gradients compute again.
    """

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        number: int,
        target: Target,
        make: MakeLowering,
        byte_price: float,
        recomputation: Recomputation = KEEP_ALL,
    ) -> None:
        self._jaxpr, self._number, self._target, self._make = jaxpr, number, target, make
        self._byte_price, self._recomputation = byte_price, recomputation
        self._eqn = jaxpr.jaxpr.eqns[number]
        self._spec: PipelineSpec = self._eqn.params["spec"]
        micro_batch = micro_batch_of(self._eqn)
        if known := named_stages(micro_batch.jaxpr):
            raise ArgumentError(
                f"stages of ipu.pipeline({self._spec.name}) are to be found, and it has stages already",
                where=source_line(self._eqn) or None,
                expected="either stages=... or ipu.stage(i)",
                got=f"stages={self._spec.stages!r}, and stages {', '.join(map(str, sorted(known)))} in the function",
            )
        modes_used = modes(micro_batch.jaxpr.eqns, recomputation)
        self._keeps_all = modes_used <= {"none"}
        self._may_keep_less = "auto" in modes_used
        self._knows_what_is_kept = bool(recomputation.shares)
        self.work = work_of(micro_batch, self._spec, target.replace(num_ipus=1), make, byte_price)
        self._rewritten: dict[Cuts, CutJaxpr] = {}
        self._charges: dict[Cuts, tuple[int, int]] = {}
        self._places = places(self.work)

    # --- one way ---

    def rewritten(self, cuts: Cuts) -> CutJaxpr:
        """The program with the stages between some cuts."""
        if cuts not in self._rewritten:
            found, spec = named(self.work, cuts), self._spec
            plan = plan_of(spec, len(cuts) + 1, self.work.has_gradients, self._target)
            same = same_values(found.jaxpr.jaxpr, spec_of_shards(spec, found))
            ipus = ipus_of_stages(self._eqn, plan, self._target.num_ipus)
            found = share_layers(found, ipus, same, self._byte_price)
            self._rewritten[cuts] = _around(self._jaxpr, self._number, replacement(self._eqn, found))
        return self._rewritten[cuts]

    def charge(self, cuts: Cuts, more: int = 0) -> tuple[int, int]:
        """By how many bytes it exceeds the memory of a tile, with some `more` beside it, and its cycles."""
        need, cycles = self._charged(cuts)
        return max(0, need + more - self._target.bytes_per_tile), cycles

    def _charged(self, cuts: Cuts) -> tuple[int, int]:
        """About the bytes of a tile that it needs, and its cycles."""
        if cuts not in self._charges:
            jaxpr = self.rewritten(cuts).jaxpr
            place = self._place_in(jaxpr)
            with step(_LOG, "stages", detail=f"cut {len(self._charges) + 1} into stages"):
                found = charged(jaxpr, place, self._target, self._make, self._byte_price, self._recomputation)
            self._charges[cuts] = need, cycles = found
            what = "%s: stages that begin at segments %s take %s cycles and about %s bytes of the fullest tile"
            _LOG.info(what, subject(), cuts, f"{cycles:,}", f"{need:,}")
        return self._charges[cuts]

    def _place_in(self, jaxpr: ClosedJaxpr) -> int:
        """Which equation of what is compiled the pipeline is, when that is cut."""
        which = [n for n, eqn in enumerate(self._jaxpr.jaxpr.eqns) if is_staged(eqn)].index(self._number)
        return [n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if is_staged(eqn)][which]

    # --- the best of them ---

    def chosen(self, whole: LowerWhole | None = None) -> Cuts:
        """The best way that is found.

        Args:
            whole: lowers what is compiled; whether that fits is not looked at when None.

        Raises:
            ArgumentError: if there is no way to cut.
        """
        ways = self._promising()
        is_open = self._may_keep_less and not self._knows_what_is_kept
        if is_open and len(self._plans) == 1 and self.charge(ways[0])[0]:
            return ways[0]  # when less is kept, the search goes on from here
        best = min(ways, key=self.charge)
        if is_open and self.charge(best)[0]:
            return best
        if self.charge(best)[0]:  # none fits
            others = chain(self._roomier(), self._all(best))
            fitting = next((cuts for cuts in others if not self.charge(cuts)[0]), best)
            best = min(self._charges, key=self.charge) if self.charge(fitting)[0] else fitting
        best = self.climbed(best)
        return best if whole is None or self._knows_what_is_kept else self._fitting(best, whole)

    def _fitting(self, best: Cuts, whole: LowerWhole) -> Cuts:
        """The best cuts whose whole program fits, or else the best."""
        beyond = dict[Cuts, int]()  # what whole programs need beyond their charge
        for ways in self._from_best_to_all(best):
            while len(beyond) < _MOST_WHOLE and (left := [cuts for cuts in ways if cuts not in beyond]):
                most, least = max(beyond.values(), default=0), min(beyond.values(), default=0)
                if all(self.charge(each, least)[0] for each in left):
                    break  # none is expected to fit
                cuts = min(left, key=lambda each: self.charge(each, most))
                need = rough_bytes(*whole(self.rewritten(cuts)))
                if need <= self._target.bytes_per_tile:
                    return cuts
                beyond[cuts] = need - self._charged(cuts)[0]
        return best

    def _from_best_to_all(self, best: Cuts) -> Iterator[list[Cuts]]:
        """Ways to try one after the other: the best, what was charged and what needs less memory, and all."""
        yield [best]
        yield [*self._charges, *self._roomier()]
        yield self._all(best)

    def _all(self, best: Cuts) -> list[Cuts]:
        """All ways with as many stages, if they are few."""
        found = list(all_cuts(self.work, len(best) + 1, _MOST_TRIED + 1))
        return found if len(found) <= _MOST_TRIED else []

    def _roomier(self) -> Iterator[Cuts]:
        """The best ways for machines of less and less memory, down to the least that there is a way for."""
        one = self._target.replace(num_ipus=1)

        def ways(plan: SchedulePlan, part: int) -> list[Cuts]:
            less = one.replace(bytes_per_tile=one.bytes_per_tile * part // _MEMORY_PARTS)
            try:
                return best_cuts(self.work, plan, less, 1, self.resident, self._keeps_all)
            except ArgumentError:  # no cut is so small
                return []

        for plan in self._plans:
            for part in range(_MEMORY_PARTS - _MEMORY_STEP, 0, -_MEMORY_STEP):
                if not (found := ways(plan, part)):
                    between = range(part + 1, part + _MEMORY_STEP)
                    yield from next((found for each in between if (found := ways(plan, each))), [])
                    break
                yield from found

    def is_way(self, cuts: Cuts) -> bool:
        """Whether there are places for some cuts."""
        return set(cuts) <= set(self._places)

    def climbed(self, best: Cuts) -> Cuts:
        """The best that is reached by moving one cut at a time to the next place."""
        if self._may_keep_less and (self._knows_what_is_kept or self.charge(best)[0]):
            return best
        until = len(self._charges) + _fewer(_MOST_MOVES, len(best) + 1)
        while len(self._charges) < until:
            moved = [way for way in self._neighbours(best) if way in self._charges or len(self._charges) < until]
            better = min([best, *moved], key=self.charge)
            if better == best:
                break
            best = better
        return best

    def _neighbours(self, cuts: Cuts) -> list[Cuts]:
        found = []
        for number, at in enumerate(map(self._places.index, cuts)):
            for place in self._places[max(at - 1, 0) : at + 2]:
                way = (*cuts[:number], place, *cuts[number + 1 :])
                if way != cuts and all(a < b for a, b in pairwise(way)):
                    found.append(way)
        return found

    @cached_property
    def _plans(self) -> list[SchedulePlan]:
        """The schedule for the number of stages that is given, or for all that the machine has IPUs for."""
        spec, training = self._spec, self.work.has_gradients
        if spec.stages != "auto":
            assert spec.stages is not None
            plan = plan_of(spec, spec.stages, training, self._target)
            ipus_of_stages(self._eqn, plan, self._target.num_ipus)
            return [plan]
        plans, refused = list[SchedulePlan](), None
        for count in range(2, self._target.num_ipus + 1):
            try:
                plans.append(plan_of(spec, count, training, self._target))
            except ArgumentError as error:  # impossible with this number of stages
                refused = refused or error
        if not plans:
            raise refused or ArgumentError(
                f"ipu.pipeline({spec.name}) has nothing to be cut for",
                where=source_line(self._eqn) or None,
                expected="two IPUs or more for each replica",
                got=self._target.num_ipus,
            )
        return plans

    def _promising(self) -> list[Cuts]:
        """The cuts to try."""
        one, few = self._target.replace(num_ipus=1), _TRIED if len(self._plans) == 1 else _TRIED_OF_EACH
        ways, refused = list[Cuts](), list[ArgumentError]()
        for plan in self._plans:
            try:
                tried = _fewer(few, plan.num_stages)
                ways += best_cuts(self.work, plan, one, tried, self.resident, self._keeps_all)
            except ArgumentError as error:  # impossible with this number of stages
                refused.append(error)
        if not ways:
            raise refused[0]
        return ways

    @cached_property
    def resident(self) -> list[tuple[int, int]]:
        """Other arguments that lie with the parameters of a segment: the segment, and bytes.

        Found by placing what is compiled as if each segment were a stage.
        """
        around = _around(self._jaxpr, self._number, replacement(self._eqn, self.work.shards)).jaxpr
        others = beside(around, self._place_in(around), _span_of_segments(self.work))
        return [(home, value_bytes(var.aval)) for var, home in others]


def _fewer(count: int, num_stages: int) -> int:
    """So many cuts, or fewer for very many stages."""
    return max(1, count * _MANY_STAGES**2 // max(_MANY_STAGES, num_stages) ** 2)


# --- around the pipeline ----------------------------------------------------------------------------------------------


def _around(jaxpr: ClosedJaxpr, number: int, new: Replacement) -> CutJaxpr:
    """The program with a pipeline replaced, and all values with the rows of its operands cut alike."""
    eqn = jaxpr.jaxpr.eqns[number]
    atoms = zip((*eqn.outvars, *eqn.invars), (*new.outputs, *new.inputs), strict=True)
    seeds = {atom: at for atom, at in atoms if at is not None and not isinstance(atom, Literal)}
    return cut(jaxpr, spread(jaxpr.jaxpr, seeds), (), {number: new})


def _span_of_segments(work: Work) -> Span:
    """A pipeline as if each segment were a stage on an IPU of its own."""
    body = work.shards.jaxpr.jaxpr
    first: dict[Var, int] = {}
    made: dict[Var, int] = {}
    for eqn, segment in zip(body.eqns, work.segments, strict=True):
        made.update(dict.fromkeys(eqn.outvars, max(segment, 0)))
        for atom in eqn.invars:
            if segment >= 0 and not isinstance(atom, Literal):
                first[atom] = min(first.get(atom, segment), segment)
    results = tuple(0 if isinstance(atom, Literal) else made.get(atom, 0) for atom in body.outvars)
    return Span(tuple(map(first.get, body.invars)), results, len(work.forward_cycles))


def _composed(outer: CutJaxpr, inner: CutJaxpr) -> CutJaxpr:
    """A jaxpr whose shards are cut once more."""
    ends = _composed_bounds(outer.inputs, inner.inputs), _composed_bounds(outer.outputs, inner.outputs)
    return CutJaxpr(inner.jaxpr, *ends, inner.sources)


def _composed_bounds(outer: Sequence[Bounds | None], inner: Sequence[Bounds | None]) -> tuple[Bounds | None, ...]:
    remaining, found = iter(inner), list[Bounds | None]()
    for at in outer:
        parts = [next(remaining) for _ in range(num_shards(at))]
        if at is None:
            found += parts
            continue
        spans = zip(pairwise(at), parts, strict=True)
        inside = [[a + row for row in (part or (0, b - a))[1:]] for (a, b), part in spans]
        found.append((0, *chain.from_iterable(inside)))
    return tuple(found)
