"""Functions of one replica as part of a jaxpr: the primitive `replicated`, with the split of its arguments.

    results = replicated_p.bind(*operands, jaxpr=…, replicas=N, in_dims=…, out_dims=…, is_checked=…, axis_name=…,
                              mesh=…)

The jaxpr is the function of one replica, over the axis `axis_name`. Operand n is split in N along dimension
`in_dims[n]`, or equal on all replicas for None; results are joined along `out_dims[n]`, or taken from replica 0 for
None. A split along several dimensions, or one that some replicas share, is a `BlockSplit`. Plain JAX computes the same
numbers, all replicas as a leading axis (`stacked_eval`).

Results that are taken from replica 0 must be equal on all: `varying` proves it, unless `is_checked`.

Limits: one level, one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import AXIS as AXIS
from ipujax.lowering.jax_compat import ClosedJaxpr, closed, make_holding_primitive
from ipujax.runtime.host import ALONE, Instances

if TYPE_CHECKING:
    from ipujax.runtime.graph import ReplicaAxes  # a call of a program in the cache needs no graph


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """Split of an array in blocks, of which several replicas may have the same.

    Args:
        counts: number of blocks along each dimension.
        blocks: number of the block of each replica, row-major.
    """

    counts: tuple[int, ...]
    blocks: tuple[int, ...]

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a block."""
        return tuple(n // count for n, count in zip(shape, self.counts, strict=True))

    def split(self, x: jax.Array) -> jax.Array:
        """Cuts an array into blocks, and gives each replica the one of its number: [replicas, *shape of a block]."""
        local = self.local_shape(x.shape)
        rank = len(local)
        # Each dimension becomes [count, size of a block]; the counts go to the front and are one number of a block.
        grid = x.reshape([n for pair in zip(self.counts, local, strict=True) for n in pair])
        blocks = grid.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(-1, *local)
        return blocks[np.array(self.blocks)]

    def join(self, parts: jax.Array) -> jax.Array:
        """The array of the blocks of all replicas; the first that has a block gives it."""
        rank = len(self.counts)
        first_holders = [self.blocks.index(block) for block in range(prod(self.counts))]
        blocks = parts[np.array(first_holders)].reshape(*self.counts, *parts.shape[1:])
        # The count of each dimension goes in front of the size of a block along it, and both are joined.
        pairs = blocks.transpose([axis for d in range(rank) for axis in (d, rank + d)])
        return pairs.reshape([n * count for n, count in zip(parts.shape[1:], self.counts, strict=True)])


Dims = tuple[int | None, ...]  # of specs over one axis
Split = int | BlockSplit | None
Splits = tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Replicated:
    """A jaxpr of one replica, and the split of its inputs and results.

    Args:
        jaxpr: the function of one replica.
        replicas: number of replicas.
        in_dims: for each input the dimension that is split, None for an input equal on all replicas.
        out_dims: for each result the dimension along which replicas are joined, None if all are equal.
        is_checked: True if equal results are proved already.
        axis_name: the axis of replicas in the jaxpr, its only one.
        mesh: axes of the mesh whose devices the replicas are; empty for others.
    """

    jaxpr: ClosedJaxpr
    replicas: int
    in_dims: Splits
    out_dims: Splits
    is_checked: bool = False
    axis_name: str = AXIS
    mesh: ReplicaAxes = ()


def split(x: jax.Array, dim: Split, replicas: int) -> jax.Array:
    """Parts of an array for all replicas, [replicas, *local]; for None the array itself, which all have."""
    if dim is None:
        return x
    if isinstance(dim, BlockSplit):
        return dim.split(x)
    replica_parts = x.reshape((*x.shape[:dim], replicas, x.shape[dim] // replicas, *x.shape[dim + 1 :]))
    return jnp.moveaxis(replica_parts, dim, 0)


def join(parts: jax.Array, dim: Split) -> jax.Array:
    """The array of the parts of all replicas, [replicas, *local]; for None the first part, as all are equal."""
    if dim is None:
        return parts[0]
    if isinstance(dim, BlockSplit):
        return dim.join(parts)
    replicas, *local = parts.shape
    return jnp.moveaxis(parts, 0, dim).reshape(global_shape(local, dim, replicas))


def local_shape(shape: Sequence[int], dim: Split, replicas: int) -> tuple[int, ...]:
    """Shape of one replica's part of an array."""
    if isinstance(dim, BlockSplit):
        return dim.local_shape(shape)
    return tuple(n // replicas if d == dim else n for d, n in enumerate(shape))


class SharedSplit(NamedTuple):
    """Division of an array among instances, and of the share of each among its replicas.

    Args:
        dim: dimension along which instances share it; None if each has all of it.
        of_share: split of a share.
    """

    dim: int | None
    of_share: Split


def shared_split(dim: Split, instances: int) -> SharedSplit:
    """Divides the split of an array over replicas in two: over instances, and of each one's share over its replicas.

    Args:
        dim: the split of the array over all replicas, of which each instance has equally many neighbouring ones: a
            dimension, blocks, or None for an array that all have.
        instances: number of instances, the processes that share the replicas.
    """
    if not isinstance(dim, BlockSplit):
        return SharedSplit(dim, dim)
    numbers = np.array(dim.blocks).reshape(instances, -1)  # of the block of each replica, [instances, local replicas]
    places = np.unravel_index(numbers, dim.counts)
    # Tries each dimension as that along which instances share the array; None if each has all of it.
    for d in (None, *range(len(dim.counts))):
        counts = tuple(n // instances if axis == d else n for axis, n in enumerate(dim.counts))  # blocks of a share
        if prod(counts) * (1 if d is None else instances) != prod(dim.counts):  # not divided evenly
            continue
        places_in_share = [place % count for place, count in zip(places, counts, strict=True)]
        local = np.ravel_multi_index(places_in_share, counts)
        # Share n must be all that instance n reads, and shares must be split alike.
        reads_own_share = d is None or (places[d] // counts[d] == np.arange(instances)[:, None]).all()
        if reads_own_share and (local == local[0]).all():
            return SharedSplit(d, BlockSplit(counts, tuple(local[0].tolist())))
    raise AssertionError("replicas of an instance hold neighbouring blocks along one dimension")


def global_shape(shape: Sequence[int], dim: Split, replicas: int) -> tuple[int, ...]:
    """Shape of an array from the shape of one replica's part."""
    if isinstance(dim, BlockSplit):
        return tuple(n * count for n, count in zip(shape, dim.counts, strict=True))
    return tuple(n * replicas if d == dim else n for d, n in enumerate(shape))


def evaluate(
    *operands: jax.Array,
    jaxpr: ClosedJaxpr,
    replicas: int,
    in_dims: Splits,
    out_dims: Splits,
    is_checked: bool = False,
    axis_name: str = AXIS,
    mesh: ReplicaAxes = (),
    instances: Instances = ALONE,
) -> list[jax.Array]:
    """Evaluates the primitive `replicated`: the function of one replica, on the parts of all replicas, and joined.

    It does so by JAX operations that can be traced, differentiated and mapped.

    Args:
        operands: entire arrays; with several instances those of the local replicas, inside a `jax.shard_map`.
        jaxpr: function of one replica.
        replicas: number of replicas of all instances.
        in_dims: split of each operand; None for one that all replicas have.
        out_dims: split of each result; None for one that is equal on all.
        is_checked: as `mesh`, a parameter of the primitive that changes no result.
        axis_name: the axis of replicas in the jaxpr.
        mesh: see there.
        instances: the processes that share the replicas.
    """
    from ipujax.lowering.replicas.stacked_eval import Replicas, stacked_eval  # for functions of replicas alone

    all_replicas = Replicas(replicas, instances, axis=axis_name)
    num_local = all_replicas.num_local
    stacked = [
        jnp.broadcast_to(x, (num_local, *jnp.shape(x))) if dim is None else split(jnp.asarray(x), dim, num_local)
        for x, dim in zip(operands, in_dims, strict=True)
    ]
    results = stacked_eval(jaxpr, stacked, all_replicas)
    return [join(x, dim) for x, dim in zip(results, out_dims, strict=True)]


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, replicas: int, out_dims: Splits, **params: Any) -> list[Any]:
    return [
        aval.update(shape=global_shape(aval.shape, dim, replicas))
        for aval, dim in zip(jaxpr.out_avals, out_dims, strict=True)
    ]


replicated_p = make_holding_primitive("replicated", evaluate, _shapes, "jaxpr")


def on_one_replica(
    jaxpr: ClosedJaxpr, rewrite: Callable[[ClosedJaxpr, Sequence[int | None]], ClosedJaxpr]
) -> ClosedJaxpr:
    """Rewrites the function of one replica inside a jaxpr; the jaxpr itself if nothing is replicated.

    Args:
        jaxpr: a jaxpr of a single `replicated` equation, or any other.
        rewrite: function from the jaxpr of one replica to an equal one; its second argument has for each input of that
            jaxpr the number of the input of `jaxpr` which it is a part of, None for a constant.
    """
    body = jaxpr.jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive is not replicated_p:
        return rewrite(jaxpr, range(len(body.invars)))
    (eqn,) = body.eqns
    places = [body.invars.index(var) if var in body.invars else None for var in eqn.invars]
    inner = rewrite(closed(eqn.params["jaxpr"]), places)
    return ClosedJaxpr(body.replace(eqns=[eqn.replace(params={**eqn.params, "jaxpr": inner})]), jaxpr.consts)


def unwrapped(jaxpr: ClosedJaxpr) -> Replicated:
    """Returns the function of one replica, with the splits of its arrays, of a jaxpr of a single `replicated` equation.

    Any other jaxpr is the function of the only replica. The equation must read all inputs of the jaxpr, and its results
    be those of the jaxpr.
    """
    body = jaxpr.jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive is not replicated_p:
        return Replicated(jaxpr, 1, (None,) * len(jaxpr.in_avals), (None,) * len(jaxpr.out_avals))
    (eqn,) = body.eqns
    values = dict(zip(body.constvars, jaxpr.consts, strict=True))
    inner = closed(eqn.params["jaxpr"])
    places = {var: n for n, var in enumerate(eqn.invars)}
    assert list(body.outvars) == list(eqn.outvars), "results of all replicas are the results of the jaxpr"
    assert set(body.invars) <= set(places), "arguments are operands of all replicas"
    # Constants of the outer jaxpr become constants of the inner one; its inputs take the order of the arguments.
    constants = [n for n, var in enumerate(eqn.invars) if var in values]  # numbers of operands, as in `order`
    order = [places[var] for var in body.invars]
    body_jaxpr = inner.jaxpr.replace(
        constvars=[*inner.jaxpr.constvars, *(inner.jaxpr.invars[n] for n in constants)],
        invars=[inner.jaxpr.invars[n] for n in order],
    )
    consts = [*inner.consts, *(values[eqn.invars[n]] for n in constants)]
    in_dims = tuple(eqn.params["in_dims"][n] for n in order)
    params = {key: value for key, value in eqn.params.items() if key not in ("jaxpr", "in_dims")}
    return Replicated(ClosedJaxpr(body_jaxpr, consts), in_dims=in_dims, **params)
