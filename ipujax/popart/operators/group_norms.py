"""Normalisations of ai.graphcore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.popart.operators.domain import graphcore


@graphcore("GroupNormalization")
def group_normalization(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, num_groups: int, epsilon: float = 1e-5, strided: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return x normalised in groups of channels, with mean and inverse deviation of each group.

    Args:
        x: [batch, channels, …].
        scale: [channels].
        bias: [channels].
        num_groups: number of groups.
        epsilon: added to the variance.
        strided: 0 for groups of adjacent channels, 1 for every num_groups-th channel.

    Returns:
        The normalised tensor, and mean and inverse deviation, [batch · groups] each.
    """
    # Statistics in float32: sums of float16 over a large group lose their digits.
    order = np.arange(x.shape[1])
    order = order.reshape(-1, num_groups).T.reshape(-1) if strided else order
    gathered = x[:, order] if strided else x
    grouped = gathered.reshape(x.shape[0] * num_groups, -1).astype(jnp.float32)
    mean = jnp.mean(grouped, axis=1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.var(grouped, axis=1, keepdims=True) + epsilon)
    normal = ((grouped - mean) * inverse).reshape(x.shape).astype(x.dtype)
    normal = normal[:, np.argsort(order)] if strided else normal
    channels = (1, -1, *[1] * (x.ndim - 2))
    scaled = normal * scale.reshape(channels) + bias.reshape(channels)
    return scaled.astype(x.dtype), mean[:, 0].astype(x.dtype), inverse[:, 0].astype(x.dtype)


@graphcore("BatchNormalization")
def batch_normalization(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    output_count: int = 1,
) -> Any:
    """Return x normalised over batch and space; in training with running and batch statistics.

    Args:
        x: [batch, channels, …].
        scale: [channels]; [channels, …] where `spatial` is 0, as the next three.
        bias: see scale.
        mean: running mean.
        variance: running variance.
        epsilon: added to the variance.
        momentum: weight of the running statistics.
        spatial: 0 for statistics of each element of a sample, over the batch alone (opset 7).
        output_count: 1 normalises with the running statistics, more with those of the batch.

    Returns:
        The normalised tensor; in training also running mean, running variance, mean and variance of the batch. The
        running variance follows the unbiased one, as PyTorch's does.
    """
    channels = (1, -1, *[1] * (x.ndim - 2)) if spatial else (1, *x.shape[1:])
    if output_count == 1:
        inverse = jax.lax.rsqrt(variance + epsilon)
        normal = (x - mean.reshape(channels)) * (scale * inverse).reshape(channels) + bias.reshape(channels)
        return normal.astype(x.dtype)
    axes = tuple(i for i in range(x.ndim) if i != 1) if spatial else (0,)
    wide = x.astype(jnp.float32)
    batch_mean = jnp.mean(wide, axis=axes)
    batch_variance = jnp.var(wide, axis=axes)
    inverse = jax.lax.rsqrt(batch_variance + epsilon)
    normal = (wide - batch_mean.reshape(channels)) * (scale * inverse).reshape(channels) + bias.reshape(channels)
    count = x.size // max(mean.size, 1)
    # One element has no unbiased variance: divided by 1, it is 0.
    unbiased = batch_variance * count / max(count - 1, 1)
    running_mean = momentum * mean + (1 - momentum) * batch_mean
    running_variance = momentum * variance + (1 - momentum) * unbiased
    outputs = (normal.astype(x.dtype), running_mean, running_variance, batch_mean, batch_variance)
    statistics = tuple(value.astype(mean.dtype) for value in outputs[1:])
    return (outputs[0], *statistics)[:output_count]
