"""Losses with their gradients, accuracy, and arg max and arg min of rows.

Source: popnn `Loss.hpp`, `EncodingConstants.hpp`. Labels that are `popops.MASKED_LABEL_CODE` are ignored, as
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add, look_up
from ipujax.popops.fills import is_indexed, widened
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

Loss = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _sum_squared(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    delta = x - target
    # The factor first, as in popnn: a term of half precision is infinite only if the loss is.
    return jnp.sum(0.5 * delta * delta, axis=1), delta


def _mean_squared(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    delta = x - target
    return jnp.sum(delta / x.shape[1] * delta, axis=1), delta * (2 / x.shape[1])


def _log(p: jax.Array) -> jax.Array:
    # Finite for zero: the product with a target of zero must not become NaN.
    return jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))


def _after_softmax(p: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The gradient p · Σ target - target of the softmax's operand: a masked row, all zeros, has none.
    return -jnp.sum(target * _log(p), axis=1), p * jnp.sum(target, axis=1, keepdims=True) - target


def _of_probabilities(p: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The divisor has the same lower bound as in `_log`.
    return -jnp.sum(target * _log(p), axis=1), -target / jnp.maximum(p, jnp.finfo(p.dtype).tiny)


def _of_logits(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    logs = jax.nn.log_softmax(x, axis=1)
    return -jnp.sum(target * logs, axis=1), jnp.exp(logs) * jnp.sum(target, axis=1, keepdims=True) - target


# Loss of each sample and its gradient, from outputs and targets [batch, classes].
LossType = Literal[
    "sum_squared",
    "mean_squared",
    "cross_entropy",
    "softmax_cross_entropy",
    "cross_entropy_of_probabilities",
    "cross_entropy_of_logits",
]
LOSSES: dict[str, Loss] = {
    "sum_squared": _sum_squared,
    "mean_squared": _mean_squared,
    "cross_entropy": _after_softmax,
    "softmax_cross_entropy": _after_softmax,  # the older name of the same in popnn
    "cross_entropy_of_probabilities": _of_probabilities,
    "cross_entropy_of_logits": _of_logits,
}


def calc_loss(
    graph: Graph,
    outputs: Tensor,
    expected: Tensor,
    loss: Tensor,
    deltas: Tensor,
    loss_type: LossType,
    prog: Program,
    name: str = "loss",
    *,
    num_correct: Tensor | None = None,
    deltas_scale: Tensor | None = None,
    model_output_scaling: Tensor | None = None,
) -> None:
    """Write a loss of each sample, and its gradient.

    - "sum_squared": `Σ (x - t)² / 2`; the gradient is that of the outputs x.
    - "mean_squared": the mean of `(x - t)²`; of the outputs.
    - "cross_entropy", "softmax_cross_entropy": `-Σ t log p`, outputs p are of a softmax; of the softmax's operand.
    - "cross_entropy_of_probabilities": `-Σ t log p`; of the probabilities p.
    - "cross_entropy_of_logits": `-Σ t log softmax(x)`; of the logits x.

    Args:
        graph: graph to add to.
        outputs: [batch, classes], of the last layer.
        expected: targets t [batch, classes], or indices of classes [batch], integers.
        loss: [batch], written.
        deltas: [batch, classes], written.
        loss_type: see above.
        prog: program to add to.
        name: debug name.
        num_correct: also written, see `calc_accuracy`.
        deltas_scale: one element, factor of the deltas.
        model_output_scaling: one element, factor that the outputs already contain.

    Raises:
        GraphError: an unknown loss, or tensors of other shapes.

    Source: popnn::calcLoss, whose types are "sum_squared" and "cross_entropy".
    """
    function: Loss = look_up(loss_type, LOSSES, "loss")
    _check_expected(name, outputs, expected, dense=True)
    scalings = [s for s in (deltas_scale, model_output_scaling) if s is not None]
    if any(s.size != 1 for s in scalings):
        raise GraphError(f"{name}: a scaling must be one number", got=[s.shape for s in scalings])

    def compute(x: jax.Array, t: jax.Array, *factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        # `factors` are in the order of `scalings`: the first is that of the deltas if there is one.
        target = _one_hot(t, x) if t.ndim == 1 else t
        if model_output_scaling is not None:
            x = x / factors[-1].reshape(()).astype(x.dtype)
        value, delta = function(x, target)
        if deltas_scale is not None:
            delta = delta * factors[0].reshape(()).astype(x.dtype)
        return value, delta

    add(graph, compute, [outputs, expected, *scalings], prog, name, [loss, deltas])
    if num_correct is not None:
        calc_accuracy(graph, outputs, expected, num_correct, prog, f"{name}/accuracy")


def _one_hot(labels: jax.Array, like: jax.Array) -> jax.Array:
    # `MASKED_LABEL_CODE` equals no class: its row is all zeros, and so are loss and gradient.
    return is_indexed(labels, like.shape).astype(like.dtype)


def calc_accuracy(
    graph: Graph, outputs: Tensor, expected: Tensor, num_correct: Tensor, prog: Program, name: str = "accuracy"
) -> None:
    """Write to a scalar the number of samples that have their greatest output at the expected class.

    Args:
        graph: graph to add to.
        outputs: [batch, classes].
        expected: indices of classes [batch], integers.
        num_correct: one element, written.
        prog: program to add to.
        name: debug name.

    Raises:
        GraphError: tensors of other shapes.

    Source: popnn::calcAccuracy.
    """
    _check_expected(name, outputs, expected, dense=False)

    def correct(x: jax.Array, labels: jax.Array) -> jax.Array:
        classes = widened(labels)
        hits = jnp.argmax(x, axis=1).astype(classes.dtype) == classes
        return jnp.sum(hits.astype(num_correct.dtype)).astype(num_correct.dtype).reshape(num_correct.shape)

    add(graph, correct, [outputs, expected], prog, name, [num_correct])


def _check_expected(name: str, outputs: Tensor, expected: Tensor, *, dense: bool) -> None:
    labels = expected.shape == outputs.shape[:1] and np.dtype(expected.dtype).kind in "iu"
    if outputs.ndim != 2 or not (labels or (dense and expected.shape == outputs.shape)):
        shapes = "[batch, classes], and indices [batch]" + (" or targets [batch, classes]" if dense else "")
        got = f"{list(outputs.shape)} and {expected.dtype}{list(expected.shape)}"
        raise GraphError(f"{name}: outputs and labels must match", expected=shapes, got=got)


def arg_max(graph: Graph, x: Tensor, prog: Program, name: str = "arg_max") -> Tensor:
    """Return the UNSIGNED_INT index of the greatest element of each row [batch, n], the first of equal elements.

    Source: popnn::argMax.
    """
    return _find_extreme(graph, x, prog, name, jnp.argmax, None)


def arg_min(graph: Graph, x: Tensor, prog: Program, name: str = "arg_min") -> Tensor:
    """Return the UNSIGNED_INT index of the smallest element of each row [batch, n], the first of equal elements.

    Source: popnn::argMin.
    """
    return _find_extreme(graph, x, prog, name, jnp.argmin, None)


def max_and_arg_max(graph: Graph, x: Tensor, prog: Program, name: str = "arg_max") -> tuple[Tensor, Tensor]:
    """Return the greatest element of each row [batch, n], and its UNSIGNED_INT index.

    Source: popnn::maxAndArgMax.
    """
    return _find_extreme(graph, x, prog, name, jnp.argmax, jnp.max)


def min_and_arg_min(graph: Graph, x: Tensor, prog: Program, name: str = "arg_min") -> tuple[Tensor, Tensor]:
    """Return the smallest element of each row [batch, n], and its UNSIGNED_INT index.

    Source: popnn::minAndArgMin.
    """
    return _find_extreme(graph, x, prog, name, jnp.argmin, jnp.min)


def _find_extreme(
    graph: Graph,
    x: Tensor,
    prog: Program,
    name: str,
    index_of: Callable[..., jax.Array],
    value_of: Callable[..., jax.Array] | None,
) -> Any:
    """Add the search of each row's largest or smallest element: its index, and its value with `value_of`."""
    if x.ndim != 2 or not x.shape[1]:
        raise GraphError(f"{name}: must have rows of elements", expected="[batch, n]", got=list(x.shape))

    def find(a: jax.Array) -> Any:
        index = index_of(a, axis=1).astype(jnp.uint32)
        return index if value_of is None else (value_of(a, axis=1), index)

    return add(graph, find, [x], prog, name)
