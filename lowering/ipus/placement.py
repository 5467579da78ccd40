"""Which stage each equation of a jaxpr belongs to.

Input: an inlined jaxpr of which some equations are named after a stage. Output: a stage for each equation.

    named equation        its stage
    other equation        where most bytes of its operands are: an argument counts as where it is first used in a stage,
                          so that an optimiser's update is where the parameter is
    sum over replicas     nowhere: each of its results is where the operand is
    of nothing placed yet where it is used first: masks, one-hot labels, constants
    of no use             stage 0

Source: the two passes over deferred equations are those of JaxPP, see `mark_stage_end` there.
Limits: a stage does not begin or end inside a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ipujax.lowering.gcl import is_reduction
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import (
    MICRO_BATCHES,
    has_phases,
    holds_pipeline,
    stage_name,
    stages_inside,
    value_bytes,
    variables,
)
from ipujax.lowering.source_info import name_stack, source_line
from ipujax.runtime.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Span:
    """An equation that is spread over IPUs by itself: a pipeline.

    Args:
        inputs: the IPU that uses each operand first, None where none does.
        results: the IPU of each result.
        num_stages: how many stages are inside.
    """

    inputs: tuple[int | None, ...]
    results: tuple[int, ...]
    num_stages: int


def place(jaxpr: Jaxpr, spans: Mapping[int, Span] | None = None) -> tuple[int, ...]:
    """Gives each equation a stage.

    Args:
        jaxpr: inlined, with at least one equation named after a stage.
        spans: the equations that are spread over IPUs by themselves, by number.

    Returns:
        The stage of each equation, in order; one for equations in `spans` means nothing.

    Raises:
        ArgumentError: for stages with a gap between their numbers, a stage inside a loop, or a value that flows back to
            an earlier stage.
    """
    return _placed(jaxpr, spans or {}).run()


def homes(jaxpr: Jaxpr, spans: Mapping[int, Span]) -> tuple[int | None, ...]:
    """The stage that uses each input first, None for one that nothing uses.

    Args:
        jaxpr: as for `place`.
        spans: as for `place`.
    """
    filling = _placed(jaxpr, spans)
    filling.run()
    return tuple(map(filling.first_use, jaxpr.invars))


def _placed(jaxpr: Jaxpr, spans: Mapping[int, Span]) -> _Filling:
    named = [None if n in spans else named_stage(eqn) for n, eqn in enumerate(jaxpr.eqns)]
    check_gaps(jaxpr.eqns, named, max((span.num_stages for span in spans.values()), default=0))
    if not has_phases(jaxpr):  # which take turns on the same IPUs
        check_flow(jaxpr, named)
    return _Filling(jaxpr, named, spans)


def named_stage(eqn: JaxprEqn) -> int | None:
    """The stage an equation is named after, or all it holds is.

    Raises:
        ArgumentError: if stages change inside of it.
    """
    if holds_pipeline(eqn):
        raise ArgumentError(
            f"a pipeline with stages is inside a {eqn.primitive.name}",
            where=source_line(eqn) or None,
            expected="a pipeline that runs once in a call",
            hint="jit one iteration of the loop"
            if eqn.primitive.name in ("scan", "while")
            else "jit the pipeline apart from what is around it",
        )
    own, inside = stage_name(eqn).stage, stages_inside(eqn)
    stages = {*inside, *(() if own is None else (own,))}
    if len(stages) > 1:
        if MICRO_BATCHES in name_stack(eqn):
            raise ArgumentError(
                "an ipu.pipeline with stages is under a jax.vmap",
                where=source_line(next(iter(inside.values()))) or None,
                expected="a pipeline of its own for each call",
                hint="jax.vmap inside of the function that is pipelined, or a call of the pipeline for each batch",
            )
        first = next(inner for stage, inner in inside.items() if stage != min(stages))
        raise ArgumentError(
            f"a stage begins inside a {eqn.primitive.name}",
            where=source_line(first) or None,
            expected="loops and branches that lie in one stage",
            got=f"stages {', '.join(map(str, sorted(stages)))} in the one at {source_line(eqn) or 'no known line'}",
            hint="ipu.pipeline(fun, micro_batches=...) for a loop over micro-batches, or jit one iteration of the loop",
        )
    return next(iter(stages), None)


def check_gaps(eqns: Sequence[JaxprEqn], named: Sequence[int | None], known: int = 0) -> None:
    """Refuses numbers of stages that leave one out.

    Args:
        eqns: the equations.
        named: the stage each is named after, or None.
        known: how many stages there are elsewhere.

    Raises:
        ArgumentError: with the line of the first stage behind the gap.
    """
    first: dict[int, JaxprEqn] = {}
    for eqn, stage in zip(eqns, named, strict=True):
        if stage is not None:
            first.setdefault(stage, eqn)
    for number, stage in enumerate(sorted({*first, *range(known)})):
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


class _Filling:
    """Gives a stage to the equations that are named after none."""

    def __init__(self, jaxpr: Jaxpr, named: Sequence[int | None], spans: Mapping[int, Span]) -> None:
        self.eqns, self.spans, self.stages = jaxpr.eqns, spans, list(named)
        for n, span in spans.items():
            self.stages[n] = span.results[0] if span.results else 0
        self.maker = {var: (n, k) for n, eqn in enumerate(jaxpr.eqns) for k, var in enumerate(eqn.outvars)}
        self.users: dict[Var, list[tuple[int, int]]] = {}
        for n, eqn in enumerate(jaxpr.eqns):
            for k, atom in enumerate(eqn.invars):
                if not isinstance(atom, Literal):
                    self.users.setdefault(atom, []).append((n, k))
        self.home = {var: self.first_use(var) for var in (*jaxpr.invars, *jaxpr.constvars)}

    def first_use(self, var: Var) -> int | None:
        """The stage that uses a variable first."""
        uses = (self.spans[n].inputs[k] if n in self.spans else self.stages[n] for n, k in self.users.get(var, ()))
        return next((stage for stage in uses if stage is not None), None)

    def made_at(self, var: Var) -> int | None:
        """The stage a variable comes from; of an input, that which uses it first."""
        if var not in self.maker:
            return self.home.get(var)
        n, k = self.maker[var]
        if n in self.spans:
            return self.spans[n].results[k]
        operands = self.eqns[n].invars
        if is_reduction(self.eqns[n]) and isinstance(operands[k], Var):
            return self.made_at(operands[k])  # type: ignore[arg-type]
        return self.stages[n]

    def run(self) -> tuple[int, ...]:
        stages, waits = self.stages, True
        while None in stages:
            before = stages.count(None)
            for n, eqn in enumerate(self.eqns):
                if stages[n] is None:
                    stages[n] = self.heaviest(eqn, waits)
            for n in reversed(range(len(stages))):
                if stages[n] is None:
                    uses = [self.first_use(var) for var in self.eqns[n].outvars]
                    stages[n] = min((stage for stage in uses if stage is not None), default=None)
            self.home = {var: self.first_use(var) if stage is None else stage for var, stage in self.home.items()}
            if stages.count(None) == before:
                if not waits:
                    stages[:] = [0 if stage is None else stage for stage in stages]
                waits = False
        return tuple(stage for stage in stages if stage is not None)

    def heaviest(self, eqn: JaxprEqn, waits: bool) -> int | None:
        """The stage with most bytes of an equation's operands; of equals one that has an argument, then the last.

        None if no operand is placed; if it `waits`, also while those that are not have more bytes than the stage holds.
        """
        missing = 0
        weight: dict[int, tuple[int, bool]] = {}
        for var in variables(eqn.invars):
            stage = self.made_at(var)
            if stage is None:
                missing += value_bytes(var.aval)
            else:
                held, has_argument = weight.get(stage, (0, False))
                weight[stage] = held + value_bytes(var.aval), has_argument or var not in self.maker
        best = max(weight, key=lambda stage: (*weight[stage], stage), default=None)
        return None if best is None or (waits and missing > weight[best][0]) else best
