"""Assignment of the equations of a jaxpr to stages.

Input: an inlined jaxpr of which some equations are named after a stage. Output: a stage for each equation.

    named equation        its stage
    other equation        the stage with most bytes of its operands; an argument counts for the stage that uses it
                          first, so that an optimiser's update is on the IPU of the parameter
    sum over replicas     none: each of its results is in the stage of its operand
    of unassigned values  the stage that uses it first: masks, one-hot labels, constants
    unused equation       the lowest stage

Source: the two passes over deferred equations are those of JaxPP, see `mark_stage_end` there.
Limits: a stage does not begin or end inside a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """IPUs of an equation that spreads over several: a pipeline.

    Args:
        inputs: IPU that first uses each operand, None for one that is not used.
        results: IPU of each result.
    """

    inputs: tuple[int | None, ...]
    results: tuple[int, ...]


def assign_stages(jaxpr: Jaxpr, spans: Mapping[int, Span] | None = None) -> tuple[int, ...]:
    """The stage (number of the IPU) of each equation, in order: where the user has named none, that of its values.

    Args:
        jaxpr: inlined, with at least one equation named after a stage.
        spans: the equations that run on several IPUs, by their number; the stage returned for these has no meaning.

    Raises:
        ArgumentError: for a stage inside a loop, or a value that flows back to an earlier stage.
    """
    return _new_assignment(jaxpr, spans or {}).run()


def homes(jaxpr: Jaxpr, spans: Mapping[int, Span]) -> tuple[int | None, ...]:
    """The stage that uses each input first, None for one that nothing uses; arguments as of `assign_stages`."""
    assignment = _new_assignment(jaxpr, spans)
    assignment.run()
    return tuple(map(assignment.first_use, jaxpr.invars))


def _new_assignment(jaxpr: Jaxpr, spans: Mapping[int, Span]) -> _StageAssignment:
    """An assignment that is to be run; refuses values that flow back to an earlier stage."""
    named_stages = [None if n in spans else named_stage(eqn) for n, eqn in enumerate(jaxpr.eqns)]
    if not has_phases(jaxpr):  # phases run one after the other on the same IPUs, so values may flow back
        check_flow(jaxpr, named_stages)
    return _StageAssignment(jaxpr, named_stages, spans)


def named_stage(eqn: JaxprEqn) -> int | None:
    """The stage that the user has given an equation by `ipu.stage`, or the only one of equations inside it; else None.

    Raises:
        ArgumentError: for a loop or branch with several stages, or with a pipeline.
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
    outer_stage = stage_name(eqn).stage
    inner_stages = stages_inside(eqn)
    stages = {*inner_stages, *(() if outer_stage is None else (outer_stage,))}
    if len(stages) > 1:
        if MICRO_BATCHES in name_stack(eqn):
            raise ArgumentError(
                "an ipu.pipeline with stages is under a jax.vmap",
                where=source_line(next(iter(inner_stages.values()))) or None,
                expected="a pipeline of its own for each call",
                hint="jax.vmap inside of the function that is pipelined, or a call of the pipeline for each batch",
            )
        first_inner = next(inner for stage, inner in inner_stages.items() if stage != min(stages))
        raise ArgumentError(
            f"a stage begins inside a {eqn.primitive.name}",
            where=source_line(first_inner) or None,
            expected="loops and branches that lie in one stage",
            got=f"stages {', '.join(map(str, sorted(stages)))} in the one at {source_line(eqn) or 'no known line'}",
            hint="ipu.pipeline(fun, micro_batches=...) for a loop over micro-batches, or jit one iteration of the loop",
        )
    return next(iter(stages), None)


def check_flow(jaxpr: Jaxpr, named_stages: Sequence[int | None]) -> None:
    """Refuses a program in which a value that a stage computes on the way forward is used by an earlier stage.

    Args:
        jaxpr: the program.
        named_stages: for each equation the stage that the user has given it; None without.
    """
    # Of each value the latest stage that it was computed from, and the equation of that stage.
    latest_origins: dict[Var, _Origin] = {}
    for eqn, stage in zip(jaxpr.eqns, named_stages, strict=True):
        if stage_name(eqn).is_backward:  # gradients do flow back
            continue
        origins = [latest_origins[v] for v in variables(eqn.invars) if v in latest_origins]
        latest = max(origins, key=lambda origin: origin.stage, default=None)
        if stage is not None:
            if latest is not None and latest.stage > stage:
                used = f"used by {eqn.primitive.name} in stage {stage}"
                raise ArgumentError(
                    f"a value of stage {latest.stage} flows back to stage {stage}",
                    where=source_line(eqn) or None,
                    expected="values that go to later stages, on the way forward",
                    got=f"{_described(latest.eqn)} in stage {latest.stage}, {used}",
                    hint="give the stage that uses it a higher number",
                )
            latest = _Origin(stage, eqn)
        if latest is not None:
            latest_origins.update(dict.fromkeys(eqn.outvars, latest))


class _Origin(NamedTuple):
    """Latest stage that a value depends on, and the last equation there."""

    stage: int
    eqn: JaxprEqn


