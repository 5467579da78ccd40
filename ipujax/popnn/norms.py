"""Batch, group, instance and layer normalisation: statistics, normalised tensors, gradients and updates.

Activations are [batch, channels, field…]. Batch normalisation keeps a mean and an inverse standard deviation for each
channel, [channels]; the others for groups of channels of each sample, [batch, groups]: an instance is a group of one
channel, a layer one group of all. `gamma` and `beta` are [channels].

    mean, inverse = popnn.batch_norm_statistics(graph, x, 1e-5, prog)
    y, whitened = popnn.batch_normalise(graph, x, gamma, beta, mean, inverse, prog)
    d_gamma, d_beta = popnn.batch_norm_param_gradients(graph, whitened, dy, prog)
    dx = popnn.batch_norm_gradients(graph, whitened, dy, inverse, gamma, prog)

Gradients go through the statistics, taken as those of the biased variance, and need the whitened activations:
`*_whiten` recomputes them from the activations where they were not kept.
Half activations are computed in float and rounded once at the end.
Source: popnn `BatchNorm.hpp`, `GroupNorm.hpp`, `InstanceNorm.hpp`, `LayerNorm.hpp`.
Limits: groups are of neighbouring channels (`groupNormStridedChannelGrouping` is false); statistics are of one replica.

An instance norm is a group norm with one channel a group, a layer norm one with a single group: only their statistics
differ, as in PopLibs. The other functions derive the number of groups from the size of the statistics.
Overloads of PopLibs that take
activations and statistics instead of whitened activations are `*_norm_whiten` followed by the functions here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import map_linearly
from ipujax.poplar.library import add
from ipujax.popops.elementwise import scaled_add_to
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

_WIDE = jnp.float32


def create_norm_params(graph: Graph, x: Tensor, name: str = "norm") -> tuple[Tensor, Tensor]:
    """Create tensors `gamma` and `beta` [channels] for activations, mapped linearly and not yet written.

    Source: poplin::createNormParams, popnn::bn::createBatchNormParams.
    """
    _check(name, x)
    gamma, beta = (graph.add_variable(x.shape[1:2], x.dtype, f"{name}/{part}") for part in ("gamma", "beta"))
    with placing(graph):
        map_linearly(graph, gamma)
        map_linearly(graph, beta)
    return gamma, beta


@dataclass(frozen=True)
class Norm:
    """Kind of normalisation; its methods are the functions under PopLibs' names.

    Args:
        kind: "batch", "group", "instance" or "layer".
        groups: number of groups for a number of channels; None for statistics of each channel over the whole batch.
    """

    kind: str
    groups: Callable[[int], int | None]

    def statistics(
        self,
        graph: Graph,
        x: Tensor,
        epsilon: float,
        prog: Program,
        unbiased_var_estimate: bool = False,
        stable_algo: bool = False,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return mean and inverse standard deviation, of each channel or of groups of channels of each sample.

        Args:
            graph: graph to add to.
            x: activations [batch, channels, field…].
            epsilon: added to the variance.
            prog: program to add to.
            unbiased_var_estimate: divide by the number of elements less one.
            stable_algo: subtract the mean before squaring, in a second pass over the elements.
            name: debug name.

        Returns:
            Two new tensors: [channels] for "batch", [batch, groups] for "group", [batch, channels] for "instance",
            [batch, 1] for "layer".

        Raises:
            GraphError: no activations, too few elements, or groups of unequal size.

        Source: popnn::bn::batchNormStatistics; gn, in and ln have the same.
        """
        name = name or f"{self.kind}_norm_statistics"
        _check(name, x)
        groups = self.groups(x.shape[1])
        if groups is not None and (groups < 1 or x.shape[1] % groups):
            raise GraphError(f"{name}: groups of unequal size", got=f"{x.shape[1]} channels, {groups} groups")
        shape, over = _parts(x.shape, groups)
        count = prod(shape[d] for d in over)
        if count < (2 if unbiased_var_estimate else 1):
            raise GraphError(f"{name}: too few elements for statistics", got=f"{count} for each")

        def estimate(a: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the mean of each part of the activations, and the inverse of its standard deviation."""
            parts = a.astype(_WIDE).reshape(shape)
            mean = jnp.mean(parts, over, keepdims=True)
            if stable_algo:
                variance = jnp.mean(lax.square(parts - mean), over, keepdims=True)
            else:  # one pass over the elements; cancellation may give a negative difference
                variance = jnp.maximum(jnp.mean(lax.square(parts), over, keepdims=True) - lax.square(mean), 0)
            if unbiased_var_estimate:  # Bessel's correction
                variance = variance * (count / (count - 1))
            sizes = [n for d, n in enumerate(shape) if d not in over]
            inverse = lax.rsqrt(variance + epsilon)
            return mean.reshape(sizes).astype(a.dtype), inverse.reshape(sizes).astype(a.dtype)

        return add(graph, estimate, [x], prog, name)

    def whiten(
        self, graph: Graph, x: Tensor, mean: Tensor, inv_std_dev: Tensor, prog: Program, name: str | None = None
    ) -> Tensor:
        """Return activations less their mean, times the inverse standard deviation.

        Source: popnn::bn::batchNormWhiten.
        """
        name = name or f"{self.kind}_norm_whiten"
        groups = self._count_groups(name, x, mean, inv_std_dev)

        def whiten(a: jax.Array, m: jax.Array, i: jax.Array) -> jax.Array:
            return _whiten(a, m, i, groups).astype(a.dtype)

        return add(graph, whiten, [x, mean, inv_std_dev], prog, name)

    def normalise(
        self,
        graph: Graph,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        mean: Tensor,
        inv_std_dev: Tensor,
        prog: Program,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return normalised activations, and whitened activations for the gradients.

        Args:
            graph: graph to add to.
            x: activations [batch, channels, field…].
            gamma: [channels], factor of the whitened activations.
            beta: [channels], added to the product.
            mean: see `statistics`.
            inv_std_dev: likewise.
            prog: program to add to.
            name: debug name.

        Returns:
            Two new tensors of the shape of `x`.

        Raises:
            GraphError: tensors whose shapes do not match.

        Source: popnn::bn::batchNormalise.
        """
        name = name or f"{self.kind}_normalise"
        groups = self._count_groups(name, x, mean, inv_std_dev)
        _check(name, x, gamma, beta)

        def normalise(
            a: jax.Array, g: jax.Array, b: jax.Array, m: jax.Array, i: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            white = _whiten(a, m, i, groups)
            out = white * _by_channel(g, a.ndim) + _by_channel(b, a.ndim)
            return out.astype(a.dtype), white.astype(a.dtype)

        return add(graph, normalise, [x, gamma, beta, mean, inv_std_dev], prog, name)

    def param_gradients(
        self, graph: Graph, acts_whitened: Tensor, grads_in: Tensor, prog: Program, name: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of `gamma` and `beta` [channels], from whitened activations and gradients of the result.

        Source: popnn::bn::batchNormParamGradients.
        """
        name = name or f"{self.kind}_norm_param_gradients"
        _check_alike(name, acts_whitened, grads_in)
        over = (0, *range(2, acts_whitened.ndim))

        def gradients(w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
            wide = g.astype(_WIDE)
            return jnp.sum(w.astype(_WIDE) * wide, over).astype(w.dtype), jnp.sum(wide, over).astype(w.dtype)

        return add(graph, gradients, [acts_whitened, grads_in], prog, name)

    def gradients(
        self,
        graph: Graph,
        acts_whitened: Tensor,
        grads_in: Tensor,
        inv_std_dev: Tensor,
        gamma: Tensor,
        prog: Program,
        name: str | None = None,
    ) -> Tensor:
        """Return the gradient of the activations, through the layer and its statistics.

        Source: popnn::bn::batchNormGradients.
        """
        name = name or f"{self.kind}_norm_gradients"
        _check_alike(name, acts_whitened, grads_in)
        _check(name, acts_whitened, gamma)
        groups = self._count_groups(name, acts_whitened, inv_std_dev)
        shape, over = _parts(acts_whitened.shape, groups)

        def backward(w: jax.Array, g: jax.Array, i: jax.Array, scale: jax.Array) -> jax.Array:
            white = w.astype(_WIDE).reshape(shape)
            d_white = (g.astype(_WIDE) * _by_channel(scale, g.ndim)).reshape(shape)
            # The two means are the gradients that pass through the mean and through the variance.
            through_variance = white * jnp.mean(d_white * white, over, keepdims=True)
            out = (d_white - jnp.mean(d_white, over, keepdims=True) - through_variance) * _by_group(i, groups)
            return out.reshape(g.shape).astype(g.dtype)

        return add(graph, backward, [acts_whitened, grads_in, inv_std_dev, gamma], prog, name)

    def norm(
        self,
        graph: Graph,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float,
        prog: Program,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute statistics by the stable algorithm and normalise; returns result, mean, inverse deviation."""
        name = name or f"{self.kind}_norm"
        mean, inverse = self.statistics(graph, x, epsilon, prog, stable_algo=True, name=f"{name}/statistics")
        return self.normalise(graph, x, gamma, beta, mean, inverse, prog, name)[0], mean, inverse

    def _count_groups(self, name: str, x: Tensor, *statistics: Tensor) -> int | None:
        """Return the number of groups of channels that statistics have; refuse statistics of another size."""
        # From the size of the statistics; None for statistics of channels.
        _check(name, x)
        batch, channels = x.shape[:2]
        is_grouped = self.kind != "batch"
        # An empty batch gives 0 groups, an error below.
        groups = statistics[0].size // max(1, batch) if is_grouped else None
        fits = (groups and channels % groups == 0) if is_grouped else True
        size = batch * groups if groups is not None else channels
        if not fits or any(t.size != size for t in statistics):
            expected = "[batch, groups]" if is_grouped else f"[{channels}]"
            got = [list(t.shape) for t in statistics]
            raise GraphError(f"{name}: statistics must fit activations {list(x.shape)}", expected=expected, got=got)
        return groups


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
    """Add `scale` times their gradients to `gamma` and `beta`, in place; the scale is a number or one element.

    Source: popnn::bn::batchNormParamUpdate.
    """
    scaled_add_to(graph, gamma, gamma_delta, scale, prog, f"{name}/gamma")
    scaled_add_to(graph, beta, beta_delta, scale, prog, f"{name}/beta")


def _parts(shape: tuple[int, ...], groups: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape [batch, groups, channels of a group, field], and the dimensions that statistics reduce."""
    # Without a field its size is 1, the empty product.
    batch, channels, *field = shape
    if groups is None:
        return (batch, channels, 1, prod(field)), (0, 2, 3)
    return (batch, groups, channels // groups, prod(field)), (2, 3)


def _by_group(statistic: jax.Array, groups: int | None) -> jax.Array:
    # In a shape that broadcasts with that of `_parts`.
    wide = statistic.astype(_WIDE)
    return wide.reshape((1, -1, 1, 1) if groups is None else (-1, groups, 1, 1))


def _whiten(x: jax.Array, mean: jax.Array, inverse: jax.Array, groups: int | None) -> jax.Array:
    parts = x.astype(_WIDE).reshape(_parts(x.shape, groups)[0])
    return ((parts - _by_group(mean, groups)) * _by_group(inverse, groups)).reshape(x.shape)


def _by_channel(values: jax.Array, rank: int) -> jax.Array:
    return values.astype(_WIDE).reshape(1, -1, *([1] * (rank - 2)))


def _check(name: str, x: Tensor, *params: Tensor) -> None:
    if x.ndim < 2 or np.dtype(x.dtype).kind != "f" or any(p.shape != x.shape[1:2] for p in params):
        expected = "floats [batch, channels, field…] and [channels]"
        got = [list(t.shape) for t in (x, *params)]
        raise GraphError(f"{name}: must have activations and parameters by channel", expected=expected, got=got)


def _check_alike(name: str, whitened: Tensor, gradient: Tensor) -> None:
    _check(name, whitened)
    if gradient.shape != whitened.shape:
        raise GraphError(f"{name}: the gradient has the wrong shape", expected=whitened.shape, got=gradient.shape)


_BATCH = Norm("batch", lambda channels: None)
_INSTANCE = Norm("instance", lambda channels: channels)
_LAYER = Norm("layer", lambda channels: 1)
_GROUP = Norm("group", lambda channels: 1)  # not for statistics: see `group_norm_statistics`
batch_norm = _BATCH.norm
batch_norm_statistics = _BATCH.statistics
batch_norm_whiten = _BATCH.whiten
batch_normalise = _BATCH.normalise
batch_norm_gradients = _BATCH.gradients
batch_norm_param_gradients = _BATCH.param_gradients
instance_norm = _INSTANCE.norm
instance_norm_statistics = _INSTANCE.statistics
instance_norm_whiten = _INSTANCE.whiten
instance_normalise = _INSTANCE.normalise
instance_norm_gradients = _INSTANCE.gradients
instance_norm_param_gradients = _INSTANCE.param_gradients
layer_norm = _LAYER.norm
layer_norm_statistics = _LAYER.statistics
layer_norm_whiten = _LAYER.whiten
layer_normalise = _LAYER.normalise
layer_norm_gradients = _LAYER.gradients
layer_norm_param_gradients = _LAYER.param_gradients
# The number of groups follows from the size of the statistics that these take.
group_norm_whiten = _GROUP.whiten
group_normalise = _GROUP.normalise
group_norm_gradients = _GROUP.gradients
group_norm_param_gradients = _GROUP.param_gradients


def group_norm_statistics(
    graph: Graph,
    x: Tensor,
    epsilon: float,
    prog: Program,
    num_groups: int,
    unbiased_var_estimate: bool = False,
    stable_algo: bool = False,
    name: str = "group_norm_statistics",
) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation [batch, groups] of groups of channels of each sample.

    Arguments as of `batch_norm_statistics`; `num_groups` divides the channels.

    Source: popnn::gn::groupNormStatistics.
    """
    kind = Norm("group", lambda channels: num_groups)
    return kind.statistics(graph, x, epsilon, prog, unbiased_var_estimate, stable_algo, name)


def group_norm(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    num_groups: int,
    prog: Program,
    name: str = "group_norm",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels of each sample; arguments as of `batch_norm`, `num_groups` divides the channels."""
    return Norm("group", lambda channels: num_groups).norm(graph, x, gamma, beta, epsilon, prog, name)
