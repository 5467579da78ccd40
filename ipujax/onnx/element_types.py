"""Element types of ONNX as dtypes of JAX, casts between them, and values that the types of JAX do not hold.

A JAX cast to a float8 gives NaN where ONNX gives the largest value; a cast to 2 or 4 bits keeps the low bits in ONNX.
Without x64, 64-bit types are JAX's 32-bit ones. Static values keep their 64 bits then. They are narrowed where they
meet traced ones or leave the model, and there each is checked: no value is ever wrapped.

Source: ONNX operator Cast, opset 28; OCP Microscaling Formats 1.0 for E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

from ipujax.onnx.onnx_errors import OnnxError, WideValueError

FLOAT = onnx.TensorProto.FLOAT
E8M0 = np.dtype(jnp.float8_e8m0fnu)
# Their casts saturate if the attribute says so; narrower floats always do.
FLOAT8 = tuple(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2, jnp.float8_e5m2fnuz)))
FLOAT4 = np.dtype(jnp.float4_e2m1fn)
NARROW_INTEGERS = tuple(map(np.dtype, (jnp.int2, jnp.uint2, jnp.int4, jnp.uint4)))


def element_dtype(element_type: int) -> np.dtype:
    """Return the dtype in which JAX holds an element type of ONNX; refuse strings, and types that JAX does not have."""
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))
    if dtype.kind == "O":
        name = onnx.TensorProto.DataType.Name(element_type)
        raise OnnxError(f"elements of type {name} are not supported", expected="numbers", got=name)
    return canonical(dtype)


def canonical(dtype: Any) -> np.dtype:
    """Return the dtype as JAX has it: without x64, 64-bit types are 32-bit ones."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def index_dtype() -> np.dtype:
    """Return the dtype of ONNX's int64 results, int32 without x64."""
    return canonical(np.int64)


def is_floating(x: Any) -> bool:
    """Return whether an array has a floating-point dtype, narrow ones included."""
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def working_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which sums of such elements are computed: float32 for narrower floats, else the dtype."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(np.float32) if floating and np.dtype(dtype).itemsize < 4 else np.dtype(dtype)


def cast(x: Any, dtype: Any, *, saturate: bool = True, round_mode: str = "up") -> jax.Array:
    """Return an array in another dtype, as ONNX's Cast.

    Args:
        x: array of numbers.
        dtype: of the result.
        saturate: a value out of range becomes the largest float8, else NaN or infinity; of float8 only.
        round_mode: "up", "down" or "nearest", of E8M0 only.
    """
    x = jnp.asarray(x)
    dtype = canonical(dtype)
    if dtype == E8M0:
        return _to_e8m0(x, saturate, round_mode)
    if dtype in FLOAT8 and saturate:
        return _saturated(x, dtype)
    if dtype in NARROW_INTEGERS:
        return x.astype(jnp.int32).astype(dtype)
    return x.astype(dtype)


def _saturated(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert to a type of 8 bits or fewer; numbers beyond its largest, infinities too, become this."""
    wide = x if is_floating(x) and x.dtype.itemsize >= 2 else x.astype(jnp.float32)
    limit = jnp.asarray(jnp.finfo(dtype).max, wide.dtype)
    # jnp.clip would do as well but for NaN, which it must keep: lax.clamp propagates it
    return lax.clamp(-limit, wide, limit).astype(dtype)


def _to_e8m0(x: jax.Array, saturate: bool, round_mode: str) -> jax.Array:
    """E8M0 is the exponent of a float32: eight bits with the same bias, 255 for NaN."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    exponent = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    half = jnp.uint32(0x400000)
    tie_up = exponent > 0  # a subnormal tie rounds down
    rounds_up = {
        "up": fraction > 0,
        "down": jnp.zeros_like(fraction, bool),
        "nearest": (fraction > half) | ((fraction == half) & tie_up),
    }[round_mode]
    largest = jnp.uint32(0xFE)
    rounded = exponent + rounds_up.astype(jnp.uint32)
    limited = jnp.minimum(rounded, largest) if saturate else rounded
    code = jnp.where(exponent == 0xFF, exponent, limited)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), E8M0)


def bit_cast(x: Any, dtype: Any) -> jax.Array:
    """Return the same bits as elements of another dtype of the same width."""
    x = jnp.asarray(x)
    dtype = canonical(dtype)
    if dtype.kind == "b":
        return lax.bitcast_convert_type(x, jnp.uint8).astype(bool)
    source = x.astype(jnp.uint8) if x.dtype == bool else x
    return lax.bitcast_convert_type(source, dtype)


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
