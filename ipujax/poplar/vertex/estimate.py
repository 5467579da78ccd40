"""Cycles of a codelet without its own estimate: counts the operations of its JAX function.

Code compiled from C++ issues one instruction a cycle (reference, "What a first-principles model was found
to need", 5: the tutorials' dot product, 4 instructions a multiply-add, is within 4 % of hardware). Counted are a load
or a store for each element of a field, and one instruction for each element an operation computes, or takes in if it
reduces; a dot of n elements then takes 4 n. Moving data about is counted with the loads.

Input: a function and its arguments' shapes. Output: instructions. Everything here is `assumed`.
Limits: a loop with a data-dependent trip count counts once, a branch as its longest side.
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
    """Instructions of one call of a codelet's function.

    Args:
        function: takes arrays, returns arrays.
        arguments: shape and dtype of each.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments)
    moved = sum(prod(aval.shape) for aval in (*jaxpr.in_avals, *jaxpr.out_avals))
    return OVERHEAD_CYCLES + moved + _body(jaxpr.jaxpr)


def _body(jaxpr: Any) -> int:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> int:
    inner = [_body(each) for each in _jaxprs(eqn.params)]
    if inner:
        return (max if eqn.primitive.name == "cond" else sum)(inner) * int(eqn.params.get("length", 1))
    if eqn.primitive.name in _FREE:
        return 0
    computed = max((prod(var.aval.shape) for var in eqn.outvars), default=0)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * computed * prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    taken = max((prod(var.aval.shape) for var in eqn.invars), default=0)
    return max(computed, taken)


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among an equation's parameters."""
    flat = [one for value in params.values() for one in (value if isinstance(value, tuple | list) else (value,))]
    opened = [getattr(one, "jaxpr", one) for one in flat]
    return [one for one in opened if hasattr(one, "eqns")]
