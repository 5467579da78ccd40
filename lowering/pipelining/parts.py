"""The parts of a partition as jaxprs of their own: what each reads of others, and what it hands on.

Input: a `Partition`, and for which stages gradients of parameters are tasks of their own. Output: `StagePart`s. Each is
a jaxpr over the variables of the whole, which evaluates by itself. While the function of a part is built, `PartBuilder`
holds its program, and `Send` and `Arrival` the values that go from part to part.

    input gradients   what other parts need of a backward part, and what that needs
    weight gradients  the rest

Repeated runs of a part become functions. A value that is only another view of one is viewed again where it is read, so
that nothing is kept or sent twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ipujax.lowering.ipus import value_bytes, variables
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var, closed
from ipujax.lowering.jaxpr import VIEWS
from ipujax.lowering.passes import outliner
from ipujax.lowering.pipelining.partition import Part, Partition, TaskKind
from ipujax.lowering.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from ipujax.runtime.graph import BYTE_PRICE_CYCLES, Function, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class StagePart:
    """The jaxpr of one kind of task of a stage.

    Args:
        task: stage and kind.
        jaxpr: from what it reads to what it hands on.
    """

    task: TaskKind
    jaxpr: Jaxpr

    @property
    def stage(self) -> int:
        """Number of its stage."""
        return self.task[0]


@dataclass(eq=False)
class Arrival:
    """Variables that receive a value of another stage.

    Args:
        landing: the variables that they are copied to, in turn.
        read: the variable that the part reads; the landing itself where there is one.
        receive: what puts what has landed in a ring, where more values can be on their way.
        ring: that ring.
    """

    landing: list[Tensor]
    read: Tensor
    receive: Function | None = None
    ring: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """A value that goes to another stage after its part has run."""

    value: Tensor
    arrival: Arrival
    source_ipu: int
    destination_ipu: int
    reader: TaskKind


@dataclass(eq=False)
class PartBuilder:
    """One part while its function is built.

    Args:
        part: the part.
        ipu: where it runs.
        body: its program.
        name: debug name.
    """

    part: StagePart
    ipu: int
    body: ProgramSequence
    name: str
    counter: Tensor | None = None
    slots: dict[int, Tensor] = field(default_factory=dict)


def stage_parts(
    partition: Partition, split: Collection[int] = (), byte_price: float = BYTE_PRICE_CYCLES
) -> tuple[StagePart, ...]:
    """The parts of a partition, those without equations too.

    Args:
        partition: the partition.
        split: stages whose parameter gradients are tasks of their own.
        byte_price: cycles that a byte on the fullest tile is worth.

    Returns:
        The parts, in an order in which they can run one after the other.
    """
    parts = [half for part in partition.parts for half in _halves(part, partition, split)]
    maker = {var: eqn for part in parts for eqn in part.eqns for var in eqn.outvars}
    eqns = [_with_views(part, maker) for part in parts]
    reads = [_reads(each) for each in eqns]
    needed = {var for each in reads for var in each} | _wanted(partition)
    jaxprs, outline = [], outliner(byte_price)
    for part, each, read in zip(parts, eqns, reads, strict=True):
        own = [var for eqn in part.eqns for var in eqn.outvars if var in needed]
        jaxprs.append(outline(closed(_jaxpr(partition, read, own, each))).jaxpr)
    return tuple(StagePart(part.task, jaxpr) for part, jaxpr in zip(parts, jaxprs, strict=True))


def _wanted(partition: Partition) -> set[Var]:
    """The variables that results and next states need."""
    results = {var for terms in partition.results for var in variables(terms)}
    return results | set(variables(partition.jaxpr.jaxpr.outvars))


def _halves(part: Part, partition: Partition, split: Collection[int]) -> Iterable[Part]:
    """A backward part in two: what other parts need, and the rest."""
    stage, kind = part.task
    if kind != BACKWARD or stage not in split:
        return (part,)
    wanted = {
        var for other in partition.parts if other is not part for eqn in other.eqns for var in variables(eqn.invars)
    }
    first: list[JaxprEqn] = []
    for eqn in reversed(part.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            first.append(eqn)
            wanted.update(variables(eqn.invars))
    chosen = set(map(id, first))
    rest = tuple(eqn for eqn in part.eqns if id(eqn) not in chosen)
    return Part((stage, BACKWARD_INPUT), tuple(reversed(first))), Part((stage, BACKWARD_WEIGHT), rest)


def _with_views(part: Part, maker: dict[Var, JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a part, behind those of views of what it reads."""
    made, views = part.made(), list[JaxprEqn]()

    def look(var: Var) -> None:
        eqn = maker.get(var)
        if eqn is None or var in made or eqn.primitive.name not in VIEWS:
            return
        seen = variables(eqn.invars)
        if sum(value_bytes(each.aval) for each in seen) <= value_bytes(var.aval):
            for each in seen:
                look(each)
            views.append(eqn)
            made.update(eqn.outvars)

    for eqn in part.eqns:
        for var in variables(eqn.invars):
            look(var)
    return [*views, *part.eqns]


def _reads(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Free variables of equations, in the order of first use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars) if var not in made))


def _jaxpr(partition: Partition, invars: Sequence[Var], outvars: Sequence[Var], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    body = partition.jaxpr.jaxpr
    names = body.debug_info.with_unknown_names()
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return body.replace(
        constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects, debug_info=names
    )
