"""Checks and normalises the types, shapes and values that users give to graphs.

Input: a user's values. Output: a dtype and a tuple of sizes, or an array of a shape. Invalid input is an error, and so
is a value out of the range of a type: values are rounded, never truncated or wrapped.
"""

from __future__ import annotations

from operator import index as as_int
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import dtype_name

_NUMBERS = "biufcV"  # kinds of NumPy types; V are those that NumPy itself lacks, such as bfloat16


def type_and_shape(a: Any, b: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """Return the canonical dtype and sizes of a variable; accepts type and shape in either order."""
    # Poplar's order is type, shape; the runtime's is shape, dtype.
    dtype, shape = (b, a) if isinstance(a, list | tuple) else (a, b)
    try:
        sizes = tuple(as_int(n) for n in shape)
        dtype = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype or "")
    except TypeError as error:
        got = f"{a!r}, {b!r}"
        raise GraphError(f"{name or 'unnamed'} must have a type and a shape", expected="FLOAT, [4]", got=got) from error
    # Without `jax_enable_x64` JAX would narrow 64-bit types in silence.
    if isinstance(dtype, np.dtype) and (dtype.kind not in _NUMBERS or jax.dtypes.canonicalize_dtype(dtype) != dtype):
        message = f"{name or 'unnamed'} is of {dtype_name(dtype)}"
        raise GraphError(message, expected="a type of at most 32 bits, such as FLOAT or INT")
    if any(n < 0 for n in sizes):
        raise GraphError(f"{name or 'unnamed'} has a negative size", expected="sizes of at least 0", got=list(sizes))
    return dtype, sizes


def fill_array(values: Any, shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
    """Broadcast one value, or reshape one value for each element in row-major order, to an array of a shape."""
    array = cast_values(values, dtype, f"values of {name}")
    if array.size == 1:
        return np.full(shape, array.reshape(())[()], dtype)
    if array.size != np.prod(shape, dtype=int):
        raise GraphError(f"values of {name}", expected=f"{np.prod(shape, dtype=int)} or one", got=array.size)
    return array.reshape(shape)


def cast_values(values: Any, dtype: Any, name: str) -> np.ndarray:
    """Convert values to a type that can represent them; floats may be rounded, anything else must be exact.

    Args:
        values: a number, or an array or nested list of them.
        dtype: the type.
        name: name of the values in error messages.

    Raises:
        GraphError: values that are not numbers, or that the type cannot represent.
    """
    try:
        source = np.asarray(values)
    except ValueError:  # rows of different lengths
        source = np.asarray(None)
    is_representable = source.dtype.kind in _NUMBERS and not (source.dtype.kind == "c" and dtype.kind != "c")
    if is_representable:
        # NumPy warns of every overflowing cast; the comparison below finds them all.
        with np.errstate(all="ignore"):
            array = source.astype(dtype)
            exact = array == source if dtype.kind in "biu" else np.isfinite(array) | ~np.isfinite(source)
        is_representable = bool(np.all(exact))
    if not is_representable:
        raise GraphError(name, expected=f"numbers that {dtype_name(dtype)} holds", got=repr(values))
    return array
