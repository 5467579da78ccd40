"""The equations of a training step in three parts: forward, backward, and what comes after.

Input: equations in order. Output: `Parts`. Backward are those that JAX names after a transposition, what a
`jax.checkpoint` computes again among them; after them comes all else that needs a gradient, which may hold further
forward and backward parts, as where a second network is trained on the results of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr import stage_name, variables_read


@dataclass(frozen=True, slots=True)
class Parts:
    """A step in parts, each in order.

    Args:
        forward: what is before the gradient.
        backward: the gradient.
        rest: what needs it, and what nothing of it needs that follows.
    """

    forward: tuple[JaxprEqn, ...]
    backward: tuple[JaxprEqn, ...]
    rest: tuple[JaxprEqn, ...]


def split(eqns: Sequence[JaxprEqn]) -> Parts | None:
    """The parts of a step, None where there is no gradient, or where its effects forbid another order.

    Args:
        eqns: its equations, in order.
    """
    backward, rest = set[int](), set[int]()
    part_of: dict[Var, set[int]] = {}
    for n, eqn in enumerate(eqns):
        reads = [part_of[var] for var in variables_read(eqn) if var in part_of]
        behind = rest if any(part is rest for part in reads) else None
        if behind is None and stage_name(eqn).is_backward:
            behind = backward
        elif behind is None and reads:
            behind = rest
        if behind is not None:
            behind.add(n)
            part_of.update(dict.fromkeys(eqn.outvars, behind))
    if not backward:
        return None
    first = min(backward)
    needed = {var for n in backward for var in variables_read(eqns[n])}
    for n in reversed(range(len(eqns))):
        if n not in backward and n not in rest:
            if n < first or not needed.isdisjoint(eqns[n].outvars):
                needed.update(variables_read(eqns[n]))
            else:
                rest.add(n)
    forward = [n for n in range(len(eqns)) if n not in backward and n not in rest]
    with_effects = [n for n in (*forward, *sorted(backward), *sorted(rest)) if eqns[n].effects]
    if with_effects != sorted(with_effects):
        return None  # what the user sees happen would happen in another order
    return Parts(*(tuple(eqns[n] for n in part) for part in (forward, sorted(backward), sorted(rest))))
