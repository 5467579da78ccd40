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

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ipujax.arguments import has_tracer, whole_number
from ipujax.calls import split_dims
from ipujax.distributed.instance.meeting import agree, naming_lost, stable
from ipujax.distributed.instance.membership import TIMEOUT_SECONDS, join, membership
from ipujax.distributed.instance.process_arrays import gathered
from ipujax.lowering.replicas import AXIS as REPLICAS
from ipujax.public import public_names
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.signatures import describe

# Of arrays stacked along the first dimension.
_OPERATIONS: dict[str, Callable[..., jax.Array]] = {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max, "min": jnp.min}
_SPLIT = PartitionSpec(REPLICAS)


def init(*, timeout_seconds: int = TIMEOUT_SECONDS) -> None:
    """Join the job of this process by `jax.distributed.initialize`; does nothing if that is done, or there is no job.

    JAX reads the variables of Slurm, Open MPI, Kubernetes and Cloud TPU; those of `ipujax run` are read here.

    Args:
        timeout_seconds: seconds after which processes that have not all come fail.

    Raises:
        ArgumentError: JAX has computed something before; the processes have not met in time; their address is in use.
    """
    join(whole_number("timeout_seconds of ipu.distributed.init", timeout_seconds, 1))


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
    return num_replicas() // num_instances()


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
    label = "root of ipu.distributed.broadcast must be the number of an instance"
    expected = f"a whole number from 0 to {num_instances() - 1}"
    number = whole_number(label, root, 0, expected)
    if number >= num_instances():
        raise ArgumentValueError(label, expected=expected, got=root)
    leaves, structure = _stacked(f"ipu.distributed.broadcast from instance {number}", tree)
    return jax.tree.unflatten(structure, [x[number] for x in leaves])


def all_reduce(tree: Any, op: Literal["mean", "sum", "max", "min"] = "mean") -> Any:
    """Reduce arrays over instances, on the host.

    Args:
        tree: pytree of arrays, of the same structure, shapes and dtypes on all instances.
        op: "mean", "sum", "max" or "min".

    Returns:
        The reduced tree, equal on all instances; dtypes are those of `jax.numpy.mean` and its like.

    Raises:
        ArgumentError: another operation, leaves that are not arrays, or a transformation of JAX; on all instances:
            trees that differ.
    """
    if op not in tuple(_OPERATIONS):
        raise ArgumentValueError(
            "unknown reduction over instances", expected=f"one of {', '.join(_OPERATIONS)}", got=repr(op)
        )
    unordered = () if op in ("mean", "sum") else (jnp.complexfloating,)
    leaves, structure = _stacked(f'ipu.distributed.all_reduce "{op}"', tree, (jax.dtypes.prng_key, *unordered))
    return jax.tree.unflatten(structure, [_OPERATIONS[op](x, axis=0) for x in leaves])


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
    leaves, structure = _stacked("ipu.distributed.gather", tree)
    entire = [x[0] if dim is None else jnp.concatenate(x, dim) for x, dim in zip(leaves, dims, strict=True)]
    return jax.tree.unflatten(structure, entire)


def _stacked(action: str, tree: Any, refused: tuple[Any, ...] = ()) -> tuple[list[jax.Array], Any]:
    """Return the leaves of all instances' trees, [instances, *shape], and the structure of the tree."""
    if has_tracer(jax.tree.leaves(tree)):
        hint = "call it between calls of compiled functions; inside, replicas reduce by jax.lax.pmean"
        raise ArgumentError(f"{action} runs on the host and cannot take a traced operand", hint=hint)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = [f"operand{jax.tree_util.keystr(path)}" for path, _ in paths]
    leaves = [_array(action, place, leaf, refused) for place, (_, leaf) in zip(places, paths, strict=True)]
    # Arrays of different shapes would abort the process inside gloo.
    agree(action, [*zip(places, map(describe, leaves), strict=True), ("the structure", stable(structure))])
    with naming_lost(action):
        return [_gathered(x) for x in leaves], structure


def _array(action: str, place: str, leaf: Any, refused: tuple[Any, ...]) -> jax.Array:
    """Return a leaf of an operand as an array; refuse kinds of dtypes that the collective `action` cannot reduce."""
    try:
        array = jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError) as error:  # of masked arrays; of numbers wider than JAX's
        got = f"{describe(leaf)} at {place}: {error}"
        raise ArgumentTypeError(f"{action} takes arrays", expected="arrays or numbers", got=got) from error
    if any(jnp.issubdtype(array.dtype, kind) for kind in refused):
        got = f"{describe(array)} at {place}"
        raise ArgumentTypeError(f"{action} is not defined for all leaves", expected="real numbers", got=got)
    return array


def _gathered(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return gathered(x)
    return jax.random.wrap_key_data(gathered(jax.random.key_data(x)), impl=jax.random.key_impl(x))


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
