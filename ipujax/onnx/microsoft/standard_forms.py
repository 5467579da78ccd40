"""Norms of sums and of embeddings; operators that have become ONNX's own since, in their earlier form; small ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import working_dtype
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.constant_arrays import number_range, triangle
from ipujax.onnx.operators.early_forms import grid_sample_of_opset_16
from ipujax.onnx.operators.indexing import gather_nd
from ipujax.onnx.operators.normalization import layer_normalization, scaled_by_root_mean_square
from ipujax.onnx.operators.operand_types import (
    Array,
    Optional,
    Static,
    Value,
    along,
    integers,
    on_axis,
    refuse_outside_axis,
)
from ipujax.onnx.operators.shapes import pad
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


@operator("SkipSimplifiedLayerNormalization", DOMAIN)
def skip_simplified_layer_normalization(
    x: Value, skip: Value, gamma: Value, bias: Optional = None, *, epsilon: float = 1e-12, output_count: int = 1
) -> tuple[Array, ...]:
    """Root mean square norm of x + skip + bias; also zero for a mean, the reciprocal of the norm, and the sum."""
    total = _total(x, skip, bias)
    on_axis(gamma, total, -1, "gamma")
    y, inverse = scaled_by_root_mean_square(total, gamma, -1, epsilon)
    return (y, jnp.zeros_like(inverse), inverse, total)[:output_count]


@operator("SimplifiedLayerNormalization", DOMAIN)
def simplified_layer_normalization(
    x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, output_count: int = 1
) -> tuple[Array, ...]:
    """Root mean square norm over an axis and those after it, and the reciprocal of the norm."""
    # ONNX Runtime has it among ONNX's own operators; see `reading.rewrites`.
    return scaled_by_root_mean_square(jnp.asarray(x), scale, axis, epsilon, stash_type)[:output_count]


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


@operator("Inverse", DOMAIN)
def inverse(x: Value) -> Array:
    return jnp.linalg.inv(jnp.asarray(x))


@operator("ExpandDims", DOMAIN)
def expand_dims(x: Value, axis: Static) -> Array:
    return jnp.expand_dims(jnp.asarray(x), integers(axis)[0])


@operator("TorchEmbedding", DOMAIN)
def torch_embedding(
    weight: Value, indices: Value, padding_idx: Optional = None, scale_grad_by_freq: Optional = None
) -> Array:
    """Rows of a table; the other operands are about gradients."""
    return jnp.asarray(weight)[jnp.asarray(indices)]


@operator("IsAllFinite", DOMAIN)
def is_all_finite(*inputs: Value, isinf_only: int = 0, isnan_only: int = 0) -> Array:
    """Whether no element of any operand is infinite or NaN, or one of the two."""
    if isinf_only and isnan_only:
        raise OnnxError("isinf_only and isnan_only exclude one another", expected="one of them")
    is_wrong = jnp.isinf if isinf_only else jnp.isnan if isnan_only else lambda x: ~jnp.isfinite(x)
    return ~jnp.any(jnp.stack([jnp.any(is_wrong(jnp.asarray(x))) for x in inputs]))


@operator("CDist", DOMAIN)
def pairwise_distances(a: Value, b: Value, *, metric: str = "sqeuclidean") -> Array:
    """Distances, or their squares, of each row of a from each row of b."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise OnnxError("the attribute 'metric' is unknown", expected="euclidean or sqeuclidean", got=metric)
    squares = jnp.sum(jnp.square(jnp.asarray(a)[:, None] - jnp.asarray(b)[None]), axis=-1)
    return squares if metric == "sqeuclidean" else jnp.sqrt(squares)


operator("GatherND", DOMAIN)(gather_nd)
operator("Trilu", DOMAIN)(triangle)


@operator("Range", DOMAIN)
def range_by_one(start: Static, limit: Static, delta: Static | None = None) -> Value:
    """Numbers from `start` to below `limit`, one apart without `delta`."""
    return number_range(start, limit, np.ones((), start.dtype) if delta is None else delta)


@operator("Pad", DOMAIN)
def padded(data: Array, pads: Static, value: Optional = None, *, mode: str = "constant") -> Array:
    """Array with static widths of padding around it."""
    modes = ("constant", "reflect", "edge")
    if mode not in modes:
        raise OnnxError("the attribute 'mode' is unknown", expected=f"one of {', '.join(modes)}", got=mode)
    return pad(data, pads, value, mode=mode)


@operator("GridSample", DOMAIN)
def sample_on_grid(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Any:
    """As ONNX's GridSample of opset 16."""
    names = ("bilinear", "nearest", "bicubic")
    if mode not in names:
        raise OnnxError("the attribute 'mode' is unknown", expected=f"one of {', '.join(names)}", got=mode)
    return grid_sample_of_opset_16(x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


# Of ONNX Runtime's own among the operators of ONNX, see `reading.rewrites`.


@operator("Affine", DOMAIN)
def affine(x: Value, *, alpha: float = 1.0, beta: float = 0.0) -> Array:
    return alpha * jnp.asarray(x) + beta


@operator("ParametricSoftplus", DOMAIN)
def parametric_softplus(x: Value, *, alpha: float = 1.0, beta: float = 1.0) -> Array:
    return alpha * jax.nn.softplus(beta * jnp.asarray(x))


@operator("ScaledTanh", DOMAIN)
def scaled_tanh(x: Value, *, alpha: float = 1.0, beta: float = 1.0) -> Array:
    return alpha * jnp.tanh(beta * jnp.asarray(x))


@operator("ImageScaler", DOMAIN)
def image_scaler(x: Value, *, bias: Sequence[float], scale: float = 1.0) -> Array:
    """Images times a factor, and a bias for each channel."""
    array = jnp.asarray(x)
    if len(bias) != array.shape[1]:
        raise OnnxError("bias needs a value for each channel", expected=array.shape[1], got=len(bias))
    return scale * array + along(jnp.asarray(np.asarray(bias, array.dtype)), 1, array.ndim)
