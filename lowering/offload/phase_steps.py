"""Steps of phased execution: the order that `ipu.phase(i)` sets.

    forward part of phase i     step i, phases counted without gaps
    its gradient                step 2n - 1 - i, of n phases
    after the gradients         step 2n: the update of an optimiser

Steps without compute are left out, such as the gradient of a phase that has none. An equation in no phase runs with
its operands. Input: equations. Output: the step of each, and the phase of each step.
Source: execution phases of PopART.
Limits: a phase does not begin inside a loop, a branch or a pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr import CONTROL_FLOW, equations_inside, is_pipeline, phase_of, stage_name, variables_read
from ipujax.lowering.offload.row_updates import is_view
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class PhaseSteps:
    """Steps of equations, and their phases."""

    of_equations: tuple[int, ...]  # the step of each equation; 0 for all if there are no phases
    # The phase of each step, counted without gaps; None for the step after the gradients.
    phases: tuple[int | None, ...]


def steps_of_phases(eqns: Sequence[JaxprEqn]) -> PhaseSteps:
    """The steps of equations in order; refuses values of later phases, and phases inside loops or pipelines."""
    for eqn in eqns:
        _check_inside(eqn, phase_of(eqn))
    computing = [not is_view(eqn) for eqn in eqns]
    phases_with_compute = {phase_of(eqn) for eqn, computes in zip(eqns, computing, strict=True) if computes}
    numbers = sorted(phase for phase in phases_with_compute if phase is not None)
    steps = _steps(eqns, numbers)
    end = 2 * len(numbers)
    used_steps = sorted({step for step, computes in zip(steps, computing, strict=True) if computes}) or [end]
    phases = (None if step == end else min(step, end - 1 - step) for step in used_steps)
    return PhaseSteps(tuple(_index(used_steps, step) for step in steps), tuple(phases))


def _steps(eqns: Sequence[JaxprEqn], numbers: Sequence[int]) -> list[int]:
    """The step of each equation, of phases with ascending numbers; some steps may have none."""
    end = 2 * len(numbers)
    # Without gradients there is no update: no equation is after the last.
    last_gradient = max((n for n, eqn in enumerate(eqns) if stage_name(eqn).is_backward), default=len(eqns))
    definitions: dict[Var, tuple[int, JaxprEqn]] = {}
    steps = list[int]()
    for number, eqn in enumerate(eqns):
        latest = max(
            (definitions[var] for var in variables_read(eqn) if var in definitions),
            default=(0, eqn),
            key=lambda x: x[0],
        )
        step = latest[0]
        phase = phase_of(eqn)
        if phase is not None:
            phase_index = _index(numbers, phase)
            is_backward = stage_name(eqn).is_backward
            if not is_backward and step > phase_index:
                later = numbers[step] if step < len(numbers) else None
                raise _flows_back(eqn, phase, later, latest[1])
            step = max(step, end - 1 - phase_index if is_backward else phase_index)
        elif numbers and number > last_gradient:
            step = end
        steps.append(step)
        definitions.update(dict.fromkeys(eqn.outvars, (step, eqn)))
    return steps


def _index(numbers: Sequence[int], number: int) -> int:
    """Index of a number in ascending numbers; of the next lower one if it is not among them."""
    return max(0, bisect_right(numbers, number) - 1)


def _flows_back(eqn: JaxprEqn, phase: int, later: int | None, defining_eqn: JaxprEqn) -> ArgumentError:
    """The error for a value of a later phase, or (None) of equations after all forward parts."""
    if later is None:
        message = f"phase {phase} uses a result of a gradient or an update, which runs after all phases"
        expected = "values of the same phase, of phases before it, or arguments"
        hint = "compute it in a call of its own, after the one with the gradient"
    else:
        message = f"phase {phase} uses a value of phase {later}, which runs later"
        expected = "values of the same phase, or of phases before it"
        hint = "give the phase that uses it a higher number"
    return ArgumentError(
        message,
        where=source_line(eqn) or None,
        expected=expected,
        got=f"the result of {defining_eqn.primitive.name} at {source_line(defining_eqn) or 'no known line'}",
        hint=hint,
    )


def _check_inside(eqn: JaxprEqn, phase: int | None) -> None:
    if eqn.primitive.name in CONTROL_FLOW or is_pipeline(eqn):
        for inner in equations_inside(eqn):
            inner_phase = phase_of(inner)
            if inner_phase is not None and inner_phase != phase:
                raise _begins_inside(inner, inner_phase, eqn)


def _begins_inside(eqn: JaxprEqn, phase: int, outer: JaxprEqn) -> ArgumentError:
    """The error for a phase that would have to run in several steps."""
    if is_pipeline(outer):
        place = "ipu.pipeline"
        expected = "phases of entire batches"
        hint = "leave out ipu.pipeline, or add up the gradients of micro-batches over several calls"
    else:
        place = f"a {outer.primitive.name}"
        expected = "loops and branches inside one phase"
        hint = "write the loop over phases in Python: for i, layer in enumerate(layers): with ipu.phase(i): …"
    return ArgumentError(
        f"phase {phase} begins inside {place}", where=source_line(eqn) or None, expected=expected, hint=hint
    )
