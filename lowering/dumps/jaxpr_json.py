"""Jaxprs as JSON: one list of all of them, those inside equations too, each once.

    jaxpr    ::= {"inputs": [value…], "constants": [value…], "equations": [equation…], "outputs": [operand…]}
    value    ::= {"name": "v3", "type": "f32[8,8]"}: a value that a pass keeps has the name it had, "_" is unused
    equation ::= {"primitive", "inputs": [operand…], "outputs": [value…], "params": {name: …},
                  "bodies": {parameter: [number of a jaxpr…]}, "line": "train.py:12 (loss)", "scope": name stack}
    operand  ::= the name of a value, or {"literal": "2.0:f32[]"}

Input: jaxprs. Output: lists and dicts. Limits: of constants the type is kept, not the elements; of functions and
objects among parameters the text, without addresses.
"""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.source_info import name_stack, source_line

Json = dict[str, Any]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class JaxprList:
    """A list of jaxprs, numbered as they are added; holding them keeps their identity."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._jaxprs: list[Jaxpr] = []
        self._names: dict[Var, str] = {}

    def number_of(self, jaxpr: ClosedJaxpr | Jaxpr) -> int:
        """Returns the number of a jaxpr, which is added if it is not there."""
        opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        if id(opened) not in self._numbers:
            self._numbers[id(opened)] = len(self._jaxprs)
            self._jaxprs.append(opened)
        return self._numbers[id(opened)]

    def json(self) -> list[Json]:
        """All jaxprs, and those inside them, by their numbers."""
        written: list[Json] = []
        while len(written) < len(self._jaxprs):  # writing one may add those that it holds
            written.append(self._jaxpr(self._jaxprs[len(written)]))
        return written

    def _jaxpr(self, jaxpr: Jaxpr) -> Json:
        inputs, constants = map(self._value, jaxpr.invars), map(self._value, jaxpr.constvars)
        return {
            "inputs": list(inputs),
            "constants": list(constants),
            "equations": [self._equation(eqn) for eqn in jaxpr.eqns],
            "outputs": [self._operand(atom) for atom in jaxpr.outvars],
        }

    def _equation(self, eqn: JaxprEqn) -> Json:
        """An equation of the grammar; the jaxprs that it holds get numbers, and `json` writes them after it."""
        bodies = bodies_of(eqn)
        return {
            "primitive": eqn.primitive.name,
            "inputs": [self._operand(atom) for atom in eqn.invars],
            "outputs": [self._value(var) for var in eqn.outvars],
            "params": {key: plain(value) for key, value in eqn.params.items() if key not in bodies},
            "bodies": {key: [self.number_of(body) for body in held] for key, held in bodies.items()},
            "line": source_line(eqn),
            "scope": name_stack(eqn),
        }

    def _value(self, var: Var) -> Json:
        return {"name": self._name(var), "type": short_type(var)}

    def _operand(self, atom: Atom) -> Any:
        return {"literal": literal_text(atom)} if isinstance(atom, Literal) else self._name(atom)

    def _name(self, var: Var) -> str:
        return "_" if isinstance(var, DropVar) else self._names.setdefault(var, f"v{len(self._names)}")


def bodies_of(eqn: JaxprEqn) -> dict[str, list[Jaxpr]]:
    """The jaxprs that an equation holds, by parameter."""
    found = {key: _jaxprs(value) for key, value in eqn.params.items()}
    return {key: jaxprs for key, jaxprs in found.items() if jaxprs}


def _jaxprs(value: Any) -> list[Jaxpr]:
    items = value if isinstance(value, tuple | list) else (value,)
    opened = (item.jaxpr if isinstance(item, ClosedJaxpr) else item for item in items)
    return [item for item in opened if isinstance(item, Jaxpr)]


def short_type(atom: Atom) -> str:
    """The type of a value as jaxprs show it, `f32[8,8]`."""
    return str(atom.aval.str_short(short_dtypes=True))


def literal_text(literal: Literal) -> str:
    """A literal as text, `2.0:f32[]`."""
    return f"{literal.val}:{short_type(literal)}"


def plain(value: Any) -> Any:
    """A parameter as JSON has it: numbers, texts and lists of them as they are, all else as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Integral):
        return int(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()  # of a named tuple
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return _ADDRESS.sub("", str(getattr(value, "__qualname__", None) or value))
