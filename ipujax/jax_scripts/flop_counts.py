"""Floating-point operations of a jaxpr, counted from shapes before anything is lowered: 2 for a multiply-add, 1 for
each element of any other result.

Limits: one iteration of a loop whose trip count is data; the largest branch of several; moves, and operations on whole
numbers, count nothing.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import VIEWS, elements_of

_MOVES = VIEWS | {
    *("slice", "concatenate", "stack", "unstack", "split", "tile", "pad", "gather", "scatter", "select_n", "iota"),
    *("dynamic_slice", "dynamic_update_slice", "convert_element_type", "device_put", "stop_gradient", "name"),
}
_READERS = ("reduce_", "arg", "cum", "sort", "top_k")  # prefixes of operations that cost by the elements they read


def flops_of(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of one evaluation."""
    return sum(map(_flops_of_equation, jaxpr.eqns))


def _flops_of_equation(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    inner = [flops_of(getattr(nested, "jaxpr", nested)) for nested in jaxprs_in_params(eqn.params)]
    if name == "cond":
        return max(inner, default=0)
    if name == "scan":
        return int(eqn.params["length"]) * sum(inner)
    if inner and not name.startswith(("reduce", "scatter", "custom_linear_solve", "sort")):  # a call of functions
        return sum(inner)
    if name in _MOVES or not any(map(_is_inexact, eqn.outvars)):
        return 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * elements_of(eqn.outvars[0]) * prod(_shape(eqn.invars[0])[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        output_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * elements_of(eqn.outvars[0]) * prod(kernel) // max(output_channels, 1)
    if name.startswith(_READERS):
        return sum(map(elements_of, eqn.invars))
    return sum(map(elements_of, eqn.outvars))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _is_inexact(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
