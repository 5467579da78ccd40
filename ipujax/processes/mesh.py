"""Instances as devices of JAX: the axis "instance", one CPU device a process.

Input: arrays of this process. Output: arrays of all processes for one computation of XLA, which every process must
start, and back again. Collectives over the axis go through gloo.

Limits: a process takes part with one device, and waits for each such computation: with two, or with several
computations under way, gloo was seen to hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "instance"
ALL = PartitionSpec()  # the same on all instances
SHARE = PartitionSpec(AXIS)  # each instance holds a share of the leading axis


@cache
def instance_mesh() -> Mesh:
    """The first device of each process, in their order."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[index] for index in sorted(first)]), (AXIS,))


def to_all(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array of this process as its part of one of all processes; no data is moved.

    Args:
        array: on this process's device.
        spec: `ALL` if every process holds the same, `SHARE` if each holds a share of the leading axis.
    """
    mesh = instance_mesh()
    shape = array.shape if spec == ALL else (array.shape[0] * mesh.size, *array.shape[1:])
    local = jax.device_put(array, jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), [local])


def to_local(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """This process's part of arrays of all processes, once they are computed."""
    return [array.addressable_data(0) for array in jax.block_until_ready(arrays)]
