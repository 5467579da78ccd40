"""Meshes of replicas: collectives over axes of a mesh as collectives over groups of replicas.

Input: the axes of a mesh, whose devices are the replicas of a program, and the parameters of collectives inside of a
`jax.shard_map` over it. Output: JAX functions over the axis of replicas. Replicas are numbered along the axes of the
mesh, the last one fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from ipujax.lowering.gcl import Groups, axis_rank
from ipujax.lowering.partition import sizes_of
from ipujax.lowering.replicas import AXIS
from ipujax.runtime.graph import ReplicaAxes

Axes = tuple[str, ...]


def named_axes(part: Any) -> Axes:
    """Axes that a parameter of JAX names: none for None, one by itself, or several in a tuple."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


@dataclass(frozen=True, slots=True)
class OuterAxis:
    """Axis of replicas, each of which has a mesh."""

    name: str
    size: int


NO_OUTER_AXIS = OuterAxis("", 1)


class PartKey(NamedTuple):
    """What a device's part of a value is known by: the value, the mesh, and the axes that split each dimension."""

    value: Any
    mesh: ReplicaAxes
    axes: tuple[Axes, ...]


@dataclass(frozen=True, slots=True)
class ReplicaMesh:
    """Mesh of replicas, which are numbered along its axes, the last one fastest.

    Args:
        sizes: size of each axis.
        devices: replicas of each point of the mesh, numbered in turn.
    """

    sizes: Mapping[str, int]
    devices: int = 1

    @staticmethod
    def of(mesh: Any, outer: OuterAxis = NO_OUTER_AXIS) -> ReplicaMesh:
        """The devices of a JAX mesh, those of each replica of `outer` after the other."""
        return ReplicaMesh(({outer.name: outer.size} if outer.name else {}) | sizes_of(mesh))

    def groups(self, names: Sequence[str], within: Any = None) -> Groups:
        """Groups of replicas among which a collective over some axes of the mesh runs: they differ in these axes only.

        Args:
            names: the axes of the collective.
            within: JAX's `axis_index_groups`, ranks along these axes by which each group is divided further; or None.

        Returns:
            Numbers of the replicas of each group, in the order of their rank along the axes.
        """
        axes = list(self.sizes)
        # Axes that are not named first, so that each row of the table is a group.
        shape = [*(self.sizes[n] for n in axes), self.devices]
        numbers = np.arange(prod(shape)).reshape(shape)
        order = [*(a for a, n in enumerate(axes) if n not in names), len(axes), *(axes.index(n) for n in names)]
        table = numbers.transpose(order).reshape(-1, prod(self.sizes[n] for n in names))
        tables = [table] if within is None else [table[:, list(group)] for group in within]
        return tuple(tuple(map(int, row)) for table in tables for row in table)

    def index(self, names: Sequence[str]) -> jax.Array:
        """Rank of a replica along some axes, int32."""
        rank_of = {replica: rank for group in self.groups(names) for rank, replica in enumerate(group)}
        return axis_rank([rank_of[replica] for replica in range(len(rank_of))])

    def part_key(self, value: Any, spec: Any) -> PartKey:
        """Key of a replica's part of a value, equal for specs that differ only in axes of size 1."""
        axes = [tuple(name for name in names if self.sizes[name] > 1) for names in map(named_axes, spec.partitions)]
        while axes and not axes[-1]:
            axes.pop()
        return PartKey(value, tuple(self.sizes.items()), tuple(axes))

    def part(self, x: jax.Array, spec: Any) -> jax.Array:
        """A replica's slice of an array that all have, as a device of a mesh has by a `PartitionSpec`."""
        for dim, names in enumerate(map(named_axes, spec.partitions)):
            ranks = prod(self.sizes[n] for n in names)
            if ranks > 1:
                size = x.shape[dim] // ranks
                x = lax.dynamic_slice_in_dim(x, self.index(names) * size, size, dim)
        return x

    def gathered(self, x: jax.Array, spec: Any) -> jax.Array:
        """The common array of the slices of all replicas."""
        for dim, names in enumerate(map(named_axes, spec.partitions)):
            if prod(self.sizes[n] for n in names) > 1:
                x = lax.all_gather(x, AXIS, axis_index_groups=self.groups(names), axis=dim, tiled=True)
        return x

    def rules(self) -> dict[str, Callable[..., Any]]:
        """Function that computes each collective of a `shard_map` over replicas, by name of the primitive.

        It has the operands and the parameters of the equation; changes of types alone are the identity.
        """
        return {
            "psum": self._reduction_rule(lax.psum),
            "psum_invariant": self._reduction_rule(lax.psum),
            "pmax": self._reduction_rule(lax.pmax),
            "pmin": self._reduction_rule(lax.pmin),
            **dict.fromkeys(("pvary", "preduced", "reduced_vary_cast_p", "vary_unreduced_cast_p"), lambda x, **_: x),
            "all_gather": self._all_gather,
            "all_gather_invariant": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "ppermute": self._permute,
            "pbroadcast": self._broadcast,
            "axis_index": lambda axis_name: self.index(named_axes(axis_name)),
        }

    def _reduction_rule(self, fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Reduction `fun`, such as `psum`, over mesh axes as one over groups of replicas, which stand for devices."""

        def reduced(x: jax.Array, axes: Any, axis_index_groups: Any = None) -> jax.Array:
            names = [axis for axis in named_axes(axes) if isinstance(axis, str)]
            dims = tuple(axis for axis in axes if not isinstance(axis, str))  # axes of `vmap`, each device's own
            partial_sum = fun(x, dims) if dims else x
            return fun(partial_sum, AXIS, axis_index_groups=self.groups(names, axis_index_groups))

        return reduced

    def _all_gather(
        self, x: jax.Array, *, all_gather_dimension: int, axis_name: Any, tiled: bool, **params: Any
    ) -> jax.Array:
        groups = self.groups(named_axes(axis_name), params.get("axis_index_groups"))
        return lax.all_gather(x, AXIS, axis_index_groups=groups, axis=all_gather_dimension, tiled=tiled)

    def _reduce_scatter(
        self, x: jax.Array, *, scatter_dimension: int, axis_name: Any, tiled: bool, **params: Any
    ) -> jax.Array:
        groups = self.groups(named_axes(axis_name), params.get("axis_index_groups"))
        return lax.psum_scatter(x, AXIS, scatter_dimension=scatter_dimension, axis_index_groups=groups, tiled=tiled)

    def _all_to_all(
        self, x: jax.Array, *, split_axis: int, concat_axis: int, axis_name: Any, **params: Any
    ) -> jax.Array:
        groups = self.groups(named_axes(axis_name), params.get("axis_index_groups"))
        return lax.all_to_all(x, AXIS, split_axis, concat_axis, axis_index_groups=groups, tiled=True)

    def _permute(self, x: jax.Array, *, axis_name: Any, perm: Sequence[tuple[int, int]]) -> jax.Array:
        # Pairs are ranks along the axes, the same in every group of replicas: as in JAX 0.10 in the order of the mesh,
        # also of axes that are named in another order.
        groups = map(sorted, self.groups(named_axes(axis_name)))
        pairs = [(group[s], group[d]) for group in groups for s, d in perm]
        return lax.ppermute(x, AXIS, pairs)

    def _broadcast(self, x: jax.Array, *, axis_name: Any, source: int, **params: Any) -> jax.Array:
        # A permutation has one destination for each source.
        groups = self.groups(named_axes(axis_name), params.get("axis_index_groups"))
        return lax.all_gather(x, AXIS, axis_index_groups=groups)[source]
