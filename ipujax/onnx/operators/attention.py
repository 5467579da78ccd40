"""Attention: softmax, linear and with user functions; rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.element_types import element_dtype
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Value, numpy_for, refuse_outside, refuse_outside_axis
from ipujax.onnx.registry import operator

RAW, CAPPED, BIASED, PROBABILITIES = range(4)  # qk_matmul_output_mode


@operator("Attention")
def attention(
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Optional = None,
    past_key: Optional = None,
    past_value: Optional = None,
    nonpad_kv_seqlen: Optional = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = RAW,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    output_count: int = 1,
) -> Array | tuple[Array, ...]:
    """Scaled dot-product attention with masks, cache, grouped heads and capped scores."""
    # q is [N, heads, queries, size] or [N, queries, heads · size], k and v alike with as many heads or fewer; past keys
    # and values [N, heads, past, size] are in front of theirs. The mask is bool, or added to the scores; it broadcasts
    # to [N, heads, queries, keys], and a shorter one hides the rest. `nonpad_kv_seqlen`: valid keys of each sample.
    # Results: y as q, all keys, all values, scores as `qk_matmul_output_mode` says; as many as the node has.
    flat = jnp.ndim(q) == 3
    queries, keys, values = (
        _split_heads(jnp.asarray(each), heads)
        for each, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
    )
    refuse_outside(nonpad_kv_seqlen, 0, keys.shape[2], "number of keys")
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        keys = jnp.concatenate([jnp.asarray(past_key), keys], axis=2)
        values = jnp.concatenate([jnp.asarray(past_value), values], axis=2)
    root = math.sqrt(1 / math.sqrt(queries.shape[-1]) if scale is None else scale)
    raw = _scores(queries, keys, root)
    capped = softcap * jnp.tanh(raw / softcap) if softcap else raw
    offset = past if nonpad_kv_seqlen is None else jnp.reshape(nonpad_kv_seqlen, (-1, 1, 1, 1)) - queries.shape[2]
    bias = _float_mask(attn_mask, raw)
    hidden = _hidden(raw, offset, bool(is_causal), left_window_size, right_window_size)
    hidden = hidden | _hidden_by_mask(attn_mask, raw) | _hidden_padding(nonpad_kv_seqlen, raw)
    biased = jnp.where(hidden, -jnp.inf, capped + bias).astype(raw.dtype)
    probabilities = _softmax(biased, hidden, bias, softmax_precision).astype(raw.dtype)
    y = _grouped("bghqk,bgkd->bghqd", probabilities, values)
    scores = {RAW: raw, CAPPED: capped, BIASED: biased, PROBABILITIES: probabilities}[qk_matmul_output_mode]
    results = (_join_heads(y) if flat else y, keys, values, scores)
    return results[0] if output_count == 1 else results[:output_count]


def _split_heads(x: Array, heads: int | None) -> Array:
    """[N, time, heads · size] as [N, heads, time, size]."""
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _join_heads(x: Array) -> Array:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _grouped(product: str, per_query_head: Array, per_key_head: Array) -> Array:
    """Product of an array of query heads with one of key heads; consecutive query heads share a key head."""
    groups = per_key_head.shape[1]
    batch, heads, *rest = per_query_head.shape
    result = jnp.einsum(product, per_query_head.reshape(batch, groups, heads // groups, *rest), per_key_head)
    return result.reshape(batch, heads, *result.shape[3:])


def _scores(queries: Array, keys: Array, root: float) -> Array:
    """Products of queries and keys, each scaled by the root of the scale so that half precision does not overflow."""
    factor = jnp.asarray(root, queries.dtype)
    return _grouped("bghqd,bgkd->bghqk", queries * factor, keys * factor)


def _padded_mask(mask: Value, scores: Array, fill: Any) -> Array:
    missing = scores.shape[-1] - mask.shape[-1]
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, max(0, missing))]
    return jnp.pad(jnp.asarray(mask), widths, constant_values=fill)


def _float_mask(mask: Optional, scores: Array) -> Array:
    if mask is None or mask.dtype == bool:
        return jnp.zeros((), scores.dtype)
    return _padded_mask(mask, scores, -jnp.inf).astype(scores.dtype)


def _hidden_by_mask(mask: Optional, scores: Array) -> Array:
    if mask is None:
        return jnp.zeros((), bool)
    if mask.dtype == bool:
        return ~_padded_mask(mask, scores, fill=False)
    return jnp.isneginf(_padded_mask(mask, scores, -jnp.inf))


def _hidden_padding(lengths: Optional, scores: Array) -> Array:
    if lengths is None:
        return jnp.zeros((), bool)
    return jnp.arange(scores.shape[-1]) >= jnp.reshape(lengths, (-1, 1, 1, 1))


def _hidden(scores: Array, offset: Any, causal: bool, past: int, future: int) -> Array:
    """Keys after the query, or out of its window; `offset` is the position of the first query."""
    xp = numpy_for(scores.shape[-2] * scores.shape[-1])
    distance = xp.arange(scores.shape[-2])[:, None] + offset - xp.arange(scores.shape[-1])
    hidden = jnp.zeros((), bool)
    # A query at position p sees keys 0 … p of the cache and of this call together.
    if causal:
        hidden = hidden | (distance < 0)
    if past >= 0:
        hidden = hidden | (distance > past)
    if future >= 0:
        hidden = hidden | (-distance > future)
    return hidden


def _softmax(biased: Array, hidden: Array, bias: Array, precision: int | None) -> Array:
    """Softmax over keys; zero where a query has none. No NaN is computed, so that gradients have none either."""
    scores = biased.astype(element_dtype(precision)) if precision is not None else biased
    empty = jnp.all(jnp.broadcast_to(hidden, scores.shape), axis=-1, keepdims=True)
    safe = jnp.where(empty, 0, scores)
    largest = lax.stop_gradient(jnp.max(safe, axis=-1, keepdims=True))
    weights = jnp.exp(safe - largest)
    return jnp.where(empty, 0, weights / jnp.sum(weights, axis=-1, keepdims=True))


@operator("FlexAttention", "ai.onnx.preview")
def flex_attention(
    q: Value,
    k: Value,
    v: Value,
    *,
    prob_mod: Callable[[Array], Any] | None = None,
    scale: float | None = None,
    score_mod: Callable[[Array], Any] | None = None,
    softmax_precision: int | None = None,
) -> Array:
    """Attention with functions of scores and of probabilities, given as subgraphs; layouts as in Attention, rank 4."""
    queries, keys, values = map(jnp.asarray, (q, k, v))
    root = math.sqrt(1 / math.sqrt(queries.shape[-1]) if scale is None else scale)
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    dtype = wide if softmax_precision is None else element_dtype(softmax_precision)
    scores = _modified(score_mod, _scores(queries, keys, root).astype(dtype))
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    probabilities = _modified(prob_mod, weights / jnp.sum(weights, axis=-1, keepdims=True))
    return _grouped("bghqk,bgkd->bghqd", probabilities, values.astype(dtype)).astype(values.dtype)


def _modified(function: Callable[[Array], Any] | None, x: Array) -> Array:
    """Apply the graph with which a node modifies scores or probabilities; none leaves them."""
    if function is None:
        return x
    (result,) = function(x)
    return jnp.asarray(result)


@operator("LinearAttention")
def linear_attention(
    query: Value,
    key: Value,
    value: Value,
    past_state: Optional = None,
    decay: Optional = None,
    beta: Optional = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array]:
    """Attention as a recurrence of states [N, heads, key size, value size]: a `lax.scan` over time, in float32."""
    # `chunk_size` is a hint to implementations, without part in the result.
    _check_update_rule(update_rule, decay, beta)
    q, k, v = (
        _time_first(jnp.asarray(each), heads)
        for each, heads in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    length, batch, heads, size = k.shape
    factor = scale or 1 / math.sqrt(size)
    # without decay states keep all, without correction all of a value is written
    gates = (
        jnp.ones((length, batch, heads, 1), jnp.float32)
        if decay is None
        else jnp.exp(_time_first(jnp.asarray(decay), heads))
    )
    rates = (
        jnp.ones((length, batch, 1, 1), jnp.float32)
        if beta is None
        else jnp.asarray(beta).astype(jnp.float32).swapaxes(0, 1)[..., None]
    )
    corrected = update_rule in ("delta", "gated_delta")
    state_dtype = jnp.asarray(query).dtype if past_state is None else jnp.asarray(past_state).dtype
    start = (
        jnp.zeros((batch, heads, size, v.shape[-1]), jnp.float32)
        if past_state is None
        else jnp.asarray(past_state).astype(jnp.float32)
    )

    def step(state: Array, each: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, gate, rate = each
        decayed = state * gate[..., None]
        written = rate * (v_t - jnp.einsum("bhdm,bhd->bhm", decayed, k_t)) if corrected else v_t
        new = decayed + k_t[..., :, None] * written[..., None, :]
        grouped = q_t.reshape(batch, heads, q_num_heads // heads, size)
        return new, factor * jnp.einsum("bhgd,bhdm->bhgm", grouped, new)

    last, outputs = lax.scan(step, start, (q, k, v, gates, rates))
    y = outputs.reshape(length, batch, -1).swapaxes(0, 1)
    return y.astype(jnp.asarray(query).dtype), last.astype(state_dtype)


# Rule → whether it has decays, and rates.
_UPDATE_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


def _check_update_rule(update_rule: str, decay: Optional, beta: Optional) -> None:
    """Refuse a rule that there is not, and one with an operand that it does not read, or without one that it does."""
    if update_rule not in _UPDATE_RULES:
        raise OutsideError("update_rule is unknown", expected=f"one of {', '.join(_UPDATE_RULES)}", got=update_rule)
    for name, operand, is_read in zip(("decay", "beta"), (decay, beta), _UPDATE_RULES[update_rule], strict=True):
        if (operand is not None) != is_read:
            message = f"the update rule {update_rule!r} {'needs' if is_read else 'does not read'} {name}"
            raise OutsideError(
                message, expected="the operand" if is_read else "none", got=name if operand is not None else "none"
            )


def _time_first(x: Array, heads: int) -> Array:
    """[N, time, heads · size] as float32 [time, N, heads, size]."""
    return x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1).swapaxes(0, 1)


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Array,
    cos_cache: Value,
    sin_cache: Value,
    position_ids: Optional = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Pairs of elements of each head rotated by angles of its position; layouts as in Attention."""
    heads = x if x.ndim == 4 else _split_heads(x, num_heads)
    size = rotary_embedding_dim or heads.shape[-1]
    turned = heads[..., :size]
    rest = heads[..., size:]
    if position_ids is not None:
        refuse_outside_axis(position_ids, np.shape(cos_cache)[0], 0)
    cosine, sine = (
        (jnp.asarray(cache) if position_ids is None else jnp.asarray(cache)[position_ids])[:, None]
        for cache in (cos_cache, sin_cache)
    )
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, axis=-1)
    real = cosine * first - sine * second
    imaginary = sine * first + cosine * second
    if interleaved:
        rotated = jnp.stack([real, imaginary], axis=-1).reshape(turned.shape)
    else:
        rotated = jnp.concatenate([real, imaginary], axis=-1)
    result = jnp.concatenate([rotated, rest], axis=-1)
    return result if x.ndim == 4 else _join_heads(result)
