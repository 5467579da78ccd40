"""Losses of class scores; and the domain ai.onnx.preview.training: gradients, optimisers of any number of tensors.

Layouts of scores are N C and further axes.

Operands of optimisers are the learning rate, the update count, and then all tensors, all gradients, and all states of
each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import working_dtype
from ipujax.onnx.operators.operand_types import Array, Optional, Value, refuse_outside
from ipujax.onnx.registry import is_static, operator

DOMAIN = "ai.onnx.preview.training"


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
    # The class that stands for an ignored one may have a probability of 0: the product would be 0 · ∞.
    loss = -jnp.where(is_counted, picked, 0) * used
    if reduction == "none":
        return loss
    # Of many samples the sum of half precision leaves its range where the mean does not.
    wide = working_dtype(x.dtype)
    total = jnp.sum(loss.astype(wide))
    # If all targets are ignored, the mean is 0 / 0, so NaN.
    return (total if reduction == "sum" else total / jnp.sum(used.astype(wide))).astype(x.dtype)


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


def _groups(inputs: tuple[Value, ...], kinds: int) -> list[tuple[Array, ...]]:
    """Operands of each tensor: itself, its gradient, its states."""
    count = len(inputs) // kinds
    return [tuple(jnp.asarray(each) for each in inputs[first::count]) for first in range(count)]


def _transposed(results: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    """All new tensors, then all new states of each kind."""
    return tuple(each for kind in zip(*results, strict=True) for each in kind)


@operator("Gradient", DOMAIN)
def gradient(
    *inputs: Value, body: Callable[..., tuple[Array, ...]], xs: Sequence[str], y: str, zs: Sequence[str] = ()
) -> tuple[Array, ...]:
    """Derivatives of the sum of a value by others, at given values of these and of those in `zs`."""
    # `body` is the part of the graph between them, which reading adds to the node.
    variables = inputs[: len(xs)]
    constants = inputs[len(xs) :]

    def target(*operands: Array) -> Array:
        (result,) = body(*operands, *constants)
        return jnp.sum(result)

    return jax.grad(target, tuple(range(len(xs))))(*map(jnp.asarray, variables))


@operator("Adagrad", DOMAIN)
def adagrad(
    rate: Value,
    count: Value,
    *inputs: Value,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Array, ...]:
    """Steps divided by the root of the sum of all squared gradients so far."""
    decayed = rate / (1 + count * decay_factor)

    def update(x: Array, gradient: Array, squares: Array) -> tuple[Array, ...]:
        regularized = norm_coefficient * x + gradient
        total = squares + regularized * regularized
        step = decayed * regularized / (jnp.sqrt(total) + epsilon)
        return (x - step).astype(x.dtype), total.astype(squares.dtype)

    return _transposed([update(*group) for group in _groups(inputs, 3)])


@operator("Adam", DOMAIN)
def adam(
    rate: Value,
    count: Value,
    *inputs: Value,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Array, ...]:
    """Running mean of gradients divided by the root of that of their squares, corrected from the first count on."""
    started = jnp.asarray(count) > 0
    exponent = jnp.where(started, count, 1)
    correction = jnp.sqrt(1 - beta**exponent) / (1 - alpha**exponent)
    corrected = rate * jnp.where(started, correction, 1)

    def update(x: Array, gradient: Array, mean: Array, squares: Array) -> tuple[Array, ...]:
        regularized = norm_coefficient * x + gradient
        new_mean = alpha * mean + (1 - alpha) * regularized
        new_squares = beta * squares + (1 - beta) * regularized * regularized
        new = (1 - norm_coefficient_post) * (x - corrected * new_mean / (jnp.sqrt(new_squares) + epsilon))
        return new.astype(x.dtype), new_mean.astype(mean.dtype), new_squares.astype(squares.dtype)

    return _transposed([update(*group) for group in _groups(inputs, 4)])


@operator("Momentum", DOMAIN)
def momentum(
    rate: Value, count: Value, *inputs: Value, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Array, ...]:
    """Steps along a running sum of gradients; with `mode` "nesterov" from where that sum leads."""
    factor = jnp.where(jnp.asarray(count) > 0, beta, 1.0)

    def update(x: Array, gradient: Array, velocity: Array) -> tuple[Array, ...]:
        regularized = norm_coefficient * x + gradient
        new_velocity = alpha * velocity + factor * regularized
        step = regularized + alpha * new_velocity if mode == "nesterov" else new_velocity
        return (x - rate * step).astype(x.dtype), new_velocity.astype(velocity.dtype)

    return _transposed([update(*group) for group in _groups(inputs, 3)])
