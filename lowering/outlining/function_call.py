"""Equation `function_call`: a callee that is lowered once and called from several places.

Each call copies operands into the function's own variables, and copies results that are read after the next call
out of them, which takes cycles, code, and memory for the copies. It saves the function's code, exchange code, vertices
and compile time at all calls but one. An operand that is one value at every call, `fixed`, is not copied: the function
reads it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Literal, jaxpr_as_fun, make_primitive
from ipujax.lowering.jaxpr import Work
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.target import PRESETS, Target

_MK2 = PRESETS["mk2"]
# Measured with the transformer of `Work`: a layer with its gradient has 84 copies.
_COPY_BYTES = 90  # exchange code on the fullest tile
_COPY_CYCLES = 250  # up to 600 for larger arrays
_WORK_PER_ELEMENT = 2  # elements that steps read and write, for each element that is copied


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str, fixed: tuple[bool, ...]) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
    return jaxpr.out_avals


function_call_p = make_primitive("function_call", _compute, _shapes)


class CallCosts(NamedTuple):
    """Costs of bytes of code and of copies.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        num_tiles: tiles over which copies are spread.
        operation_bytes: bytes of a tile that one operation may take; copies within them are live when others are not.
    """

    byte_cost: float = BYTE_COST_CYCLES
    num_tiles: int = _MK2.tiles_per_ipu  # the machine of programs that know none
    operation_bytes: float = _MK2.operation_bytes

    @staticmethod
    def of(target: Target, byte_cost: float) -> CallCosts:
        """Return the costs on one IPU of a machine, as planners know it."""
        return CallCosts(byte_cost, target.tiles_per_ipu, target.operation_bytes)


class Copied(NamedTuple):
    """Operands and results that each call copies: elements of each, and bytes of all."""

    elements: Sequence[int]
    num_bytes: int


def gain(code: Any, copies: Any, calls: Any, byte_cost: float) -> Any:
    """Cycles that a function saves: `code` bytes at all `calls` but one, minus code and cycles of `copies` at each."""
    saved_bytes = (calls - 1) * code - calls * copies * _COPY_BYTES
    return saved_bytes * byte_cost - calls * copies * _COPY_CYCLES


def gain_of(work: Work, copied: Copied, calls: int, costs: CallCosts) -> float:
    """Cycles that calls of one function save instead of its code several times; 0 if it computes little for its copies.

    A byte of code or of copies counts as the cycles that memory is worth.

    Args:
        work: work of one call.
        copied: what a call copies, to variables of the function, which all calls share.
        calls: number of calls.
        costs: of code and of copies.
    """
    if work.elements < _WORK_PER_ELEMENT * sum(copied.elements):
        return 0.0
    # Copies are live during a call, as the temporary data of an operation are: a tile has `operation_bytes` for those
    # anyway, and copies cost memory only beyond them.
    excess_bytes = max(0.0, copied.num_bytes / costs.num_tiles - costs.operation_bytes)
    return float(gain(work.code, len(copied.elements), calls, costs.byte_cost) - costs.byte_cost * excess_bytes)


def fixed_operands(calls: Sequence[Sequence[Atom]]) -> tuple[bool, ...]:
    """For each operand whether it is one value at every call; `calls` has the operands of each."""
    return tuple(len(set(map(_identity, atoms))) == 1 for atoms in zip(*calls, strict=True))


def _identity(atom: Atom) -> object:
    if isinstance(atom, Literal):
        return str(atom.aval), np.asarray(atom.val).tobytes()
    return atom
