"""Types of operands and results of operators, and small helpers that several families use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Array = jax.Array
Value = jax.Array | np.ndarray  # an operand: traced or static
Optional = jax.Array | np.ndarray | None  # an operand that a node may leave out
Scalar = Any


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return axes counted from the front."""
    return tuple(int(axis) % rank if rank else 0 for axis in axes)


def integers(values: Any) -> tuple[int, ...]:
    """Return the elements of a static operand as Python integers."""
    return tuple(int(value) for value in np.ravel(values))


def along(values: Any, axis: int, rank: int) -> Any:
    """Return a vector shaped so that it broadcasts along one axis of arrays of a rank."""
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def ceil_div(a: int, b: int) -> int:
    """Return ⌈a / b⌉."""
    return -(-a // b)


def size_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
