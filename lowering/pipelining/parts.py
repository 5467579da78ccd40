"""The parts of a partition as jaxprs of their own, from the values they read to those they hand on.

Input: a `Partition`, and the stages whose weight gradients are tasks of their own. Output: `StagePart`s. Each is a
jaxpr over the variables of the micro-batch, which evaluates by itself.

    input gradients   values that other parts need of a backward part, and their operands
    weight gradients  the rest

Repeated runs of a part become functions. A part repeats the views (reshapes, transposes) of values it reads, so that no
value is stored or sent twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ipujax.lowering.ipus import value_bytes, variables
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var, closed
from ipujax.lowering.passes import CallCosts, outliner
from ipujax.lowering.pipelining.partition import Part, Partition, TaskKind
from ipujax.lowering.primitives import record_of
from ipujax.lowering.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT

_COSTS = CallCosts()


@dataclass(frozen=True, slots=True)
class StagePart:
    """The jaxpr of one kind of task of a stage."""

    task: TaskKind
    jaxpr: Jaxpr  # from the values it reads to those it hands on

    @property
    def stage(self) -> int:
        """Number of its stage."""
        return self.task.stage


def stage_parts(partition: Partition, split: Collection[int] = (), costs: CallCosts = _COSTS) -> tuple[StagePart, ...]:
    """The parts of a pipeline as jaxprs, in an order in which they can run.

    Args:
        partition: equations of each part.
        split: stages whose backward part becomes two: gradients of its inputs, then those of its weights.
        costs: costs of calls, by which repeated runs of equations are outlined.
    """
    parts = [half for part in partition.parts for half in _halves(part, partition, split)]
    defining_eqn = {var: eqn for part in parts for eqn in part.eqns for var in eqn.outvars}
    eqns_of_parts = [_with_views(part, defining_eqn) for part in parts]
    invars_of_parts = [_free_variables(part_eqns) for part_eqns in eqns_of_parts]
    needed = {var for invars in invars_of_parts for var in invars} | _result_variables(partition)
    jaxprs = []
    outline = outliner(costs)
    for part, part_eqns, invars in zip(parts, eqns_of_parts, invars_of_parts, strict=True):
        outvars = [var for eqn in part.eqns for var in eqn.outvars if var in needed]
        jaxprs.append(outline(closed(_part_jaxpr(partition, invars, outvars, part_eqns))).jaxpr)
    return tuple(StagePart(part.task, jaxpr) for part, jaxpr in zip(parts, jaxprs, strict=True))


def _result_variables(partition: Partition) -> set[Var]:
    """Variables that results and next states need."""
    results = {var for terms in partition.results for var in variables(terms)}
    return results | set(variables(partition.jaxpr.jaxpr.outvars))


def _halves(part: Part, partition: Partition, split: Collection[int]) -> Iterable[Part]:
    """A backward part of a stage in `split` as two parts, input gradients and weight gradients; another part alone.

    Other stages wait for the first alone, so that a schedule may run the second where its IPU would be idle.
    """
    stage, kind = part.task
    if kind != BACKWARD or stage not in split:
        return (part,)
    needed = {
        var for other in partition.parts if other is not part for eqn in other.eqns for var in variables(eqn.invars)
    }
    input_gradients: list[JaxprEqn] = []
    for eqn in reversed(part.eqns):
        # Equations with effects keep their order, so they all stay in the first half.
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            input_gradients.append(eqn)
            needed.update(variables(eqn.invars))
    input_gradient_ids = set(map(id, input_gradients))
    weight_gradients = tuple(eqn for eqn in part.eqns if id(eqn) not in input_gradient_ids)
    return (
        Part(TaskKind(stage, BACKWARD_INPUT), tuple(reversed(input_gradients))),
        Part(TaskKind(stage, BACKWARD_WEIGHT), weight_gradients),
    )


def _with_views(part: Part, defining_eqn: dict[Var, JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a part, after those that define views it reads, so that it reads what they view instead."""
    outputs = part.outputs()
    views: list[JaxprEqn] = []

    def add_view(var: Var) -> None:
        """Adds the equation of a view, after those of the values that it views, unless the view is cheaper to store."""
        eqn = defining_eqn.get(var)
        if eqn is None or var in outputs or record_of(eqn).cost != "view":
            return
        viewed = variables(eqn.invars)
        # A small view of a large value, such as a slice, is cheaper to store than the value.
        if sum(value_bytes(operand.aval) for operand in viewed) <= value_bytes(var.aval):
            for operand in viewed:
                add_view(operand)
            views.append(eqn)
            outputs.update(eqn.outvars)

    for eqn in part.eqns:
        for var in variables(eqn.invars):
            add_view(var)
    return [*views, *part.eqns]


def _free_variables(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Free variables of equations, in the order of first use."""
    outputs = {var for eqn in eqns for var in eqn.outvars}
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars) if var not in outputs))


def _part_jaxpr(partition: Partition, invars: Sequence[Var], outvars: Sequence[Var], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    body = partition.jaxpr.jaxpr
    names = body.debug_info.with_unknown_names()
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return body.replace(
        constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects, debug_info=names
    )
