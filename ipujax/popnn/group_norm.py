"""Group, instance and layer normalisation under PopLibs' names; formulas and shapes are in `norms`.

An instance norm is a group norm with a group a channel, a layer norm one with a single group: only their statistics
differ, as in PopLibs. Which groups they are the functions see from the size of the statistics.
Source: popnn `GroupNorm.hpp`, `InstanceNorm.hpp`, `LayerNorm.hpp`.
"""

from __future__ import annotations

from ipujax.popnn import norms
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


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
    """Mean and inverse standard deviation [batch, groups] of groups of channels of each sample.

    Arguments as of `batch_norm_statistics`; `num_groups` divides the channels.

    Source: popnn::gn::groupNormStatistics.
    """
    return norms.statistics(graph, x, epsilon, num_groups, prog, name, unbiased_var_estimate, stable_algo)


def instance_norm_statistics(
    graph: Graph,
    x: Tensor,
    epsilon: float,
    prog: Program,
    unbiased_var_estimate: bool = False,
    stable_algo: bool = False,
    name: str = "instance_norm_statistics",
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation [batch, channels] of each channel of each sample.

    Source: popnn::in::instanceNormStatistics.
    """
    groups = x.shape[1] if x.ndim > 1 else 1
    return norms.statistics(graph, x, epsilon, groups, prog, name, unbiased_var_estimate, stable_algo)


def layer_norm_statistics(
    graph: Graph,
    x: Tensor,
    epsilon: float,
    prog: Program,
    unbiased_var_estimate: bool = False,
    stable_algo: bool = False,
    name: str = "layer_norm_statistics",
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation [batch, 1] of each sample.

    Source: popnn::ln::layerNormStatistics.
    """
    return norms.statistics(graph, x, epsilon, 1, prog, name, unbiased_var_estimate, stable_algo)


def group_norm_whiten(
    graph: Graph, x: Tensor, mean: Tensor, inv_std_dev: Tensor, prog: Program, name: str = "group_norm_whiten"
) -> Tensor:
    """Activations less their mean, times the inverse standard deviation.

    Source: popnn::gn::groupNormWhiten.
    """
    return norms.whiten(graph, x, mean, inv_std_dev, True, prog, name)


def group_normalise(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    inv_std_dev: Tensor,
    prog: Program,
    name: str = "group_normalise",
) -> tuple[Tensor, Tensor]:
    """Normalised activations, and whitened ones; arguments as of `batch_normalise`, statistics [batch, groups].

    Source: popnn::gn::groupNormalise.
    """
    return norms.normalise(graph, x, gamma, beta, mean, inv_std_dev, True, prog, name)


def group_norm_param_gradients(
    graph: Graph, acts_whitened: Tensor, grads_in: Tensor, prog: Program, name: str = "group_norm_param_gradients"
) -> tuple[Tensor, Tensor]:
    """Gradients of `gamma` and `beta` [channels], from whitened activations and gradients of the result.

    Source: popnn::gn::groupNormParamGradients.
    """
    return norms.param_gradients(graph, acts_whitened, grads_in, prog, name)


def group_norm_gradients(
    graph: Graph,
    acts_whitened: Tensor,
    grads_in: Tensor,
    inv_std_dev: Tensor,
    gamma: Tensor,
    prog: Program,
    name: str = "group_norm_gradients",
) -> Tensor:
    """The gradient of the activations, through the whole layer with its statistics.

    Source: popnn::gn::groupNormGradients.
    """
    return norms.gradients(graph, acts_whitened, grads_in, inv_std_dev, gamma, True, prog, name)


instance_norm_whiten = layer_norm_whiten = group_norm_whiten
instance_normalise = layer_normalise = group_normalise
instance_norm_param_gradients = layer_norm_param_gradients = group_norm_param_gradients
instance_norm_gradients = layer_norm_gradients = group_norm_gradients


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
    """Statistics (by the stable algorithm) and normalisation at once: the result, the mean, the inverse deviation."""
    mean, inverse = group_norm_statistics(
        graph, x, epsilon, prog, num_groups, stable_algo=True, name=f"{name}/statistics"
    )
    return group_normalise(graph, x, gamma, beta, mean, inverse, prog, name)[0], mean, inverse


def instance_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "instance_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_norm` with a group a channel."""
    return group_norm(graph, x, gamma, beta, epsilon, x.shape[1] if x.ndim > 1 else 1, prog, name)


def layer_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "layer_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """As `group_norm` with one group."""
    return group_norm(graph, x, gamma, beta, epsilon, 1, prog, name)
