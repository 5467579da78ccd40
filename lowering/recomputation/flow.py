"""Which values of a forward part are read where: by the forward part, and by the gradient.

Input: the equations of a forward and a backward part, and the variables that others need. Output: a `Flow`, in which a
value is the variable that holds its data: views of it cost nothing, and are viewed again where they are read.

Some values are fixed, that is, they are always kept: what others need, what an effect, a collective or a random state
of the machine has made, and what a policy of `jax.checkpoint` saves or offloads. What a checkpoint computes again
is never kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import (
    PARTS,
    VIEWS,
    holds_pipeline,
    stage_name,
    value_bytes,
    variables,
    variables_read,
)

_VIEWS = VIEWS | PARTS


class Flow:
    """The values of a forward part, by the place of the equation that makes them.

    Args:
        forward: its equations, in order.
        backward: those of the gradient.
        outside: variables that others need.

    Attributes:
        made: place of the equation that makes each value.
        last: place of the last forward equation that reads it, its own if none does.
        fixed: values that are always kept.
        repeated: values that a checkpoint of the user's computes again.
        needed: values that the gradient reads.
    """

    def __init__(self, forward: Sequence[JaxprEqn], backward: Sequence[JaxprEqn], outside: Collection[Var]) -> None:
        self.forward, self.backward, self.outside = forward, backward, outside
        self.views: dict[Var, JaxprEqn] = {}
        self.made: dict[Var, int] = {}
        self.last: dict[Var, int] = {}
        for place, eqn in enumerate(forward):
            if self.is_view(eqn):
                self.views.update(dict.fromkeys(eqn.outvars, eqn))
            else:
                self.last.update((var, place) for var in self.values_of(eqn.invars))
                for var in eqn.outvars:
                    if not isinstance(var, DropVar):
                        self.made[var] = self.last[var] = place
        for eqn in backward:
            if self.is_view(eqn) and self.values_of(eqn.invars):
                self.views.update(dict.fromkeys(eqn.outvars, eqn))
        self.gradient = [eqn for eqn in backward if not self.is_forward_view(eqn)]
        self.needed = {var for eqn in self.gradient for var in self.values_of(eqn.invars)}
        self.fixed = self._fixed()
        self.repeated = self._repeated()

    @staticmethod
    def is_view(eqn: JaxprEqn) -> bool:
        """Whether an equation only views what it reads."""
        return eqn.primitive.name in _VIEWS and len(variables_read(eqn)) == 1

    def value(self, atom: Atom) -> Var | None:
        """The value that a variable views, None for what the forward part does not make."""
        while not isinstance(atom, Literal) and atom in self.views:
            (atom,) = variables_read(self.views[atom])
        return atom if isinstance(atom, Var) and atom in self.made else None

    def values_of(self, atoms: Sequence[Atom]) -> list[Var]:
        """The values that variables view, each once."""
        return list(dict.fromkeys(value for atom in atoms if (value := self.value(atom)) is not None))

    def is_forward_view(self, eqn: JaxprEqn) -> bool:
        """Whether an equation only views what the forward part has made or was given."""
        return bool(eqn.outvars) and eqn.outvars[0] in self.views

    def _fixed(self) -> set[Var]:
        found = set(self.values_of(list(self.outside)))
        for eqn in self.forward:
            if eqn.effects or is_collective(eqn) or holds_pipeline(eqn):
                found.update(var for var in eqn.outvars if var in self.made)
            if _is_saved_by_policy(eqn):
                found.update(self.values_of([*eqn.invars, *eqn.outvars]))
        return found

    def _repeated(self) -> set[Var]:
        """Values of which the gradient has a copy: of the same primitive, on the same operands."""
        originals: dict[Any, Sequence[Var]] = {_identity(eqn, eqn.invars): eqn.outvars for eqn in self.forward}
        original: dict[Atom, Atom] = {}
        found = set[Var]()
        for eqn in self.backward:
            if stage_name(eqn).is_recomputed:
                same = originals.get(
                    _identity(eqn, [original.get(v, v) if isinstance(v, Var) else v for v in eqn.invars])
                )
                if same is not None:
                    original.update(zip(eqn.outvars, same, strict=True))
                    found.update(var for var in same if var in self.made)
        return found - self.fixed


def _is_saved_by_policy(eqn: JaxprEqn) -> bool:
    """Whether JAX marks with an equation what a policy of a checkpoint saves, or offloads to the host."""
    if eqn.primitive.name == "host_put":
        return True
    return eqn.primitive.name == "reduce_precision" and _keeps_precision(eqn)


def _keeps_precision(eqn: JaxprEqn) -> bool:
    operand: Any = eqn.invars[0]
    info = jnp.finfo(operand.aval.dtype)
    return bool(eqn.params["exponent_bits"] == info.nexp and eqn.params["mantissa_bits"] == info.nmant)


def _identity(eqn: JaxprEqn, operands: Sequence[Atom]) -> tuple[Any, ...]:
    """What an equation and its copy have in common."""
    read = tuple(repr(atom.val) if isinstance(atom, Literal) else id(atom) for atom in operands)
    results: list[Any] = [var.aval for var in eqn.outvars]
    return eqn.primitive, read, tuple((aval.shape, aval.dtype) for aval in results)


def bytes_of(values: Collection[Var]) -> int:
    """Bytes of several values."""
    return sum(value_bytes(var.aval) for var in variables(values))
