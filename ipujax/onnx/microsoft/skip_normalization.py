"""Norms of sums, norms of embeddings, and ONNX Runtime's own norm among the operators of ONNX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ipujax.onnx.element_types import element_dtype, working_dtype
from ipujax.onnx.operators.normalization import layer_normalization
from ipujax.onnx.operators.operand_types import Array, Optional, Value, axis_of, on_axis, refuse_outside_axis
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def _total(x: Value, skip: Value, bias: Optional) -> Array:
    total = jnp.asarray(x) + skip
    return total if bias is None else total + on_axis(bias, total, -1, "the bias")


@operator("SkipLayerNormalization", DOMAIN)
def skip_layer_normalization(
    x: Value,
    skip: Value,
    gamma: Value,
    beta: Optional = None,
    bias: Optional = None,
    *,
    epsilon: float = 1e-12,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Layer norm of x + skip + bias; also mean, reciprocal deviation, and the sum."""
    total = _total(x, skip, bias)
    on_axis(gamma, total, -1, "gamma")
    y, mean, inverse = layer_normalization(total, gamma, beta, epsilon=epsilon, output_count=3)
    return (y, mean, inverse, total)[:output_count]


def _root_mean_square_norm(
    x: Array, scale: Value, epsilon: float, axes: tuple[int, ...], stash: int = 1
) -> tuple[Array, Array]:
    wide = x.astype(element_dtype(stash))
    inverse = lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * scale, inverse


@operator("SkipSimplifiedLayerNormalization", DOMAIN)
def skip_simplified_layer_normalization(
    x: Value, skip: Value, gamma: Value, bias: Optional = None, *, epsilon: float = 1e-12, output_count: int = 1
) -> tuple[Array, ...]:
    """Root mean square norm of x + skip + bias; also zero for a mean, the reciprocal of the norm, and the sum."""
    total = _total(x, skip, bias)
    on_axis(gamma, total, -1, "gamma")
    y, inverse = _root_mean_square_norm(total, gamma, epsilon, (-1,))
    return (y, jnp.zeros_like(inverse), inverse, total)[:output_count]


@operator("SimplifiedLayerNormalization", DOMAIN)
def simplified_layer_normalization(
    x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, output_count: int = 1
) -> tuple[Array, ...]:
    """Root mean square norm over an axis and those after it, and the reciprocal of the norm."""
    # ONNX Runtime has it among ONNX's own operators; see `reading.old_nodes`.
    x = jnp.asarray(x)
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    return _root_mean_square_norm(x, scale, epsilon, axes, stash_type)[:output_count]


@operator("EmbedLayerNormalization", DOMAIN)
def embed_layer_normalization(
    input_ids: Value,
    segment_ids: Optional,
    word_embedding: Value,
    position_embedding: Value,
    segment_embedding: Optional,
    gamma: Value,
    beta: Value,
    mask: Optional = None,
    position_ids: Optional = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Layer norm of embeddings of words, positions and segments; also the lengths that a mask has, and the sum."""
    for ids, table in ((input_ids, word_embedding), (segment_ids, segment_embedding)):
        if ids is not None and table is not None:
            refuse_outside_axis(ids, table.shape[0], 0)
    words = jnp.asarray(word_embedding)[jnp.asarray(input_ids)]
    positions = jnp.asarray(position_embedding)
    places = positions[: words.shape[1]] if position_ids is None else positions[jnp.asarray(position_ids)]
    total = words + places
    if segment_embedding is not None and segment_ids is not None:
        total = total + jnp.asarray(segment_embedding)[jnp.asarray(segment_ids)]
    wide = total.astype(working_dtype(total.dtype))
    y = layer_normalization(wide, gamma, beta, epsilon=epsilon)
    assert not isinstance(y, tuple)
    lengths = (
        jnp.zeros(words.shape[:1], jnp.int32) if mask is None else jnp.sum(jnp.asarray(mask) == 1, 1, dtype=jnp.int32)
    )
    return (y.astype(total.dtype), lengths, total)[:output_count]
