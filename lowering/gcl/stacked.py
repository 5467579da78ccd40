"""Array semantics of collectives: functions of arrays with a leading axis of replicas.

They are what the engine computes, and what `ipu.jit` functions compute outside of a simulated machine.
Input: arrays [replicas, …] and groups of replicas, all of one size; rank r of a group is its r-th replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl.collective_schedules import Groups, Pairs
from ipujax.lowering.popops import neutral

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}


def group_places(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """The group of each replica, and its rank in it, int64[replicas]."""
    table = np.array(groups)
    group_of, rank_of = np.zeros(table.size, np.int64), np.zeros(table.size, np.int64)
    group_of[table] = np.arange(len(groups))[:, None]
    rank_of[table] = np.arange(table.shape[1])
    return group_of, rank_of


def all_reduce(x: jax.Array, monoid: str, groups: Groups) -> jax.Array:
    """Every replica gets the sum, or the like, over its group; groups may differ in size."""
    if len({len(group) for group in groups}) > 1:
        own = of_group(groups).reshape(len(x), len(x), *(1 for _ in x.shape[1:]))
        return reduced(jnp.where(own, x, neutral(monoid, x.dtype)), monoid, (1,))
    return reduced(x[np.array(groups)], monoid, (1,))[group_places(groups)[0]]


def of_group(groups: Groups) -> np.ndarray:
    """Which replicas are of the group of each replica, bool[replicas, replicas]."""
    replicas = sum(map(len, groups))
    together = np.zeros((replicas, replicas), bool)
    for group in groups:
        together[np.ix_(group, group)] = True
    return together


def all_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """Every replica gets the values of its group, [replicas, ranks, …]."""
    return x[np.array(groups)][group_places(groups)[0]]


def reduce_scatter(x: jax.Array, monoid: str, groups: Groups) -> jax.Array:
    """Of values [replicas, ranks, …] each replica gets the sum of the one of its rank, [replicas, …]."""
    return reduced(x[np.array(groups)], monoid, (1,))[group_places(groups)]


def all_to_all(x: jax.Array, groups: Groups) -> jax.Array:
    """Of values [replicas, ranks, …] the n-th goes to rank n; returns what came, by the rank it came from."""
    group_of, rank_of = group_places(groups)
    members = np.array(groups)[group_of]
    return x[members, rank_of[:, None]]


def permute(x: jax.Array, pairs: Pairs) -> jax.Array:
    """Sends values by (source, destination); who receives nothing gets zeros."""
    source = np.full(len(x), -1)
    for sender, receiver in pairs:
        source[receiver] = sender
    received = jnp.asarray(source >= 0).reshape(-1, *(1 for _ in x.shape[1:]))
    return jnp.where(received, x[np.maximum(source, 0)], jnp.zeros((), x.dtype))


def reduced(x: jax.Array, monoid: str, dims: tuple[int, ...]) -> jax.Array:
    """The sum, or the like, over some dimensions, in the array's dtype."""
    more = {"dtype": x.dtype} if monoid == "add" else {}
    return _REDUCTIONS[monoid](x, axis=dims, **more) if dims else x


def whole(groups: Sequence[Sequence[int]] | None, replicas: int) -> Groups:
    """Groups as JAX gives them, where None stands for one of all replicas."""
    return (tuple(range(replicas)),) if groups is None else tuple(tuple(int(r) for r in group) for group in groups)
