"""Constant scalars of elementwise operations: immediates of a vertex, and folding of operations on constants alone.

Rising numbers (`iota`) are constants too large for this: they are computed by the tiles that they are mapped to. Source
of their cost: poplibs `popopsCycleEstimators.cpp`, iota (reference machine.md §1.3).

Operations are folded while compiling: by NumPy where IEEE 754 and two's complement fix every bit of the result, else by
JAX, which takes 30 to 50 ms to compile each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.layout.choose import choose
from ipujax.lowering.layout.grid_cost import FieldUse, Work, spans
from ipujax.lowering.layout.place import along, mapped_variable, placed_axes
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import Frozen, Op, Step, freeze, thawed
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Builder, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import Tensor, dtype_name, element_bytes, is_key_dtype

_FLOATS = ("float32", "float64")
_SIGNED = ("int32", "int64")
_INTEGERS = (*_SIGNED, "uint32")
_BITS = ("bool", *_INTEGERS)
_NUMBERS = (*_INTEGERS, *_FLOATS)
_ALL = ("bool", *_NUMBERS)
# Operations whose results NumPy gives bit by bit as XLA does, and the dtypes for which it does.
_EXACT: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = MappingProxyType(
    {
        "add": (np.add, _NUMBERS),
        "sub": (np.subtract, _NUMBERS),
        "mul": (np.multiply, _NUMBERS),
        "div": (np.divide, _FLOATS),  # JAX rounds quotients of integers towards zero
        "neg": (np.negative, _NUMBERS),
        "sign": (np.sign, _SIGNED),
        "abs": (np.abs, _SIGNED),
        "min": (np.minimum, _INTEGERS),  # of floats the sign of zeros is open
        "max": (np.maximum, _INTEGERS),
        "ceil": (np.ceil, _FLOATS),
        "floor": (np.floor, _FLOATS),
        "nextafter": (np.nextafter, _FLOATS),
        "is_finite": (np.isfinite, _FLOATS),
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
        "select_n": (lambda index, *cases: cases[int(index)], _ALL),
        "convert_element_type": (lambda x: x, _ALL),
        "copy": (lambda x: x, _ALL),
    }
)


def immediate_of(tensor: Tensor) -> np.ndarray | None:
    """Constant scalar that all elements of a tensor equal, or None; a key of random numbers is no immediate."""
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
    """Folds steps on constants; returns the other steps, results by number or constant, and the other operands.

    Values are numbered as in a `Kernel`, operands and then steps; afterwards without those that are constant, and with
    equal operands once. A constant in the place of a number is an immediate, `Frozen`.
    """
    values: list[int | Frozen] = []  # by old number: the new number, or the constant
    tensors: list[Tensor] = []  # operands that are not constants, each once
    for operand in operands:
        constant = immediate_of(operand)
        # Of the first equal operand, else the next number.
        number = next((n for n, tensor in enumerate(tensors) if tensor.node == operand.node), len(tensors))
        tensors += [operand] if constant is None and number == len(tensors) else []
        values.append(number if constant is None else freeze(constant))
    unfolded: list[Step] = []
    for step in steps:
        arguments = tuple(values[x] if isinstance(x, int) else x for x in step.operands)
        if any(isinstance(x, int) for x in arguments):
            unfolded.append(Step(step.op, arguments))
            values.append(len(tensors) + len(unfolded) - 1)  # its new number: operands come first
        else:
            values.append(freeze(fold(step.op, [thawed(x) for x in arguments if not isinstance(x, int)])))
    return tuple(unfolded), [values[x] for x in results], tensors


def fold(op: Op, operands: Sequence[np.ndarray]) -> np.ndarray:
    """Result of an operation on constant scalars."""
    result = exact_value(op.name, operands, op.out_dtype) if op.is_primitive else None
    if result is not None:
        return result
    with jax.ensure_compile_time_eval():  # lowering runs while JAX traces
        return np.asarray(op.fun(*operands), op.out_dtype)


def exact_value(name: str, operands: Sequence[np.ndarray], out_dtype: Any) -> np.ndarray | None:
    """Result of a primitive without further parameters on constant scalars; None where NumPy may differ from XLA."""
    function, dtypes = _EXACT.get(name, (None, ()))  # NumPy's function, and the operands' dtypes for which it is exact
    if function is None or np.dtype(out_dtype).name not in _ALL or any(x.dtype.name not in dtypes for x in operands):
        return None
    is_float = operands[0].dtype.name in _FLOATS
    if name == "convert_element_type" and is_float and np.dtype(out_dtype).name not in _FLOATS:
        limits = np.iinfo(np.int32)  # XLA keeps to the range of integers
        if out_dtype not in (np.int32, np.int64) or not limits.min < operands[0] < limits.max:
            return None
    with np.errstate(all="ignore"):  # infinities and NaNs are results like any other
        result: np.ndarray = np.asarray(function(*operands)).astype(out_dtype)
    return None if any(_is_subnormal(x) for x in (*operands, result)) else result


def _is_subnormal(value: np.ndarray) -> bool:
    """True if XLA flushes a float to zero."""
    return value.dtype.name in _FLOATS and bool(0 < abs(value) < np.finfo(value.dtype).tiny)


_BASE_CYCLES = 14
_VECTOR_CYCLES = 2  # of the 3 of a vector, one stores it


def iota(builder: Builder, dtype: Any, size: int) -> Tensor:
    """Adds the numbers 0 … size − 1, at least one, in a tensor of shape (size,) that is spread over tiles."""
    codelet = _iota_codelet(dtype)
    # The index space is the result: dimension 0 of its only field runs along axis 0.
    work = Work(codelet, (FieldUse(spans((size,), (0,))),))

    placement = choose(builder.graph, (size,), (0,), work, ())
    out = mapped_variable(builder.graph, (size,), dtype, builder.name, (0,), placement)
    accesses = [along(out, (0,))]
    # The codelet reads the first index of its block (`origins`) along the only axis, which `placed_axes` calls d0.
    add_vertices(builder, codelet, placed_axes(placement), accesses, placement.tile, origins=["d0"])
    return out


@remembered
def _iota_codelet(dtype: Any) -> Codelet:
    """Codelet of rising numbers, which begin at the first index of the block."""

    def compute(origins: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        ((length,),) = shapes  # one field, of one dimension
        numbers = jax.lax.iota(np.dtype(np.int32), length) + jnp.asarray(origins[0], np.int32)
        return numbers.astype(dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        vector_cycles = _VECTOR_CYCLES + store_cycles(target.vector_width_bytes, target)
        loop = whole_cycles(vector_cycles * -(-parts(shapes, target) // target.worker_contexts))
        return target.supervisor_overhead_cycles + issue_round_cycles(target) * (_BASE_CYCLES + loop)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        """Vectors of a block, which workers share."""
        return -(-shapes[0][0] * element_bytes(dtype) // target.vector_width_bytes)

    fields = (Field("out", "out", dtype),)
    title = f"popops::Iota<{dtype_name(dtype)}>"
    return Codelet(
        title,
        fields,
        compute,
        cycles,
        state_bytes=12,  # assumed, as the size of the code
        code_bytes=120,
        takes=("origins", "shapes"),
        parts=parts,
        language="C++",
    )
