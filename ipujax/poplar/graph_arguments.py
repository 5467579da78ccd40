"""What graphs are given of types, shapes and values: checked, in one form.

Input: what a user gave. Output: a dtype and a tuple of sizes, or an array of a shape. What makes no sense is an error.
"""

from __future__ import annotations

from operator import index as as_int
from typing import Any

import numpy as np

from ipujax.runtime.errors import GraphError


def type_and_shape(a: Any, b: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """Type and shape, given in either order."""
    dtype, shape = (b, a) if isinstance(a, list | tuple) else (a, b)
    try:
        sizes = tuple(as_int(n) for n in shape)
        dtype = dtype if hasattr(dtype, "itemsize") else np.dtype(dtype)
    except TypeError as error:
        got = f"{a!r}, {b!r}"
        raise GraphError(f"{name or 'unnamed'} has no type and shape", expected="FLOAT, [4]", got=got) from error
    if any(n < 0 for n in sizes):
        raise GraphError(f"{name or 'unnamed'} has a negative size", expected="sizes of at least 0", got=list(sizes))
    return dtype, sizes


def filled(values: Any, shape: tuple[int, ...], dtype: Any, what: str) -> np.ndarray:
    """An array of a shape, from one value for all elements or one for each."""
    array = np.asarray(values, dtype)
    if array.size == 1:
        return np.full(shape, array.reshape(())[()], dtype)
    if array.size != np.prod(shape, dtype=int):
        raise GraphError(f"values of {what}", expected=f"{np.prod(shape, dtype=int)} or one", got=array.size)
    return array.reshape(shape)
