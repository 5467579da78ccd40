"""Operators without data: constants, filled arrays, ranges, shapes and sizes of arrays. Most results are static."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import MAX_STATIC_ELEMENTS
from ipujax.onnx.element_types import canonical, element_dtype
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Value, integers, numpy_for
from ipujax.onnx.registry import operator, static


@operator("Constant")
def constant(
    *,
    value: np.ndarray | None = None,
    value_float: float | None = None,
    value_floats: list[float] | None = None,
    value_int: int | None = None,
    value_ints: list[int] | None = None,
    value_string: str | None = None,
    value_strings: list[str] | None = None,
) -> np.ndarray:
    """The only attribute of the node, as a static array."""
    attributes = (
        (value, None),
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
        (value_string, object),
        (value_strings, object),
    )
    [(data, dtype)] = [(data, dtype) for data, dtype in attributes if data is not None]
    return np.asarray(data, dtype)


@operator("ConstantOfShape")
def constant_of_shape(shape: Value, *, value: np.ndarray | None = None) -> Array:
    fill = np.zeros(1, np.float32) if value is None else np.ravel(value)
    return jnp.full(integers(static(shape, "shape")), fill[0])


@operator("EyeLike")
def eye_like(x: Value, *, dtype: int | None = None, k: int = 0) -> Array:
    """Ones on a diagonal, zeros elsewhere, in the shape of the operand."""
    rows, columns = x.shape
    return jnp.eye(rows, columns, k, dtype=jnp.asarray(x).dtype if dtype is None else element_dtype(dtype))


@operator("Range")
def number_range(start: Value, limit: Value, delta: Value, *, stash_type: int = 1) -> Value:
    """Array of start, start + delta, … before limit, static unless large; half precision is computed in float32."""
    first, last, step = (
        np.ravel(static(each, name))[0] for each, name in ((start, "start"), (limit, "limit"), (delta, "delta"))
    )
    if step == 0:
        raise OutsideError("a range has no end", expected="a delta that is not 0", got=step)
    dtype = first.dtype
    integral = np.issubdtype(dtype, np.integer)
    wide = np.dtype(np.int64) if integral else np.promote_types(np.float32, dtype if dtype.itemsize > 2 else np.float32)
    low, high, stride = (each.astype(wide) for each in (first, last, step))
    count = max(0, int(-((low - high) // stride)) if integral else int(np.ceil((high - low) / stride)))
    if count <= MAX_STATIC_ELEMENTS:
        return (low + np.arange(count, dtype=wide) * stride).astype(dtype)
    working = canonical(wide)
    if integral and not np.array_equal(np.asarray([low, high, stride]).astype(working), [low, high, stride]):
        raise ValueError(f"{count:,} numbers up to {high} need jax_enable_x64")
    return (low.astype(working) + jnp.arange(count, dtype=working) * stride.astype(working)).astype(canonical(dtype))


@operator("Shape")
def shape_of(x: Value, *, start: int = 0, end: int | None = None) -> np.ndarray:
    return np.array(np.shape(x)[start:end], np.int64)


@operator("Size")
def size_of_array(x: Value) -> np.ndarray:
    return np.array(np.size(x), np.int64)


@operator("Identity")
def identity(x: Any) -> tuple[Any]:
    """The operand, which may be a sequence or an optional."""
    return (x,)


@operator("Trilu")
def triangle(x: Value, k: Optional = None, *, upper: int = 1) -> Array:
    """Upper or lower triangle of matrices, zero elsewhere; k is the diagonal where it ends."""
    x = jnp.asarray(x)
    diagonal = 0 if k is None else jnp.ravel(k)[0]
    xp = numpy_for(x.shape[-1] * x.shape[-2])
    distance = xp.arange(x.shape[-1]) - xp.arange(x.shape[-2])[:, None]
    inside = distance >= diagonal if upper else distance <= diagonal
    return jnp.where(inside, x, jnp.zeros_like(x))
