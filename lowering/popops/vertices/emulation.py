"""Cost of emulated arithmetic: dtypes that a target lacks, computed by instructions of others.

`Target.native_dtypes` lists the dtypes of a target. A move is no arithmetic: words of any dtype are moved natively.
Arithmetic on another dtype is emulated:

    bfloat16, 8-bit floats      cast to the next wider native float, which computes, and rounded back
    integers of 4 bits          unpacked to bytes and packed again
    64-bit integers             two words: with a carry, or four partial products
    float64                     in software, of 32-bit integers
    complex                     their parts; a product is four products and two sums

Limits: all figures are assumed; nobody published cycles of emulated arithmetic on an IPU. That of float64 is the figure
of the dot product vertex (64 instructions for a multiply-add, where a float takes 4, see `poplin.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name, is_key_dtype

Width = Literal["float", "half", "int", "byte", "double"]
Kind = Literal["move", "add", "multiply", "function"]

_WORD_BYTES = 4  # of the numbers that a target computes in
# A wide number is moved, compared and added word by word; its products and functions take more.
_MOVES = frozenset(("copy", "bitcast_convert_type", "select_n", "real", "imag", "complex", "not", "and", "or", "xor"))
_SUMS = frozenset((
    *("add", "sub", "add_any", "max", "min", "clamp", "neg", "abs", "sign", "conj", "is_finite"),
    *("convert_element_type", "eq", "ne", "ge", "gt", "le", "lt", "eq_to", "le_to", "lt_to"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
    *("population_count", "clz", "floor", "ceil", "round", "reduce_precision", "nextafter"),
))  # fmt: skip
_PRODUCTS = frozenset(("mul", "mulhi", "square", "integer_pow"))

_DOUBLE_FACTOR = 16  # assumed: 64 instructions for a multiply-add, where a float takes 4


@dataclass(frozen=True, slots=True)
class Emulation:
    """Instructions that emulate one operation of a dtype."""

    width: Width  # column of the cost table of the emulating instructions, or of a native dtype itself
    factor: int = 1  # instructions for one operation
    cast_cycles: int = 0  # cycles to unpack and to pack one element


_HALF_FLOAT = Emulation("float", cast_cycles=5)  # assumed: a shift to unpack; an addition, a shift, ties to pack
_SMALL_FLOAT = Emulation("half", cast_cycles=8)  # assumed: a lookup in a table of 256 to unpack, rounding to pack
_SMALL_INTEGER = Emulation("byte", cast_cycles=4)  # assumed: shift and mask, each way
# Of each wide dtype the column of the emulating instructions, and how many of them an operation of each kind takes.
_WIDE: dict[str, tuple[Width, dict[Kind, int]]] = {
    "int64": ("int", {"add": 2, "multiply": 4, "function": 4}),
    "uint64": ("int", {"add": 2, "multiply": 4, "function": 4}),
    "float64": ("float", {"add": _DOUBLE_FACTOR, "multiply": _DOUBLE_FACTOR, "function": _DOUBLE_FACTOR}),
    "complex64": ("float", {"add": 2, "multiply": 6, "function": 6}),
    "complex128": (
        "float",
        {"add": 2 * _DOUBLE_FACTOR, "multiply": 6 * _DOUBLE_FACTOR, "function": 6 * _DOUBLE_FACTOR},
    ),
}


def kind_of(op: str) -> Kind:
    """Kind of work of an elementwise operation."""
    if op in _MOVES:
        return "move"
    return "add" if op in _SUMS else "multiply" if op in _PRODUCTS else "function"


def is_native(dtype: Any, target: Target) -> bool:
    """True if a target computes in a dtype; keys of random numbers are for its own generator."""
    return is_key_dtype(dtype) or dtype_name(dtype) in target.native_dtypes


def emulation(dtype: Any, kind: Kind, target: Target) -> Emulation:
    """Emulation of an operation of a kind on a target; the operation itself where the dtype is native.

    A move of any dtype is native: it is of words.
    """
    if kind == "move" or is_key_dtype(dtype):
        return Emulation(width_of(dtype))
    dtype = np.dtype(dtype)
    if dtype.name in _WIDE:
        width, instructions = _WIDE[dtype.name]
        words = dtype.itemsize // _WORD_BYTES
        return Emulation(width, factor=words if is_native(dtype, target) else instructions[kind])
    if is_native(dtype, target):
        return Emulation(width_of(dtype))
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return _SMALL_FLOAT if dtype.itemsize == 1 else _HALF_FLOAT
    if dtype.itemsize == 1 and dtype != np.bool_:
        return _SMALL_INTEGER
    # Bools and integers of 16 and 32 bits are assumed to cost what they would as native dtypes.
    return Emulation(width_of(dtype))


def width_of(dtype: Any) -> Width:
    """Column of the cost table of a native dtype, or of one that is only moved; 64 bits are two words."""
    if is_key_dtype(dtype) or np.dtype(dtype).itemsize >= 8:
        return "double"
    narrow: dict[int, Width] = {1: "byte", 2: "half"}
    return narrow.get(np.dtype(dtype).itemsize, "float" if np.dtype(dtype).kind == "f" else "int")
