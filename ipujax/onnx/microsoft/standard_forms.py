"""Operators that have become ONNX's own since, in their earlier form, and small ones without a counterpart there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.images import grid_sample
from ipujax.onnx.operators.indexing import gather_nd
from ipujax.onnx.operators.operand_types import Array, Optional, Value, along
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator, static


@operator("Inverse", DOMAIN)
def inverse(x: Value) -> Array:
    return jnp.linalg.inv(jnp.asarray(x))


@operator("ExpandDims", DOMAIN)
def expand_dims(x: Value, axis: Value) -> Array:
    return jnp.expand_dims(jnp.asarray(x), int(static(axis, "axis").reshape(())))


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


@operator("Trilu", DOMAIN)
def triangle(x: Value, k: Optional = None, *, upper: int = 1) -> Array:
    diagonal = 0 if k is None else int(static(k, "k").reshape(()))
    return (jnp.triu if upper else jnp.tril)(jnp.asarray(x), diagonal)


@operator("GatherND", DOMAIN)
def gather_rows(data: Value, indices: Value) -> Any:
    return gather_nd(data, indices)


@operator("Range", DOMAIN)
def number_range(start: Value, limit: Value, delta: Optional = None) -> np.ndarray:
    """Static numbers from `start` to below `limit`."""
    first, stop = static(start, "start"), static(limit, "limit")
    step = np.ones((), first.dtype) if delta is None else static(delta, "delta")
    count = np.ceil((stop - first) / step).reshape(())
    return np.asarray(first + step * np.arange(max(0, int(count))), first.dtype)


@operator("Pad", DOMAIN)
def padded(data: Value, pads: Value, value: Optional = None, *, mode: str = "constant") -> Array:
    """Array with static widths of padding around it."""
    modes = {"constant": "constant", "reflect": "reflect", "edge": "edge"}
    if mode not in modes:
        raise OnnxError("the attribute 'mode' is unknown", expected=f"one of {', '.join(modes)}", got=mode)
    widths: Sequence[Any] = static(pads, "pads").reshape(2, -1).T.tolist()
    if mode == "constant":
        return jnp.pad(
            jnp.asarray(data), widths, constant_values=0 if value is None else jnp.asarray(value).reshape(())
        )
    return jnp.pad(jnp.asarray(data), widths, mode=mode)


@operator("GridSample", DOMAIN)
def sample_on_grid(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Any:
    """As ONNX's GridSample, whose modes have other names since."""
    names = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
    if mode not in names:
        raise OnnxError("the attribute 'mode' is unknown", expected=f"one of {', '.join(names)}", got=mode)
    return grid_sample(x, grid, align_corners=align_corners, mode=names[mode], padding_mode=padding_mode)


# Of ONNX Runtime's own among the operators of ONNX, see `reading.old_nodes`.


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
