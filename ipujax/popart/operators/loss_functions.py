"""Losses of ai.graphcore, reduced by their sum or mean.

That of connectionist temporal classification is the forward recursion in logarithms. Source: Graves et al. 2006,
"Connectionist temporal classification", section 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.popart.enumerations import ReductionType
from ipujax.popart.operators.domain import graphcore
from ipujax.popart.tensor_info import DTYPES

# Least probability of a logarithm, and of its gradient.
# Source: `willow/src/popx/op/nllx.cpp` of github:graphcore/popart.
_FLOOR = {"float32": 1e-7, "float16": 6.104e-05}
_FLOOR_OF_GRADIENT = {"float32": 1e-10, "float16": 6.104e-05}


@jax.custom_jvp
def log_probability(p: jax.Array) -> jax.Array:
    """Return the logarithm of probabilities, from a least one on; the gradient is that of smaller ones too."""
    return jnp.log(jnp.maximum(p, jnp.asarray(_FLOOR.get(str(p.dtype), 0.0), p.dtype)))


@log_probability.defjvp
def _log_probability_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (p,) = primals
    (tangent,) = tangents
    floor = jnp.asarray(_FLOOR_OF_GRADIENT.get(str(p.dtype), 0.0), p.dtype)
    return log_probability(p), tangent / jnp.maximum(p, floor)


def as_reduction(value: Any) -> ReductionType:
    """Return a reduction.

    Args:
        value: an attribute: number, or PopART's name, as models of PopART have it.
    """
    text = value.decode() if isinstance(value, bytes) else value
    return ReductionType[text.rpartition(":")[2]] if isinstance(text, str) else ReductionType(int(text))


def reduced(losses: jax.Array, reduction: Any, count: Any = None) -> jax.Array:
    """Return the losses of all elements, reduced.

    Args:
        losses: of each element.
        reduction: as `as_reduction` takes it.
        count: elements of a mean; all of them when None.
    """
    kind = as_reduction(reduction)
    if kind is ReductionType.NoReduction:
        return losses
    # In float32: a sum over many elements leaves the range of float16, their mean does not.
    total = jnp.sum(losses.astype(jnp.float32) if losses.dtype == jnp.float16 else losses)
    if kind is ReductionType.Sum:
        return total.astype(losses.dtype)
    return (total / (losses.size if count is None else count)).astype(losses.dtype)


@graphcore("L1")
def l1_loss(x: jax.Array, *, reduction: Any = ReductionType.Mean, **keywords: float) -> jax.Array:
    """Return λ·|x|, reduced; λ is the attribute `lambda`."""
    # |x| as x · sign(x): at zero the gradient is zero, as PopART's.
    magnitude = x * jax.lax.stop_gradient(jnp.sign(x))
    return reduced(magnitude * jnp.asarray(keywords["lambda"], x.dtype), reduction)


@graphcore("IdentityLoss")
def identity_loss(x: jax.Array, *, reduction: Any = ReductionType.Mean) -> jax.Array:
    """Return x, reduced."""
    return reduced(x, reduction)


@graphcore("Nll")
def nll_loss(
    probabilities: jax.Array,
    labels: jax.Array,
    *,
    reduction: Any = ReductionType.Mean,
    ignoreIndex: int | None = None,
    inputIsLogProbability: int = 0,
) -> jax.Array:
    """Return the negative logarithms of the probabilities of labels, reduced.

    Args:
        probabilities: [..., classes], or their logarithms.
        labels: [...], whole numbers.
        reduction: a mean is over the labels that are not ignored.
        ignoreIndex: label that costs nothing.
        inputIsLogProbability: 1 if the first operand has logarithms.
    """
    index = labels.astype(jnp.int32)
    is_counted = jnp.ones(index.shape, bool) if ignoreIndex is None else index != ignoreIndex
    # A label that is ignored may be outside of the classes.
    inside = jnp.where(is_counted, index, 0)[..., None]
    chosen = jnp.take_along_axis(probabilities, inside, axis=-1)[..., 0]
    if not inputIsLogProbability:
        chosen = log_probability(chosen)
    losses = jnp.where(is_counted, -chosen, jnp.zeros_like(chosen))
    count = jnp.maximum(jnp.sum(is_counted), 1) if ignoreIndex is not None else None
    return reduced(losses, reduction, count)


_IMPOSSIBLE = -1e30  # logarithm of a probability of zero; finite, so that gradients are


@graphcore("Ctc")
def ctc_loss(
    log_probabilities: jax.Array,
    targets: jax.Array,
    input_lengths: jax.Array,
    target_lengths: jax.Array,
    *,
    reduction: Any = ReductionType.Mean,
    blank: int = 0,
    outDataType: str = "UNDEFINED",
    zeroInfinity: int = 0,
) -> jax.Array:
    """Return the negative logarithm of the probability of all alignments with the targets.

    Args:
        log_probabilities: [time, batch, classes].
        targets: [batch, most labels], labels of each sequence, padded.
        input_lengths: [batch], steps of each sequence.
        target_lengths: [batch], labels of each sequence.
        reduction: a mean divides each loss by its number of labels first, then averages over the batch.
        blank: class of the blank.
        outDataType: element type of the loss; that of the probabilities when undefined.
        zeroInfinity: 1 if targets that do not fit cost nothing.
    """
    logs = log_probabilities.astype(jnp.float32)
    losses = jax.vmap(_sequence_loss, in_axes=(1, 0, 0, 0, None))(
        logs, targets.astype(jnp.int32), input_lengths.astype(jnp.int32), target_lengths.astype(jnp.int32), blank
    )
    is_impossible = losses > -_IMPOSSIBLE / 2
    losses = jnp.where(is_impossible, 0.0 if zeroInfinity else jnp.inf, losses)
    kind = as_reduction(reduction)
    if kind is ReductionType.Mean:
        losses = jnp.mean(losses / jnp.maximum(target_lengths, 1))
    elif kind is ReductionType.Sum:
        losses = jnp.sum(losses)
    dtype = log_probabilities.dtype if outDataType == "UNDEFINED" else DTYPES[outDataType]
    return losses.astype(np.dtype(dtype))


def _sequence_loss(logs: jax.Array, labels: jax.Array, steps: jax.Array, count: jax.Array, blank: int) -> jax.Array:
    """Return the loss of one sequence by the forward recursion of CTC (Graves et al., 2006), in logarithms.

    `alpha[i]` is the logarithm of the probability of all alignments that have reached position i of the path.
    """
    positions = 2 * labels.shape[0] + 1
    path = jnp.full(positions, blank).at[1::2].set(labels)  # blank, label, blank, label, …, blank
    # A blank between two labels may be skipped only if they differ: equal ones would merge.
    before = jnp.concatenate([jnp.full(2, -1), path[:-2]])[:positions]
    may_skip = (path != blank) & (path != before)
    start = jnp.full(positions, _IMPOSSIBLE)
    start = start.at[0].set(logs[0, blank])
    if positions > 1:
        start = start.at[1].set(jnp.where(count > 0, logs[0, path[1]], _IMPOSSIBLE))

    def step(alpha: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, row = inputs
        from_previous = jnp.concatenate([jnp.full(1, _IMPOSSIBLE), alpha[:-1]])
        from_before_previous = jnp.where(
            may_skip, jnp.concatenate([jnp.full(2, _IMPOSSIBLE), alpha[:-2]])[:positions], _IMPOSSIBLE
        )
        reached = jnp.logaddexp(jnp.logaddexp(alpha, from_previous), from_before_previous) + row[path]
        # Sequences in a batch have lengths of their own: behind the end alpha stays.
        return jnp.where(time < steps, jnp.maximum(reached, _IMPOSSIBLE), alpha), None

    alpha, _ = jax.lax.scan(step, start, (jnp.arange(1, logs.shape[0]), logs[1:]))
    last = alpha[2 * count]
    label = jnp.where(count > 0, alpha[jnp.maximum(2 * count - 1, 0)], _IMPOSSIBLE)
    return -jnp.logaddexp(last, label)
