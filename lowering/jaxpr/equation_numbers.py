"""Numbers of equations, equal for equal computations: to find repeated computations of a jaxpr.

Equations with one number have equal primitives, parameters (jaxprs in them up to the names of their variables),
literals, shapes, dtypes, stages and settings of random numbers, and are alike parts of a gradient, or recomputed, or
neither. Scopes, source lines and the values of operands may differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, closed
from ipujax.lowering.jaxpr.stage_names import stage_name

_LABELS = {"name": ("name",), "function_call": ("name",)}  # parameters without effect on the computation, by primitive


class EquationNumbers:
    """Assigns numbers; those of two instances are unrelated."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        # By the ids of a jaxpr and its constants; the jaxpr is stored so that its id is not reused.
        self._jaxprs: dict[tuple[int, ...], tuple[ClosedJaxpr, int]] = {}
        self._objects: list[Any] = []  # objects compared by id, which must stay alive for their ids to stay theirs

    def of(self, eqn: JaxprEqn) -> int:
        """Number of an equation."""
        operands = tuple(self._literal(atom) if isinstance(atom, Literal) else atom.aval for atom in eqn.invars)
        return self._number((eqn.primitive, self.of_parameters(eqn), operands, stage_name(eqn)))

    def of_parameters(self, eqn: JaxprEqn) -> int:
        """Number that equations share whose parameters and results are alike; primitive and operands may differ."""
        results = tuple(var.aval for var in eqn.outvars)
        labels = _LABELS.get(eqn.primitive.name, ())
        params = tuple(
            (key, self._canonical_value(value)) for key, value in sorted(eqn.params.items()) if key not in labels
        )
        is_partitionable = eqn.ctx.threefry_partitionable  # of random numbers
        return self._number((params, results, is_partitionable, eqn.ctx.compute_type))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _literal(self, literal: Literal) -> Hashable:
        value = np.asarray(literal.val)
        return literal.aval, value.dtype.name, value.tobytes()

    def _canonical_value(self, value: Any) -> Hashable:
        """Return a hashable form of an equation's parameter, equal for parameters that mean the same.

        A jaxpr is its number; an object that cannot be hashed its identity, for which it is kept alive.
        """
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return "jaxpr", self._number_of_jaxpr(value)
        if isinstance(value, tuple | list):
            return type(value), *map(self._canonical_value, value)
        if isinstance(value, Mapping):
            return "mapping", *((key, self._canonical_value(item)) for key, item in value.items())
        if isinstance(value, np.ndarray | np.generic | float | complex):  # to the bit: 0 and -0 differ
            array = np.asarray(value)
            return type(value), array.dtype.name, array.shape, array.tobytes()
        try:
            hash(value)
        except TypeError:
            self._objects.append(value)
            return "object", id(value)
        return type(value), value

    def _number_of_jaxpr(self, jaxpr: ClosedJaxpr | Jaxpr) -> int:
        """Number of a jaxpr, equal for equal equations between equal inputs and results."""
        closed_jaxpr = closed(jaxpr)
        key = id(closed_jaxpr.jaxpr), *map(id, closed_jaxpr.consts)
        if key not in self._jaxprs:
            self._jaxprs[key] = closed_jaxpr, self._number(self._canonical_form(closed_jaxpr))
        return self._jaxprs[key][1]

    def _canonical_form(self, jaxpr: ClosedJaxpr) -> Hashable:
        """Return a hashable form of a jaxpr, equal for jaxprs that differ in the names of their variables alone.

        A variable is the number of its first mention, an equation that of its primitive and parameters, `self.of`.
        """
        body = jaxpr.jaxpr
        numbers: dict[Any, int] = {}

        def name_of(atom: Atom) -> Hashable:
            return self._literal(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

        inputs = tuple((name_of(var), var.aval) for var in (*body.constvars, *body.invars))
        eqns = tuple((self.of(eqn), *map(name_of, (*eqn.invars, *eqn.outvars))) for eqn in body.eqns)
        return tuple(map(id, jaxpr.consts)), inputs, eqns, tuple(map(name_of, body.outvars))
