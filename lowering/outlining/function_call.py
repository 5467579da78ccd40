"""The equation `function_call`: a callee that is lowered once and called from several places.

Operands are copied into the function's own variables, and results that are read after its next call out of them, at
each place, which takes cycles and code. What is saved is its code, its exchange code, its vertices and the time to
lower them, at all places but one. An operand that is the same value at every place, `fixed`, is not copied: the
function reads it where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Literal, jaxpr_as_fun, make_primitive
from ipujax.lowering.jaxpr import Work

# Measured with the transformer of `Work`, of which a layer with its gradient has 84 copies.
_COPY_BYTES = 90  # of exchange code on the fullest tile
_COPY_CYCLES = 250  # up to 600 for larger arrays
_WORK_PER_ELEMENT = 2  # elements that steps read and write, for each element that is copied


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str, fixed: tuple[bool, ...]) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
    return jaxpr.out_avals


function_call_p = make_primitive("function_call", _compute, _shapes, None)


def gain(code: Any, copies: Any, calls: Any, byte_price: float) -> Any:
    """What a function saves: cycles, and bytes of code at their price.

    Args:
        code: bytes of what is called.
        copies: operands and results that a call copies.
        calls: from how many places it is called.
        byte_price: cycles that a byte is worth.
    """
    saved = (calls - 1) * code - calls * copies * _COPY_BYTES
    return saved * byte_price - calls * copies * _COPY_CYCLES


def gain_of(work: Work, copied: Sequence[int], calls: int, byte_price: float) -> float:
    """The same, 0 where little is computed beside what is copied.

    Args:
        work: what one call does.
        copied: the elements of each operand and result that a call copies.
        calls: from how many places it is called.
        byte_price: cycles that a byte is worth.
    """
    is_small = work.elements < _WORK_PER_ELEMENT * sum(copied)
    return 0.0 if is_small else float(gain(work.code, len(copied), calls, byte_price))


def fixed_operands(calls: Sequence[Sequence[Atom]]) -> tuple[bool, ...]:
    """For each operand whether it is the same value at every call.

    Args:
        calls: the operands of each call, in one jaxpr.
    """
    return tuple(len(set(map(_identity, atoms))) == 1 for atoms in zip(*calls, strict=True))


def _identity(atom: Atom) -> object:
    if isinstance(atom, Literal):
        return str(atom.aval), np.asarray(atom.val).tobytes()
    return atom
