"""Makes a pipeline definite: by its named stages, or by the best of the stages that are found for it.

Input: the equation of a pipeline, and the machine. Output: a `StagedPipeline`. Where stages are to be found, the most
promising cuts are each lowered into a graph of their own and charged by the cost model, memory included; from the best
of them single cuts are moved as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ipujax.lowering.ipus import Ipus, MakeLowering
from ipujax.lowering.jax_compat import JaxprEqn, source_line
from ipujax.lowering.pipeline_op import PipelineSpec
from ipujax.lowering.pipelining.cuts import all_cuts, best_cuts, named, places
from ipujax.lowering.pipelining.program import lower_pipeline
from ipujax.lowering.pipelining.staged import StagedPipeline, ipus_of_stages, micro_batch_of, staged_pipeline
from ipujax.lowering.pipelining.work import Work, work_of
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.lowering.schedules import schedule_plan
from ipujax.lowering.stage_names import named_stages
from ipujax.runtime.clock_steps import clock_steps
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.effects import EffectsOf
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Graph
from ipujax.runtime.memory import memory_report
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.steps import while_names
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.timeline import timeline

_TRIED = 5  # cuts that are lowered for a given number of stages
_TRIED_OF_EACH = 2  # where the number is open too
_MOST_TRIED = 256  # if none of those fits the memory
_MOST_MOVES = 24  # cuts that are tried to make the best of these better

Cuts = tuple[int, ...]  # the first number of each stage but the first


def definite(eqn: JaxprEqn, target: Target, make: MakeLowering) -> StagedPipeline:
    """Makes a pipeline definite.

    Args:
        eqn: its equation.
        target: the machine of one replica.
        make: makes what lowers equations into a graph.

    Raises:
        ArgumentError: for stages that make no sense, or none to be found.
    """
    spec: PipelineSpec = eqn.params["spec"]
    jaxpr = micro_batch_of(eqn)
    if spec.stages is None:
        return staged_pipeline(eqn, jaxpr, target.num_ipus)
    if found := named_stages(jaxpr.jaxpr):
        raise ArgumentError(
            f"stages of ipu.pipeline({spec.name}) are to be found, and it has stages already",
            where=source_line(eqn) or None,
            expected="either stages=... or ipu.stage(i)",
            got=f"stages={spec.stages!r}, and stages {', '.join(map(str, sorted(found)))} in the function",
        )
    work = work_of(jaxpr, spec, target.replace(num_ipus=1), make)
    search = _Search(eqn, work, target, make)
    promising = _promising(eqn, work, target)
    best = search.best(promising)
    if search.charge(best)[0] and spec.stages != "auto":  # none fits
        best = next((cuts for cuts in all_cuts(work, len(best) + 1, _MOST_TRIED) if not search.charge(cuts)[0]), best)
    return search.pipeline(search.climbed(best))


class _Search:
    """Ways to cut, each lowered and charged once."""

    def __init__(self, eqn: JaxprEqn, work: Work, target: Target, make: MakeLowering) -> None:
        self._eqn, self._work, self._target, self._make = eqn, work, target, make
        self._pipelines: dict[Cuts, StagedPipeline] = {}
        self._charges: dict[Cuts, tuple[int, int]] = {}
        self._places = places(work)

    def pipeline(self, cuts: Cuts) -> StagedPipeline:
        """The pipeline of some cuts."""
        if cuts not in self._pipelines:
            self._pipelines[cuts] = staged_pipeline(self._eqn, named(self._work, cuts), self._target.num_ipus)
        return self._pipelines[cuts]

    def charge(self, cuts: Cuts) -> tuple[int, int]:
        """By how many bytes it exceeds the memory of a tile, and its cycles."""
        if cuts not in self._charges:
            self._charges[cuts] = charged(self._eqn, self.pipeline(cuts), self._target, self._make)
        return self._charges[cuts]

    def best(self, ways: Sequence[Cuts]) -> Cuts:
        """The best of some cuts, the first of equals."""
        return min(ways, key=self.charge)

    def climbed(self, best: Cuts) -> Cuts:
        """The best that is reached by moving one cut at a time to the next place."""
        until = len(self._charges) + _MOST_MOVES
        while len(self._charges) < until:
            moved = [way for way in self._neighbours(best) if way in self._charges or len(self._charges) < until]
            step = self.best([best, *moved])
            if step == best:
                break
            best = step
        return best

    def _neighbours(self, cuts: Cuts) -> list[Cuts]:
        found = []
        for number, cut in enumerate(cuts):
            at = self._places.index(cut)
            for place in self._places[max(at - 1, 0) : at + 2]:
                way = (*cuts[:number], place, *cuts[number + 1 :])
                if way != cuts and all(a < b for a, b in pairwise(way)):
                    found.append(way)
        return found


def _promising(eqn: JaxprEqn, work: Work, target: Target) -> list[Cuts]:
    """The cuts to try, for the number of stages that is given, or for all that the machine has IPUs for."""
    spec: PipelineSpec = eqn.params["spec"]
    one, training = target.replace(num_ipus=1), work.has_gradients
    if spec.stages != "auto":
        assert spec.stages is not None
        plan = schedule_plan(spec.schedule, spec.stages, spec.micro_batches, training)
        ipus_of_stages(eqn, plan, target.num_ipus)
        return best_cuts(work, plan, one, _TRIED)
    refused: ArgumentError | None = None
    ways: list[Cuts] = []
    for count in range(2, target.num_ipus + 1):
        try:
            plan = schedule_plan(spec.schedule, count, spec.micro_batches, training)
            ways += best_cuts(work, plan, one, _TRIED_OF_EACH)
        except ArgumentError as error:  # this number will not do
            refused = refused or error
    if not ways:
        raise refused or ArgumentError(
            f"ipu.pipeline({spec.name}) has nothing to be cut for",
            where=source_line(eqn) or None,
            expected="two IPUs or more for each replica",
            got=target.num_ipus,
        )
    return ways


def charged(eqn: JaxprEqn, staged: StagedPipeline, target: Target, make: MakeLowering) -> tuple[int, int]:
    """By how many bytes a pipeline exceeds the memory of a tile, and its cycles."""
    graph, prog = Graph(target), ProgramSequence()
    operands = [graph.add_variable(atom.aval.shape, atom.aval.dtype, "operand") for atom in eqn.invars]  # type: ignore[attr-defined]
    _, run = lower_pipeline(Ipus(graph, make), staged, operands, prog, staged.spec.name)
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    costs, effects = leaf_costs(graph, prog), EffectsOf(graph)
    memory = memory_report(graph, prog, effects, costs)
    steps, slots = clock_steps(prog, costs, effects, target)
    trips = {name: 1 for names in while_names(prog).values() for name in names}
    cycles = timeline(run.program, steps, target.num_ipus, slots, trips).cycles
    return max(0, int(memory.max_tile_bytes) - target.bytes_per_tile), cycles
