"""Sums over all paths that spell a label: the recursions of connectionist temporal classification.

A label of L symbols is extended to blank, symbol, blank, …, blank: 2 L + 1 places. From one time step to the next a
path stays at its place, advances by one, or by two over a blank between different symbols. `alpha` sums paths from the
start to a place, including the emission there, `beta` paths from a place to an end, without it; both are logarithms.

Source: A. Graves et al., ICML 2006, equations 6 to 15.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_NEVER = np.float32(-1e30)  # the logarithm of no probability: finite, so that differences of two of them are numbers
_IMPOSSIBLE = np.float32(-1e29)  # no sum of logarithms of probabilities comes near


def loss_of_paths(
    log_probs: jax.Array, labels: jax.Array, data_lengths: jax.Array, label_lengths: jax.Array, *, blank: int
) -> jax.Array:
    """The negative logarithm of the probability of all paths, float [batch]; infinity where there is none.

    Args:
        log_probs: [time, batch, classes].
        labels: [batch, length].
        data_lengths: valid time steps [batch].
        label_lengths: valid symbols [batch].
        blank: class of no symbol.
    """
    emitted, skips = _emissions(log_probs, labels, blank)
    alpha, _ = _from_the_beginning(emitted, skips, data_lengths, every=False)
    total = _total(alpha, _ends(alpha.shape[1], label_lengths))
    return jnp.where(total > _IMPOSSIBLE, -total, jnp.inf)


def loss_and_gradient(
    log_probs: jax.Array,
    labels: jax.Array,
    data_lengths: jax.Array,
    label_lengths: jax.Array,
    *,
    blank: int,
    include_softmax_gradient: bool,
) -> tuple[jax.Array, jax.Array]:
    """The loss of `loss_of_paths` and its gradient, floats [batch] and [time, batch, classes].

    Args:
        log_probs: see `loss_of_paths`, as all that follow.
        labels: [batch, length].
        data_lengths: [batch].
        label_lengths: [batch].
        blank: class of no symbol.
        include_softmax_gradient: whether the gradient is that of the operand of the log-softmax that made `log_probs`.
    """
    time, _, classes = log_probs.shape
    emitted, skips = _emissions(log_probs, labels, blank)
    ends = _ends(emitted.shape[2], label_lengths)
    last, alpha = _from_the_beginning(emitted, skips, data_lengths, every=True)
    assert alpha is not None, "alpha of all steps with `every`"
    total = _total(last, ends)
    beta = _to_the_end(emitted, skips, data_lengths, ends)
    # The probability that a path of the label is at a place, from which follows that of each emitted class.
    places = jnp.exp(alpha + beta - total[None, :, None])
    is_class = _walk(labels, blank)[..., None] == jnp.arange(classes, dtype=labels.dtype)
    emits = jnp.einsum("tbs,bsc->tbc", places, is_class.astype(places.dtype))
    gradient = jnp.exp(log_probs.astype(emits.dtype)) - emits if include_softmax_gradient else -emits
    counts = _before(time, data_lengths) & (total > _IMPOSSIBLE)[None]
    loss = jnp.where(total > _IMPOSSIBLE, -total, jnp.inf)
    return loss, jnp.where(counts[..., None], gradient, 0)


def _walk(labels: jax.Array, blank: int) -> jax.Array:
    """The classes of all places, [batch, 2 length + 1]."""
    blanks = jnp.full_like(labels, blank)
    pairs = jnp.stack([blanks, labels], -1).reshape(labels.shape[0], -1)
    return jnp.concatenate([pairs, jnp.full((labels.shape[0], 1), blank, labels.dtype)], 1)


def _emissions(log_probs: jax.Array, labels: jax.Array, blank: int) -> tuple[jax.Array, jax.Array]:
    """Emission of each place at each time [time, batch, places], and whether a path may skip the place before."""
    walk = _walk(labels, blank)
    wide = jnp.maximum(log_probs.astype(jnp.float32), _NEVER)
    emitted = jnp.take_along_axis(wide, walk[None].astype(jnp.int32), axis=2, mode="clip")
    two_before = jnp.concatenate([jnp.full((walk.shape[0], 2), blank, walk.dtype), walk], 1)[:, : walk.shape[1]]
    return emitted, (walk != blank) & (walk != two_before)


def _before(time: int, lengths: jax.Array) -> jax.Array:
    """Whether each time step is valid, [time, batch]."""
    return jnp.arange(time, dtype=lengths.dtype)[:, None] < lengths[None]


def _ends(places: int, label_lengths: jax.Array) -> jax.Array:
    """Whether a path may end at a place: at the last symbol, or the blank after it."""
    place, blanks = jnp.arange(places, dtype=jnp.int32), 2 * label_lengths.astype(jnp.int32)[:, None]
    return (place == blanks) | (place == blanks - 1)


def _total(alpha: jax.Array, ends: jax.Array) -> jax.Array:
    ended = jnp.where(ends, alpha, _NEVER)
    greatest = jnp.max(ended, 1, keepdims=True)
    return greatest[:, 0] + jnp.log(jnp.sum(jnp.exp(ended - greatest), 1))


def _sum(stay: jax.Array, one: jax.Array, two: jax.Array) -> jax.Array:
    """The logarithm of the sum of three exponentials."""
    greatest = jnp.maximum(jnp.maximum(stay, one), two)
    return greatest + jnp.log(jnp.exp(stay - greatest) + jnp.exp(one - greatest) + jnp.exp(two - greatest))


def _never(x: jax.Array, places: int) -> jax.Array:
    return jnp.full((x.shape[0], places), _NEVER)


def _from_the_beginning(
    emitted: jax.Array, skips: jax.Array, data_lengths: jax.Array, *, every: bool
) -> tuple[jax.Array, jax.Array | None]:
    """`alpha` of the last valid time step [batch, places], and with `every` of all [time, batch, places]."""
    time, batch, places = emitted.shape

    def step(alpha: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        emits, counts = now
        one = jnp.concatenate([_never(alpha, 1), alpha], 1)[:, :places]
        two = jnp.concatenate([_never(alpha, 2), alpha], 1)[:, :places]
        new = _sum(alpha, one, jnp.where(skips, two, _NEVER)) + emits
        alpha = jnp.where(counts, new, alpha)
        return alpha, alpha if every else None

    # Before the first step all paths are at the first blank: it leads to that blank and to the first symbol.
    start = jnp.concatenate([jnp.zeros((batch, 1), emitted.dtype), jnp.full((batch, places - 1), _NEVER)], 1)
    return lax.scan(step, start, (emitted, _before(time, data_lengths)[..., None]))


def _to_the_end(emitted: jax.Array, skips: jax.Array, data_lengths: jax.Array, ends: jax.Array) -> jax.Array:
    """`beta` of all time steps, [time, batch, places]."""
    time = emitted.shape[0]
    ended = jnp.where(ends, jnp.float32(0), _NEVER)

    def step(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        emits, goes_on = now
        one = jnp.concatenate([later, _never(later, 1)], 1)[:, 1:]
        two = jnp.concatenate([jnp.where(skips, later, _NEVER), _never(later, 2)], 1)[:, 2:]
        beta = jnp.where(goes_on, _sum(later, one, two), ended)
        return beta + emits, beta

    # Whether another valid step follows each.
    goes_on = jnp.arange(1, time + 1, dtype=data_lengths.dtype)[:, None] < data_lengths[None]
    return lax.scan(step, ended, (emitted, goes_on[..., None]), reverse=True)[1]
