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
from typing import NamedTuple

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
    """The steps of equations in order.

    Raises:
        ArgumentError: an equation of a phase reads a value of a later one, or a phase begins in a loop or a pipeline.
    """
    for eqn in eqns:
        _check_no_phase_begins_inside(eqn, phase_of(eqn))
    computing = [not is_view(eqn) for eqn in eqns]
    phases_with_compute = {phase_of(eqn) for eqn, computes in zip(eqns, computing, strict=True) if computes}
    phase_numbers = sorted(phase for phase in phases_with_compute if phase is not None)
    order = _StepOrder(len(phase_numbers))
    steps = _steps_with_gaps(eqns, phase_numbers, order)
    used_steps = {step for step, computes in zip(steps, computing, strict=True) if computes} or {order.update_step}
    step_numbers = sorted(used_steps)
    phases = tuple(map(order.phase_of_step, step_numbers))
    # Steps are counted without those that are left out; a view in such a step goes with the one before.
    return PhaseSteps(tuple(_index_at_or_before(step_numbers, step) for step in steps), phases)


@dataclass(frozen=True, slots=True)
class _StepOrder:
    """Order of steps, if none is left out: a forward part of each phase, their gradients from last to first, an update.

    Phases are counted without gaps, so that the number of one is also the step of its forward part.
    """

    num_phases: int

    @property
    def update_step(self) -> int:
        """Step after all gradients."""
        return 2 * self.num_phases

    def gradient_step(self, phase: int) -> int:
        """Step of the gradient of a phase: the last of the forward parts is the first of the gradients."""
        return self.update_step - 1 - phase

    def phase_of_step(self, step: int) -> int | None:
        """Phase whose forward part or gradient a step is; None for the update."""
        if step == self.update_step:
            return None
        return step if step < self.num_phases else self.update_step - 1 - step


class _Definition(NamedTuple):
    step: int
    eqn: JaxprEqn


def _steps_with_gaps(eqns: Sequence[JaxprEqn], phase_numbers: Sequence[int], order: _StepOrder) -> list[int]:
    """The step of each equation; some steps may have none.

    Args:
        eqns: the equations.
        phase_numbers: the user's numbers of the phases, ascending.
        order: order of the steps of so many phases.

    Raises:
        ArgumentError: an equation of a phase reads a value of a later one.
    """
    # Without gradients there is no update: no equation is after the last.
    last_gradient = max((n for n, eqn in enumerate(eqns) if stage_name(eqn).is_backward), default=len(eqns))
    definitions: dict[Var, _Definition] = {}
    steps = list[int]()
    for number, eqn in enumerate(eqns):
        of_operands = (definitions[var] for var in variables_read(eqn) if var in definitions)
        latest = max(of_operands, default=_Definition(step=0, eqn=eqn), key=lambda definition: definition.step)
        step = latest.step
        phase_number = phase_of(eqn)
        if phase_number is not None:
            phase = _index_at_or_before(phase_numbers, phase_number)
            is_backward = stage_name(eqn).is_backward
            if not is_backward and step > phase:
                later = phase_numbers[step] if step < len(phase_numbers) else None
                raise _flows_back(eqn, phase_number, later, latest.eqn)
            step = max(step, order.gradient_step(phase) if is_backward else phase)
        elif phase_numbers and number > last_gradient:
            step = order.update_step
        steps.append(step)
        definitions.update(dict.fromkeys(eqn.outvars, _Definition(step, eqn)))
    return steps


def _index_at_or_before(numbers: Sequence[int], number: int) -> int:
    """Index of a number in ascending numbers; of the next lower one if it is not among them, or 0 if none is lower."""
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


def _check_no_phase_begins_inside(eqn: JaxprEqn, phase: int | None) -> None:
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
