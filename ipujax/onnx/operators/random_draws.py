"""Random numbers and dropout.

A model is a pure function: the same node draws the same numbers in each call. The key comes from the seed of the node,
or, without one, from its name. A network that needs other numbers each time takes them as input.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import FLOAT, element_dtype, working_dtype
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.registry import operator


def node_key(seed: float | None, node_name: str) -> Array:
    """Return the random key of a node: of its seed's bits, or of its name."""
    # Without a seed ONNX leaves the numbers open; those of a node stay equal from call to call, so results are pure.
    source = node_name.encode() if seed is None else np.float32(seed).tobytes()
    return jax.random.key(zlib.crc32(source))


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
    x: Value, *, dtype: int | None = None, sample_size: int = 1, seed: float | None = None, node_name: str
) -> Array:
    """Classes [N, sample_size], drawn with the unnormalised log probabilities [N, classes]."""
    x = jnp.asarray(x)
    drawn = jax.random.categorical(node_key(seed, node_name), x, shape=(sample_size, x.shape[0]))
    return drawn.T.astype(jnp.int32 if dtype is None else element_dtype(dtype))


@operator("Dropout")
def dropout(
    x: Value,
    ratio: Optional = None,
    training_mode: Optional = None,
    *,
    seed: float | None = None,
    node_name: str,
    output_count: int = 1,
) -> Array | tuple[Array, Array]:
    """While training, elements are zero with a probability, others scaled up; and the mask of those that stay."""
    x = jnp.asarray(x)
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
