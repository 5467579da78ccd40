"""The bytes that a jaxpr holds when its equations run in order: independent of the compiler's own plans.

Values are those that equations make; a view of one is that value, and is live as long as any view of it is read.
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
    """Of each value the equation that makes it, and the last that reads it; results live on."""
    held: dict[Any, Var] = {}
    lives: dict[Var, tuple[int, int]] = {}
    for number, eqn in enumerate([*jaxpr.jaxpr.eqns, None]):
        atoms = jaxpr.jaxpr.outvars if eqn is None else eqn.invars
        read = [held[atom] for atom in atoms if not isinstance(atom, Literal) and atom in held]
        lives.update((var, (lives[var][0], number)) for var in read)
        if eqn is None:
            break
        if eqn.primitive.name in _VIEWS:
            held.update((var, read[0]) for var in eqn.outvars if read)
            continue
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                held[var], lives[var] = var, (number, number)
    return lives


def live_bytes(jaxpr: ClosedJaxpr) -> list[int]:
    """Bytes while each equation runs: its operands and its results among them."""
    change = [0] * (len(jaxpr.jaxpr.eqns) + 2)
    for var, (made, last) in live_values(jaxpr).items():
        change[made] += _size(var)
        change[last + 1] -= _size(var)
    return list(accumulate(change))[: len(jaxpr.jaxpr.eqns)]


def peak(jaxpr: ClosedJaxpr) -> int:
    """The most bytes at once."""
    return max(live_bytes(jaxpr))


def bytes_across(jaxpr: ClosedJaxpr, place: int) -> int:
    """Bytes of what is made before an equation and read at it or behind it, results included."""
    return sum(_size(var) for var, (made, last) in live_values(jaxpr).items() if made < place <= last)
