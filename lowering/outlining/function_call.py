"""Equation `function_call`: a callee that is lowered once and called from several places.

Each call copies operands into the function's own variables, and copies results that are read after the next call
out of them, which takes cycles and code. It saves the function's code, exchange code, vertices and compile time at
all calls but one. An operand that is one value at every call, `fixed`, is not copied: the function reads it in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Literal, jaxpr_as_fun, make_primitive
from ipujax.lowering.jaxpr import Work

# Measured with the transformer of `Work`: a layer with its gradient has 84 copies.
_COPY_BYTES = 90  # exchange code on the fullest tile
_COPY_CYCLES = 250  # up to 600 for larger arrays
_WORK_PER_ELEMENT = 2  # elements that steps read and write, for each element that is copied


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str, fixed: tuple[bool, ...]) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
    return jaxpr.out_avals


function_call_p = make_primitive("function_call", _compute, _shapes)


def gain(code: Any, copies: Any, calls: Any, byte_cost: float) -> Any:
    """Cycles that a function saves: `code` bytes at all `calls` but one, minus code and cycles of `copies` at each."""
    saved_bytes = (calls - 1) * code - calls * copies * _COPY_BYTES
    return saved_bytes * byte_cost - calls * copies * _COPY_CYCLES


def gain_of(work: Work, copied: Sequence[int], calls: int, byte_cost: float) -> float:
    """Cycles that calls of one function save instead of its code several times; 0 if it computes little for its copies.

    A byte of code counts as the cycles that memory is worth; calls copy operands and results.

    Args:
        work: work of one call.
        copied: elements of each operand and result that a call copies.
        calls: number of calls.
        byte_cost: cost per byte on the fullest tile, in cycles.
    """
    is_small = work.elements < _WORK_PER_ELEMENT * sum(copied)
    return 0.0 if is_small else float(gain(work.code, len(copied), calls, byte_cost))


def fixed_operands(calls: Sequence[Sequence[Atom]]) -> tuple[bool, ...]:
    """For each operand whether it is one value at every call; `calls` has the operands of each."""
    return tuple(len(set(map(_identity, atoms))) == 1 for atoms in zip(*calls, strict=True))


def _identity(atom: Atom) -> object:
    if isinstance(atom, Literal):
        return str(atom.aval), np.asarray(atom.val).tobytes()
    return atom
