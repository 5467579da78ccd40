"""Constant scalars of elementwise operations: immediates of a vertex, and operations on nothing else.

An operation on constants alone is done while compiling. NumPy does it where IEEE 754 and two's complement say every bit
of the result; JAX does the others, and takes 30 to 50 ms to compile each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from ipujax.lowering.popops.vertices.kernel import Frozen, Op, Step, freeze, thawed
from ipujax.runtime.tensor import Tensor, is_key_dtype

_FLOAT, _BITS = ("float32",), ("bool", "int32", "uint32")
_NUMBERS, _ALL = ("int32", "uint32", "float32"), ("bool", "int32", "uint32", "float32")
_EXACT: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = MappingProxyType(
    {
        "add": (np.add, _NUMBERS),
        "sub": (np.subtract, _NUMBERS),
        "mul": (np.multiply, _NUMBERS),
        "div": (np.divide, _FLOAT),  # JAX's integers are rounded towards zero
        "neg": (np.negative, _NUMBERS),
        "eq": (np.equal, _ALL),
        "ne": (np.not_equal, _ALL),
        "lt": (np.less, _ALL),
        "le": (np.less_equal, _ALL),
        "gt": (np.greater, _ALL),
        "ge": (np.greater_equal, _ALL),
        "and": (np.bitwise_and, _BITS),
        "or": (np.bitwise_or, _BITS),
        "xor": (np.bitwise_xor, _BITS),
        "not": (np.invert, _BITS),
        "select_n": (lambda which, *cases: cases[int(which)], _ALL),
    }
)


def immediate_of(tensor: Tensor) -> np.ndarray | None:
    """The value of a tensor whose elements are all one constant scalar, else None."""
    affine = tensor.affine
    if affine is None or not affine.variable.is_constant or affine.variable.size != 1 or affine.variable.by_replica:
        return None
    value = affine.variable.value
    if is_key_dtype(value.dtype):
        return None
    return np.asarray(value).reshape(())


def with_immediates(
    steps: Sequence[Step], results: Sequence[int], operands: Sequence[Tensor]
) -> tuple[tuple[Step, ...], list[int | Frozen], list[Tensor]]:
    """The same operations with constant scalars in the steps, each other operand once; results may be constants."""
    values: list[int | Frozen] = []
    kept: list[Tensor] = []
    for tensor in operands:
        constant = immediate_of(tensor)
        same = next((n for n, other in enumerate(kept) if other.node == tensor.node), len(kept))
        kept += [tensor] if constant is None and same == len(kept) else []
        values.append(same if constant is None else freeze(constant))
    left: list[Step] = []
    for step in steps:
        given = tuple(values[x] if isinstance(x, int) else x for x in step.operands)
        if any(isinstance(x, int) for x in given):
            left.append(Step(step.op, given))
            values.append(len(kept) + len(left) - 1)
            continue
        values.append(freeze(folded(step.op, [thawed(x) for x in given if not isinstance(x, int)])))
    return tuple(left), [values[x] for x in results], kept


def folded(op: Op, operands: Sequence[np.ndarray]) -> np.ndarray:
    """The result of an operation on constant scalars."""
    exact, dtypes = _EXACT.get(op.name, (None, ()))
    if exact is not None and op.is_primitive and all(x.dtype.name in dtypes for x in operands):
        with np.errstate(all="ignore"):  # infinities and NaNs are results like others
            result = np.asarray(exact(*operands), op.out_dtype)
        if not any(_is_subnormal(x) for x in (*operands, result)):
            return result
    with jax.ensure_compile_time_eval():  # lowering runs while JAX traces
        return np.asarray(op.fun(*operands), op.out_dtype)


def _is_subnormal(value: np.ndarray) -> bool:
    """Whether a float is one that XLA flushes to zero."""
    return value.dtype == np.float32 and bool(0 < abs(value) < np.finfo(np.float32).tiny)
