"""Array semantics of collectives: functions of arrays with a leading axis of replicas.

The engine and `ipu.jit` functions outside of a simulated machine compute collectives by them.
Input: arrays [replicas, …] and groups of replicas, all of one size; rank r of a group is its r-th replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Groups = tuple[tuple[int, ...], ...]  # of replicas, each in order
Pairs = tuple[tuple[int, int], ...]  # (source, destination)
_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}


def group_places(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """Group of each replica, and its rank in it, int64[replicas]."""
    table = np.array(groups)
    group_of = np.zeros(table.size, np.int64)
    rank_of = np.zeros(table.size, np.int64)
    group_of[table] = np.arange(len(groups))[:, None]
    rank_of[table] = np.arange(table.shape[1])
    return group_of, rank_of


def all_reduce(x: jax.Array, monoid: str, groups: Groups) -> jax.Array:
    """Gives every replica the reduction over its group; groups may differ in size."""
    if len({len(group) for group in groups}) > 1:
        # A table of groups would be ragged; masks of all replicas have one shape.
        members = is_in_group(groups).reshape(len(x), len(x), *(1 for _ in x.shape[1:]))
        from ipujax.lowering.popops import neutral  # the op library, for groups of several replicas alone

        return reduced(jnp.where(members, x, neutral(monoid, x.dtype)), monoid, (1,))
    return reduced(x[np.array(groups)], monoid, (1,))[group_places(groups)[0]]


def is_in_group(groups: Groups) -> np.ndarray:
    """For each replica whether each replica is in its group, bool[replicas, replicas]."""
    replicas = sum(map(len, groups))
    mask = np.zeros((replicas, replicas), bool)
    for group in groups:
        mask[np.ix_(group, group)] = True
    return mask


def all_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """Gives every replica the values of its group, [replicas, ranks, …]."""
    return x[np.array(groups)][group_places(groups)[0]]


def reduce_scatter(x: jax.Array, monoid: str, groups: Groups) -> jax.Array:
    """Reduces values [replicas, ranks, …] over each group; a replica gets the part of its rank, [replicas, …]."""
    return reduced(x[np.array(groups)], monoid, (1,))[group_places(groups)]


def all_to_all(x: jax.Array, groups: Groups) -> jax.Array:
    """Sends the n-th of values [replicas, ranks, …] to rank n; returns received values by the rank of the sender."""
    group_of, rank_of = group_places(groups)
    members = np.array(groups)[group_of]
    return x[members, rank_of[:, None]]


def permute(x: jax.Array, pairs: Pairs) -> jax.Array:
    """Sends values by (source, destination) pairs; replicas without a source get zeros."""
    source = np.full(len(x), -1)
    for sender, receiver in pairs:
        source[receiver] = sender
    received = jnp.asarray(source >= 0).reshape(-1, *(1 for _ in x.shape[1:]))
    # Source −1 reads replica 0, which the mask replaces by zero.
    return jnp.where(received, x[np.maximum(source, 0)], jnp.zeros((), x.dtype))


def reduced(x: jax.Array, monoid: str, dims: tuple[int, ...]) -> jax.Array:
    """Reduces an array over some dimensions; the result has its dtype, sums of halves are rounded once as XLA's are."""
    # `jnp.sum` widens small integers unless told the dtype, and adds halves in 32 bits unless told.
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    dtype_argument = {"dtype": x.dtype} if monoid == "add" and not is_float else {}
    return _REDUCTIONS[monoid](x, axis=dims, **dtype_argument) if dims else x


def whole(groups: Sequence[Sequence[int]] | None, replicas: int) -> Groups:
    """Groups of JAX as tuples; None stands for one group of all replicas."""
    return (tuple(range(replicas)),) if groups is None else tuple(tuple(int(r) for r in group) for group in groups)
