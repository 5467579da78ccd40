"""Training by several processes, on one host or many: functions for their script.

    import ipujax as ipu
    ipu.distributed.init()                                          # before JAX computes anything
    params = ipu.distributed.broadcast(params)                      # the weights of instance 0
    step = ipu.jit(fun, replicas=ipu.distributed.num_replicas(), …)  # each instance holds its share of the replicas
    loss = step(params, ipu.distributed.share(batch))               # and feeds its share of the data
    loss = ipu.distributed.all_reduce(loss, "mean")                 # on the host: Horovod's way

Input: pytrees of arrays. Output: the same on all instances, which are the processes that `jax.distributed` has joined.
A script that is alone is one instance, and everything here works for it too.

Limits: a call here that only some instances make ends all of them with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ipujax.arguments import has_tracer
from ipujax.calls import split_dims
from ipujax.distributed.instance import (
    TIMEOUT_SECONDS,
    agree,
    join,
    membership,
    naming_lost,
    over_instances,
    stable,
    to_all,
    to_local,
)
from ipujax.lowering.replicas import AXIS as REPLICAS
from ipujax.public import public_names
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.host import AXIS
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.signatures import describe

_Combine = Callable[[jax.Array, Any], jax.Array]
_OPERATIONS: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "mean": lax.pmean,
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}
_SPLIT = PartitionSpec(REPLICAS)
_UNORDERED = (jax.dtypes.prng_key, jnp.complexfloating)
_REFUSED = {"mean": _UNORDERED[:1], "sum": _UNORDERED[:1], "max": _UNORDERED, "min": _UNORDERED}


def init(*, timeout_seconds: int = TIMEOUT_SECONDS) -> None:
    """Join the job of this process by `jax.distributed.initialize`; does nothing if that is done, or there is no job.

    JAX reads the variables of Slurm, Open MPI, Kubernetes and Cloud TPU; those of `ipujax run` are read here.

    Args:
        timeout_seconds: seconds after which processes that have not all come fail.

    Raises:
        ArgumentError: JAX has computed something before; the processes have not met in time; their address is in use.
    """
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int) or timeout_seconds < 1:
        problem = "timeout_seconds of ipu.distributed.init must be a whole number of seconds"
        raise ArgumentValueError(problem, expected="at least 1", got=timeout_seconds)
    join(timeout_seconds)


def instance_index() -> int:
    """Return the number of this instance, from 0."""
    return membership().instance_index


def num_instances() -> int:
    """Return the number of instances of this run."""
    return membership().num_instances


def num_replicas() -> int:
    """Return the number of replicas of all instances together: `IPUJAX_NUM_REPLICAS`, by default one each."""
    return membership().num_replicas


def local_replicas() -> int:
    """Return the number of replicas of this instance."""
    return membership().local_replicas


def broadcast(tree: Any, root: int = 0) -> Any:
    """Copy the arrays of one instance to all, bit for bit.

    Args:
        tree: pytree of arrays, of the same structure, shapes and dtypes on all instances.
        root: number of the instance with the values.

    Returns:
        The tree of that instance, on this one's device.

    Raises:
        ArgumentError: leaves that are not arrays, or a transformation of JAX; on all instances: trees that differ.
    """
    if not isinstance(root, int) or not 0 <= root < num_instances():
        expected = f"a whole number from 0 to {num_instances() - 1}"
        raise ArgumentValueError(
            "root of ipu.distributed.broadcast must be the number of an instance", expected=expected, got=root
        )
    return _together(f"ipu.distributed.broadcast from instance {root}", _share_of, tree, repeat(root))


def all_reduce(tree: Any, op: Literal["mean", "sum", "max", "min"] = "mean") -> Any:
    """Reduce arrays over instances, on the host.

    Args:
        tree: pytree of arrays, of the same structure, shapes and dtypes on all instances.
        op: "mean", "sum", "max" or "min".

    Returns:
        The reduced tree, equal on all instances; dtypes are those of `jax.lax.pmean` and its like.

    Raises:
        ArgumentError: another operation, leaves that are not arrays, or a transformation of JAX; on all instances:
            trees that differ.
    """
    if op not in _OPERATIONS:
        raise ArgumentValueError(
            "unknown reduction over instances", expected=f"one of {', '.join(_OPERATIONS)}", got=repr(op)
        )
    return _together(f'ipu.distributed.all_reduce "{op}"', _reduced, tree, repeat(op), _REFUSED[op])


def share(tree: Any, specs: Any = _SPLIT) -> Any:
    """Return the parts of whole arrays for this instance's replicas; nothing is sent.

    Args:
        tree: pytree of arrays.
        specs: tree prefix, as the `in_specs` of `ipu.jit`; by default all arrays are split along the first dimension.

    Returns:
        The tree with this instance's part of each array that is split; arrays of `PartitionSpec()` are unchanged.

    Raises:
        ArgumentError: an array that instances cannot share equally, or specs of another structure.
    """
    count = num_instances()
    index = instance_index()
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    dims = split_dims("specs of ipu.distributed.share", specs, tree)
    parts = []
    for (path, x), dim in zip(paths, dims, strict=True):
        if dim is not None and (dim >= jnp.ndim(x) or jnp.shape(x)[dim] % count):
            problem = f"{count} instances cannot share operand{jax.tree_util.keystr(path)} equally"
            raise ArgumentValueError(problem, expected=f"a multiple of {count} in dimension {dim}", got=describe(x))
        size = 0 if dim is None else jnp.shape(x)[dim] // count
        parts.append(x if dim is None else x[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)])
    return jax.tree.unflatten(structure, parts)


def gather(tree: Any, specs: Any = _SPLIT) -> Any:
    """Return whole arrays from the parts of all instances: the inverse of `share`.

    Args:
        tree: pytree of arrays, of the same structure, shapes and dtypes on all instances.
        specs: tree prefix, as the `out_specs` of `ipu.jit`; by default all arrays are split along the first dimension.

    Returns:
        The tree of whole arrays, equal on all instances.

    Raises:
        ArgumentError: as `broadcast`; specs of another structure.
    """
    dims = split_dims("specs of ipu.distributed.gather", specs, tree)
    for (path, x), dim in zip(jax.tree.leaves_with_path(tree), dims, strict=True):
        if dim is not None and dim >= jnp.ndim(x):
            problem = f"operand{jax.tree_util.keystr(path)} has no dimension {dim} along which to gather it"
            raise ArgumentValueError(problem, expected=f"{dim + 1} dimensions or more", got=describe(x))
    return _together("ipu.distributed.gather", _all_shares, tree, dims)


def _together(action: str, combine: _Combine, tree: Any, settings: Iterable[Any], refused: Sequence[Any] = ()) -> Any:
    """Combine the leaves of all instances' trees, each with its setting."""
    if has_tracer(jax.tree.leaves(tree)):
        hint = "call it between calls of compiled functions; inside, replicas reduce by jax.lax.pmean"
        raise ArgumentError(f"{action} runs on the host and cannot take a traced operand", hint=hint)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = [f"operand{jax.tree_util.keystr(path)}" for path, _ in paths]
    leaves = [_array(action, place, leaf) for place, (_, leaf) in zip(places, paths, strict=True)]
    for place, x in zip(places, leaves, strict=True):
        if any(jnp.issubdtype(x.dtype, kind) for kind in refused):
            got = f"{describe(x)} at {place}"
            raise ArgumentTypeError(f"{action} is not defined for all leaves", expected="real numbers", got=got)
    texts = [*zip(places, map(describe, leaves), strict=True), ("the structure", stable(structure))]
    agree(action, texts)
    keys = {n: jax.random.key_impl(x) for n, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}
    arrays = [jax.random.key_data(x) if n in keys else x for n, x in enumerate(leaves)]
    leaf_settings = tuple(islice(settings, len(arrays)))
    with naming_lost(action):
        outs = to_local(_combined(combine, leaf_settings, [to_all(x[None], 0) for x in arrays])) if arrays else []
    wrapped = [jax.random.wrap_key_data(x, impl=keys[n]) if n in keys else x for n, x in enumerate(outs)]
    return jax.tree.unflatten(structure, wrapped)


