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

_PURE_COSTS = frozenset(("view", "part", "joined", "look-up", "elementwise", "product"))
_PURE_NAMES = frozenset(("iota", "name", "stop_gradient"))  # of those that cost nothing, without barriers
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
    return cost in _PURE_COSTS or name in _PURE_NAMES or (cost == "other" and name in RECORDS)


def earlier_equals(
    eqns: Sequence[JaxprEqn],
    constants: Mapping[Var, Hashable],
    separation: Callable[[int], Hashable],
) -> dict[int, int]:
    """Finds the equations that compute what an earlier one has computed, by value numbering.

    Args:
        eqns: equations of a body, in order.
        constants: key of each constant of the body: constants of one key have equal values.
        separation: function from the number of an equation to what else must be equal, as its stage; None for an
            equation that may be equal to no other.

    Returns:
        Number of the last equal earlier equation, by number of the equation.
    """
    return _ValueNumbers(constants).earlier(eqns, separation)


class _ValueNumbers:
    """Numbers of values and equations, given in order; equal values have one number."""

    def __init__(self, constants: Mapping[Var, Hashable]) -> None:
        self._numbers: dict[Hashable, int] = {}  # by what tells a value from others
        self._of_var: dict[Var, int] = {var: self._number_of(key) for var, key in constants.items()}
        self._scalars: dict[int, int] = {}  # number of a value → that of the scalar that all of its elements are
        self._parameters = EquationNumbers()

    def earlier(self, eqns: Sequence[JaxprEqn], separation: Callable[[int], Hashable]) -> dict[int, int]:
        """Return for each equation that is equal to an earlier one the number of the last such.

        `separation` maps the number of an equation to what else must be equal; None for one that is equal to no other.
        """
        earlier: dict[int, int] = {}
        # Equations are alike if they have one operation, equal operands and one separation, and equal if parameters are
        # equal too: these are compared only of alike ones, as most equations are alike with no other.
        first_alike: dict[Hashable, int] = {}  # by operation, operands and separation
        last_equal: dict[Hashable, int] = {}  # by these and parameters
        for number, eqn in enumerate(eqns):
            self._find_repeated_scalar(eqn)
            part = separation(number) if is_pure(eqn) else None
            if part is None:
                continue
            alike = (*self._operation(eqn), part)
            first = first_alike.setdefault(alike, number)
            if first == number:
                continue
            last_equal.setdefault((alike, self._parameters.of_parameters(eqns[first])), first)
            equal = alike, self._parameters.of_parameters(eqn)
            if equal in last_equal:
                earlier[number] = last_equal[equal]
                # Equal results have one number, so that their readers can be equal too.
                results = zip(eqn.outvars, eqns[last_equal[equal]].outvars, strict=True)
                self._of_var.update({var: self._number_of_value(earlier_var) for var, earlier_var in results})
            last_equal[equal] = number
        return earlier

    def _find_repeated_scalar(self, eqn: JaxprEqn) -> None:
        """Numbers a view of one repeated scalar by that and its type: all such are equal, as gradients of a sum are."""
        if record_of(eqn).cost not in ("view", "part") or len(eqn.invars) != 1:
            return
        operand = self._number_of_value(eqn.invars[0])
        scalar = self._scalars.get(operand) if shape_of(eqn.invars[0]) else operand
        if scalar is not None:
            for var in eqn.outvars:
                self._of_var[var] = self._number_of(("repeated", scalar, var.aval))
                self._scalars[self._of_var[var]] = scalar

    def _operation(self, eqn: JaxprEqn) -> tuple[str, tuple[int, ...]]:
        """Name of an equation's operation, and the numbers of its operands; sorted where their order is nothing."""
        operands = [self._number_of_value(atom) for atom in eqn.invars]
        if record_of(eqn).is_commutative:
            operands.sort()
        name = eqn.primitive.name
        return _SAME_OPERATION.get(name, name), tuple(operands)

    def _number_of_value(self, atom: Atom) -> int:
        """The number of a variable's value, a new one if none is known, or of a literal."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            aval: Any = atom.aval
            # The type of a result shows whether that of the literal is weak.
            return self._number_of((aval.shape, aval.dtype, value.dtype.name, value.tobytes()))
        if atom not in self._of_var:
            self._of_var[atom] = self._number_of(atom)
        return self._of_var[atom]

    def _number_of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
