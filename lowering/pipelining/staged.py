"""A pipeline with all choices made: its parts, its schedule, and the IPU of each stage.

Input: an equation of the primitive of pipelines with stages. Output: `StagedPipeline`, which `program` lowers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ipujax.lowering.ipus import Span, variables
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import ready
from ipujax.lowering.pipelining.partition import Part, Partition, TaskKind, partition
from ipujax.lowering.pipelining.parts import StagePart, stage_parts
from ipujax.lowering.pipelining.primitive import PipelineSpec, staged_pipeline_p
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation, recomputed_parts
from ipujax.lowering.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, SchedulePlan, default_schedule, schedule_plan
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, raised_at
from ipujax.runtime.graph import BYTE_PRICE_CYCLES, PipelineLayout, PipelineTask
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable


@dataclass(frozen=True)
class StagedPipeline:
    """A pipeline before tile mapping.

    Args:
        spec: how micro-batches go through it.
        partition: equations computed once, and the terms of results.
        parts: what tasks compute, in an order in which they can run.
        plan: which task runs when.
        ipus: the IPU of each stage.
        trades: what recomputation saves and costs in each stage that finds out by itself.
    """

    spec: PipelineSpec
    partition: Partition
    parts: tuple[StagePart, ...]
    plan: SchedulePlan
    ipus: tuple[int, ...]
    trades: tuple[ChainTrade, ...] = ()

    @cached_property
    def part_of(self) -> Mapping[TaskKind, StagePart]:
        """The part of each kind of task."""
        return {part.task: part for part in self.parts}

    @cached_property
    def made_in(self) -> Mapping[Var, StagePart]:
        """The part that makes each value that is handed on; a state is made where it is held."""
        found: dict[Var, StagePart] = {var: part for part in self.parts for var in variables(part.jaxpr.outvars)}
        return found | {state: self.parts[stage] for state, stage in self.partition.carried.items()}

    def part_with(self, atom: object) -> StagePart:
        """The part that has a value first: that makes it, or the first of all."""
        return self.made_in.get(atom, self.parts[0]) if isinstance(atom, Var) else self.parts[0]

    def input_ipus(self) -> tuple[int | None, ...]:
        """For each operand the IPU that uses it first, None for one that is not used."""
        first: dict[Var, int] = {state: self.ipus[stage] for state, stage in self.partition.carried.items()}
        for part in self.parts:
            for var in part.jaxpr.invars:
                first.setdefault(var, self.ipus[part.stage])
        for eqn, stage in self.partition.before:
            for var in variables(eqn.invars):
                first.setdefault(var, self.ipus[stage])
        return tuple(first.get(var) for var in self.partition.jaxpr.jaxpr.invars)

    def result_ipus(self) -> tuple[int, ...]:
        """For each result the IPU it ends on: that of the first of the stages that add to it."""
        return tuple(self.home(terms) for terms in self.partition.results)

    def span(self) -> Span:
        """Where its operands and results are, for placement."""
        return Span(self.input_ipus(), self.result_ipus(), self.partition.num_stages)

    def viewed_whole(self, same: Mapping[Var, Tensor]) -> set[tuple[Variable, int]]:
        """Variables of which an IPU reads several views, as a parameter and its transpose, as large as it together.

        Args:
            same: the tensors of what is the same for all micro-batches.
        """
        views: dict[tuple[Variable, int], dict[Tensor, None]] = {}
        for part in self.parts:
            for value in (same[var] for var in part.jaxpr.invars if var in same):
                if len(value.variables()) == 1:
                    views.setdefault((value.variables()[0], self.ipus[part.stage]), {})[value] = None
        return {key for key, seen in views.items() if len(seen) > 1 and sum(x.size for x in seen) >= key[0].size}

    def marks(
        self, name: str, tasks: Iterable[TaskKind], links: Iterable[tuple[TaskKind, TaskKind]]
    ) -> dict[TaskKind, PipelineTask]:
        """What marks the calls of each kind of task in the program, for profiles.

        Args:
            name: debug name.
            tasks: the kinds of task that do anything.
            links: which task hands something on to which, also to such that do nothing.
        """
        named = {task: (task[0], task[1].name.lower()) for task in tasks}
        linked = tuple(dict.fromkeys((named[a], named[b]) for a, b in links if a in named and b in named))
        names = tuple(named.values())
        layout = PipelineLayout(name, self.plan.schedule.name, tuple(self.ipus), self.spec.micro_batches, names, linked)
        return {task: PipelineTask(layout, *mark) for task, mark in named.items()}

    def home(self, terms: Sequence[object]) -> int:
        """The IPU on which the parts of a result are added."""
        return self.ipus[min(self.part_with(term).stage for term in terms)]


def is_staged(eqn: JaxprEqn) -> bool:
    """Whether an equation is a pipeline that has stages; those without are inlined."""
    return eqn.primitive is staged_pipeline_p


def micro_batch_of(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr of one micro-batch of a pipeline, before the passes that its parts go through."""
    given = eqn.params["micro_batch"]
    return given.jaxpr if given.is_ready else ready(given.jaxpr, is_cut=True)


