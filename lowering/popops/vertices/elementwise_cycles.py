"""Cycle costs of elementwise codelets, by operation and dtype.

One worker spends `start + iterations · cycles`; six share the vertex. A row gives the cycles of one iteration, loads,
stores and the loop itself included, and how many elements it handles, for 32-bit floats, 16-bit floats, integers and
bytes. Its loads and stores are of 64 bits a cycle; ports of other widths change that part of an iteration.

Source: poplibs `popops/popopsCycleEstimators.{hpp,cpp}` (reference machine.md §1.3). Its rows without a natural vector
width are full iterations; to those with one it adds 4 cycles (unary), 2 (binary assembly: float add, sub, mul) or 5.
Rows marked `assumed` have no public figure and equal those of a similar operation. `emulation` adds the cost of dtypes
that the target lacks.

Limits: data-dependent costs (transcendentals) are the averages of that source; unsigned integers cost as signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops.vertices.emulation import Width, emulation, kind_of
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import VECTOR_BYTES

Iteration = tuple[int, int]  # cycles and elements of one iteration of the loop


@dataclass(frozen=True, slots=True)
class OpCost:
    """One iteration of an operation's loop, for 32-bit floats, 16-bit floats, integers and bytes."""

    on_float: Iteration  # a 64-bit type takes two words of it (assumed)
    on_half: Iteration  # of 16-bit integers too
    on_int: Iteration  # of floats where only floats have the operation
    on_byte: Iteration | None = None  # that of integers where None
    start: int | None = None  # cycles of a worker before its loop; depends on the number of operands where None

    def iteration(self, width: Width) -> Iteration:
        """Cycles and elements of one iteration on operands of a width."""
        if width == "double":
            return 2 * self.on_float[0], self.on_float[1]
        by_width = {"float": self.on_float, "half": self.on_half, "byte": self.on_byte or self.on_int}
        return by_width.get(width, self.on_int)


def _floats(on_float: Iteration, on_half: Iteration, start: int | None = None) -> OpCost:
    """Costs of an operation that only floats have."""
    return OpCost(on_float, on_half, on_float, start=start)


_ARITHMETIC = OpCost((3, 2), (3, 4), (7, 1))
_EXTREME = OpCost((3, 2), (4, 4), (7, 1))
_MOVE = OpCost((3, 2), (3, 4), (3, 2))  # assumed: a load, a store and the loop
_BITWISE = OpCost((7, 1), (3, 4), (7, 1), (5, 4))
_SHIFT = OpCost((7, 1), (7, 1), (7, 1))
_LESS = OpCost((14, 4), (9, 4), (22, 4))
_LESS_OR_EQUAL = OpCost((14, 4), (9, 4), (26, 4))
_EQUAL = OpCost((14, 4), (9, 4), (22, 4), (6, 4))
_POWER = OpCost((312, 1), (325, 1), (32, 1))
_SLOW = _floats((312, 1), (325, 1))  # assumed, as power: special functions without a figure
_EXP = _floats((6, 2), (4, 4), start=33)
_SINE = _floats((2304, 1), (25, 1))
_ARCSINE = _floats((106, 1), (106, 1))
_ERF = _floats((41, 1), (13, 1))
_ROUND = _floats((6, 2), (6, 4))
_COUNT_BITS = OpCost((5, 1), (5, 1), (5, 1))

