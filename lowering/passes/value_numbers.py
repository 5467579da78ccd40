"""Value numbering: equations of one body that compute equal values from equal operands have one number.

Input: the equations of a jaxpr, and what else must be equal. Output: for each equation the numbers of equal ones before
it. Only pure equations are equal to others: no effects, no barriers, and primitives that the tables of records and
costs know, so no calls of foreign code, of Python or of the user's codelets. Loops and branches are pure if all
inside is. Random bits are pure functions of their keys.
Source: Briggs, Cooper, Simpson, Value Numbering, 1997; operands of commutative operations in either order, as in XLA.
Limits: by structure alone, so that x² and x·x differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr import CONTROL_FLOW, EquationNumbers, equations_inside
from ipujax.lowering.primitives import RECORDS, record_of

_COSTS = frozenset(("view", "part", "joined", "look-up", "elementwise", "product"))
_NAMES = frozenset(("iota", "name", "stop_gradient"))  # of those that cost nothing, without barriers
# A copy is a value of its own; `rng_uniform` has a state.
_NOT_JOINED = frozenset(("copy", "copy_p", "rng_uniform"))
_SAME_OPERATION = {"add_any": "add"}  # of gradients


def is_pure(eqn: JaxprEqn) -> bool:
    """Return True if equal operands always give equal results, and nothing else happens."""
    name = eqn.primitive.name
    if eqn.effects or name in _NOT_JOINED:
        return False
    if name in CONTROL_FLOW:
        return all(is_pure(inner) for inner in equations_inside(eqn))
    cost = record_of(eqn).cost
    return cost in _COSTS or name in _NAMES or (cost == "other" and name in RECORDS)


def earlier_equals(
    eqns: Sequence[JaxprEqn],
    constants: Mapping[Var, Hashable],
    separation: Callable[[int], Hashable],
) -> dict[int, int]:
    """Return for each equation that is equal to an earlier one the number of the last such.

    Args:
        eqns: equations of a body.
        constants: what identifies the values of constants.
        separation: of the number of an equation, what else must be equal; None for one that is equal to no other.
    """
    return _ValueNumbers(constants).earlier(eqns, separation)


class _ValueNumbers:
    """Numbers of values and equations, given in order."""

    def __init__(self, constants: Mapping[Var, Hashable]) -> None:
        self._values: dict[Hashable, int] = {}
        self._of_var: dict[Var, int] = {var: self._number(key) for var, key in constants.items()}
        self._scalars: dict[int, int] = {}  # value → the scalar that all of its elements are
        self._parameters = EquationNumbers()

    def earlier(self, eqns: Sequence[JaxprEqn], separation: Callable[[int], Hashable]) -> dict[int, int]:
        """Return for each equation that is equal to an earlier one the number of the last such."""
        earlier: dict[int, int] = {}
        # The parameters are compared only of equations with equal operands: most have none.
        first_alike: dict[Hashable, int] = {}
        last_equal: dict[Hashable, int] = {}
        for number, eqn in enumerate(eqns):
            self._find_repeated_scalar(eqn)
            apart = separation(number) if is_pure(eqn) else None
            if apart is None:
                continue
            alike = (*self._operation(eqn), apart)
            first = first_alike.setdefault(alike, number)
            if first == number:
                continue
            last_equal.setdefault((alike, self._parameters.of_parameters(eqns[first])), first)
            equal = alike, self._parameters.of_parameters(eqn)
            if equal in last_equal:
                earlier[number] = last_equal[equal]
                results = zip(eqn.outvars, eqns[last_equal[equal]].outvars, strict=True)
                self._of_var.update({var: self._value(earlier_var) for var, earlier_var in results})
            last_equal[equal] = number
        return earlier

    def _find_repeated_scalar(self, eqn: JaxprEqn) -> None:
        """Numbers a view of one repeated scalar by that: all parts of it are equal, as gradients of a sum are."""
        if record_of(eqn).cost not in ("view", "part") or len(eqn.invars) != 1:
            return
        operand = self._value(eqn.invars[0])
        scalar = self._scalars.get(operand) if shape_of(eqn.invars[0]) else operand
        if scalar is not None:
            for var in eqn.outvars:
                self._of_var[var] = self._number(("repeated", scalar, var.aval))
                self._scalars[self._of_var[var]] = scalar

    def _operation(self, eqn: JaxprEqn) -> tuple[str, tuple[int, ...]]:
        operands = [self._value(atom) for atom in eqn.invars]
        if record_of(eqn).is_commutative:
            operands.sort()
        name = eqn.primitive.name
        return _SAME_OPERATION.get(name, name), tuple(operands)

    def _value(self, atom: Atom) -> int:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            aval: Any = atom.aval
            # Whether its type is weak shows in the types of results.
            return self._number((aval.shape, aval.dtype, value.dtype.name, value.tobytes()))
        if atom not in self._of_var:
            self._of_var[atom] = self._number(atom)
        return self._of_var[atom]

    def _number(self, key: Hashable) -> int:
        return self._values.setdefault(key, len(self._values))
