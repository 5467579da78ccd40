"""The steps of phased execution: `ipu.phase(i)` says what runs after what.

    forward part of phase i     step i
    its gradient                step 2n - 1 - i, of n phases
    what follows the gradients  step 2n: the update of an optimiser

An equation in no phase runs with what it reads. Input: equations. Output: the step of each.
Source: execution phases of PopART.
Limits: a phase does not begin inside a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.jax_compat import JaxprEqn, Var, source_line
from ipujax.lowering.jaxpr import equations_inside, phase_of, stage_name, variables_read
from ipujax.runtime.errors import ArgumentError

_CONTROL = frozenset(("scan", "while", "cond"))


def steps_of_phases(eqns: Sequence[JaxprEqn]) -> list[int]:
    """The step of each equation; 0 for all where there are no phases.

    Args:
        eqns: in an order in which they can run.

    Raises:
        ArgumentError: a value of a later phase that a phase needs, or a phase that begins in a loop.
    """
    phases = [phase_of(eqn) for eqn in eqns]
    for eqn, phase in zip(eqns, phases, strict=True):
        _check_inside(eqn, phase)
    count = 1 + max((phase for phase in phases if phase is not None), default=-1)
    last_gradient = max((n for n, eqn in enumerate(eqns) if stage_name(eqn).is_backward), default=len(eqns))
    made: dict[Var, tuple[int, JaxprEqn]] = {}
    steps = []
    for number, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
        before = max((made[var] for var in variables_read(eqn) if var in made), default=(0, eqn), key=lambda x: x[0])
        step = before[0]
        if phase is not None:
            is_backward = stage_name(eqn).is_backward
            if not is_backward and step > phase:
                raise _flows_back(eqn, phase, *before)
            step = max(step, 2 * count - 1 - phase if is_backward else phase)
        elif count and number > last_gradient:
            step = 2 * count
        steps.append(step)
        made.update(dict.fromkeys(eqn.outvars, (step, eqn)))
    return steps


def _flows_back(eqn: JaxprEqn, phase: int, step: int, maker: JaxprEqn) -> ArgumentError:
    return ArgumentError(
        f"phase {phase} uses a value of phase {step}, which runs later",
        where=source_line(eqn) or None,
        expected="values of the same phase, or of phases before it",
        got=f"what {maker.primitive.name} makes at {source_line(maker) or 'no known line'}",
        hint="give the phase that uses it a higher number",
    )


def _check_inside(eqn: JaxprEqn, phase: int | None) -> None:
    if eqn.primitive.name not in _CONTROL:
        return
    for inner in equations_inside(eqn):
        own = phase_of(inner)
        if own is not None and own != phase:
            raise ArgumentError(
                f"phase {own} begins inside a {eqn.primitive.name}",
                where=source_line(inner) or None,
                expected="loops and branches that lie in one phase",
                hint="write the loop over phases in Python: for i, layer in enumerate(layers): with ipu.phase(i): …",
            )
