"""64-bit values where JAX is not set to 64 bits: which of them 32 bits hold, and the error about the others.

Static values keep their 64 bits. They are narrowed where they meet traced ones or leave the model, and there each is
checked: no value is ever wrapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import canonical
from ipujax.onnx.onnx_errors import OnnxError, WideValueError

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64")))
REMEDY = 'jax.config.update("jax_enable_x64", True) before the model is loaded computes with 64 bits'


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Saturated:
    """Result of a selection from values of which 32 bits do not hold some: those are the nearest that 32 bits hold.

    `evaluation.saturation` says which operators may read it.

    Args:
        array: values, the limits of the 32-bit type among them.
        sides: of each element, int8: −1 if it stands for one below the lower limit, 1 above the upper one, else 0.
        present: the values that marked elements stand for.
        source: label of the node that selects them.
        is_of_masked_rows: whether elements are marked only where all that they were chosen from were. Operators that
            read no marks then read the limits.
    """

    array: jax.Array
    sides: jax.Array
    present: frozenset[int | float] = field(metadata={"static": True})
    source: str = field(metadata={"static": True})
    is_of_masked_rows: bool = field(default=False, metadata={"static": True})

    @property
    def dtype(self) -> np.dtype:
        """Of the values, with 32 bits."""
        return np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def is_wide_enabled() -> bool:
    """Return whether JAX is set to 64 bits."""
    return canonical(np.int64) == np.int64


def _limits(dtype: Any, narrow: Any) -> tuple[Any, Any]:
    """Return the least and the largest finite value of a dtype that a narrower one holds."""
    info: Any = jnp.iinfo(narrow) if dtype.kind in "iu" else jnp.finfo(narrow)
    return dtype.type(info.min), dtype.type(info.max)


def sides_of(value: Any) -> np.ndarray | None:
    """Return −1 and 1, int8, where elements are below and above what 32 bits hold, 0 elsewhere; None if all are held.

    Args:
        value: any; infinities are held, traced values and those of 32 bits are not looked at.
    """
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer)
    if not is_array or value.dtype not in _WIDE or is_wide_enabled():
        return None
    return sides_beyond(np.asarray(value), canonical(value.dtype))


def sides_beyond(array: np.ndarray, narrow: Any) -> np.ndarray | None:
    """Return the sides of elements that a narrower dtype does not hold, as `sides_of`."""
    low, high = _limits(array.dtype, narrow)
    if not array.size or (array.min() >= low and array.max() <= high):  # the usual case, without further arrays
        return None
    is_finite = np.isfinite(array)
    sides = ((array > high) & is_finite).astype(np.int8) - ((array < low) & is_finite).astype(np.int8)
    return sides if sides.any() else None


def saturated(value: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return a 64-bit array with 32 bits; elements of sides −1 and 1 become the lower and the upper limit."""
    low, high = _limits(value.dtype, canonical(value.dtype))
    return np.where(sides < 0, low, np.where(sides > 0, high, value)).astype(canonical(value.dtype))


def check_held(value: Any, place: str) -> None:
    """Refuse a value with elements that 32 bits do not hold.

    Args:
        value: an array, a sequence of them, or None.
        place: of the value, with which the message begins.

    Raises:
        WideValueError: names place, value, limits and `jax_enable_x64`.
    """
    if isinstance(value, tuple | list):
        for item in value:
            check_held(item, place)
    if isinstance(value, Saturated) and not value.is_of_masked_rows:
        message = f"{place} has values of {value.source} that 32 bits do not hold"
        expected = "comparisons, a maximum of values below 32 bits, or a minimum of values above them"
        raise WideValueError(message, expected=expected, hint=REMEDY)
    sides = sides_of(value)
    if sides is not None:
        raise not_held(np.asarray(value)[sides != 0][0], place)


def not_held(number: Any, place: str) -> WideValueError:
    """Return the error about a number of a 64-bit dtype that 32 bits do not hold."""
    low, high = _limits(number.dtype, canonical(number.dtype))
    expected = f"{canonical(number.dtype)}, from {low} to {high}"
    message = f"{place} has the value {number}, which 32 bits do not hold"
    return WideValueError(message, expected=expected, got=f"{number.dtype} {number}", hint=REMEDY)


def narrowed(values: Any, place: str) -> Any:
    """Return a tree of values as arrays of JAX, traced from here on; refuse those that 32 bits do not hold.

    Text, which JAX does not have, stays as it is.
    """

    def as_array(value: Any) -> Any:
        check_held(value, place)
        if is_text(value):
            return value
        return jnp.asarray(value.array if isinstance(value, Saturated) else value)

    return jax.tree.map(as_array, values, is_leaf=lambda value: isinstance(value, Saturated))


def is_text(value: Any) -> bool:
    """Return whether a value is an array of text."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "OSU"


def typed_array(value: Any, dtype: Any, place: str) -> np.ndarray:
    """Return numbers of Python as an array of a dtype; refuse those that the dtype does not hold."""
    try:
        return np.asarray(value, dtype)
    except OverflowError as error:
        raise OnnxError(f"{place} has values that {dtype} does not hold", expected=dtype, got=str(error)) from error
    except (TypeError, ValueError) as error:
        raise OnnxError(f"{place} is no array of numbers", expected=dtype, got=str(error)) from error
