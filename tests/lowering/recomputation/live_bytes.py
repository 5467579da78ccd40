"""Live bytes of a jaxpr whose equations run in order: independent of the compiler's own plans.

Values are results of equations; a view of one is that value, and is live as long as any view of it is read.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar, Literal, Var

_VIEWS = {"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "slice", "split", "copy"}


def _size(var: Var) -> int:
    aval: Any = var.aval
    return int(aval.size) * int(aval.dtype.itemsize)


def live_values(jaxpr: ClosedJaxpr) -> dict[Var, tuple[int, int]]:
    """Definition and last use of each value, as indices of equations; results are live to the end."""
    value_of: dict[Any, Var] = {}
    lives: dict[Var, tuple[int, int]] = {}
    for number, eqn in enumerate([*jaxpr.jaxpr.eqns, None]):
        atoms = jaxpr.jaxpr.outvars if eqn is None else eqn.invars
        operands = [value_of[atom] for atom in atoms if not isinstance(atom, Literal) and atom in value_of]
        lives.update((var, (lives[var][0], number)) for var in operands)
        if eqn is None:
            break
        if eqn.primitive.name in _VIEWS:
            value_of.update((var, operands[0]) for var in eqn.outvars if operands)
            continue
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                value_of[var] = var
                lives[var] = (number, number)
    return lives


def live_bytes(jaxpr: ClosedJaxpr) -> list[int]:
    """Live bytes at each equation, its operands and results among them."""
    change = [0] * (len(jaxpr.jaxpr.eqns) + 2)
    for var, (definition, last_use) in live_values(jaxpr).items():
        change[definition] += _size(var)
        change[last_use + 1] -= _size(var)
    return list(accumulate(change))[: len(jaxpr.jaxpr.eqns)]


def peak(jaxpr: ClosedJaxpr) -> int:
    """Peak live bytes."""
    return max(live_bytes(jaxpr))


def bytes_across(jaxpr: ClosedJaxpr, index: int) -> int:
    """Bytes of values that are defined before an equation and read at it or later, results included."""
    return sum(
        _size(var) for var, (definition, last_use) in live_values(jaxpr).items() if definition < index <= last_use
    )
