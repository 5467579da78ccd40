"""Types of operands and results of operators, and small helpers that several families use."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import MAX_STATIC_ELEMENTS
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.registry import is_static, static

Array = jax.Array
Value = jax.Array | np.ndarray  # an operand: traced or static
Optional = jax.Array | np.ndarray | None  # an operand that a node may leave out
Static = np.ndarray  # an operand that must be known while tracing: `registry` reads the annotation
MAX_SIZE = 2**31 - 1  # of an axis


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front; refuse one that an array of a rank does not have."""
    if not -rank <= axis < max(rank, 1):
        raise OutsideError(f"axis {axis} is outside of an array", expected=f"an axis of {rank} dimensions", got=axis)
    return int(axis) % rank if rank else 0


def axes_of(axes: Collection[int], rank: int) -> tuple[int, ...]:
    """Return axes counted from the front; refuse those that an array of a rank does not have, and repeated ones."""
    counted = tuple(axis_of(int(axis), rank) for axis in axes)
    if len(set(counted)) < len(counted):
        raise OutsideError("an axis is named twice", expected="different axes", got=list(axes))
    return counted


def refuse_outside(values: Any, low: float, high: float, name: str = "index") -> None:
    """Refuse values below `low`, or above `high`, where they are known; traced ones are not."""
    if values is None or not is_static(values):
        return
    array = np.asarray(values)
    outside = array[(array < low) | (array > high)]
    if outside.size:
        raise OutsideError(f"{name} {outside[0]} is out of range", expected=f"{low} to {high}", got=outside[0])


def refuse_outside_axis(indices: Any, size: int, axis: int) -> None:
    """Refuse known indices outside of an axis; negative ones count from its end."""
    refuse_outside(indices, -size, size - 1, f"axis {axis} has length {size}: index")


def integers(values: Any) -> tuple[int, ...]:
    """Return the elements of a static operand as Python integers."""
    return tuple(int(value) for value in np.ravel(values))


def static_integer(value: Any, name: str) -> int:
    """Return the first element of an operand that must be static, as an integer."""
    return integers(static(value, name))[0]


def along(values: Any, axis: int, rank: int) -> Any:
    """Return a vector shaped so that it broadcasts along one axis of arrays of a rank."""
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def on_axis(values: Any, x: Any, axis: int, name: str) -> Array:
    """Return a vector with a value for each position on an axis, shaped to broadcast; refuse another shape."""
    vector = jnp.asarray(values)
    if vector.shape != (x.shape[axis],):
        message = f"{name} needs a value for each position on axis {axis % x.ndim}"
        raise OutsideError(message, expected=[x.shape[axis]], got=list(vector.shape))
    return along(vector, axis, x.ndim)


def ceil_div(a: int, b: int) -> int:
    """Return ⌈a / b⌉."""
    return -(-a // b)


def numpy_for(elements: int) -> Any:
    """Return NumPy for a table that a program may hold as a constant, else `jax.numpy`, which computes it there."""
    return np if elements <= MAX_STATIC_ELEMENTS else jnp


def index_range(size: int) -> Value:
    """Return 0, 1, … size − 1, static unless there are many."""
    return numpy_for(size).arange(size)


def size_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
