"""Cycles of a codelet without an estimate of its own: counts the operations of its JAX function.

Code compiled from C++ issues one instruction a cycle (reference, needs of a first-principles model, point 5:
the tutorials' dot product, 4 instructions a multiply-add, is within 4 % of hardware). Each element of a field is a load
or a store; each element that an operation computes, or that a reduction reads, is one instruction; a dot of n elements
then takes 4 n. A division, a root or another function takes the instructions of its row of PopLibs' estimators
(reference 1.3) without that row's own loads, stores and loop: 3 for a division of floats, 272 of integers, 4 for a
logarithm. An iteration of a loop ends with two more, which compare and branch, as in those rows. Data movement is
counted with the loads, but a conversion from an integer or to one is an instruction.

Input: a function and the shapes of its arguments. Output: instructions. All of it is `assumed`.
Limits: no instruction waits for another's result; a loop with a data-dependent trip count counts once, a branch counts
as its longest side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.popops import OP_COSTS, kind_of, scalar_instructions

OVERHEAD_CYCLES = 10  # assumed: entry, loading of pointers, exit
# poplibs popopsCycleEstimators.cpp: a C++ loop over vectors adds 5 cycles, two loads and a store among them.
_LOOP_INSTRUCTIONS = 2

_MOVES = {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice"}
_VIEWS = {"expand_dims", "gather", "iota", "pad", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"}
_FREE = frozenset(_MOVES | _VIEWS)


def instructions(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Count the instructions of one call of a codelet's function of arrays."""
    jaxpr = count_loops(jax.make_jaxpr(function)(*arguments))
    accessed_elements = sum(prod(aval.shape) for aval in (*jaxpr.in_avals, *jaxpr.out_avals))
    return OVERHEAD_CYCLES + accessed_elements + _instructions_of_jaxpr(jaxpr.jaxpr)


def _instructions_of_jaxpr(jaxpr: Any) -> int:
    return sum(_instructions_of_equation(eqn) for eqn in jaxpr.eqns)


def _instructions_of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    body_counts = [_instructions_of_jaxpr(jaxpr) for jaxpr in _jaxprs_in_params(eqn.params)]
    if body_counts:
        body = (max if name == "cond" else sum)(body_counts)
        # `length` is the trip count of a scan, of which some iterations are unrolled; that of a `while` is data, so it
        # counts once, and compares in its condition.
        length = int(eqn.params.get("length", 1))
        iterations = {"scan": _LOOP_INSTRUCTIONS * -(-length // int(eqn.params.get("unroll", 1))), "while": 1}
        return body * length + iterations.get(name, 0)
    computed_elements = max((prod(var.aval.shape) for var in eqn.outvars), default=0)
    if name in _FREE:
        return computed_elements if name == "convert_element_type" and _crosses_registers(eqn) else 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        # A multiplication and an addition; with the two loads of its operands, 4 instructions an element.
        return 2 * computed_elements * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    read_elements = max((prod(var.aval.shape) for var in eqn.invars), default=0)
    return max(computed_elements, read_elements) * _instructions_of_element(eqn)


def _crosses_registers(eqn: Any) -> bool:
    """True if numbers go from integer registers to those of floats, or back."""
    kinds = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in (eqn.invars[0], eqn.outvars[0])]
    return kinds[0] != kinds[1]


def _instructions_of_element(eqn: Any) -> int:
    """Instructions that compute one element: several of a function, one of a sum, a product or a comparison."""
    # A reciprocal is a negative power.
    is_reciprocal = eqn.primitive.name == "integer_pow" and eqn.params["y"] < 0
    name = "div" if is_reciprocal else eqn.primitive.name
    if name not in OP_COSTS or kind_of(name) != "function":
        return 1
    return scalar_instructions(name, eqn.invars[0].aval.dtype, 2 if is_reciprocal else len(eqn.invars))


def _jaxprs_in_params(params: dict[str, Any]) -> list[Any]:
    flat = [
        parameter for value in params.values() for parameter in (value if isinstance(value, tuple | list) else (value,))
    ]
    opened = [getattr(parameter, "jaxpr", parameter) for parameter in flat]
    return [parameter for parameter in opened if hasattr(parameter, "eqns")]
