"""Batch normalisation under PopLibs' names; formulas and shapes are in `norms`.

Source: popnn `BatchNorm.hpp`. Its overloads that take activations and statistics for whitened activations are
`batch_norm_whiten` followed by the functions here.
"""

from __future__ import annotations

from ipujax.popnn import norms
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


def batch_norm_statistics(
    graph: Graph,
    x: Tensor,
    epsilon: float,
    prog: Program,
    unbiased_var_estimate: bool = False,
    stable_algo: bool = False,
    name: str = "batch_norm_statistics",
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel.

    Args:
        graph: graph to add to.
        x: activations [batch, channels, field…].
        epsilon: added to the variance.
        prog: program the steps are added to.
        unbiased_var_estimate: divide by one element less than there are.
        stable_algo: take the mean away before squaring, in a second pass over the elements.
        name: debug name.

    Returns:
        Two new tensors [channels].

    Raises:
        GraphError: no activations, or too few.

    Source: popnn::bn::batchNormStatistics.
    """
    return norms.statistics(graph, x, epsilon, None, prog, name, unbiased_var_estimate, stable_algo)


def batch_norm_whiten(
    graph: Graph, x: Tensor, mean: Tensor, inv_std_dev: Tensor, prog: Program, name: str = "batch_norm_whiten"
) -> Tensor:
    """Activations less their mean, times the inverse standard deviation.

    Source: popnn::bn::batchNormWhiten.
    """
    return norms.whiten(graph, x, mean, inv_std_dev, False, prog, name)


def batch_normalise(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    inv_std_dev: Tensor,
    prog: Program,
    name: str = "batch_normalise",
) -> tuple[Tensor, Tensor]:
    """Normalised activations, and whitened ones.

    Args:
        graph: graph to add to.
        x: activations [batch, channels, field…].
        gamma: [channels], what whitened activations are multiplied by.
        beta: [channels], what is added to that.
        mean: [channels], see `batch_norm_statistics`.
        inv_std_dev: [channels].
        prog: program the steps are added to.
        name: debug name.

    Returns:
        Two new tensors of the shape of `x`.

    Raises:
        GraphError: tensors that do not go together.

    Source: popnn::bn::batchNormalise.
    """
    return norms.normalise(graph, x, gamma, beta, mean, inv_std_dev, False, prog, name)


def batch_norm_param_gradients(
    graph: Graph, acts_whitened: Tensor, grads_in: Tensor, prog: Program, name: str = "batch_norm_param_gradients"
) -> tuple[Tensor, Tensor]:
    """Gradients of `gamma` and `beta` [channels], from whitened activations and gradients of the result.

    Source: popnn::bn::batchNormParamGradients.
    """
    return norms.param_gradients(graph, acts_whitened, grads_in, prog, name)


def batch_norm_gradients(
    graph: Graph,
    acts_whitened: Tensor,
    grads_in: Tensor,
    inv_std_dev: Tensor,
    gamma: Tensor,
    prog: Program,
    name: str = "batch_norm_gradients",
) -> Tensor:
    """The gradient of the activations, through the whole layer with its statistics.

    Source: popnn::bn::batchNormGradients.
    """
    return norms.gradients(graph, acts_whitened, grads_in, inv_std_dev, gamma, False, prog, name)


def batch_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "batch_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (by the stable algorithm) and normalisation at once: the result, the mean, the inverse deviation."""
    mean, inverse = batch_norm_statistics(graph, x, epsilon, prog, stable_algo=True, name=f"{name}/statistics")
    return batch_normalise(graph, x, gamma, beta, mean, inverse, prog, name)[0], mean, inverse
