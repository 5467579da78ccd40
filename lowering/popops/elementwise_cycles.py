"""Cycle costs of elementwise codelets, by operation and dtype.

One worker spends `base + vectors · (cycles + overhead)`; six share the vertex. A row gives cycles for one vector and
how many elements that is, for 32-bit floats, 16-bit floats, and integers. Source: poplibs
`popops/popopsCycleEstimators.cpp` (reference machine.md §1.3); rows marked `assumed` have no public figure and are set
like their nearest relative. Dtypes that the machine lacks cost what stands for them, see `emulation`.

Known limit: data dependent costs (transcendentals) are the averages of that source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.lowering.popops.emulation import Width, emulation, kind_of
from ipujax.runtime.target import Target

Turn = tuple[int, int]  # cycles and elements of one turn of the loop


@dataclass(frozen=True, slots=True)
class OpCost:
    """One turn of an operation's loop, for 32-bit floats, 16-bit floats and integers."""

    on_float: Turn
    on_half: Turn
    on_int: Turn

    def of(self, width: Width) -> Turn:
        """Row for a width; bytes cost as integers, 64-bit types twice their 32-bit row (assumed: two words a value)."""
        if width == "double":
            return 2 * self.on_float[0], self.on_float[1]
        return {"float": self.on_float, "half": self.on_half}.get(width, self.on_int)


# The third entry, integers: 7 cycles an element for add, mul, max (source as above); bit operations and moves assumed
# alike to a two-element vector operation.
_ARITHMETIC = OpCost((3, 2), (3, 4), (7, 1))
_MOVE = OpCost((3, 2), (3, 4), (3, 2))
_BITWISE = OpCost((3, 2), (3, 4), (3, 2))
_COMPARE = OpCost((14, 4), (9, 4), (14, 4))
_NOT_EQUAL = OpCost((20, 4), (11, 4), (20, 4))
_SLOW = OpCost((312, 1), (325, 1), (312, 1))  # power; assumed for special functions without a figure
_SINE = OpCost((2304, 1), (29, 1), (2304, 1))
_TANGENT = OpCost((5104, 1), (5704, 1), (5104, 1))
_ARCSINE = OpCost((106, 1), (106, 1), (106, 1))
_ERF = OpCost((41, 1), (13, 1), (41, 1))
_ABS = OpCost((9, 1), (9, 1), (9, 1))

