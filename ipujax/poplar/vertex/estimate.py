"""Cycles of a codelet without an estimate of its own: counts the operations of its JAX function.

Code compiled from C++ issues one instruction a cycle (reference, needs of a first-principles model, point 5:
the tutorials' dot product, 4 instructions a multiply-add, is within 4 % of hardware). Each element of a field is a load
or a store; each element that an operation computes, or that a reduction reads, is one instruction; a dot of n elements
then takes 4 n. Data movement is counted with the loads.

Input: a function and the shapes of its arguments. Output: instructions. All of it is `assumed`.
Limits: a loop with a data-dependent trip count counts once, a branch counts as its longest side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax

OVERHEAD_CYCLES = 10  # assumed: entry, loading of pointers, exit

_MOVES = {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice"}
_VIEWS = {"expand_dims", "gather", "iota", "pad", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"}
_FREE = frozenset(_MOVES | _VIEWS)


def instructions(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Count the instructions of one call of a codelet's function of arrays."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    accessed_elements = sum(prod(aval.shape) for aval in (*jaxpr.in_avals, *jaxpr.out_avals))
    return OVERHEAD_CYCLES + accessed_elements + _instructions_of_jaxpr(jaxpr.jaxpr)


def _instructions_of_jaxpr(jaxpr: Any) -> int:
    return sum(_instructions_of_equation(eqn) for eqn in jaxpr.eqns)


def _instructions_of_equation(eqn: Any) -> int:
    body_counts = [_instructions_of_jaxpr(jaxpr) for jaxpr in _jaxprs_in_params(eqn.params)]
    if body_counts:
        # `length` is the trip count of a scan; a `while` has none and counts once.
        return (max if eqn.primitive.name == "cond" else sum)(body_counts) * int(eqn.params.get("length", 1))
    if eqn.primitive.name in _FREE:
        return 0
    computed_elements = max((prod(var.aval.shape) for var in eqn.outvars), default=0)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        # A multiplication and an addition; with the two loads of its operands, 4 instructions an element.
        return 2 * computed_elements * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    read_elements = max((prod(var.aval.shape) for var in eqn.invars), default=0)
    return max(computed_elements, read_elements)


def _jaxprs_in_params(params: dict[str, Any]) -> list[Any]:
    flat = [
        parameter for value in params.values() for parameter in (value if isinstance(value, tuple | list) else (value,))
    ]
    opened = [getattr(parameter, "jaxpr", parameter) for parameter in flat]
    return [parameter for parameter in opened if hasattr(parameter, "eqns")]