def _array(action: str, place: str, leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        got = f"{describe(leaf)} at {place}"
        raise ArgumentTypeError(f"{action} takes arrays", expected="arrays or numbers", got=got) from error


@partial(jax_jit, static_argnums=(0, 1))
def _combined(combine: _Combine, settings: tuple[Any, ...], stacked: list[jax.Array]) -> Sequence[jax.Array]:
    """Combine arrays [instances, *local] over instances; results are equal on all instances."""

    def local_results(*shares: jax.Array) -> list[jax.Array]:
        return [combine(x[0], setting) for x, setting in zip(shares, settings, strict=True)]

    result: Sequence[jax.Array] = over_instances(local_results, (0,) * len(stacked), (None,) * len(stacked))(*stacked)
    return result


def _all_shares(x: jax.Array, dim: int | None) -> jax.Array:
    return x if dim is None else lax.all_gather(x, AXIS, axis=dim, tiled=True)


def _share_of(x: jax.Array, root: int) -> jax.Array:
    return lax.all_gather(x, AXIS)[root]


def _reduced(x: jax.Array, op: str) -> jax.Array:
    return _OPERATIONS[op](x, AXIS)


__all__ = [
    "all_reduce",
    "broadcast",
    "gather",
    "init",
    "instance_index",
    "local_replicas",
    "num_instances",
    "num_replicas",
    "share",
]
__dir__ = public_names(globals())