OP_COSTS: dict[str, OpCost] = {
    "add": _ARITHMETIC,
    "sub": _ARITHMETIC,
    "mul": _ARITHMETIC,
    "add_any": _ARITHMETIC,
    "mulhi": OpCost((14, 1), (14, 1), (14, 1)),  # assumed: two multiplications, for the machine keeps the low half
    "max": OpCost((8, 2), (9, 4), (7, 1)),
    "min": OpCost((8, 2), (9, 4), (7, 1)),
    "clamp": OpCost((11, 2), (12, 4), (14, 1)),
    "div": OpCost((15, 2), (26, 4), (277, 1)),
    "rem": OpCost((46, 1), (46, 1), (277, 1)),  # assumed for floats
    "pow": _SLOW,
    "atan2": _SLOW,
    "nextafter": _COMPARE,  # assumed
    "eq": _COMPARE,
    "ge": _COMPARE,
    "gt": _COMPARE,
    "le": _COMPARE,
    "lt": _COMPARE,
    "eq_to": _COMPARE,  # the total order of floats: assumed to cost as much as the ordinary one
    "le_to": _COMPARE,
    "lt_to": _COMPARE,
    "ne": _NOT_EQUAL,
    "and": _BITWISE,
    "or": _BITWISE,
    "xor": _BITWISE,
    "not": _BITWISE,
    "shift_left": _BITWISE,
    "shift_right_logical": _BITWISE,
    "shift_right_arithmetic": _BITWISE,
    "population_count": OpCost((7, 1), (7, 1), (7, 1)),  # assumed
    "clz": OpCost((7, 1), (7, 1), (7, 1)),  # assumed
    "neg": OpCost((6, 2), (6, 4), (7, 1)),
    "sign": OpCost((14, 4), (9, 4), (14, 4)),  # assumed, as a comparison
    "abs": _ABS,
    "square": OpCost((6, 2), (6, 4), (7, 1)),
    "integer_pow": OpCost((6, 2), (6, 4), (14, 1)),  # assumed: one squaring for each bit of the exponent, see rules
    "exp": OpCost((10, 2), (8, 4), (10, 2)),
    "exp2": OpCost((10, 2), (8, 4), (10, 2)),
    "expm1": OpCost((16, 2), (12, 4), (16, 2)),  # assumed: exp and a correction
    "log": OpCost((16, 2), (8, 4), (16, 2)),
    "log1p": OpCost((20, 2), (12, 4), (20, 2)),  # assumed: log and a correction
    "tanh": OpCost((16, 2), (8, 4), (16, 2)),
    "logistic": OpCost((16, 2), (10, 4), (16, 2)),
    "sqrt": OpCost((14, 2), (27, 4), (14, 2)),
    "rsqrt": OpCost((12, 2), (23, 4), (12, 2)),
    "cbrt": _SLOW,
    "erf": _ERF,
    "erfc": _ERF,
    "erf_inv": _SLOW,
    "lgamma": _SLOW,
    "digamma": _SLOW,
    "sin": _SINE,
    "cos": _SINE,
    "tan": _TANGENT,
    "asin": _ARCSINE,
    "acos": _ARCSINE,
    "atan": _ARCSINE,
    "sinh": _SLOW,
    "cosh": _SLOW,
    "asinh": _SLOW,
    "acosh": _SLOW,
    "atanh": _SLOW,
    "floor": OpCost((6, 2), (6, 4), (3, 2)),  # assumed, as neg
    "ceil": OpCost((6, 2), (6, 4), (3, 2)),
    "round": OpCost((6, 2), (6, 4), (3, 2)),
    "is_finite": _COMPARE,
    "real": _MOVE,  # complex numbers: their parts moved
    "imag": _MOVE,
    "conj": _MOVE,
    "complex": _MOVE,
    **dict.fromkeys(("bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "polygamma", "zeta"), _SLOW),
    "regularized_incomplete_beta": _SLOW,
    "select_n": OpCost((11, 1), (11, 1), (11, 1)),
    "convert_element_type": OpCost((4, 2), (4, 4), (4, 2)),  # cast f16 <-> f32; integer casts assumed alike
    "reduce_precision": OpCost((4, 2), (4, 4), (4, 2)),
    "bitcast_convert_type": _MOVE,
    "copy": _MOVE,
}

# Start of a worker's loop, cycles: binary 29 (float) and 26 (half), unary 17 plus 9 of the supervisor.
_BASE_CYCLES: dict[tuple[int, Width], int] = {(2, "float"): 29, (2, "half"): 26}
_UNARY_BASE_CYCLES = 26
_BINARY_BASE_CYCLES = 29
_VECTOR_OVERHEAD_SAVED = 1  # a scalar operand is loaded once, not every turn


def elementwise_cycles(
    op: str, dtype: Any, operands: int, immediates: int, elements: np.ndarray, target: Target
) -> np.ndarray:
    """Tile cycles of one elementwise vertex.

    Args:
        op: JAX primitive name.
        dtype: dtype the operation computes in.
        operands: number of tensors read.
        immediates: number of scalar operands held in the vertex.
        elements: elements of the vertex, int64 array.
        target: the machine.
    """
    means = emulation(dtype, kind_of(op), target)
    width = means.width
    cost, vector = OP_COSTS[op].of(width)
    fewer = _VECTOR_OVERHEAD_SAVED if immediates and operands and OP_COSTS[op] is _ARITHMETIC else 0
    base = _BASE_CYCLES.get((operands, width), _BINARY_BASE_CYCLES if operands > 1 else _UNARY_BASE_CYCLES)
    workers = target.worker_contexts
    vectors = ceil_div(elements, vector)
    turns = ceil_div(vectors, workers)
    turn = means.factor * (cost - fewer) + means.cast_cycles * vector
    return target.supervisor_overhead_cycles + workers * (base + turns * turn)


def ceil_div(number: np.ndarray, divisor: int) -> np.ndarray:
    """Quotients rounded up, int64."""
    return -(-number // divisor)


def total_elements(shape: Sequence[np.ndarray]) -> np.ndarray:
    """Elements of a block from the lengths of its dimensions, over the grid."""
    total = np.ones((), np.int64)
    for length in shape:
        total = total * length
    return total
