"""Parts of a jaxpr for its dumps: the jaxprs inside equations, types of values, plain parameters.

Input: an equation, a value, or a parameter. Output: the data that JSON and DOT show.
Limits: of functions and objects among parameters only the text is kept, without addresses.
"""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
