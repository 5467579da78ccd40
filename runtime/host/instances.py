"""Replicas spread over processes: each instance has an equal share of them, in order.

Arrays of replicas have a leading axis of the local ones. Where replicas meet, one `jax.lax` collective over the axis
"instance" gathers the values of all; every instance then computes the same from them, so numbers do not depend on the
number of instances. Sums over all replicas are sums of the instances' sums, and so differ by their rounding.

Limits: with several instances all methods must be traced inside a `jax.shard_map` over that axis. At each meeting point
but sums the values of all replicas are in the memory of each instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.runtime.tensor import wide_dtype

AXIS = "instance"  # of a mesh with one device a process


@dataclass(frozen=True, slots=True)
class Instances:
    """Division of replicas among instances.

    Args:
        count: number of instances; 1 for all replicas in this process.
    """

    count: int = 1

    def count_local(self, replicas: int) -> int:
        """Return the number of replicas of each instance, out of `replicas`, a multiple of `count`."""
        assert replicas % self.count == 0, "replicas must be a multiple of the number of instances"
        return replicas // self.count

    def gather(self, local_values: jax.Array) -> jax.Array:
        """Return the values of all replicas, [replicas, …], from those of the local ones, [local, …]."""
        return local_values if self.count == 1 else lax.all_gather(local_values, AXIS, tiled=True)

    def sum(self, local_values: jax.Array) -> jax.Array:
        """Return the sum of the values of all replicas, for each local one, [local, …]."""
        dtype = local_values.dtype
        # Sums of half precision round once, as those of one instance.
        wide = wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        total = lax.psum(jnp.sum(local_values, axis=0, dtype=wide), AXIS).astype(dtype)
        return jnp.broadcast_to(total, local_values.shape)

    def take_local(self, all_values: jax.Array) -> jax.Array:
        """Return the values of the local replicas, [local, …], from those of all, [replicas, …]."""
        if self.count == 1:
            return all_values
        # Every instance has the values of all, and its replicas are one contiguous part of them.
        local = self.count_local(all_values.shape[0])
        return lax.dynamic_slice_in_dim(all_values, lax.axis_index(AXIS) * local, local)


ALONE = Instances()
