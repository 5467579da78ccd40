"""Attention with the projections or biases that ONNX Runtime's optimiser puts into it; masks of several forms.

Each is ONNX's own Attention on heads, with one mask of floats: `mask_filter_value` where a mask hides a key.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.attention import attention, rotary_embedding
from ipujax.onnx.operators.operand_types import Array, Optional, Value, on_axis
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator

MASKED = -10000.0  # default of mask_filter_value


def as_heads(x: Array, heads: int) -> Array:
    """Return [N, time, heads · size] as [N, heads, time, size]; an array of heads stays."""
    if x.ndim == 4:
        return x
    if x.shape[-1] % heads:
        raise OnnxError("heads do not divide the hidden size", expected=f"a multiple of {heads}", got=x.shape[-1])
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def without_heads(x: Array) -> Array:
    """Return [N, heads, time, size] as [N, time, heads · size]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def key_mask(mask: Optional, batch: int, queries: int, keys: int, hidden: float) -> Array | None:
    """Return a mask as floats that broadcast to scores [N, heads, queries, keys]; None without one.

    Args:
        mask: [N, keys], [N, queries, keys] or [N, 1, …, keys] with 1 for keys that are seen; [N] lengths; [2 N] ends
            and starts; [3 N + 2] lengths and two sums of them.
        batch: N.
        queries: of each sample.
        keys: past ones included.
        hidden: value of keys that are not seen.

    Raises:
        OnnxError: a mask of another shape.
    """
    if mask is None:
        return None
    array = jnp.asarray(mask)
    if array.ndim == 1:
        return _mask_of_lengths(array, batch, keys, hidden)
    broadcast = {2: lambda: array[:, None, None, :], 3: lambda: array[:, None], 4: lambda: array}.get(array.ndim)
    if broadcast is None:
        raise OnnxError("the mask has another rank", expected="1 to 4", got=array.ndim)
    flags = broadcast()
    if array.ndim == 4:  # one square for all lengths, of which the last queries and the first keys count
        start = keys - queries
        flags = flags[..., start : start + queries, :keys]
    return jnp.where(flags > 0, 0.0, hidden)


def _mask_of_lengths(lengths: Array, batch: int, keys: int, hidden: float) -> Array:
    places = np.arange(keys)
    if lengths.shape[0] == 3 * batch + 2 or lengths.shape[0] == batch:
        is_seen = places < lengths[:batch, None]
    elif lengths.shape[0] == 2 * batch:
        is_seen = (places < lengths[:batch, None]) & (places >= lengths[batch:, None])
    else:
        message = "a mask of lengths has another number of them"
        raise OnnxError(message, expected=f"{batch}, {2 * batch} or {3 * batch + 2}", got=lengths.shape[0])
    return jnp.where(is_seen, 0.0, hidden)[:, None, None, :]


def summed(*masks: Any) -> Array | None:
    """Return the sum of masks; None without one."""
    present = [jnp.asarray(mask) for mask in masks if mask is not None]
    return functools.reduce(jnp.add, present) if present else None


def attended(
    heads: Sequence[Array],
    mask: Array | None,
    past: Sequence[Optional],
    *,
    scale: float,
    is_causal: int,
    softcap: float = 0.0,
) -> tuple[Array, ...]:
    """Return attention of heads [N, heads, time, size] without heads, all keys, all values, and the scores."""
    q, k, v = heads
    y, keys, values, scores = attention(
        q,
        k,
        v,
        None if mask is None else mask.astype(q.dtype),
        past[0],
        past[1],
        is_causal=is_causal,
        scale=scale or None,
        softcap=softcap,
        output_count=4,
    )
    return without_heads(y), keys, values, scores


