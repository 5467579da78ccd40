"""Uses of the values of a forward part: by the forward part, and by the gradient.

Input: the equations of a forward and a backward part, and the variables with other uses. Output: a `DataFlow`, in which
a value is the variable that holds its data: views of it cost nothing, and are repeated where they are read.

Some values are fixed, that is, they are always stored: those with other uses, results of an effect, a collective or a
random state of the hardware, and values that a policy of `jax.checkpoint` saves or offloads. Values that a checkpoint
recomputes are never stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import holds_pipeline, stage_name, substituted, value_bytes, variables, variables_read
from ipujax.lowering.primitives import has_state, record_of


class DataFlow:
    """The values of a forward part, and where they are defined and used, by the index of its equations.

    Args:
        forward: equations of the forward part.
        backward: equations of the gradient.
        external: variables of either that others need.
    """

    def __init__(self, forward: Sequence[JaxprEqn], backward: Sequence[JaxprEqn], external: Collection[Var]) -> None:
        """Finds the definition and last use of each forward value, the views of values, and which must be stored.

        `external` are the variables of forward part and gradient that other equations read, or that are results.
        """
        self.forward = forward
        self.backward = backward
        self.external = external
        self.views: dict[Var, JaxprEqn] = {}  # view of a value or a constant → the equation that views it
        self.definition: dict[Var, int] = {}  # value → number of the forward equation that computes it
        self.last_use: dict[Var, int] = {}  # last forward equation that reads a value, its definition if none does
        for index, eqn in enumerate(forward):
            if self.is_view(eqn) or _is_constant(eqn):
                self.views.update(dict.fromkeys(eqn.outvars, eqn))
            else:
                self.last_use.update((var, index) for var in self.forward_values(eqn.invars))
                for var in eqn.outvars:
                    if not isinstance(var, DropVar):
                        self.definition[var] = self.last_use[var] = index
        for eqn in backward:  # of views in the gradient those of forward values
            if self.is_view(eqn) and self.forward_values(eqn.invars):
                self.views.update(dict.fromkeys(eqn.outvars, eqn))
        self.gradient = [eqn for eqn in backward if not self.is_forward_view(eqn)]
        self.needed = {var for eqn in self.gradient for var in self.forward_values(eqn.invars)}
        self.fixed = self._fixed_values()  # that are always stored
        self.repeated = self._repeated_values()  # that a user's checkpoint recomputes

    @staticmethod
    def is_view(eqn: JaxprEqn) -> bool:
        """True if an equation only views its operand, the one variable that it reads."""
        return record_of(eqn).cost in ("view", "part") and len(variables_read(eqn)) == 1

    def forward_value(self, atom: Atom) -> Var | None:
        """The forward value that a variable is or views; None for others, as an argument, a constant or a gradient."""
        while not isinstance(atom, Literal) and atom in self.views:
            operands = variables_read(self.views[atom])
            if not operands:  # equal layers share a constant, whose step says nothing about those of its readers
                return None
            (atom,) = operands
        return atom if isinstance(atom, Var) and atom in self.definition else None

    def forward_values(self, atoms: Sequence[Atom]) -> list[Var]:
        """The forward values that variables are or view, each once."""
        return list(dict.fromkeys(value for atom in atoms if (value := self.forward_value(atom)) is not None))

    def is_forward_view(self, eqn: JaxprEqn) -> bool:
        """True if an equation only views values or arguments of the forward part."""
        return bool(eqn.outvars) and eqn.outvars[0] in self.views

    def _fixed_values(self) -> set[Var]:
        """Values that are always stored, as they must not or need not be computed again.

        They are values with uses outside, results of equations with effects or states and of collectives, and those
        that the policy of a checkpoint saves.
        """
        fixed = set(self.forward_values(list(self.external)))
        for eqn in self.forward:
            if eqn.effects or has_state(eqn) or is_collective(eqn) or holds_pipeline(eqn):
                fixed.update(var for var in eqn.outvars if var in self.definition)
            if _is_saved_by_policy(eqn):
                fixed.update(self.forward_values([*eqn.invars, *eqn.outvars]))
        return fixed

    def _repeated_values(self) -> set[Var]:
        """Forward values that a user's `jax.checkpoint` computes again in the gradient, by copies of their equations.

        A copy has the same primitive and the same operands, or copies of them. Without those that must be stored.
        """
        results_of: dict[Any, Sequence[Var]] = {_identity(eqn, eqn.invars): eqn.outvars for eqn in self.forward}
        original_of: dict[Var, Atom] = {}
        repeated = set[Var]()
        # In order, so that operands of a copy are mapped to originals before the copy is looked up.
        for eqn in self.backward:
            if stage_name(eqn).is_recomputed:
                outvars = results_of.get(_identity(eqn, [substituted(atom, original_of) for atom in eqn.invars]))
                if outvars is not None:
                    original_of.update(zip(eqn.outvars, outvars, strict=True))
                    repeated.update(var for var in outvars if var in self.definition)
        return repeated - self.fixed


def _is_constant(eqn: JaxprEqn) -> bool:
    """True if an equation only views a literal."""
    return record_of(eqn).cost in ("view", "part") and not variables_read(eqn)


def _is_saved_by_policy(eqn: JaxprEqn) -> bool:
    """True if JAX marks with an equation a value that a policy of a checkpoint saves, or offloads to the host."""
    if eqn.primitive.name == "host_put":
        return True
    return eqn.primitive.name == "reduce_precision" and _keeps_precision(eqn)


def _keeps_precision(eqn: JaxprEqn) -> bool:
    operand: Any = eqn.invars[0]
    info = jnp.finfo(operand.aval.dtype)
    return bool(eqn.params["exponent_bits"] == info.nexp and eqn.params["mantissa_bits"] == info.nmant)


def _identity(eqn: JaxprEqn, operands: Sequence[Atom]) -> tuple[Any, ...]:
    """A key that an equation shares with its copies: primitive, operands, types of results."""
    operand_keys = tuple(repr(atom.val) if isinstance(atom, Literal) else id(atom) for atom in operands)
    results: list[Any] = [var.aval for var in eqn.outvars]
    return eqn.primitive, operand_keys, tuple((aval.shape, aval.dtype) for aval in results)


def bytes_of(values: Collection[Var]) -> int:
    """Bytes of several values."""
    return sum(value_bytes(var.aval) for var in variables(values))
