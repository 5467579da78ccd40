"""Attention of decoders: groups of queries that share keys, a cache of keys and values in a buffer, windows, sinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.microsoft.encoder_attention import MASKED, as_heads, attended, multi_head_attention, rotary, summed
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import Array, Optional, Value, static_integer
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, MaxSizes, data_dependent_size, is_static, operator


@operator("GroupQueryAttention", DOMAIN)
def group_query_attention(
    query: Value,
    key: Optional,
    value: Optional,
    past_key: Optional,
    past_value: Optional,
    seqlens_k: Value,
    total_sequence_length: Value,
    cos_cache: Optional = None,
    sin_cache: Optional = None,
    position_ids: Optional = None,
    attention_bias: Optional = None,
    head_sink: Optional = None,
    k_scale: Optional = None,
    v_scale: Optional = None,
    q_norm_weight: Optional = None,
    k_norm_weight: Optional = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    output_count: int = 1,
    max_sizes: MaxSizes,
) -> tuple[Array, ...]:
    """Attention [N, time, heads · size] of new queries with a cache, which the new keys and values are written into.

    `seqlens_k` is the last position of each sample, `total_sequence_length` the longest length. The cache is a buffer:
    as long as the past one where that has room, else as the total length.
    """
    if k_quant_type != "NONE" or v_quant_type != "NONE" or k_scale is not None or v_scale is not None:
        raise OnnxError("quantised caches are not supported", expected="k_quant_type and v_quant_type NONE")
    q, k, v = _heads_of(jnp.asarray(query), key, value, num_heads, kv_num_heads)
    batch, _, time, _ = q.shape
    past = 0 if past_key is None else past_key.shape[2]
    lengths = jnp.reshape(jnp.asarray(seqlens_k), (-1,)).astype(jnp.int32) + 1
    length = _buffer_length(past, total_sequence_length, max_sizes)
    # A prompt fills the cache from its beginning, and is padded behind; new tokens end at the last position.
    is_prompt = jnp.reshape(jnp.asarray(total_sequence_length), ()) == time
    starts = jnp.broadcast_to(jnp.where(is_prompt, 0, lengths - time), (batch,))
    places = starts[:, None] + np.arange(time)
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (_normalized(x, w, qk_norm_epsilon) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise OnnxError("do_rotary needs caches of cosines and sines", expected="cos_cache and sin_cache")
        positions = jnp.maximum(places, 0) if position_ids is None else position_ids
        q, k = (rotary(x, positions, cos_cache, sin_cache, interleaved=rotary_interleaved) for x in (q, k))
    keys, values = (_written(before, new, starts, length) for before, new in ((past_key, k), (past_value, v)))
    distance = places[:, :, None] - np.arange(length)
    is_seen = (distance >= 0) if causal else (np.arange(length) < lengths[:, None, None])
    if local_window_size >= 0:
        is_seen = is_seen & (distance < local_window_size)
    mask = summed(jnp.where(is_seen, 0.0, -jnp.inf)[:, None], _of_length(attention_bias, length))
    assert mask is not None
    sink = None if head_sink is None else jnp.asarray(head_sink)
    if sink is None and smooth_softmax > 0:
        sink = jnp.zeros((num_heads,), q.dtype)
    attending_keys, attending_values, masks = (
        (keys, values, mask) if sink is None else _with_sink(keys, values, mask, sink, num_heads)
    )
    y, *_ = attended(
        (q, attending_keys, attending_values), masks, (None, None), scale=scale, is_causal=0, softcap=softcap
    )
    return (y, keys, values)[:output_count]


def _heads_of(query: Array, key: Optional, value: Optional, heads: int, key_heads: int) -> tuple[Array, Array, Array]:
    """Return queries, keys and values as heads; packed ones are side by side."""
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * key_heads)
        cuts = [heads * size, (heads + key_heads) * size]
        query, key, value = jnp.split(query, cuts, axis=-1)
    return as_heads(query, heads), as_heads(jnp.asarray(key), key_heads), as_heads(jnp.asarray(value), key_heads)


def _buffer_length(past: int, total: Value, max_sizes: MaxSizes) -> int:
    """Return the length of the cache after the node: a traced total must fit into the past buffer or a bound."""
    if is_static(total):
        return max(past, static_integer(total, "total_sequence_length"))
    is_open = not any(bound for _, bound in max_sizes)
    return past if past and is_open else data_dependent_size(max_sizes, "the cache of keys")


def _normalized(x: Array, weight: Value, epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype) * weight


def _written(before: Optional, new: Array, starts: Array, length: int) -> Array:
    """Return a cache [N, heads, length, size] with new rows from the position of each sample on."""
    cache = jnp.zeros((*new.shape[:2], 0, new.shape[3]), new.dtype) if before is None else jnp.asarray(before)
    cache = jnp.pad(cache, ((0, 0), (0, 0), (0, length - cache.shape[2]), (0, 0)))
    # Rows of a negative position, of samples that are shorter than the new tokens, are dropped.
    rows = starts[:, None] + np.arange(new.shape[2])
    rows = jnp.where(rows < 0, length, rows)
    write = jax.vmap(lambda rows, cache, new: cache.at[:, rows].set(new.astype(cache.dtype), mode="drop"))
    written: Array = write(rows, cache, new)
    return written


def _of_length(bias: Optional, length: int) -> Array | None:
    """Return an additive mask for all places of the cache; those behind its own are hidden by the lengths."""
    if bias is None:
        return None
    array = jnp.asarray(bias)[..., :length]
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, length - array.shape[-1]),))


def _with_sink(keys: Array, values: Array, mask: Array, sink: Array, heads: int) -> tuple[Array, Array, Array]:
    """Return keys, values and mask with one more place that has a score for each head, and a value of zero."""
    # A key of zeros scores zero with each query: its mask is the score of the sink.
    empty = jnp.zeros((*keys.shape[:2], 1, keys.shape[3]), keys.dtype)
    scores = jnp.broadcast_to(mask, (mask.shape[0], heads, *mask.shape[2:]))
    column = jnp.broadcast_to(sink.reshape(1, heads, 1, 1), (*scores.shape[:3], 1))
    joined_values = jnp.concatenate([values, jnp.zeros((*values.shape[:2], 1, values.shape[3]), values.dtype)], 2)
    return jnp.concatenate([keys, empty], 2), joined_values, jnp.concatenate([scores, column], 3)


@operator("DecoderMaskedMultiHeadAttention", DOMAIN)
def decoder_masked_attention(
    query: Value,
    key: Optional = None,
    value: Optional = None,
    mask_index: Optional = None,
    attention_bias: Optional = None,
    past_key: Optional = None,
    past_value: Optional = None,
    past_sequence_length: Optional = None,
    beam_width: Optional = None,
    cache_indirection: Optional = None,
    bias: Optional = None,
    *,
    mask_filter_value: float = MASKED,
    num_heads: int,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Attention of one new token; refused with buffers of beams."""
    if beam_width is not None or cache_indirection is not None or past_present_share_buffer:
        raise OnnxError("buffers of past and present with beams are not supported", expected="past of its own length")
    return multi_head_attention(
        query,
        key,
        value,
        bias,
        mask_index,
        attention_bias,
        past_key,
        past_value,
        past_sequence_length,
        mask_filter_value=mask_filter_value,
        num_heads=num_heads,
        scale=scale,
        output_count=output_count,
    )
