"""Sizes of values, and the work of equations, counted before they are lowered: for passes that trade computing for
copying.

Limits: counts of equations and elements, no cycles, because operations are not planned yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod, sqrt
from operator import add
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.primitives import record_of
from ipujax.runtime.tensor import element_bytes

_FREE = ("view", "part", "joined", "none")  # kinds of cost

# Measured on 1,472 tiles: each further layer of a transformer of width 256 with 8 x 128 tokens, with its gradient 127
# steps and 18 products, takes 57 KB of code on the fullest tile; a program of GELUs takes 75 B a step.
_STEP_BYTES = 75
_PRODUCT_BYTES = 2600
_MACS_PER_ELEMENT = 16  # multiply-adds in the time of reading a float, on the AMP unit of mk2


def elements_of(atom: Atom) -> int:
    """Return the number of elements of an array."""
    aval: Any = atom.aval
    return prod(aval.shape)


def value_bytes(aval: Any) -> int:
    """Return the number of bytes of an array of a shape and dtype."""
    return prod(aval.shape) * element_bytes(aval.dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a jaxpr.

    Args:
        code: approximate code bytes on the fullest tile.
        elements: elements that it reads and writes, and multiply-adds as equally costly elements.
    """

    code: int = 0
    elements: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.code + other.code, self.elements + other.elements)

    def times(self, iterations: int) -> Work:
        """Return the work of a loop, whose code is stored once."""
        return Work(self.code, self.elements * iterations)


def work_of(jaxpr: Jaxpr) -> Work:
    """Return the work of one evaluation: all branches together, one iteration of a `while`."""
    return reduce(add, map(work_of_equation, jaxpr.eqns), Work())


def work_of_equation(eqn: JaxprEqn) -> Work:
    """Return an estimate of what an equation takes on tiles: bytes of code, and elements read, written and multiplied.

    A loop has the work of all its iterations.
    """
    cost = record_of(eqn).cost
    inner = [work_of(getattr(nested, "jaxpr", nested)) for nested in jaxprs_in_params(eqn.params)]
    if cost == "body":  # control flow or a call: only a `scan` has a length, its trip count
        return reduce(add, inner, Work()).times(eqn.params.get("length", 1))
    if cost in _FREE:
        return Work()
    written = sum(map(elements_of, eqn.outvars))
    read = list(map(elements_of, eqn.invars))
    if cost == "product":
        contracted = sqrt(read[0] * read[1] / written) if written else 0  # inner dimension: m·k · k·n / (m·n) = k²
        return Work(_PRODUCT_BYTES, sum(read) + written + written * contracted / _MACS_PER_ELEMENT)
    if cost == "look-up":  # of the table, the first operand, only the elements that are copied to the result
        return Work(_STEP_BYTES, sum(read[1:]) + written)
    return Work(_STEP_BYTES, sum(read) + written)