OP_COSTS: dict[str, OpCost] = {
    "add": _ARITHMETIC,
    "sub": _ARITHMETIC,
    "mul": _ARITHMETIC,
    "add_any": _ARITHMETIC,
    "mulhi": OpCost((14, 1), (14, 1), (14, 1)),  # assumed: two multiplications, the instruction gives the low half
    "max": _EXTREME,
    "min": _EXTREME,
    "clamp": OpCost((2, 2), (2, 4), (7, 1), start=11),
    "div": OpCost((10, 2), (21, 4), (277, 1)),
    "rem": OpCost((133, 2), (300, 4), (292, 1)),
    "pow": _POWER,
    "atan2": _floats((272, 2), (578, 4)),
    "nextafter": _LESS,  # assumed, as a comparison
    "eq": _EQUAL,
    "ge": _LESS_OR_EQUAL,
    "gt": _LESS,
    "le": _LESS_OR_EQUAL,
    "lt": _LESS,
    "eq_to": _EQUAL,  # the total order of floats: assumed to cost as much as the ordinary one
    "le_to": _LESS_OR_EQUAL,
    "lt_to": _LESS,
    "ne": OpCost((20, 4), (11, 4), (22, 4), (5, 4)),
    "and": _BITWISE,
    "or": _BITWISE,
    "xor": OpCost((7, 1), (5, 2), (7, 1), (5, 4)),  # of bytes assumed, as bool `ne`
    "not": OpCost((5, 2), (2, 4), (5, 2), (21, 1)),  # integers: a vector is assumed to be 64 bits
    "shift_left": _SHIFT,  # of 16-bit integers assumed
    "shift_right_logical": _SHIFT,
    "shift_right_arithmetic": _SHIFT,
    "population_count": _COUNT_BITS,
    "clz": _COUNT_BITS,
    "neg": OpCost((2, 2), (2, 4), (6, 1)),
    "sign": OpCost((9, 2), (9, 4), (9, 1)),
    "abs": OpCost((5, 1), (5, 1), (6, 1)),
    "square": OpCost((2, 2), (2, 4), (5, 2)),  # integers as `not`
    "integer_pow": OpCost((2, 2), (2, 4), (7, 1)),  # assumed: as one multiplication by itself
    "exp": _EXP,
    "exp2": _EXP,
    "expm1": _floats((8, 1), (9, 4)),
    "log": _floats((12, 2), (4, 4)),
    "log1p": _floats((22, 2), (22, 4)),
    "tanh": _floats((12, 2), (4, 4)),
    "logistic": _floats((12, 2), (6, 4)),
    "sqrt": _floats((10, 2), (23, 4)),
    "rsqrt": _floats((8, 2), (19, 4)),
    "cbrt": _floats((31, 2), (21, 4)),
    "erf": _ERF,
    "erfc": _ERF,  # assumed
    "erf_inv": _SLOW,
    "lgamma": _SLOW,
    "digamma": _SLOW,
    "sin": _SINE,
    "cos": _SINE,
    "tan": _floats((5100, 1), (5700, 1)),
    "asin": _ARCSINE,
    "acos": _ARCSINE,  # assumed
    "atan": _ARCSINE,  # assumed
    "sinh": _SLOW,
    "cosh": _SLOW,
    "asinh": _SLOW,
    "acosh": _SLOW,
    "atanh": _SLOW,
    "floor": _ROUND,
    "ceil": _ROUND,
    "round": _ROUND,
    "is_finite": _floats((9, 2), (9, 4)),
    "real": _MOVE,  # complex numbers: a move of their parts
    "imag": _MOVE,
    "conj": _MOVE,
    "complex": _MOVE,
    **dict.fromkeys(("bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "polygamma", "zeta"), _SLOW),
    "regularized_incomplete_beta": _SLOW,
    "select_n": OpCost((5, 1), (5, 1), (5, 1), start=11),
    "convert_element_type": OpCost((1, 2), (2, 4), (2, 1), start=37),
    "reduce_precision": OpCost((2, 2), (4, 4), (4, 1), start=37),  # assumed: a cast each way
    "bitcast_convert_type": _MOVE,
    "copy": OpCost((1, 2), (1, 4), (1, 2)),  # `memcpy_bytes_per_cycle`: 64 bits loaded and stored by one instruction
}

ROW_START_CYCLES = {"unary": 17, "scalar": 20, "binary float": 29, "binary": 26}  # of a worker, before its loop
_UNARY_SUPERVISOR_CYCLES = 9
WIDTH_BYTES: dict[Width, int] = {"double": 8, "float": 4, "int": 4, "half": 2, "byte": 1}
# In these operations a scalar operand is loaded once, not in every iteration.
_SCALAR_SAVING_CYCLES = 1
_SAVES_A_LOAD = (_ARITHMETIC, _BITWISE, _SHIFT)
# Others by a scalar (`broadcastOpPerfInfo`).
_LESS_THAN_SCALAR = OpCost((12, 4), (8, 4), (16, 4))
_LESS_OR_EQUAL_SCALAR = OpCost((12, 4), (8, 4), (20, 4))
_BY_SCALAR = {
    "div": OpCost((6, 2), (16, 4), (277, 1)),
    "rem": OpCost((93, 2), (225, 4), (280, 1)),
    "max": OpCost((3, 2), (3, 4), (6, 1)),
    "min": OpCost((3, 2), (3, 4), (6, 1)),
    "lt": _LESS_THAN_SCALAR,
    "gt": _LESS_THAN_SCALAR,
    "le": _LESS_OR_EQUAL_SCALAR,
    "ge": _LESS_OR_EQUAL_SCALAR,
    "eq": OpCost((12, 4), (8, 4), (16, 4), (14, 4)),
    "ne": OpCost((18, 4), (10, 4), (16, 4), (4, 4)),
}


def elementwise_cycles(
    op: str, dtype: Any, operands: int, immediates: int, elements: np.ndarray, target: Target
) -> np.ndarray:
    """Tile cycles of a vertex that applies one operation to each element of its block.

    Args:
        op: name of a JAX primitive, a row of `OP_COSTS`.
        dtype: dtype of the arithmetic.
        operands: number of tensor operands.
        immediates: number of scalar operands stored in the vertex.
        elements: elements of the block, int64 array of any shape, which is that of the result.
        target: the machine.
    """
    cost = OP_COSTS[op]
    by_scalar = immediates > 0 and operands > 0
    emulated = emulation(dtype, kind_of(op), target)
    binary = "binary float" if emulated.width == "float" else "binary"
    loop = binary if operands > 1 else "scalar" if by_scalar else "unary"
    start = ROW_START_CYCLES[loop] if cost.start is None else cost.start
    launch = target.supervisor_overhead_cycles + (_UNARY_SUPERVISOR_CYCLES if loop == "unary" else 0)
    # Workers share the vector operations evenly; all of them go through the start and the loop at once.
    vectors = elementwise_parts(op, dtype, elements, target)
    iterations = ceil_div(vectors, target.worker_contexts)
    iteration_cycles, _ = elementwise_iteration(op, dtype, operands, immediates, target)
    return launch + issue_round_cycles(target) * (start + whole_cycles(iterations * iteration_cycles))


def elementwise_iteration(op: str, dtype: Any, operands: int, immediates: int, target: Target) -> tuple[float, int]:
    """Cycles of one iteration of a worker's loop over its block, and the elements that the iteration computes.

    `op` is a row of `OP_COSTS`, `operands` the number of tensors, `immediates` that of scalars stored in the vertex.
    """
    # A dtype that the machine lacks is computed as another one, `width`, in `factor` times the instructions, and cast.
    emulated = emulation(dtype, kind_of(op), target)
    by_scalar = immediates > 0 and operands > 0
    cost = _BY_SCALAR.get(op, OP_COSTS[op]) if by_scalar else OP_COSTS[op]
    cycles, vector = cost.iteration(emulated.width)
    if by_scalar and cost in _SAVES_A_LOAD:
        cycles -= _SCALAR_SAVING_CYCLES
    accesses = ceil_div(vector * WIDTH_BYTES[emulated.width], VECTOR_BYTES)
    cycles_by_rate = _at_port_rates(cycles, operands * accesses, accesses, target)
    return emulated.factor * cycles_by_rate + emulated.cast_cycles * vector, vector


def _at_port_rates(cycles: int, loads: int, stores: int, target: Target) -> Any:
    """Cycles of an iteration on a target, whose memory ports may be wider or narrower than those of real IPUs.

    `cycles` is the published figure of an iteration in which each of the `loads` and `stores`, of a vector, takes one
    cycle. If these are more than the cycles together, a load and a store issue together, by one instruction.
    """
    loads, stores = min(cycles, loads), min(cycles, stores)
    loading, storing = load_cycles(loads * VECTOR_BYTES, target), store_cycles(stores * VECTOR_BYTES, target)
    if loads + stores <= cycles:
        return cycles - loads - stores + loading + storing
    return cycles - max(loads, stores) + larger(loading, storing)


def elementwise_parts(op: str, dtype: Any, elements: np.ndarray, target: Target) -> np.ndarray:
    """Number of vectors of elements that workers share; `op` is a row of `OP_COSTS`."""
    _, vector = OP_COSTS[op].iteration(emulation(dtype, kind_of(op), target).width)
    return ceil_div(elements, vector)
