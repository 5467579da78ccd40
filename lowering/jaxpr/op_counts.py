"""How much a jaxpr computes, counted before it is lowered: for passes that weigh computing against copying.

Limits: counts of equations and elements, no cycles; what a planner makes of an operation is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod, sqrt
from operator import add
from typing import Any

from ipujax.lowering.jax_compat import CALLEES, Atom, Jaxpr, JaxprEqn, jaxprs_in_params

_VIEWS = frozenset((
    *("reshape", "broadcast_in_dim", "transpose", "squeeze", "rev", "slice", "concatenate", "stack", "unstack"),
    *("split", "tile", "copy", "name", "stop_gradient", "optimization_barrier", "dce_sink", "iota"),
))  # fmt: skip
_HOLDERS = frozenset((*CALLEES, "scan", "while", "cond", "function_call"))  # their work is that of the jaxprs inside
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_PARTS = frozenset(("gather", "dynamic_slice", "dynamic_update_slice"))  # of their first operand they touch parts

# Measured on 1,472 tiles: 12,000 cycles of a matrix product of 128 x 512 x 512, 1,000 to 2,000 of one elementwise step
# or reduction of a softmax or layer norm of its result.
_PRODUCT_WEIGHT = 12
_MACS_PER_ELEMENT = 16  # multiply-adds in the time of reading a float, on the AMP unit of mk2


@dataclass(frozen=True, slots=True)
class Work:
    """What a jaxpr does.

    Args:
        steps: equations that compute.
        weight: the same, a matrix product or convolution as many as it costs.
        elements: what they read and write, and multiply-adds in the unit of an element moved.
    """

    steps: int = 0
    weight: float = 0
    elements: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.weight + other.weight, self.elements + other.elements)

    def times(self, iterations: int) -> Work:
        """The work of a loop, whose code is there once."""
        return Work(self.steps, self.weight * iterations, self.elements * iterations)


def work_of(jaxpr: Jaxpr) -> Work:
    """The work of evaluating a jaxpr once; of all branches together, of one iteration of a `while`."""
    return reduce(add, map(_of_equation, jaxpr.eqns), Work())


def _of_equation(eqn: JaxprEqn) -> Work:
    name = eqn.primitive.name
    inner = [work_of(getattr(nested, "jaxpr", nested)) for nested in jaxprs_in_params(eqn.params)]
    if name in _HOLDERS:
        return reduce(add, inner, Work()).times(eqn.params.get("length", 1))
    if name in _VIEWS:
        return Work()
    written, read = sum(map(elements_of, eqn.outvars)), list(map(elements_of, eqn.invars))
    if name in _PRODUCTS:
        contracted = sqrt(read[0] * read[1] / written) if written else 0  # of a matrix product the inner dimension
        return Work(1, _PRODUCT_WEIGHT, sum(read) + written + written * contracted / _MACS_PER_ELEMENT)
    if name in _PARTS:
        return Work(1, 1, sum(read[1:]) + written)
    return Work(1, 1, sum(read) + written)


def elements_of(atom: Atom) -> int:
    """The elements of an array."""
    aval: Any = atom.aval
    return prod(aval.shape)
