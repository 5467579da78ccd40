"""Normalisations by mean and variance, by norms, and over neighbouring channels. Layouts are N C spatial."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.element_types import element_dtype, working_dtype
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Value, along, axis_of, on_axis
from ipujax.onnx.registry import operator


@operator("BatchNormalization")
def batch_normalization(
    x: Array,
    scale: Value,
    bias: Value,
    input_mean: Value,
    input_var: Value,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    output_count: int = 1,
) -> Array | tuple[Array, ...]:
    """Each channel normalised with given statistics, or with its own, and then the running statistics too."""
    shape = x.shape
    x = x[:, None] if x.ndim == 1 else x  # of one channel
    if not training_mode:
        return _normalized(x, scale, bias, input_mean, input_var, epsilon).reshape(shape)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    # Statistics of half precision are computed in single precision.
    wide = x.astype(working_dtype(x.dtype))
    mean = jnp.mean(wide, axes)
    variance = jnp.var(wide, axes)
    # The variance is that of the population, unlike the unbiased one of PyTorch.
    running = [
        (momentum * jnp.asarray(old) + (1 - momentum) * new).astype(jnp.asarray(old).dtype)
        for old, new in ((input_mean, mean), (input_var, variance))
    ]
    return (_normalized(x, scale, bias, mean, variance, epsilon).reshape(shape), *running)[:output_count]


def _normalized(x: Array, scale: Value, bias: Value, mean: Value, variance: Value, epsilon: float) -> Array:
    """Array normalised by statistics of channels, all [C]: one factor and two offsets a channel."""
    for values, name in ((scale, "scale"), (variance, "input_var")):
        on_axis(values, x, 1, name)
    factor = jnp.asarray(scale) * lax.rsqrt(jnp.asarray(variance) + epsilon)
    centred = x - on_axis(mean, x, 1, "input_mean")
    return (centred * along(factor, 1, x.ndim) + on_axis(bias, x, 1, "bias")).astype(x.dtype)


@operator("InstanceNormalization")
def instance_normalization(x: Array, scale: Value, bias: Value, *, epsilon: float = 1e-5) -> Array:
    """Each channel of each sample normalised over its image."""
    axes = tuple(range(2, x.ndim))
    wide = x.astype(working_dtype(x.dtype))
    standard = _standardized(wide, axes, epsilon)[0].astype(x.dtype)
    return standard * on_axis(scale, x, 1, "scale") + on_axis(bias, x, 1, "bias")


def _standardized(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """Array of mean zero and variance one, the mean, and the reciprocal of the deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    inverse = lax.rsqrt(jnp.mean(centred * centred, axes, keepdims=True) + epsilon)
    return centred * inverse, mean, inverse


@operator("GroupNormalization")
def group_normalization(
    x: Array, scale: Value, bias: Value, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Array:
    """Each group of channels of each sample normalised, computed in `stash_type`."""
    if x.shape[1] % num_groups:
        raise OutsideError("groups do not divide the channels", expected=f"a multiple of {num_groups}", got=x.shape[1])
    groups = x.reshape(x.shape[0], num_groups, -1).astype(element_dtype(stash_type))
    standard = _standardized(groups, (2,), epsilon)[0].astype(x.dtype).reshape(x.shape)
    return standard * on_axis(scale, x, 1, "scale") + on_axis(bias, x, 1, "bias")


@operator("LayerNormalization")
def layer_normalization(
    x: Array,
    scale: Value,
    bias: Optional = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    output_count: int = 1,
) -> Array | tuple[Array, ...]:
    """Array normalised over an axis and those after it; mean and reciprocal deviation in `stash_type`."""
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    standard, mean, inverse = _standardized(x.astype(element_dtype(stash_type)), axes, epsilon)
    # `stash_type` is the type of the statistics alone; scale and bias apply in that of the array.
    y = standard.astype(x.dtype) * scale
    shifted = y if bias is None else y + bias
    return shifted if output_count == 1 else (shifted, mean, inverse)[:output_count]


@operator("RMSNormalization")
def rms_normalization(x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Array:
    """Array divided by its root mean square over an axis and those after it."""
    return scaled_by_root_mean_square(jnp.asarray(x), scale, axis, epsilon, stash_type)[0]


def scaled_by_root_mean_square(
    x: Array, scale: Value, axis: int, epsilon: float, stash_type: int = 1
) -> tuple[Array, Array]:
    """Return the array of `rms_normalization`, and the reciprocal of the root."""
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    wide = x.astype(element_dtype(stash_type))
    inverse = lax.rsqrt(jnp.mean(wide * wide, axes, keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * scale, inverse


@operator("LpNormalization")
def lp_normalization(x: Array, *, axis: int = -1, p: int = 2) -> Array:
    """Array divided by its norm along an axis; zero where the norm is."""
    wide = x.astype(working_dtype(x.dtype))
    total = jnp.sum(jnp.abs(wide) if p == 1 else wide * wide, axis, keepdims=True)
    # of a zero norm neither root nor quotient is computed: their gradients are infinite
    safe = jnp.where(total == 0, 1, total)
    norm = safe if p == 1 else jnp.sqrt(safe)
    return jnp.where(total == 0, 0, x / norm).astype(x.dtype)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(x: Array, *, axes: Sequence[int] = (0, 2, 3)) -> Array:
    """Array of mean zero and deviation one over axes."""
    wide = x.astype(working_dtype(x.dtype))
    centred = wide - jnp.mean(wide, tuple(axes), keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centred * centred, tuple(axes), keepdims=True))
    # 1e-9 is added to the deviation, not to the variance: the function body in the schema.
    return (centred / (deviation + 1e-9)).astype(x.dtype)


@operator("LRN")
def local_response_normalization(
    x: Array, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Array:
    """Array divided by a power of the mean square over `size` neighbouring channels."""
    rest = (1,) * (x.ndim - 2)
    padding = [(0, 0), ((size - 1) // 2, size // 2), *((0, 0),) * (x.ndim - 2)]
    wide = x.astype(working_dtype(x.dtype))
    zero = np.zeros((), wide.dtype)
    squares = lax.reduce_window(wide * wide, zero, lax.add, (1, size, *rest), (1, 1, *rest), padding)
    return (wide / (bias + alpha / size * squares) ** beta).astype(x.dtype)