def plan_of(spec: PipelineSpec, num_stages: int, training: bool, target: Target) -> SchedulePlan:
    """The schedule of a pipeline for a number of stages: as asked for, or the one that suits the machine.

    Args:
        spec: the pipeline.
        num_stages: stages of the model.
        training: whether there are backward tasks.
        target: the machine of one replica.

    Raises:
        ScheduleError: as `schedule_plan`.
    """
    schedule, count = spec.schedule, spec.micro_batches
    if schedule is None:
        schedule = default_schedule(target.global_exchange, num_stages, count, training)
    return schedule_plan(schedule, num_stages, count, training)


def staged_pipeline(
    eqn: JaxprEqn,
    target: Target,
    byte_price: float = BYTE_PRICE_CYCLES,
    recomputation: Recomputation = KEEP_ALL,
) -> StagedPipeline:
    """Partitions and schedules a pipeline, maps its stages to IPUs, and has them compute values again.

    Args:
        eqn: its equation; those of its micro-batch are named after stages.
        target: the machine of one replica.
        byte_price: cycles that a byte on the fullest tile is worth.
        recomputation: what gradients compute again.

    Raises:
        ArgumentError: for stages that make no sense, a schedule that does not work for so many micro-batches, or more
            stages than IPUs or than a mapping names.
    """
    spec: PipelineSpec = eqn.params["spec"]
    jaxpr = micro_batch_of(eqn)
    cut = partition(jaxpr, spec)
    with raised_at(source_line(eqn)):
        plan = plan_of(spec, cut.num_stages, cut.training, target)
    ipus = ipus_of_stages(eqn, plan, target.num_ipus, jaxpr)
    split = {stage for tasks in plan.lists for stage in tasks.stages[tasks.kinds == BACKWARD_WEIGHT].tolist()}
    trades = list[ChainTrade]()
    cut = _recomputed(cut, plan, ipus, recomputation, trades)
    return StagedPipeline(spec, cut, stage_parts(cut, split, byte_price), plan, ipus, tuple(trades))


def _recomputed(
    cut: Partition, plan: SchedulePlan, ipus: Sequence[int], recomputation: Recomputation, trades: list[ChainTrade]
) -> Partition:
    """The partition with backward parts that compute again what their forward parts have computed."""
    part_of = {part.task: part.eqns for part in cut.parts}
    results = {var for terms in cut.results for var in variables(terms)}
    results |= set(variables(cut.jaxpr.jaxpr.outvars))
    for stage in range(cut.num_stages if cut.training else 0):
        forward, backward = (stage, FORWARD), (stage, BACKWARD)
        others = (eqns for task, eqns in part_of.items() if task not in (forward, backward))
        sent = {var for eqns in others for eqn in eqns for var in variables(eqn.invars)}
        made = {var for eqn in part_of[backward] for var in eqn.outvars}
        before, after = recomputed_parts(
            part_of[forward],
            part_of[backward],
            results | (sent & made),
            recomputation,
            trades,
            ipu=ipus[stage],
            in_flight=plan.in_flight(stage),
            is_summed=True,
            feeds_loss=stage == cut.num_stages - 1,
        )
        part_of |= {forward: tuple(before), backward: tuple(after)}
    return replace(cut, parts=tuple(Part(task, eqns) for task, eqns in part_of.items()))


def ipus_of_stages(
    eqn: JaxprEqn, plan: SchedulePlan, num_ipus: int, jaxpr: ClosedJaxpr | None = None
) -> tuple[int, ...]:
    """The IPU of each stage: as mapped, or as the schedule has it.

    Args:
        eqn: the pipeline.
        plan: its schedule.
        num_ipus: IPUs of a replica.
        jaxpr: where the line of a stage is found that has no IPU.

    Raises:
        ArgumentError: a mapping for another number of stages, or more IPUs than there are.
    """
    spec: PipelineSpec = eqn.params["spec"]
    ipus = plan.ipus if spec.device_mapping is None else spec.device_mapping
    if len(ipus) != plan.num_stages:
        raise ArgumentError(
            f"device_mapping of ipu.pipeline({spec.name}) does not fit its stages",
            where=source_line(eqn) or None,
            expected=f"an IPU for each of {plan.num_stages} stages",
            got=list(ipus),
        )
    if max(ipus) >= num_ipus:
        stage = int(np.argmax(np.asarray(ipus) >= num_ipus))
        eqns = [] if jaxpr is None else [e for e in jaxpr.jaxpr.eqns if stage_name(e).stage == stage]
        raise ArgumentError(
            f"stage {stage} of ipu.pipeline({spec.name}) has no IPU {ipus[stage]}",
            where=source_line(eqns[0] if eqns else eqn) or None,
            expected=f"{max(ipus) + 1} IPUs",
            got=f"{num_ipus} for each replica",
            hint=f"num_ipus={1 << max(ipus).bit_length()}, or device_mapping=[...] for several stages on an IPU",
        )
    return tuple(ipus)
