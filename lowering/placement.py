"""Which stage each equation of a jaxpr belongs to.

Input: an inlined jaxpr of which some equations are named after a stage. Output: a stage for each equation.

    named equation        its stage
    other equation        where most bytes of its operands are: an argument counts as where it is first used in a stage,
                          so that an optimiser's update is where the parameter is
    of nothing placed yet where it is used first: masks, one-hot labels, constants
    of no use             stage 0

Source: the two passes over deferred equations are those of JaxPP, see `mark_stage_end` there.
Limits: a stage does not begin or end inside a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Literal, Var, source_line
from ipujax.lowering.stage_names import stage_name, stages_inside
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.variable import element_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the equations of a jaxpr belong.

    Args:
        stages: of each equation, in order.
        num_stages: how many there are.
    """

    stages: tuple[int, ...]
    num_stages: int


def place(jaxpr: Jaxpr) -> Placement:
    """Gives each equation a stage.

    Args:
        jaxpr: inlined, with at least one equation named after a stage.

    Raises:
        ArgumentError: for stages with a gap between their numbers, a stage inside a loop, or a value that flows back to
            an earlier stage.
    """
    named = [_named_stage(eqn) for eqn in jaxpr.eqns]
    _check_gaps(jaxpr.eqns, named)
    check_flow(jaxpr, named)
    return Placement(_filled(jaxpr, named), 1 + max(stage for stage in named if stage is not None))


def _named_stage(eqn: JaxprEqn) -> int | None:
    """The stage an equation is named after, or all it holds is.

    Raises:
        ArgumentError: if stages change inside of it.
    """
    own, inside = stage_name(eqn).stage, stages_inside(eqn)
    stages = {*inside, *(() if own is None else (own,))}
    if len(stages) > 1:
        first = next(inner for stage, inner in inside.items() if stage != min(stages))
        raise ArgumentError(
            f"a stage begins inside a {eqn.primitive.name}",
            where=source_line(first) or None,
            expected="loops and branches that lie in one stage",
            got=f"stages {', '.join(map(str, sorted(stages)))} in the one at {source_line(eqn) or 'no known line'}",
            hint="ipu.pipeline(fun, micro_batches=...) for a loop over micro-batches, or jit one turn of the loop",
        )
    return next(iter(stages), None)


def _check_gaps(eqns: Sequence[JaxprEqn], named: Sequence[int | None]) -> None:
    first: dict[int, JaxprEqn] = {}
    for eqn, stage in zip(eqns, named, strict=True):
        if stage is not None:
            first.setdefault(stage, eqn)
    for number, stage in enumerate(sorted(first)):
        if number != stage:
            raise ArgumentError(
                f"there is no stage {number}, but a stage {stage}",
                where=source_line(first[stage]) or None,
                expected="stages numbered 0, 1, 2, … without a gap",
                got=f"stages {', '.join(map(str, sorted(first)))}",
            )


def check_flow(jaxpr: Jaxpr, named: Sequence[int | None]) -> None:
    """Refuses a value that a stage finds on its way forward and an earlier stage uses on its own.

    Args:
        jaxpr: the equations.
        named: the stage each is named after, or None.

    Raises:
        ArgumentError: with the lines of both.
    """
    made: dict[Var, tuple[int, JaxprEqn]] = {}  # the latest stage a value comes from, and the equation that was in it
    for eqn, stage in zip(jaxpr.eqns, named, strict=True):
        if stage_name(eqn).is_backward:
            continue
        origins = [made[v] for v in variables(eqn.invars) if v in made]
        latest = max(origins, key=lambda origin: origin[0], default=None)
        if stage is not None:
            if latest is not None and latest[0] > stage:
                raise ArgumentError(
                    f"a value of stage {latest[0]} flows back to stage {stage}",
                    where=source_line(eqn) or None,
                    expected="values that go to later stages, on the way forward",
                    got=f"{_described(latest[1])} in stage {latest[0]}, used by {eqn.primitive.name} in stage {stage}",
                    hint="give the stage that uses it a higher number",
                )
            latest = (stage, eqn)
        if latest is not None:
            made.update(dict.fromkeys(eqn.outvars, latest))


def _described(eqn: JaxprEqn) -> str:
    shown = ", ".join(var.aval.str_short() for var in eqn.outvars)
    return f"{shown} that {eqn.primitive.name} makes at {source_line(eqn) or 'no known line'}"


def _filled(jaxpr: Jaxpr, named: Sequence[int | None]) -> tuple[int, ...]:
    """A stage for every equation."""
    stages = list(named)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    maker = {var: n for n, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    users: dict[Var, list[int]] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            users.setdefault(var, []).append(n)

    def first_use(var: Var) -> int | None:
        return next((stage for n in users.get(var, ()) if (stage := stages[n]) is not None), None)

    home = {var: first_use(var) for var in inputs}
    waits = True
    while None in stages:
        before = stages.count(None)
        for n, eqn in enumerate(jaxpr.eqns):
            if stages[n] is None:
                stages[n] = _heaviest(eqn, maker, stages, home, waits)
        for n in reversed(range(len(stages))):
            if stages[n] is None:
                uses = [first_use(var) for var in jaxpr.eqns[n].outvars]
                stages[n] = min((stage for stage in uses if stage is not None), default=None)
        home = {var: first_use(var) if stage is None else stage for var, stage in home.items()}
        if stages.count(None) == before:
            stages = stages if waits else [0 if stage is None else stage for stage in stages]
            waits = False
    return tuple(stage for stage in stages if stage is not None)


def _heaviest(
    eqn: JaxprEqn, maker: Mapping[Var, int], stages: Sequence[int | None], home: Mapping[Var, int | None], waits: bool
) -> int | None:
    """The stage that holds most bytes of an equation's operands; of equals one that holds an argument, then the last.

    None if no operand is placed; if it `waits`, also while those that are not have more bytes than the stage holds.
    """
    missing = 0
    weight: dict[int, tuple[int, bool]] = {}
    for var in variables(eqn.invars):
        stage = stages[maker[var]] if var in maker else home.get(var)
        if stage is None:
            missing += value_bytes(var.aval)
        else:
            held, has_argument = weight.get(stage, (0, False))
            weight[stage] = held + value_bytes(var.aval), has_argument or var not in maker
    best = max(weight, key=lambda stage: (*weight[stage], stage), default=None)
    return None if best is None or (waits and missing > weight[best][0]) else best


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among atoms."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def value_bytes(aval: Any) -> int:
    """Bytes of a value."""
    return prod(aval.shape) * element_bytes(aval.dtype)
