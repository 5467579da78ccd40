"""Replicas spread over processes: each instance holds an equal share of them, in order.

Arrays of replicas have a leading axis of those that are here. Where replicas meet, one `jax.lax` collective over the
axis "instance" brings all of them together; what comes of it is computed by every instance in the same way, so numbers
do not depend on how many instances there are.

Limits: with several instances everything here must be traced inside a `jax.shard_map` over that axis. All replicas'
values of a meeting pass through each instance's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

AXIS = "instance"  # of a mesh with one device a process


@dataclass(frozen=True, slots=True)
class Instances:
    """Among how many instances replicas are shared.

    Args:
        count: how many; 1 for all replicas in this process.
    """

    count: int = 1

    def local(self, replicas: int) -> int:
        """How many of the replicas are here.

        Args:
            replicas: of all instances, a multiple of their number.
        """
        assert replicas % self.count == 0, "every instance has as many replicas"
        return replicas // self.count

    def all_of(self, here: jax.Array) -> jax.Array:
        """The values of all replicas, [replicas, …], from those of the replicas that are here, [local, …]."""
        return here if self.count == 1 else lax.all_gather(here, AXIS, tiled=True)

    def own(self, all_values: jax.Array) -> jax.Array:
        """The values of the replicas that are here, from those of all, which every instance has."""
        if self.count == 1:
            return all_values
        local = self.local(all_values.shape[0])
        return lax.dynamic_slice_in_dim(all_values, lax.axis_index(AXIS) * local, local)


ALONE = Instances()
