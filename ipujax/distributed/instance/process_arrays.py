"""Arrays of all processes of a job, for one XLA computation, which every process must start.

Processes are devices of JAX: a mesh with one CPU device of each. Collectives over its axis use gloo.

Limits: a process has one device in the mesh, and waits for each such computation: with two devices, or two computations
at once, gloo was measured to hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.replicas import Dims, global_shape
from ipujax.runtime.host import AXIS
from ipujax.runtime.names_at_import import jax_jit


@cache
def _mesh() -> Mesh:
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[index] for index in sorted(first)]), (AXIS,))


def over_instances(fun: Callable[..., Sequence[Any]], in_dims: Dims, out_dims: Dims) -> Callable[..., Any]:
    """Return a function of arrays of all instances that calls `fun` with this instance's shares; for traces.

    Args:
        fun: function of arrays that returns a list of them; may use collectives over the axis.
        in_dims: for each operand the dimension that is split over instances, None where it is equal on all.
        out_dims: the same for each result.
    """
    in_specs, out_specs = (tuple(map(_spec, dims)) for dims in (in_dims, out_dims))
    # Unchecked: the analysis of replicas decides equality, see `lowering.replicas.varying`.
    return jax.shard_map(
        lambda *xs: tuple(fun(*xs)), mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def to_all(array: jax.Array, dim: int | None) -> jax.Array:
    """Return an array of all processes, split along `dim` or equal, whose part here is `array`; moves no data."""
    device, sharding = _local_sharding(dim)
    local = array if array.devices() == {device} else jax.device_put(array, device)
    kind = local.sharding.memory_kind
    sharding = sharding if kind is None else sharding.with_memory_kind(kind)
    shape = global_shape(array.shape, dim, sharding.mesh.size)
    return jax.make_array_from_single_device_arrays(shape, sharding, [local])


def to_local(tree: Any) -> Any:
    """Return this process's part of a tree of arrays of all processes, after they are computed."""
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, jax.block_until_ready(tree))


def gathered(array: jax.Array | np.ndarray) -> jax.Array:
    """Return the arrays of all processes, of one shape, stacked; as `process_allgather`, but also inside of a trace."""
    with jax.ensure_compile_time_eval():
        stacked: jax.Array = to_local(_all_of(to_all(jnp.asarray(array[None]), 0)))
    return stacked


@cache
def _local_sharding(dim: int | None) -> tuple[jax.Device, NamedSharding]:
    return jax.local_devices()[0], NamedSharding(_mesh(), _spec(dim))


def _spec(dim: int | None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, AXIS)


@jax_jit
def _all_of(array: jax.Array) -> Any:
    return over_instances(lambda x: [jax.lax.all_gather(x, AXIS, tiled=True)], (0,), (None,))(array)[0]
