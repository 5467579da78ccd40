"""Losses of class scores: negative log likelihood, softmax cross entropy. Layouts are N C and further axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.operators.operand_types import Array, Optional, Value, refuse_outside
from ipujax.onnx.registry import is_static, operator


@operator("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    x: Value, target: Value, weight: Optional = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Array:
    """Loss of log probabilities [N, C, …] for classes [N, …]; a mean is over the weights, 0 for `ignore_index`."""
    if is_static(target):
        counted = np.asarray(target)[np.asarray(target) != ignore_index]
        refuse_outside(counted, 0, np.shape(x)[1] - 1, f"axis 1 has {np.shape(x)[1]} classes: class")
    x, target = map(jnp.asarray, (x, target))
    is_counted = jnp.ones(target.shape, bool) if ignore_index is None else target != ignore_index
    # An ignored class may be out of range, as −1 is: it must not be looked up.
    classes = jnp.where(is_counted, target, 0)
    picked = jnp.take_along_axis(x, classes[:, None], axis=1)[:, 0]
    weights = jnp.ones((), x.dtype) if weight is None else jnp.asarray(weight)[classes]
    used = jnp.where(is_counted, weights, 0).astype(x.dtype)
    loss = -picked * used
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    # If all targets are ignored, the mean is 0 / 0, so NaN.
    return total if reduction == "sum" else total / jnp.sum(used)


@operator("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    scores: Value,
    labels: Value,
    weights: Optional = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    output_count: int = 1,
) -> Array | tuple[Array, Array]:
    """Loss of scores [N, C, …], as `negative_log_likelihood` of their log softmax, which is the second result."""
    log_prob = jax.nn.log_softmax(jnp.asarray(scores), axis=1)
    loss = negative_log_likelihood(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss if output_count == 1 else (loss, log_prob)
