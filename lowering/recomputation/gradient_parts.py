"""The equations of a training step in three parts: forward, backward, and update.

Input: equations in order. Output: `Parts`. Backward equations are those that JAX names after a transposition, with
those that a `jax.checkpoint` recomputes; the update is all else that needs a gradient, which may have further forward
and backward parts, as if a second network is trained on the results of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr import stage_name, variables_read


@dataclass(frozen=True, slots=True)
class Parts:
    """A step in parts, each in order."""

    forward: tuple[JaxprEqn, ...]  # equations before the gradient
    backward: tuple[JaxprEqn, ...]  # the gradient
    update: tuple[JaxprEqn, ...]  # users of the gradient, and later equations that it does not need


def split(eqns: Sequence[JaxprEqn]) -> Parts | None:
    """The parts of a step, None if it has no gradient, or if its effects forbid another order."""
    backward: set[int] = set()
    update: set[int] = set()
    part_of: dict[Var, set[int]] = {}
    for n, eqn in enumerate(eqns):
        operand_parts = [part_of[var] for var in variables_read(eqn) if var in part_of]
        members = update if any(part is update for part in operand_parts) else None
        if members is None and stage_name(eqn).is_backward:
            members = backward
        elif members is None and operand_parts:
            members = update
        if members is not None:
            members.add(n)
            part_of.update(dict.fromkeys(eqn.outvars, members))
    if not backward:
        return None
    first_backward = min(backward)
    # Equations after the first of the gradient that it does not need are moved behind it.
    needed = {var for n in backward for var in variables_read(eqns[n])}
    for n in reversed(range(len(eqns))):
        if n not in backward and n not in update:
            if n < first_backward or not needed.isdisjoint(eqns[n].outvars):
                needed.update(variables_read(eqns[n]))
            else:
                update.add(n)
    forward = [n for n in range(len(eqns)) if n not in backward and n not in update]
    effects_in_order = [n for n in (*forward, *sorted(backward), *sorted(update)) if eqns[n].effects]
    if effects_in_order != sorted(effects_in_order):
        return None  # prints and callbacks would come in another order
    return Parts(*(tuple(eqns[n] for n in part) for part in (forward, sorted(backward), sorted(update))))
