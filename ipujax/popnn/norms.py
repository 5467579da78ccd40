"""Batch, group, instance and layer normalisation: statistics, normalised tensors, gradients and updates.

Activations are [batch, channels, field…]. Batch normalisation keeps a mean and an inverse standard deviation for each
channel, [channels]; the others for groups of channels of each sample, [batch, groups]: an instance is a group of one
channel, a layer one group of all. `gamma` and `beta` are [channels].

    mean, inverse = popnn.batch_norm_statistics(graph, x, 1e-5, prog)
    y, whitened = popnn.batch_normalise(graph, x, gamma, beta, mean, inverse, prog)
    d_gamma, d_beta = popnn.batch_norm_param_gradients(graph, whitened, dy, prog)
    dx = popnn.batch_norm_gradients(graph, whitened, dy, inverse, gamma, prog)

Gradients go through the statistics, taken as those of the biased variance, and need the whitened activations:
`*_whiten` makes them anew from the activations where they were not kept.
Half activations are computed in float and rounded once at the end.
Source: popnn `BatchNorm.hpp`, `GroupNorm.hpp`, `InstanceNorm.hpp`, `LayerNorm.hpp`.
Limits: groups are of neighbouring channels (`groupNormStridedChannelGrouping` is false); statistics are of one replica.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.emit import placing
from ipujax.lowering.poputil import map_linearly
from ipujax.poplar.library import add
from ipujax.popops.scaled import scaled_add_to
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

_WIDE = jnp.float32


def create_norm_params(graph: Graph, x: Tensor, name: str = "norm") -> tuple[Tensor, Tensor]:
    """Tensors `gamma` and `beta` for activations, spread over the tiles and not yet written.

    Source: poplin::createNormParams, popnn::bn::createBatchNormParams.
    """
    _check(name, x)
    made = [graph.add_variable(x.shape[1:2], x.dtype, f"{name}/{part}") for part in ("gamma", "beta")]
    with placing(graph):
        for tensor in made:
            map_linearly(graph, tensor)
    return made[0], made[1]


def statistics(
    graph: Graph,
    x: Tensor,
    epsilon: float,
    groups: int | None,
    prog: Program,
    name: str,
    unbiased_var_estimate: bool,
    stable_algo: bool,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of channels (`groups` None), or of groups of channels of each sample."""
    _check(name, x)
    if groups is not None and (groups < 1 or x.shape[1] % groups):
        raise GraphError(f"{name}: groups of unequal size", got=f"{x.shape[1]} channels, {groups} groups")
    shape, over = _parts(x.shape, groups)
    count = prod(shape[d] for d in over)
    if count < (2 if unbiased_var_estimate else 1):
        raise GraphError(f"{name}: too few elements for statistics", got=f"{count} for each")

    def estimated(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = a.astype(_WIDE).reshape(shape)
        mean = jnp.mean(parts, over, keepdims=True)
        if stable_algo:
            variance = jnp.mean(lax.square(parts - mean), over, keepdims=True)
        else:  # one pass over the elements; what cancels may fall below zero
            variance = jnp.maximum(jnp.mean(lax.square(parts), over, keepdims=True) - lax.square(mean), 0)
        if unbiased_var_estimate:
            variance = variance * (count / (count - 1))
        kept = [n for d, n in enumerate(shape) if d not in over]
        inverse = lax.rsqrt(variance + epsilon)
        return mean.reshape(kept).astype(a.dtype), inverse.reshape(kept).astype(a.dtype)

    return add(graph, estimated, [x], prog, name)


def whiten(graph: Graph, x: Tensor, mean: Tensor, inverse: Tensor, grouped: bool, prog: Program, name: str) -> Tensor:
    """`(x - mean) · inverse`."""
    groups = _groups(name, x, [mean, inverse], grouped)

    def whitened(a: jax.Array, m: jax.Array, i: jax.Array) -> jax.Array:
        return _whitened(a, m, i, groups).astype(a.dtype)

    return add(graph, whitened, [x, mean, inverse], prog, name)


def normalise(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    inverse: Tensor,
    grouped: bool,
    prog: Program,
    name: str,
) -> tuple[Tensor, Tensor]:
    """The whitened activations times `gamma` plus `beta`, and the whitened activations."""
    groups = _groups(name, x, [mean, inverse], grouped)
    _check(name, x, gamma, beta)

    def normalised(a: jax.Array, g: jax.Array, b: jax.Array, m: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        white = _whitened(a, m, i, groups)
        out = white * _by_channel(g, a.ndim) + _by_channel(b, a.ndim)
        return out.astype(a.dtype), white.astype(a.dtype)

    return add(graph, normalised, [x, gamma, beta, mean, inverse], prog, name)


def param_gradients(
    graph: Graph, whitened: Tensor, gradient: Tensor, prog: Program, name: str
) -> tuple[Tensor, Tensor]:
    """Gradients of `gamma` and `beta`, from the whitened activations and the gradient of the result."""
    _check_alike(name, whitened, gradient)
    over = (0, *range(2, whitened.ndim))

    def gradients(w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, g, dtype = w.astype(_WIDE), g.astype(_WIDE), w.dtype
        return jnp.sum(w * g, over).astype(dtype), jnp.sum(g, over).astype(dtype)

    return add(graph, gradients, [whitened, gradient], prog, name)


def gradients(
    graph: Graph,
    whitened: Tensor,
    gradient: Tensor,
    inverse: Tensor,
    gamma: Tensor,
    grouped: bool,
    prog: Program,
    name: str,
) -> Tensor:
    """The gradient of the activations, through normalisation and statistics."""
    _check_alike(name, whitened, gradient)
    _check(name, whitened, gamma)
    groups = _groups(name, whitened, [inverse], grouped)
    shape, over = _parts(whitened.shape, groups)

    def backward(w: jax.Array, g: jax.Array, i: jax.Array, scale: jax.Array) -> jax.Array:
        white = w.astype(_WIDE).reshape(shape)
        inner = (g.astype(_WIDE) * _by_channel(scale, g.ndim)).reshape(shape)
        along = jnp.mean(inner * white, over, keepdims=True)
        out = (inner - jnp.mean(inner, over, keepdims=True) - white * along) * _kept(i, groups)
        return out.reshape(g.shape).astype(g.dtype)

    return add(graph, backward, [whitened, gradient, inverse, gamma], prog, name)


def norm_param_update(
    graph: Graph,
    gamma_delta: Tensor,
    beta_delta: Tensor,
    scale: float | Tensor,
    gamma: Tensor,
    beta: Tensor,
    prog: Program,
    name: str = "norm_param_update",
) -> None:
    """Adds `scale` times their gradients to `gamma` and `beta`, in place; the scale is a number or one element.

    Source: popnn::bn::batchNormParamUpdate and its like.
    """
    scaled_add_to(graph, gamma, gamma_delta, scale, prog, f"{name}/gamma")
    scaled_add_to(graph, beta, beta_delta, scale, prog, f"{name}/beta")


def _parts(shape: tuple[int, ...], groups: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[batch, groups, channels of a group, field], and the dimensions that statistics are taken over."""
    batch, channels, *field = shape
    if groups is None:
        return (batch, channels, 1, prod(field)), (0, 2, 3)
    return (batch, groups, channels // groups, prod(field)), (2, 3)


def _kept(statistic: jax.Array, groups: int | None) -> jax.Array:
    """Statistics in a shape that broadcasts with the parts."""
    wide = statistic.astype(_WIDE)
    return wide.reshape((1, -1, 1, 1) if groups is None else (-1, groups, 1, 1))


def _whitened(x: jax.Array, mean: jax.Array, inverse: jax.Array, groups: int | None) -> jax.Array:
    parts = x.astype(_WIDE).reshape(_parts(x.shape, groups)[0])
    return ((parts - _kept(mean, groups)) * _kept(inverse, groups)).reshape(x.shape)


def _by_channel(values: jax.Array, rank: int) -> jax.Array:
    return values.astype(_WIDE).reshape(1, -1, *([1] * (rank - 2)))


def _groups(name: str, x: Tensor, kept: list[Tensor], grouped: bool) -> int | None:
    """How many groups of channels statistics are of; None for those of channels."""
    _check(name, x)
    batch, channels = x.shape[:2]
    groups = kept[0].size // max(1, batch) if grouped else None
    fits = (groups and channels % groups == 0) if grouped else True
    size = batch * groups if groups is not None else channels
    if not fits or any(t.size != size for t in kept):
        expected, got = "[batch, groups]" if grouped else f"[{channels}]", [list(t.shape) for t in kept]
        raise GraphError(f"{name}: not the statistics of {list(x.shape)}", expected=expected, got=got)
    return groups


def _check(name: str, x: Tensor, *params: Tensor) -> None:
    if x.ndim < 2 or np.dtype(x.dtype).kind != "f" or any(p.shape != x.shape[1:2] for p in params):
        expected = "floats [batch, channels, field…] and [channels]"
        raise GraphError(f"{name}: no activations", expected=expected, got=[list(t.shape) for t in (x, *params)])


def _check_alike(name: str, whitened: Tensor, gradient: Tensor) -> None:
    _check(name, whitened)
    if gradient.shape != whitened.shape:
        raise GraphError(f"{name}: the gradient has another shape", expected=whitened.shape, got=gradient.shape)
