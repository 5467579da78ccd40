"""Functions of one replica as part of a jaxpr: the primitive `replicated`, and which arguments are split.

    results = replicated_p.bind(*operands, jaxpr=…, replicas=N, in_dims=…, out_dims=…, is_checked=…, axis_name=…)

The jaxpr is what one replica computes, over the axis `axis_name`. Operand n is split in N along dimension `in_dims[n]`,
or the same for all replicas when that is None; results are joined, or taken from replica 0, by `out_dims`. Plain JAX
computes the same numbers, all replicas as a leading axis (`stacked_eval`).

Results that are taken from replica 0 must be equal on all: that is proved (`varying`), or known already (`is_checked`).

Limits: one level, one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.gcl import AXIS as AXIS
from ipujax.lowering.jax_compat import ClosedJaxpr, closed, make_holding_primitive
from ipujax.lowering.replicas.stacked_eval import Replicas, stacked_eval
from ipujax.runtime.host import ALONE, Instances

Dims = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Replicated:
    """A jaxpr of one replica, and how its inputs and results are split.

    Args:
        jaxpr: the function of one replica.
        replicas: how many.
        in_dims: for each of its inputs the dimension that is split, None where all replicas get the same.
        out_dims: for each of its results the dimension along which they are joined, None where all are equal.
        is_checked: whether they are known to be.
        axis_name: the axis of replicas in the jaxpr, the only one there.
    """

    jaxpr: ClosedJaxpr
    replicas: int
    in_dims: Dims
    out_dims: Dims
    is_checked: bool = False
    axis_name: str = AXIS


def split(x: jax.Array, dim: int | None, replicas: int) -> jax.Array:
    """The parts of an array, [replicas, *local]; the array itself without a dimension to split."""
    if dim is None:
        return x
    parts = x.reshape((*x.shape[:dim], replicas, x.shape[dim] // replicas, *x.shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim, 0)


def joined(parts: jax.Array, dim: int | None) -> jax.Array:
    """The array of all parts [replicas, *local]; the first part without a dimension to join."""
    if dim is None:
        return parts[0]
    moved = jnp.moveaxis(parts, 0, dim)
    joint = moved.shape[dim] * moved.shape[dim + 1]
    return moved.reshape((*moved.shape[:dim], joint, *moved.shape[dim + 2 :]))


def global_shape(shape: Sequence[int], dim: int | None, replicas: int) -> tuple[int, ...]:
    """The shape of all parts of a local shape."""
    return tuple(n * replicas if d == dim else n for d, n in enumerate(shape))


def evaluate(
    *operands: jax.Array,
    jaxpr: ClosedJaxpr,
    replicas: int,
    in_dims: Dims,
    out_dims: Dims,
    is_checked: bool = False,
    axis_name: str = AXIS,
    instances: Instances = ALONE,
) -> list[jax.Array]:
    """The numbers of all replicas, as JAX operations that can be traced, differentiated and mapped.

    With several instances operands and results are what their replicas here have, inside a `jax.shard_map` over them.
    """
    everyone = Replicas(replicas, instances)
    here = everyone.here
    stacked = [
        jnp.broadcast_to(x, (here, *jnp.shape(x))) if dim is None else split(jnp.asarray(x), dim, here)
        for x, dim in zip(operands, in_dims, strict=True)
    ]
    results = stacked_eval(jaxpr, stacked, everyone)
    return [joined(x, dim) for x, dim in zip(results, out_dims, strict=True)]


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, replicas: int, out_dims: Dims, **params: Any) -> list[Any]:
    return [
        aval.update(shape=global_shape(aval.shape, dim, replicas))
        for aval, dim in zip(jaxpr.out_avals, out_dims, strict=True)
    ]


replicated_p = make_holding_primitive("replicated", evaluate, _shapes, "jaxpr")


def on_one_replica(
    jaxpr: ClosedJaxpr, rewrite: Callable[[ClosedJaxpr, Sequence[int | None]], ClosedJaxpr]
) -> ClosedJaxpr:
    """The jaxpr with the function of one replica rewritten, which is all of it where nothing is replicated.

    Args:
        jaxpr: of nothing but a `replicated` equation, or any other.
        rewrite: from the jaxpr of one replica, and for each of its inputs the number of that of the whole (None for a
            constant), to an equal one.
    """
    body = jaxpr.jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive is not replicated_p:
        return rewrite(jaxpr, range(len(body.invars)))
    (eqn,) = body.eqns
    places = [body.invars.index(var) if var in body.invars else None for var in eqn.invars]
    inner = rewrite(closed(eqn.params["jaxpr"]), places)
    return ClosedJaxpr(body.replace(eqns=[eqn.replace(params={**eqn.params, "jaxpr": inner})]), jaxpr.consts)


def unwrapped(jaxpr: ClosedJaxpr) -> Replicated:
    """A jaxpr of nothing but a `replicated` equation as what it holds; any other as one replica."""
    body = jaxpr.jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive is not replicated_p:
        return Replicated(jaxpr, 1, (None,) * len(jaxpr.in_avals), (None,) * len(jaxpr.out_avals))
    (eqn,) = body.eqns
    values = dict(zip(body.constvars, jaxpr.consts, strict=True))
    inner = closed(eqn.params["jaxpr"])
    places = {var: n for n, var in enumerate(eqn.invars)}
    assert list(body.outvars) == list(eqn.outvars), "results of all replicas go straight out"
    assert set(body.invars) <= set(places), "arguments go straight to all replicas"
    constants = [n for n, var in enumerate(eqn.invars) if var in values]
    order = [places[var] for var in body.invars]
    whole = inner.jaxpr.replace(
        constvars=[*inner.jaxpr.constvars, *(inner.jaxpr.invars[n] for n in constants)],
        invars=[inner.jaxpr.invars[n] for n in order],
    )
    consts = [*inner.consts, *(values[eqn.invars[n]] for n in constants)]
    in_dims = tuple(eqn.params["in_dims"][n] for n in order)
    replicas, *ends = (eqn.params[key] for key in ("replicas", "out_dims", "is_checked", "axis_name"))
    return Replicated(ClosedJaxpr(whole, consts), replicas, in_dims, *ends)
