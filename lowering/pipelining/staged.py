"""A pipeline with all choices made: its parts, its schedule, and the IPU of each stage.

Input: an equation of the primitive of pipelines with stages. Output: `StagedPipeline`, which `pipeline_program` lowers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ipujax.lowering.ipus import Span, variables
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import CallCosts, ready
from ipujax.lowering.pipelining.partition import Part, Partition, TaskKind, partition
from ipujax.lowering.pipelining.parts import StagePart, stage_parts
from ipujax.lowering.pipelining.primitive import PipelineSpec, Role, staged_pipeline_p
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation, recomputed_parts
from ipujax.lowering.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, SchedulePlan, default_schedule, schedule_plan
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, raised_at
from ipujax.runtime.graph import BYTE_COST_CYCLES, PipelineLayout, PipelineTask
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable


class Term(NamedTuple):
    """A value that is added to a result; a result has several if several stages add to it.

    Args:
        number: of the result.
        position: among the terms of the result.
        atom: the value, of one micro-batch.
    """

    number: int
    position: int
    atom: Atom


@dataclass(frozen=True)
class StagedPipeline:
    """A pipeline before tile mapping."""

    spec: PipelineSpec
    partition: Partition  # equations computed once, and the terms of results
    parts: tuple[StagePart, ...]  # jaxprs of the tasks, in an order in which they can run
    plan: SchedulePlan  # order of tasks on each IPU
    ipus: tuple[int, ...]  # IPU of each stage
    trades: tuple[ChainTrade, ...] = ()  # curves of memory and recomputation, of each stage whose mode is "auto"

    @cached_property
    def defining_part(self) -> Mapping[Var, StagePart]:
        """The part that defines each value that is handed on; a state is defined in the stage that holds it."""
        parts_of_values: dict[Var, StagePart] = {
            var: part for part in self.parts for var in variables(part.jaxpr.outvars)
        }
        return parts_of_values | {state: self.parts[stage] for state, stage in self.partition.carried.items()}

    @cached_property
    def roles(self) -> Mapping[Var, Role]:
        """The role of each input."""
        return dict(zip(self.partition.jaxpr.jaxpr.invars, self.spec.roles, strict=True))

    @cached_property
    def streamed(self) -> frozenset[Var]:
        """Batches that are loaded from the host by micro-batches."""
        # Without streams the spec has no flags.
        flags = zip(self.partition.jaxpr.jaxpr.invars, self.spec.streamed, strict=False)
        return frozenset(var for var, is_streamed in flags if is_streamed)

    @cached_property
    def next_of_state(self) -> Mapping[Var, Atom]:
        """The result that is the next value of each state."""
        body = self.partition.jaxpr.jaxpr
        return {body.invars[operand]: body.outvars[result] for operand, result in self.spec.carries}

    @cached_property
    def readers(self) -> Mapping[tuple[Var, int], Sequence[StagePart]]:
        """Parts that read a value or hand it on, by value and stage, in the order of parts."""
        readers: dict[tuple[Var, int], list[StagePart]] = {}
        for part in self.parts:
            for var in self.inputs_of(part):
                readers.setdefault((var, part.stage), []).append(part)
        return readers

    def is_after(self, part: StagePart, other: StagePart) -> bool:
        """True if a part comes after another one."""
        return self.parts.index(part) > self.parts.index(other)

    def states_of(self, part: StagePart) -> list[Var]:
        """States that a part holds."""
        return [var for var, holder in self.partition.carried.items() if self.parts[holder] is part]

    def terms_of(self, part: StagePart) -> list[Term]:
        """Terms of results that a part computes."""
        results = enumerate(self.partition.results)
        rows = (Term(number, position, atom) for number, atoms in results for position, atom in enumerate(atoms))
        return [row for row in rows if self.part_with(row.atom) is part]

    def inputs_of(self, part: StagePart) -> list[Var]:
        """Values that a part reads, and streamed batches that it hands on as results or states without reading them."""
        states = [self.next_of_state[var] for var in self.states_of(part)]
        handed = dict.fromkeys(variables([*(term.atom for term in self.terms_of(part)), *states]))
        read = part.jaxpr.invars
        return [*read, *(var for var in handed if var in self.streamed and var not in read)]

    def part_with(self, atom: object) -> StagePart:
        """The part that defines a value; the first for one that no part defines, as an input or a constant."""
        return self.defining_part.get(atom, self.parts[0]) if isinstance(atom, Var) else self.parts[0]

    def input_ipus(self) -> tuple[int | None, ...]:
        """The IPU that uses each operand first, None for one that is not used."""
        first_ipu: dict[Var, int] = {state: self.ipus[stage] for state, stage in self.partition.carried.items()}
        for part in self.parts:
            for var in part.jaxpr.invars:
                first_ipu.setdefault(var, self.ipus[part.stage])
        for eqn, stage in self.partition.shared:
            for var in variables(eqn.invars):
                first_ipu.setdefault(var, self.ipus[stage])
        return tuple(first_ipu.get(var) for var in self.partition.jaxpr.jaxpr.invars)

    def result_ipus(self) -> tuple[int, ...]:
        """The IPU of each result: that of the first stage that adds to it."""
        return tuple(self.result_ipu(terms) for terms in self.partition.results)

    def span(self) -> Span:
        """IPUs of operands and results, for placement."""
        return Span(self.input_ipus(), self.result_ipus())

    def fully_viewed(self, same: Mapping[Var, Tensor]) -> set[tuple[Variable, int]]:
        """(variable, IPU) pairs where the IPU reads several views, together as large as the variable.

        Only of `same` values, those of all micro-batches. One copy of such a variable is less to send than one a view.
        """
        views: dict[tuple[Variable, int], dict[Tensor, None]] = {}
        for part in self.parts:
            for value in (same[var] for var in part.jaxpr.invars if var in same):
                if len(value.variables()) == 1:
                    views.setdefault((value.variables()[0], self.ipus[part.stage]), {})[value] = None
        return {
            (variable, ipu)
            for (variable, ipu), distinct_views in views.items()
            if len(distinct_views) > 1 and sum(x.size for x in distinct_views) >= variable.size
        }

    def marks(
        self, name: str, tasks: Iterable[TaskKind], links: Iterable[tuple[TaskKind, TaskKind]]
    ) -> dict[TaskKind, PipelineTask]:
        """Marks of the calls of each kind of task, by which profiles show the pipeline.

        Args:
            name: name of the pipeline.
            tasks: kinds of tasks that have a program.
            links: (writer, reader) of each value that goes from one kind of task to another.
        """
        numbers = self.partition.numbers
        # Profiles show the user's number of a stage, and "forward" or "backward".
        shown_tasks = {task: (numbers[task.stage], task.kind.name.lower()) for task in tasks}
        shown_links = dict.fromkeys(
            (shown_tasks[writer], shown_tasks[reader])
            for writer, reader in links
            if writer in shown_tasks and reader in shown_tasks
        )
        # By the user's number of a stage; one that is left out has the IPU of the next stage.
        ipus = tuple(self.ipus[bisect_left(numbers, number)] for number in range(numbers[-1] + 1))
        names = tuple(shown_tasks.values())
        layout = PipelineLayout(name, self.plan.schedule.name, ipus, self.spec.micro_batches, names, tuple(shown_links))
        return {task: PipelineTask(layout, *shown) for task, shown in shown_tasks.items()}

    def result_ipu(self, terms: Sequence[object]) -> int:
        """The IPU on which the terms of a result are added."""
        return self.ipus[min(self.part_with(term).stage for term in terms)]


def is_staged(eqn: JaxprEqn) -> bool:
    """True if an equation is a pipeline that has stages; those without are inlined."""
    return eqn.primitive is staged_pipeline_p


def micro_batch_of(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr of one micro-batch of a pipeline, before the passes that its parts go through."""
    micro_batch = eqn.params["micro_batch"]
    return micro_batch.jaxpr if micro_batch.is_ready else ready(micro_batch.jaxpr, is_cut=True)


