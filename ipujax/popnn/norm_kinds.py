"""Batch, group, instance and layer normalisation under PopLibs' names; formulas, shapes and arguments are in `norms`.

An instance norm is a group norm with one channel a group, a layer norm one with a single group: only their statistics
differ, as in PopLibs. The other functions derive the number of groups from the size of the statistics.
Source: popnn `BatchNorm.hpp`, `GroupNorm.hpp`, `InstanceNorm.hpp`, `LayerNorm.hpp`. Their overloads that take
activations and statistics instead of whitened activations are `*_norm_whiten` followed by the functions here.
"""

from __future__ import annotations

from ipujax.popnn.norms import Norm
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

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
