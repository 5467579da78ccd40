"""Operators without data: constants, filled arrays, ranges, shapes and sizes of arrays, random numbers.

Most results are static. A model is a pure function: the same node draws the same numbers in each call. The key comes
from the seed of the node, or, without one, from its name. A network that needs other numbers each time takes them as
input.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import MAX_STATIC_ELEMENTS
from ipujax.onnx.element_types import FLOAT, canonical, element_dtype, working_dtype
from ipujax.onnx.iterations import key_in_iteration
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Static, Value, integers, numpy_for
from ipujax.onnx.registry import operator


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
def constant_of_shape(shape: Static, *, value: np.ndarray | None = None) -> Array:
    fill = np.zeros(1, np.float32) if value is None else np.ravel(value)
    return jnp.full(integers(shape), fill[0])


@operator("EyeLike")
def eye_like(x: Value, *, dtype: int | None = None, k: int = 0) -> Array:
    """Ones on a diagonal, zeros elsewhere, in the shape of the operand."""
    rows, columns = x.shape
    return jnp.eye(rows, columns, k, dtype=jnp.asarray(x).dtype if dtype is None else element_dtype(dtype))


@operator("Range")
def number_range(start: Static, limit: Static, delta: Static, *, stash_type: int = 1) -> Value:
    """Array of start, start + delta, … before limit, static unless large; half precision is computed in float32."""
    first, last, step = (np.ravel(each)[0] for each in (start, limit, delta))
    if step == 0:
        raise OutsideError("a range has no end", expected="a delta that is not 0", got=step)
    dtype = first.dtype
    integral = np.issubdtype(dtype, np.integer)
    wide = np.dtype(np.int64) if integral else np.promote_types(np.float32, dtype if dtype.itemsize > 2 else np.float32)
    low, high, stride = (each.astype(wide) for each in (first, last, step))
    # The quotient of floats is one of doubles: rounded to single precision, 0.3 / 0.1 lacks the part above 3.
    count = -((low - high) // stride) if integral else np.ceil(np.float64(high - low) / np.float64(stride))
    count = max(0, int(count))
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
def triangle(x: Array, k: Optional = None, *, upper: int = 1) -> Array:
    """Upper or lower triangle of matrices, zero elsewhere; k is the diagonal where it ends."""
    diagonal = 0 if k is None else jnp.ravel(k)[0]
    xp = numpy_for(x.shape[-1] * x.shape[-2])
    distance = xp.arange(x.shape[-1]) - xp.arange(x.shape[-2])[:, None]
    inside = distance >= diagonal if upper else distance <= diagonal
    return jnp.where(inside, x, jnp.zeros_like(x))


def node_key(seed: float | None, node_name: str) -> Array:
    """Return the random key of a node: of its seed's bits, or of its name, and of the iterations of loops around it."""
    # Without a seed ONNX leaves the numbers open; those of a node stay equal from call to call, so results are pure.
    source = node_name.encode() if seed is None else np.float32(seed).tobytes()
    return key_in_iteration(jax.random.key(zlib.crc32(source)))


def _dtype_like(x: Value, dtype: int | None) -> np.dtype:
    return element_dtype(dtype) if dtype is not None else np.dtype(jnp.asarray(x).dtype)


@operator("RandomNormal")
def random_normal(
    *,
    dtype: int = FLOAT,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    shape: Sequence[int],
    node_name: str,
) -> Array:
    return mean + scale * jax.random.normal(node_key(seed, node_name), tuple(shape), element_dtype(dtype))


@operator("RandomUniform")
def random_uniform(
    *,
    dtype: int = FLOAT,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
    shape: Sequence[int],
    node_name: str,
) -> Array:
    return jax.random.uniform(node_key(seed, node_name), tuple(shape), element_dtype(dtype), low, high)


@operator("RandomNormalLike")
def random_normal_like(
    x: Value,
    *,
    dtype: int | None = None,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    node_name: str,
) -> Array:
    key = node_key(seed, node_name)
    return mean + scale * jax.random.normal(key, np.shape(x), _dtype_like(x, dtype))


@operator("RandomUniformLike")
def random_uniform_like(
    x: Value,
    *,
    dtype: int | None = None,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
    node_name: str,
) -> Array:
    return jax.random.uniform(node_key(seed, node_name), np.shape(x), _dtype_like(x, dtype), low, high)


@operator("Bernoulli")
def bernoulli(x: Value, *, dtype: int | None = None, seed: float | None = None, node_name: str) -> Array:
    """One with the probability that each element is, else zero."""
    probability = jnp.asarray(x).astype(working_dtype(jnp.asarray(x).dtype))
    return jax.random.bernoulli(node_key(seed, node_name), probability).astype(_dtype_like(x, dtype))


@operator("Multinomial")
def multinomial(
    x: Array, *, dtype: int | None = None, sample_size: int = 1, seed: float | None = None, node_name: str
) -> Array:
    """Classes [N, sample_size], drawn with the unnormalised log probabilities [N, classes]."""
    drawn = jax.random.categorical(node_key(seed, node_name), x, shape=(sample_size, x.shape[0]))
    return drawn.T.astype(jnp.int32 if dtype is None else element_dtype(dtype))


@operator("Dropout")
def dropout(
    x: Array,
    ratio: Optional = None,
    training_mode: Optional = None,
    *,
    seed: float | None = None,
    node_name: str,
    output_count: int = 1,
) -> Array | tuple[Array, Array]:
    """While training, elements are zero with a probability, others scaled up; and the mask of those that stay."""
    probability = jnp.float32(0.5) if ratio is None else jnp.ravel(ratio)[0]
    training = jnp.asarray(False) if training_mode is None else jnp.ravel(training_mode)[0]
    always = training_mode is None or (isinstance(training_mode, np.ndarray) and not training_mode.any())
    if always:
        return x if output_count == 1 else (x, jnp.ones(x.shape, bool))
    drawn = jax.random.uniform(node_key(seed, node_name), x.shape) >= probability
    mask = drawn | ~training
    factor = jnp.where(training, 1 / (1 - probability), 1).astype(x.dtype)
    y = jnp.where(mask, x * factor, jnp.zeros_like(x))
    return y if output_count == 1 else (y, mask)
