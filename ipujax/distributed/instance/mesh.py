"""Instances as devices of JAX: a mesh with one CPU device a process.

Input: arrays of this process. Output: arrays of all processes for one computation of XLA, which every process must
start, and back again. Collectives over the axis go through gloo.

Limits: a process takes part with one device, and waits for each such computation: with two, or with several
computations under way, gloo was seen to hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.replicas import Dims, global_shape
from ipujax.runtime.host import AXIS


@cache
def instance_mesh() -> Mesh:
    """The first device of each process, in their order."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[index] for index in sorted(first)]), (AXIS,))


def over_instances(fun: Callable[..., Sequence[Any]], in_dims: Dims, out_dims: Dims) -> Callable[..., Any]:
    """A function of this instance's shares as one of arrays of all instances, in a trace.

    Args:
        fun: takes arrays, gives a list of them; may use collectives over the axis.
        in_dims: for each operand the dimension of which every instance has a share, None where all have the same.
        out_dims: the same for each result.
    """
    in_specs, out_specs = (tuple(map(_spec, dims)) for dims in (in_dims, out_dims))
    return jax.shard_map(
        lambda *operands: tuple(fun(*operands)),
        mesh=instance_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # what is equal on all instances is known from the replicas, see `lowering.replicas.varying`
    )


def to_all(array: jax.Array, dim: int | None) -> jax.Array:
    """An array of this process as its part of one of all processes; no data is moved.

    Args:
        array: any.
        dim: the dimension of which every instance has a share, None where all have the same.
    """
    device, sharding = _here(dim)
    local = array if array.devices() == {device} else jax.device_put(array, device)
    kind = local.sharding.memory_kind
    sharding = sharding if kind is None else sharding.with_memory_kind(kind)
    shape = global_shape(array.shape, dim, sharding.mesh.size)
    return jax.make_array_from_single_device_arrays(shape, sharding, [local])


def to_local(tree: Any) -> Any:
    """This process's part of a tree of arrays of all processes, once they are computed."""
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, jax.block_until_ready(tree))


@cache
def _here(dim: int | None) -> tuple[jax.Device, NamedSharding]:
    """This process's device, and how an array is spread."""
    return jax.local_devices()[0], NamedSharding(instance_mesh(), _spec(dim))


def _spec(dim: int | None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)
