"""Cycles of a vertex of several elementwise operations: loads, instructions, stores, and one launch.

One worker spends `start + iterations · cycles`; six share the vertex. An iteration handles the widest vector of all
operations: 64 bits of the narrowest dtype. It loads each input once and stores each result once, 64 bits a port;
scalars are loaded before the loop. A worker issues a load, a store or an integer operation and beside it a float
operation in one cycle, so an iteration takes as long as the longer of the two.
An operation's instructions are its row of `OP_COSTS` without the row's own loads, stores and loop, which its source
adds to a natural vector width: 4 cycles to unary operations, 2 to the assembly of sums and products, 5 to others. A
comparison of floats leaves a mask in a register (`f32v2cmp…`, `f16v4cmp…`), on which the logic of booleans works bit by
bit; a selection by it is `and`, `andc`, `or`. Booleans in memory are bytes, packed and unpacked one a cycle (assumed).

Source: PopLibs' generated codelets (`popops/ExpressionGenerator.cpp`) for the form; its scaled add for two operations
in one bundle and for the instructions before the loop (`popops/codelets/asm/ScaledAddSupervisor_fp.S`: 32, one of them
the load of the scalar). A single operation has the cost of its own row.
Limits: no dependence is taken to stall; addresses of repeated inputs cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops.vertices.elementwise_cycles import (
    OP_COSTS,
    ROW_START_CYCLES,
    elementwise_cycles,
    elementwise_iteration,
    elementwise_parts,
)
from ipujax.lowering.popops.vertices.emulation import emulation, kind_of, width_of
from ipujax.lowering.popops.vertices.reducers import LAUNCH_CYCLES
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.graph import Language
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import VECTOR_BYTES, element_bytes

_MOST_VECTOR_ELEMENTS = 4  # of an iteration: 64 bits of the narrowest dtype, which counts as two bytes at least
_START_CYCLES = 31  # derived: instructions before the loop of PopLibs' scaled add, scalars apart
_LOOP_CYCLES = {"unary": 4, "sum": 2, "other": 5}  # part of a row's cycles: loads, stores and the loop itself
_SUMS = frozenset(("add", "sub", "mul", "add_any", "square", "neg"))
_COMPARISONS = frozenset(("eq", "ne", "ge", "gt", "le", "lt", "is_finite"))
_SELECT_INSTRUCTIONS = 3
# Rows with a codelet in assembly (popops/codelets/asm: Clamp.S, select_*.S, unaryOps1DNonLinearity.S), and copies.
_IN_ASSEMBLY = frozenset(("clamp", "select_n", "tanh", "logistic", "copy"))
_SUMS_IN_ASSEMBLY = frozenset(("add", "sub", "mul", "add_any"))  # of floats (popops/codelets/asm/binaryOps1D.S)


@dataclass(frozen=True, slots=True)
class OpCount:
    """Features of an operation that its cycles depend on."""

    name: str  # row of `OP_COSTS`
    dtype: Any  # dtype of the arithmetic
    tensors: int  # number of tensor operands
    constants: int  # number of constant operands


def kernel_cycles(
    ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any], elements: Any, target: Target, scalars: int = 0
) -> np.ndarray:
    """Tile cycles of a vertex that applies operations one after the other to each element.

    Args:
        ops: the operations.
        read: dtype of each load of an iteration.
        written: dtype of each store of an iteration.
        elements: elements of the vertex, int64 array.
        target: the machine.
        scalars: number of inputs of one element, which are loaded once.
    """
    if _is_single_codelet(ops, read, written):
        (op,) = ops
        return elementwise_cycles(op.name, op.dtype, op.tensors, op.constants, elements, target)
    cycles, vector = kernel_iteration(ops, read, written, target)
    iterations = ceil_div(ceil_div(elements, vector), target.worker_contexts)  # workers share the vectors
    worker = _START_CYCLES + scalars + whole_cycles(iterations * cycles)
    return target.supervisor_overhead_cycles + issue_round_cycles(target) * worker


def kernel_iteration(
    ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any], target: Target
) -> tuple[float, int]:
    """Cycles of one iteration of a worker's loop that applies several operations, and the elements of the iteration.

    `read` and `written` are the dtypes of each load and store of the iteration. In a cycle a worker issues two
    instructions: one of the float unit, and beside it a load, a store or another one. So the slower of the two counts.
    """
    if _is_single_codelet(ops, read, written):
        (op,) = ops
        return elementwise_iteration(op.name, op.dtype, op.tensors, op.constants, target)
    vector = _vector_elements(ops, read, written)
    dual_issued = sum(_instructions(op, vector, target) for op in ops if _is_dual_issued(op))
    single_issued = sum(_instructions(op, vector, target) for op in ops if not _is_dual_issued(op))
    loads, stores = (sum(_access_bytes(dtype, vector) for dtype in dtypes) for dtypes in (read, written))
    # Booleans are bytes in memory and bits in registers, packed and unpacked one a cycle.
    packing = sum(vector for dtype in (*read, *written) if dtype == np.bool_)
    accesses = load_cycles(loads, target) + store_cycles(stores, target)
    return larger(dual_issued, single_issued + packing + accesses), vector


@remembered_small
def least_element_cycles(op: OpCount, target: Target) -> tuple[float, bool]:
    """Lower bound of the tile cycles that an operation takes for one element, in whatever vertex; for bounds of plans.

    The bound is the smaller of two: its instructions among others on the longest vector, and its own codelet's loop.
    Also returns whether its instructions issue beside loads and stores, and so may take no time beyond these.
    """
    alone, vector = elementwise_iteration(op.name, op.dtype, op.tensors, op.constants, target)
    fused = _instructions(op, _MOST_VECTOR_ELEMENTS, target) / _MOST_VECTOR_ELEMENTS
    round_share = float(issue_round_cycles(target)) / target.worker_contexts
    return round_share * min(float(alone) / vector, fused), _is_dual_issued(op)


@remembered_small
def smallest_kernel_cycles(target: Target) -> float:
    """Tile cycles that each vertex of elementwise operations or of a reduction takes before its first element."""
    starts = [*ROW_START_CYCLES.values(), *(cost.start for cost in OP_COSTS.values() if cost.start is not None)]
    launch = min(target.supervisor_overhead_cycles, LAUNCH_CYCLES)
    return float(launch + issue_round_cycles(target) * min(_START_CYCLES, *starts))


@remembered_small
def smallest_vertex_cycles(op: OpCount, target: Target) -> float:
    """Lower bound of the tile cycles of any vertex that computes an operation: one element, alone or with others."""
    one_element = np.asarray(1)
    operands = op.tensors + op.constants
    alone = [
        elementwise_cycles(op.name, op.dtype, tensors, operands - tensors, one_element, target)
        for tensors in range(1, operands + 1)
    ]
    fused = target.supervisor_overhead_cycles + issue_round_cycles(target) * (_START_CYCLES + 1)
    return float(min(fused, *alone))


def kernel_language(ops: Sequence[OpCount]) -> Language:
    """Language of the code of a vertex: PopLibs generates C++ for several operations, and has assembly for some."""
    is_in_assembly = all(op.name in _IN_ASSEMBLY or _is_sum_in_assembly(op) for op in ops)
    return "assembly" if len(ops) <= 1 and is_in_assembly else "C++"


def scalar_instructions(name: str, dtype: Any, operands: int) -> int:
    """Instructions of a function of one element in C++ code, which computes one element after the other.

    Its row of `OP_COSTS` without the row's own loads, stores and loop.
    """
    row = "unary" if operands == 1 else "other"
    cycles, vector = OP_COSTS[name].iteration(width_of(dtype))
    return max(1, int(ceil_div(cycles - _LOOP_CYCLES[row], vector)))


def kernel_parts(
    ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any], elements: Any, target: Target
) -> np.ndarray:
    """Iterations that workers share, for vertices of `elements`; `read`, `written`: dtypes of each load and store."""
    if _is_single_codelet(ops, read, written):
        return elementwise_parts(ops[0].name, ops[0].dtype, elements, target)
    return np.asarray(ceil_div(elements, _vector_elements(ops, read, written)))


def _is_single_codelet(ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any]) -> bool:
    """True if PopLibs has a codelet of its own for the operations."""
    return len(ops) == 1 and len(written) == 1 and len(read) <= ops[0].tensors


def _vector_elements(ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any]) -> int:
    """Elements of one iteration."""
    narrowest = min(max(2, element_bytes(dtype)) for dtype in (*(op.dtype for op in ops), *read, *written))
    return max(1, VECTOR_BYTES // narrowest)


def _is_dual_issued(op: OpCount) -> bool:
    """True if an operation issues beside loads and stores: on floats, or on masks in float registers."""
    return op.dtype == np.bool_ or bool(jnp.issubdtype(op.dtype, jnp.inexact))


def _is_sum_in_assembly(op: OpCount) -> bool:
    is_float = bool(jnp.issubdtype(op.dtype, jnp.floating)) and element_bytes(op.dtype) <= 4
    return is_float and op.name in _SUMS_IN_ASSEMBLY


def _instructions(op: OpCount, elements: int, target: Target) -> int:
    """Instructions that an operation adds to a loop with others, on a vector of `elements` that is in registers."""
    words = ceil_div(elements * element_bytes(op.dtype), VECTOR_BYTES)
    if op.dtype == np.bool_:
        return 1
    if op.name == "select_n":
        return int(_SELECT_INSTRUCTIONS * words)
    emulated = emulation(op.dtype, kind_of(op.name), target)
    if op.name in _COMPARISONS and emulated.width in ("float", "half"):
        return int(words * emulated.factor + emulated.cast_cycles * elements)
    in_assembly = op.name in _SUMS and emulated.width in ("float", "half")
    row = "sum" if in_assembly else "unary" if op.tensors + op.constants == 1 else "other"
    cycles, vector = OP_COSTS[op.name].iteration(emulated.width)
    # The published row is of a loop of the operation alone: what it spends on loads, stores and the loop is taken off.
    instructions = emulated.factor * max(1, cycles - _LOOP_CYCLES[row]) * ceil_div(elements, vector)
    return int(instructions + emulated.cast_cycles * elements)


def _access_bytes(dtype: Any, elements: int) -> int:
    """Bytes of the vectors that are loaded or stored for a number of elements."""
    return VECTOR_BYTES * int(ceil_div(elements * element_bytes(dtype), VECTOR_BYTES))