def plan_of(spec: PipelineSpec, num_stages: int, training: bool, target: Target) -> SchedulePlan:
    """The schedule of a pipeline for a number of stages; without a `schedule`, the one that suits the target."""
    schedule = spec.schedule
    count = spec.micro_batches
    if schedule is None:
        schedule = default_schedule(target.global_exchange, num_stages, count, training)
    return schedule_plan(schedule, num_stages, count, training)


def staged_pipeline(
    eqn: JaxprEqn,
    target: Target,
    byte_cost: float = BYTE_COST_CYCLES,
    recomputation: Recomputation = KEEP_ALL,
) -> StagedPipeline:
    """Partitions and schedules a pipeline, maps its stages to IPUs, and adds recomputation; refuses what cannot run."""
    spec: PipelineSpec = eqn.params["spec"]
    jaxpr = micro_batch_of(eqn)
    partitioned = partition(jaxpr, spec)
    with raised_at(source_line(eqn)):
        plan = plan_of(spec, partitioned.num_stages, partitioned.training, target)
    ipus = ipus_of_stages(eqn, plan, target.num_ipus, partitioned.numbers, jaxpr)
    # Stages for which the schedule has tasks of weight gradients alone.
    split = {stage for tasks in plan.lists for stage in tasks.stages[tasks.kinds == BACKWARD_WEIGHT].tolist()}
    trades: list[ChainTrade] = []
    partitioned = _recomputed(partitioned, plan, ipus, recomputation, trades)
    parts = stage_parts(partitioned, split, CallCosts.of(target, byte_cost))
    return StagedPipeline(spec, partitioned, parts, plan, ipus, tuple(trades))