@operator("Attention", DOMAIN)
def projected_attention(
    x: Value,
    weights: Value,
    bias: Optional = None,
    mask_index: Optional = None,
    past: Optional = None,
    attention_bias: Optional = None,
    past_sequence_length: Optional = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = MASKED,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Attention of x with itself, projected by weights [hidden, all of q, k and v]; also keys and values, stacked."""
    if past_present_share_buffer or past_sequence_length is not None:
        raise OnnxError("a shared buffer of past and present is not supported", expected="past of its own length")
    projected = jnp.matmul(jnp.asarray(x), jnp.asarray(weights))
    projected = projected if bias is None else projected + on_axis(bias, projected, -1, "the bias")
    total = projected.shape[-1]
    sizes = list(qkv_hidden_sizes or [total // 3] * 3)
    if sum(sizes) != total:
        raise OnnxError("qkv_hidden_sizes do not add up to the weights' columns", expected=total, got=sum(sizes))
    heads = [as_heads(part, num_heads) for part in jnp.split(projected, np.cumsum(sizes)[:2].tolist(), axis=-1)]
    before = (None, None) if past is None else tuple(jnp.asarray(past))
    length = 0 if before[0] is None else before[0].shape[2]
    if do_rotary:
        heads[:2] = [_rotated(part, length, rotary_embedding_dim) for part in heads[:2]]
    batch, queries = projected.shape[:2]
    mask = summed(key_mask(mask_index, batch, queries, length + queries, mask_filter_value), attention_bias)
    y, keys, values, _ = attended(heads, mask, before, scale=scale, is_causal=unidirectional)
    return (y,) if output_count == 1 else (y, jnp.stack([keys, values]))


def _rotated(x: Array, start: int, size: int) -> Array:
    """Return heads rotated by the angles of their positions, base 10,000."""
    half = (size or x.shape[-1]) // 2
    angles = (np.arange(x.shape[2]) + start)[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = (function(angles).astype(x.dtype)[None] for function in (np.cos, np.sin))
    return rotary_embedding(x, cos, sin, rotary_embedding_dim=size)


@operator("MultiHeadAttention", DOMAIN)
def multi_head_attention(
    query: Value,
    key: Optional = None,
    value: Optional = None,
    bias: Optional = None,
    key_padding_mask: Optional = None,
    attention_bias: Optional = None,
    past_key: Optional = None,
    past_value: Optional = None,
    past_sequence_length: Optional = None,
    cache_indirection: Optional = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Attention of projected queries, keys and values; also all keys, all values, and the scores."""
    if past_sequence_length is not None or cache_indirection is not None:
        raise OnnxError("buffers of past and present with beams are not supported", expected="past of its own length")
    q, k, v = _separate(jnp.asarray(query), key, value)
    if bias is not None:
        sizes = [part.shape[-1] if part.ndim == 3 else part.shape[1] * part.shape[-1] for part in (q, k, v)]
        parts = jnp.split(jnp.asarray(bias), np.cumsum(sizes)[:2].tolist())
        q, k, v = (_biased(x, part) for x, part in zip((q, k, v), parts, strict=True))
    heads = [as_heads(x, num_heads) for x in (q, k, v)]
    past = 0 if past_key is None else past_key.shape[2]
    batch, queries = heads[0].shape[0], heads[0].shape[2]
    mask = key_mask(key_padding_mask, batch, queries, past + heads[1].shape[2], mask_filter_value)
    results = attended(
        heads, summed(mask, attention_bias), (past_key, past_value), scale=scale, is_causal=unidirectional
    )
    return results[:output_count]


def _biased(x: Array, bias: Array) -> Array:
    """Return an array with its bias; keys of an encoder that come as heads have theirs already."""
    return x + bias if x.ndim == 3 else x


def _separate(query: Array, key: Optional, value: Optional) -> tuple[Array, Array, Array]:
    """Return queries, keys and values of the packed forms [N, time, heads, 3 or 2, size] and of separate ones."""
    if key is None:
        if query.ndim != 5:
            raise OnnxError("the node has no keys", expected="packed queries of rank 5, or keys", got=query.ndim)
        q, k, v = (query[:, :, :, n].swapaxes(1, 2) for n in range(3))
        return q, k, v
    keys = jnp.asarray(key)
    if value is None:
        if keys.ndim != 5:
            raise OnnxError("the node has no values", expected="packed keys of rank 5, or values", got=keys.ndim)
        return query, keys[:, :, :, 0].swapaxes(1, 2), keys[:, :, :, 1].swapaxes(1, 2)
    return query, keys, jnp.asarray(value)


@operator("RotaryEmbedding", DOMAIN)
def rotary(
    x: Value,
    position_ids: Value,
    cos_cache: Value,
    sin_cache: Value,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """Pairs of elements of each head rotated; positions are [N, time], or the first one of all samples."""
    if is_packed_batching:
        raise OnnxError("packed batches are not supported", expected="is_packed_batching=0", got=is_packed_batching)
    array = jnp.asarray(x)
    size = rotary_embedding_dim or 2 * np.shape(cos_cache)[-1]
    heads = num_heads or (array.shape[-1] // size if array.ndim == 3 else array.shape[1])
    time = array.shape[1] if array.ndim == 3 else array.shape[2]
    places: Any = position_ids
    if np.size(position_ids) == 1 and np.ndim(position_ids) <= 1:
        places = position_ids.reshape(1, 1) + np.arange(time)
        places = (np if isinstance(places, np.ndarray) else jnp).broadcast_to(places, (array.shape[0], time))
    return rotary_embedding(
        array, cos_cache, sin_cache, places, interleaved=interleaved, num_heads=heads, rotary_embedding_dim=size
    )
