"""NumPy's basic indexing as a strided slice: start, count and step of every dimension.

Input: a shape and a key: integers, slices, `...` and None. Output: a `StridedSlice`.
Limits: no index arrays, since those are gathers and no views.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index as as_int
from typing import Any

import numpy as np

from ipujax.runtime.errors import TensorError

Key = Any  # an integer, a slice, Ellipsis, None, or a tuple of these; anything else is refused by `parse_key`


@dataclass(frozen=True, slots=True)
class StridedSlice:
    """Strided slice of every dimension, and the shape of the result.

    Args:
        starts: first index in each dimension.
        counts: number of indices in each dimension.
        steps: distance of indices in each dimension, negative for a reversal.
        shape: `counts` without the dimensions that integers index, with a 1 for each None.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]


def parse_key(shape: tuple[int, ...], key: Key) -> StridedSlice:
    """Return the strided slice of an array of `shape` that the basic index `key` selects."""
    starts: list[int] = []
    counts: list[int] = []
    steps: list[int] = []
    result_shape: list[int] = []
    for item in _with_full_slices(len(shape), key):
        if item is None:
            result_shape.append(1)
            continue
        start, count, step = _parse_item(shape, len(starts), item)
        starts.append(start)
        counts.append(count)
        steps.append(step)
        if isinstance(item, slice):
            result_shape.append(count)
    return StridedSlice(tuple(starts), tuple(counts), tuple(steps), tuple(result_shape))


def _with_full_slices(ndim: int, key: Key) -> list[Any]:
    """Return the items of a key with `...`, written or implied at the end, expanded to full slices."""
    items = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, item in enumerate(items) if item is Ellipsis] or [len(items)]
    missing = ndim - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0 or len(dots) > 1:
        raise TensorError(f"index of {ndim} dimensions", expected=f"at most {ndim} indices and one ...", got=key)
    items[dots[0] : dots[0] + 1] = [slice(None)] * missing
    return items


def _parse_item(shape: tuple[int, ...], axis: int, item: Any) -> tuple[int, int, int]:
    """Return start, count and step of an integer or a slice."""
    n = shape[axis]
    if isinstance(item, slice):
        if item.step == 0:
            raise TensorError(f"slice of dimension {axis} of {list(shape)}", expected="a step other than 0", got=item)
        indices = range(*item.indices(n))
        return indices.start, len(indices), indices.step
    # A bool is a Python integer, but as an index NumPy takes it for a mask.
    if isinstance(item, bool | np.bool_ | np.ndarray) or not hasattr(item, "__index__"):
        raise TensorError(f"index of {list(shape)}", expected="integers, slices, ... and None", got=repr(item))
    number = as_int(item)
    if not -n <= number < n:
        raise TensorError(f"index of {list(shape)}", expected=f"{-n} <= index < {n} in dimension {axis}", got=number)
    return number % n, 1, 1
