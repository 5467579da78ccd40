"""Differences of arrays, and which of them rounding explains.

Input: an array by the program, the same by plain JAX, and the size of rounding errors. Output: a `Difference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.checking.rounding import MARGIN
from ipujax.runtime.tensor import is_key_dtype

_FLIPS = 4  # assumed: elements that rounding may flip, over those that it flips in the samples


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two arrays.

    Args:
        largest: largest absolute difference of two elements; infinite where one of them is no number. Of integers and
            flags likewise.
        is_error: whether rounding does not explain it.
        index: of the element that differs most beyond rounding errors, or most if there is none.
        expected: that element by plain JAX.
        got: that element by the other.
    """

    largest: float
    is_error: bool
    index: tuple[int, ...]
    expected: str
    got: str


def is_equal(got: Any, expected: Any) -> bool:
    """Return whether two arrays have the same elements; NaN equals NaN."""
    return not difference(got, expected, None, is_sampled=False).largest


def difference(got: Any, expected: Any, size: Any, *, is_sampled: bool) -> Difference:
    """Compare two arrays.

    Args:
        got: array by the program.
        expected: array of the same shape and dtype by plain JAX.
        size: sizes of rounding errors of its elements; of integers and flags True for those that rounding may change.
            None for values without rounding errors.
        is_sampled: whether the sizes come from samples, each of which may be small by chance.
    """
    if is_key_dtype(expected.dtype):
        got = jax.random.key_data(got)
        expected = jax.random.key_data(expected)
        size = None
    array = np.asarray(got)
    reference = np.asarray(expected)
    if (array.shape, array.dtype) != (reference.shape, reference.dtype):
        texts = (f"{x.dtype}{list(x.shape)}" for x in (reference, array))
        return Difference(np.inf, True, (), *texts)
    if array.size == 0:
        return Difference(0.0, False, (), "", "")
    if size is None:
        size = np.zeros(reference.shape, np.float32)
    is_float = jnp.issubdtype(reference.dtype, jnp.inexact)
    distance = _distances(array, reference)
    beyond = distance - _tolerance(np.asarray(size), reference.dtype, is_sampled) if is_float else distance
    if not is_float:
        # Which elements rounding flips is chance, how many it flips is not.
        is_flipped = np.asarray(size).astype(bool)
        explained = np.count_nonzero(distance) <= _FLIPS * np.count_nonzero(is_flipped)
        beyond = np.where(is_flipped | explained, 0.0, distance)
    is_error = bool(np.any(beyond > 0))
    place = np.unravel_index(np.argmax(beyond if is_error else distance), distance.shape)
    index = tuple(map(int, place))
    return Difference(float(distance.max()), is_error, index, str(reference[index]), str(array[index]))


def _distances(array: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return absolute differences of elements as float64; NaN equals NaN."""
    wide = np.complex128 if reference.dtype.kind == "c" else np.float64
    a = array.astype(wide)
    b = reference.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    if reference.dtype.kind in "iu" and reference.dtype.itemsize == 8:  # float64 has not all of them
        is_same = array == reference
    distance = np.where(np.isnan(distance), np.inf, distance)
    return np.where(is_same, 0.0, np.where(distance == 0, 1.0, distance))


def _tolerance(size: np.ndarray, dtype: Any, is_sampled: bool) -> np.ndarray:
    """Return the largest difference that rounding explains, for each element."""
    sizes = size.astype(np.float64)
    finite = sizes[np.isfinite(sizes)]
    mean = float(np.sqrt(np.mean(finite**2))) if is_sampled and finite.size else 0.0
    # Processors may flush numbers below the smallest normal one to zero.
    return MARGIN * (sizes + mean) + 2 * float(jnp.finfo(dtype).tiny)
