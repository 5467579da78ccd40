"""Element types of ONNX as dtypes of JAX, and casts between them as ONNX rounds and saturates.

A JAX cast to a float8 gives NaN where ONNX gives the largest value; a cast to 2 or 4 bits keeps the low bits in ONNX.
Without x64, 64-bit types are JAX's 32-bit ones.

Source: ONNX operator Cast, opset 28; OCP Microscaling Formats 1.0 for E8M0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

from ipujax.onnx.onnx_errors import OnnxError

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
