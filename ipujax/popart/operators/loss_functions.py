"""Losses of ai.graphcore, reduced by their sum or mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import ReductionType
from ipujax.popart.operators.domain import graphcore

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
