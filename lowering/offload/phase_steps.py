"""The steps of phased execution: `ipu.phase(i)` says what runs after what.

    forward part of phase i     step i, where phases are counted without gaps
    its gradient                step 2n - 1 - i, of n phases
    what follows the gradients  step 2n: the update of an optimiser

Steps in which nothing is computed are left out, such as the gradient of a phase that has none. An equation in no phase
runs with what it reads. Input: equations. Output: the step of each, and the phase of each step.
Source: execution phases of PopART.
Limits: a phase does not begin inside a loop, a branch or a pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr import equations_inside, is_pipeline, phase_of, stage_name, variables_read
from ipujax.lowering.offload.row_updates import is_view
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError

_CONTROL = frozenset(("scan", "while", "cond"))


@dataclass(frozen=True, slots=True)
class PhaseSteps:
    """What runs when.

    Args:
        of_equations: the step of each equation; 0 for all where there are no phases.
        phases: the phase of each step, counted without gaps; None for what follows the gradients.
    """

    of_equations: tuple[int, ...]
    phases: tuple[int | None, ...]


def steps_of_phases(eqns: Sequence[JaxprEqn]) -> PhaseSteps:
    """The steps of equations.

    Args:
        eqns: in an order in which they can run.

    Raises:
        ArgumentError: a value of a later phase that a phase needs, or a phase that begins in a loop or a pipeline.
    """
    for eqn in eqns:
        _check_inside(eqn, phase_of(eqn))
    computing = [not is_view(eqn) for eqn in eqns]
    named = {phase_of(eqn) for eqn, computes in zip(eqns, computing, strict=True) if computes}
    numbers = sorted(phase for phase in named if phase is not None)
    steps, end = _steps(eqns, numbers), 2 * len(numbers)
    there = sorted({step for step, computes in zip(steps, computing, strict=True) if computes}) or [end]
    phases = (None if step == end else min(step, end - 1 - step) for step in there)
    return PhaseSteps(tuple(_place(there, step) for step in steps), tuple(phases))


def _steps(eqns: Sequence[JaxprEqn], numbers: Sequence[int]) -> list[int]:
    """The step of each equation; some steps may have none.

    Args:
        eqns: the equations.
        numbers: of the phases, ascending.
    """
    end = 2 * len(numbers)
    last_gradient = max((n for n, eqn in enumerate(eqns) if stage_name(eqn).is_backward), default=len(eqns))
    made: dict[Var, tuple[int, JaxprEqn]] = {}
    steps = list[int]()
    for number, eqn in enumerate(eqns):
        before = max((made[var] for var in variables_read(eqn) if var in made), default=(0, eqn), key=lambda x: x[0])
        step, phase = before[0], phase_of(eqn)
        if phase is not None:
            place, is_backward = _place(numbers, phase), stage_name(eqn).is_backward
            if not is_backward and step > place:
                later = numbers[step] if step < len(numbers) else None
                raise _flows_back(eqn, phase, later, before[1])
            step = max(step, end - 1 - place if is_backward else place)
        elif numbers and number > last_gradient:
            step = end
        steps.append(step)
        made.update(dict.fromkeys(eqn.outvars, (step, eqn)))
    return steps


def _place(numbers: Sequence[int], number: int) -> int:
    """The place of a number among ascending ones; of the one before it where it is not among them."""
    return max(0, bisect_right(numbers, number) - 1)


def _flows_back(eqn: JaxprEqn, phase: int, later: int | None, maker: JaxprEqn) -> ArgumentError:
    """The error for a value of a later phase, or, where that is None, of what runs behind all forward parts."""
    if later is None:
        what = f"phase {phase} uses what a gradient or an update makes, which runs after all phases"
        expected = "values of the same phase, of phases before it, or arguments"
        hint = "compute it in a call of its own, behind the one with the gradient"
    else:
        what = f"phase {phase} uses a value of phase {later}, which runs later"
        expected = "values of the same phase, or of phases before it"
        hint = "give the phase that uses it a higher number"
    return ArgumentError(
        what,
        where=source_line(eqn) or None,
        expected=expected,
        got=f"what {maker.primitive.name} makes at {source_line(maker) or 'no known line'}",
        hint=hint,
    )


def _check_inside(eqn: JaxprEqn, phase: int | None) -> None:
    if eqn.primitive.name in _CONTROL or is_pipeline(eqn):
        for inner in equations_inside(eqn):
            own = phase_of(inner)
            if own is not None and own != phase:
                raise _begins_inside(inner, own, eqn)


def _begins_inside(eqn: JaxprEqn, phase: int, outer: JaxprEqn) -> ArgumentError:
    if is_pipeline(outer):
        what, expected = "ipu.pipeline", "phases of whole batches"
        hint = "leave out ipu.pipeline, or add up the gradients of micro-batches over several calls"
    else:
        what, expected = f"a {outer.primitive.name}", "loops and branches that lie in one phase"
        hint = "write the loop over phases in Python: for i, layer in enumerate(layers): with ipu.phase(i): …"
    return ArgumentError(
        f"phase {phase} begins inside {what}", where=source_line(eqn) or None, expected=expected, hint=hint
    )