def _described(eqn: JaxprEqn) -> str:
    shapes = ", ".join(var.aval.str_short() for var in eqn.outvars)
    return f"{shapes} that {eqn.primitive.name} makes at {source_line(eqn) or 'no known line'}"


class _Place(NamedTuple):
    """Number of an equation, and position among its results or operands."""

    eqn: int
    position: int


class _Weight(NamedTuple):
    """Bytes of operands in a stage, and whether they include an argument."""

    num_bytes: int = 0
    has_argument: bool = False


class _StageAssignment:
    """Assigns stages to the equations that are named after none.

    Args:
        jaxpr: the jaxpr.
        named_stages: for each equation the stage that it is named after; None without.
        spans: IPUs of the equations that are pipelines, by number of the equation.
    """

    def __init__(self, jaxpr: Jaxpr, named_stages: Sequence[int | None], spans: Mapping[int, Span]) -> None:
        """Tables that the assignment reads: definitions and users of values, and the stages that are known by name."""
        self.eqns = jaxpr.eqns
        self.spans = spans
        self.stages = list(named_stages)
        ipus_of_spans = [ipu for span in spans.values() for ipu in (*span.results, *span.inputs)]
        self.lowest = min((stage for stage in (*named_stages, *ipus_of_spans) if stage is not None), default=0)
        for n, span in spans.items():  # a pipeline has several stages: any of them, as it is not to be assigned one
            self.stages[n] = span.results[0] if span.results else self.lowest
        # Of each value the equation, and the position among its results or operands.
        self.definition = {var: _Place(n, k) for n, eqn in enumerate(jaxpr.eqns) for k, var in enumerate(eqn.outvars)}
        self.users: dict[Var, list[_Place]] = {}
        for n, eqn in enumerate(jaxpr.eqns):
            for k, atom in enumerate(eqn.invars):
                if not isinstance(atom, Literal):
                    self.users.setdefault(atom, []).append(_Place(n, k))
        self.input_stage = {var: self.first_use(var) for var in (*jaxpr.invars, *jaxpr.constvars)}

    def first_use(self, var: Var) -> int | None:
        """The stage that uses a variable first, None as long as no user has one."""
        stages = (self.spans[n].inputs[k] if n in self.spans else self.stages[n] for n, k in self.users.get(var, ()))
        return next((stage for stage in stages if stage is not None), None)

    def stage_of(self, var: Var) -> int | None:
        """The stage that computes a value; of an input, the one that uses it first; None while that is unknown."""
        if var not in self.definition:
            return self.input_stage.get(var)
        n, k = self.definition[var]  # numbers of the equation, and of the result
        if n in self.spans:
            return self.spans[n].results[k]
        operands = self.eqns[n].invars
        # A reduction over replicas of many values runs on many IPUs: result k where operand k is.
        if is_reduction(self.eqns[n]) and isinstance(operands[k], Var):
            return self.stage_of(operands[k])  # type: ignore[arg-type]
        return self.stages[n]

    def run(self) -> tuple[int, ...]:
        """Assigns a stage to each equation that is named after none; returns the stages of all.

        An equation goes to the stage of its operands, from the first on, or of its users, from the last on; both are
        repeated as long as they assign any.
        """
        stages = self.stages
        # First only equations most of whose bytes have a stage, then all with any, then the rest.
        waits = True
        while None in stages:
            num_open = stages.count(None)
            for n, eqn in enumerate(self.eqns):
                if stages[n] is None:
                    stages[n] = self.heaviest_stage(eqn, waits_for_bytes=waits)
            for n in reversed(range(len(stages))):
                if stages[n] is None:
                    user_stages = [self.first_use(var) for var in self.eqns[n].outvars]
                    stages[n] = min((stage for stage in user_stages if stage is not None), default=None)
            self.input_stage = {
                var: self.first_use(var) if stage is None else stage for var, stage in self.input_stage.items()
            }
            if stages.count(None) == num_open:
                if not waits:
                    stages[:] = [self.lowest if stage is None else stage for stage in stages]
                waits = False
        return tuple(stage for stage in stages if stage is not None)

    def heaviest_stage(self, eqn: JaxprEqn, *, waits_for_bytes: bool) -> int | None:
        """Returns the stage with most bytes of an equation's operands, so that few are copied between IPUs.

        Of equals one of an argument, then the last. None if no operand has a stage.

        Args:
            eqn: the equation.
            waits_for_bytes: return None too if operands without a stage have more bytes: these may decide later.
        """
        open_bytes = 0
        weights: dict[int, _Weight] = {}
        for var in variables(eqn.invars):
            num_bytes = value_bytes(var.aval)
            stage = self.stage_of(var)
            if stage is None:
                open_bytes += num_bytes
            else:
                old = weights.get(stage, _Weight())
                weights[stage] = _Weight(old.num_bytes + num_bytes, old.has_argument or var not in self.definition)
        best = max(weights, key=lambda stage: (*weights[stage], stage), default=None)
        return None if best is None or (waits_for_bytes and open_bytes > weights[best].num_bytes) else best