def _recomputed(
    partitioned: Partition,
    plan: SchedulePlan,
    ipus: Sequence[int],
    recomputation: Recomputation,
    trades: list[ChainTrade],
) -> Partition:
    """The partition with backward parts that recompute values of their forward parts.

    Args:
        partitioned: the partition.
        plan: the schedule, which says how many micro-batches store their values at a stage.
        ipus: IPU of each stage.
        recomputation: which values to recompute.
        trades: the trade-off of memory and cycles of each stage is appended.
    """
    eqns_of_task = {part.task: part.eqns for part in partitioned.parts}
    results = {var for terms in partitioned.results for var in variables(terms)}
    results |= set(variables(partitioned.jaxpr.jaxpr.outvars))
    for stage in range(partitioned.num_stages if partitioned.training else 0):
        forward = TaskKind(stage, FORWARD)
        backward = TaskKind(stage, BACKWARD)
        other_eqns = (eqns for task, eqns in eqns_of_task.items() if task not in (forward, backward))
        # Variables of the two parts that others read: results, and gradients that parts of other stages take. What the
        # forward part sends is not among them: its equations stay as they are.
        sent = {var for eqns in other_eqns for eqn in eqns for var in variables(eqn.invars)}
        gradients = {var for eqn in eqns_of_task[backward] for var in eqn.outvars}
        forward_eqns, backward_eqns = recomputed_parts(
            eqns_of_task[forward],
            eqns_of_task[backward],
            results | (sent & gradients),
            recomputation,
            trades,
            ipu=ipus[stage],
            in_flight=plan.in_flight(stage),
            is_summed=True,  # gradients are added to the accumulators of the step
            feeds_loss=stage == partitioned.num_stages - 1,
        )
        eqns_of_task |= {forward: tuple(forward_eqns), backward: tuple(backward_eqns)}
    return replace(partitioned, parts=tuple(Part(task, eqns) for task, eqns in eqns_of_task.items()))


def ipus_of_stages(
    eqn: JaxprEqn, plan: SchedulePlan, num_ipus: int, numbers: Sequence[int] = (), jaxpr: ClosedJaxpr | None = None
) -> tuple[int, ...]:
    """The IPU of each stage: that of `device_mapping`, or else of the schedule; refuses missing IPUs.

    `numbers`: by which the stages are named, from 0 without a gap when empty; `device_mapping` has an IPU for each
    number up to the last. Without it stage n is on IPU n: a schedule counts its stages and IPUs without gaps, so that
    its IPU i is the one with the number of its stage i, and it may put several stages there.
    """
    spec: PipelineSpec = eqn.params["spec"]
    numbers = numbers or range(plan.num_stages)
    mapping = spec.device_mapping
    if mapping is not None and len(mapping) != numbers[-1] + 1:
        raise ArgumentError(
            f"device_mapping of ipu.pipeline({spec.name}) does not fit its stages",
            where=source_line(eqn) or None,
            expected=f"an IPU for each of {numbers[-1] + 1} stages",
            got=list(mapping),
        )
    ipus = [numbers[ipu] for ipu in plan.ipus] if mapping is None else [mapping[number] for number in numbers]
    if max(ipus) >= num_ipus:
        stage = next(number for number, ipu in zip(numbers, ipus, strict=True) if ipu >= num_ipus)
        eqns = [] if jaxpr is None else [e for e in jaxpr.jaxpr.eqns if stage_name(e).stage == stage]
        raise ArgumentError(
            f"stage {stage} of ipu.pipeline({spec.name}) has no IPU {ipus[numbers.index(stage)]}",
            where=source_line(eqns[0] if eqns else eqn) or None,
            expected=f"{max(ipus) + 1} IPUs",
            got=f"{num_ipus} for each replica",
            hint=f"num_ipus={1 << max(ipus).bit_length()}, or device_mapping=[...] for several stages on an IPU",
        )
    return tuple(ipus)
