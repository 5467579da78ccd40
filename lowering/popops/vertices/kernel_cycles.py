"""Cycles of a vertex that does several elementwise operations: loads, instructions, stores, and one launch.

One worker spends `start + iterations · cycles`; six share the vertex. An iteration handles the widest vector of all
operations: 64 bits of the narrowest dtype. It loads each input once and stores each result once, 64 bits a cycle;
scalars are loaded before it. A worker issues a load, a store or an integer operation and beside it a float operation
in one cycle, so an iteration takes as long as the longer of the two.
The instructions of an operation are its row of `OP_COSTS` without the row's own loads, stores and loop, which its
source adds to a natural vector width: 4 cycles to unary operations, 2 to the assembly of sums and products, 5 to
others. A comparison of floats leaves a mask in a register (`f32v2cmp…`, `f16v4cmp…`), on which the logic of booleans
works bit by bit; a selection by it is `and`, `andc`, `or`. Booleans in memory are bytes, packed and unpacked one a
cycle (assumed).

Source: PopLibs' generated codelets (`popops/ExpressionGenerator.cpp`) for the form; its scaled add for two operations
in one bundle and for the instructions before the loop (`popops/codelets/asm/ScaledAddSupervisor_fp.S`: 32, one of them
the load of the scalar). A single operation costs its own row.
Limits: no dependence is taken to stall; addresses of repeated inputs cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops.vertices.elementwise_cycles import OP_COSTS, elementwise_cycles, elementwise_parts
from ipujax.lowering.popops.vertices.emulation import emulation, kind_of
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import VECTOR_BYTES, element_bytes

_START_CYCLES = 31  # derived: instructions before the loop of PopLibs' scaled add, scalars apart
_MOVED = {"unary": 4, "sum": 2, "other": 5}  # cycles of a row that are loads, stores and its loop
_SUMS = frozenset(("add", "sub", "mul", "add_any", "square", "neg"))
_COMPARISONS = frozenset(("eq", "ne", "ge", "gt", "le", "lt", "is_finite"))
_SELECT_INSTRUCTIONS = 3


@dataclass(frozen=True, slots=True)
class OpCount:
    """What the cycles of an operation depend on.

    Args:
        name: row of `OP_COSTS`.
        dtype: what it computes in.
        tensors: operands that are tensors.
        constants: operands that are constants.
    """

    name: str
    dtype: Any
    tensors: int
    constants: int


def kernel_cycles(
    ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any], elements: Any, target: Target, scalars: int = 0
) -> np.ndarray:
    """Tile cycles of one vertex.

    Args:
        ops: its operations.
        read: dtype of each load of every iteration.
        written: dtype of each result.
        elements: elements of each result, int64 array.
        target: the machine.
        scalars: inputs of one element, which are loaded once.
    """
    if _is_one(ops, read, written):
        (op,) = ops
        return elementwise_cycles(op.name, op.dtype, op.tensors, op.constants, elements, target)
    vector = _vector(ops, read, written)
    on_floats = sum(_instructions(op, vector, target) for op in ops if _is_of_floats(op))
    others = sum(_instructions(op, vector, target) for op in ops if not _is_of_floats(op))
    cycles = max(on_floats, others + sum(_moves(dtype, vector) for dtype in (*read, *written)))
    iterations = ceil_div(ceil_div(elements, vector), target.worker_contexts)
    return target.supervisor_overhead_cycles + target.worker_contexts * (_START_CYCLES + scalars + iterations * cycles)


def kernel_parts(
    ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any], elements: Any, target: Target
) -> np.ndarray:
    """Iterations that workers share; arguments as `kernel_cycles`."""
    if _is_one(ops, read, written):
        return elementwise_parts(ops[0].name, ops[0].dtype, elements, target)
    return np.asarray(ceil_div(elements, _vector(ops, read, written)))


def _is_one(ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any]) -> bool:
    """Whether PopLibs has a codelet of its own for the operations."""
    return len(ops) == 1 and len(written) == 1 and len(read) <= ops[0].tensors


def _vector(ops: Sequence[OpCount], read: Sequence[Any], written: Sequence[Any]) -> int:
    """Elements of one iteration."""
    narrowest = min(max(2, element_bytes(dtype)) for dtype in (*(op.dtype for op in ops), *read, *written))
    return max(1, VECTOR_BYTES // narrowest)


def _is_of_floats(op: OpCount) -> bool:
    """Whether an operation is done beside loads and stores: of floats, or of masks in their registers."""
    return op.dtype == np.bool_ or bool(jnp.issubdtype(op.dtype, jnp.inexact))


def _instructions(op: OpCount, elements: int, target: Target) -> int:
    """Instructions of one operation on some elements."""
    words = ceil_div(elements * element_bytes(op.dtype), VECTOR_BYTES)
    if op.dtype == np.bool_:
        return 1
    if op.name == "select_n":
        return int(_SELECT_INSTRUCTIONS * words)
    means = emulation(op.dtype, kind_of(op.name), target)
    if op.name in _COMPARISONS and means.width in ("float", "half"):
        return int(words * means.factor + means.cast_cycles * elements)
    in_assembly = op.name in _SUMS and means.width in ("float", "half")
    row = "sum" if in_assembly else "unary" if op.tensors + op.constants == 1 else "other"
    cycles, vector = OP_COSTS[op.name].of(means.width)
    work = means.factor * max(1, cycles - _MOVED[row]) * ceil_div(elements, vector)
    return int(work + means.cast_cycles * elements)


def _moves(dtype: Any, elements: int) -> int:
    """Cycles to load or store some elements."""
    if dtype == np.bool_:
        return 1 + elements
    return int(ceil_div(elements * element_bytes(dtype), VECTOR_BYTES))
