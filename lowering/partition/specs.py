"""Specs: the mesh axes that split each dimension of a value, and those over which it is an unreduced sum.

An unreduced sum is a value of which each device has a partial sum, also called its term: the value is the sum of the
terms of all devices along the unreduced axes, which no collective has added up so far.

A mesh has named axes; a device of it is one IPU, the last axis varying fastest. A dimension split over axes (a, b) is
in `a × b` blocks, b varying fastest. Axes of size 1 split nothing and do not occur. Devices that differ only in axes
that a spec does not name hold equal blocks, or, over unreduced axes, partial sums of one block.
Source: `jax.sharding.PartitionSpec`, jax 0.10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]

# Equations that only state the spec of a value.
SPEC_STATEMENTS = frozenset({"sharding_constraint", "reshard"})


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Axes of a mesh of IPUs, in order.

    Args:
        names: name of each axis.
        sizes: number of devices along each axis.
    """

    names: Axes
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh | AbstractMesh) -> MeshAxes:
        """Axes of a mesh of JAX."""
        return MeshAxes(tuple(map(str, mesh.axis_names)), tuple(sizes_of(mesh).values()))

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Number of blocks of a dimension that is split over axes."""
        return prod(self.sizes[self.names.index(axis)] for axis in axes)

    def __str__(self) -> str:
        """Names and sizes of the axes, as in messages."""
        return f"a mesh of {', '.join(f'{name}: {size}' for name, size in zip(self.names, self.sizes, strict=True))}"

    def abstract(self) -> AbstractMesh:
        """Mesh of JAX without devices, its axes left to the compiler."""
        return AbstractMesh(self.sizes, self.names, (AxisType.Auto,) * len(self.names))


@dataclass(frozen=True, slots=True)
class Spec:
    """Split of a value.

    Args:
        dims: axes of each dimension, major to minor.
        unreduced: axes over which devices have partial sums; the value is the sum of these.
    """

    dims: tuple[Axes, ...]
    unreduced: frozenset[str] = frozenset()

    @property
    def axes(self) -> Axes:
        """Axes that split a dimension."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def is_whole(self) -> bool:
        """True if every device has the whole value."""
        return not self.unreduced and not any(self.dims)

    def reduced(self) -> Spec:
        """Spec after all sums are taken."""
        return replace(self, unreduced=frozenset())

    def partition_spec(self) -> PartitionSpec:
        """The spec in JAX's form, without trailing Nones."""
        parts = [None if not dim else dim[0] if len(dim) == 1 else dim for dim in self.dims]
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts, unreduced=set(self.unreduced)) if self.unreduced else PartitionSpec(*parts)


def sizes_of(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Size of each axis of a mesh of JAX, whose sizes may be NumPy's integers."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def in_words(spec: Spec) -> str:
    """A spec as text, an unreduced sum by its axes."""
    text = str(spec.reduced().partition_spec()).replace("PartitionSpec", "P")
    return f"{text}, a sum over {', '.join(sorted(spec.unreduced))}" if spec.unreduced else text


def whole(rank: int) -> Spec:
    """Spec of a value that every device has."""
    return Spec(((),) * rank)


def spec_of(spec: PartitionSpec, rank: int, mesh: MeshAxes) -> Spec:
    """Spec of a `PartitionSpec` for a value of some rank; open dimensions (`UNCONSTRAINED`) count as not split."""
    dims = [_axes_that_split(names_of(part), mesh) for part in spec.partitions]
    dims += [()] * (rank - len(dims))
    return Spec(tuple(dims), frozenset(_axes_that_split(tuple(getattr(spec, "unreduced", ()) or ()), mesh)))


def names_of(part: Any) -> Axes:
    """Names in one entry of a `PartitionSpec`."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _axes_that_split(axes: Axes, mesh: MeshAxes) -> Axes:
    return tuple(axis for axis in axes if mesh.size((axis,)) > 1)


def local_shape(shape: Sequence[int], spec: Spec, mesh: MeshAxes) -> tuple[int, ...]:
    """Shape of the block of each device."""
    return tuple(n // mesh.size(axes) for n, axes in zip(shape, spec.dims, strict=True))


def divides(shape: Sequence[int], spec: Spec, mesh: MeshAxes) -> bool:
    """True if all blocks have one size."""
    return all(n % mesh.size(axes) == 0 for n, axes in zip(shape, spec.dims, strict=True))


def typed_spec(aval: Any, mesh: MeshAxes) -> Spec | None:
    """Spec in the type of a value over a mesh of explicit axes; None if its type leaves the split to the compiler."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _is_explicit(sharding.mesh):
        return None
    return spec_of(sharding.spec, len(aval.shape), mesh)


def explicit_axes(aval: Any) -> frozenset[str]:
    """Explicit axes of the mesh in the type of a value, but for those of size 1."""
    sharding = getattr(aval, "sharding", None)
    return frozenset(_explicit_axes_of(sharding.mesh)) if isinstance(sharding, NamedSharding) else frozenset()


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """True if the mesh splits values, and all axes that do are explicit."""
    num_splitting = sum(size > 1 for size in mesh.shape.values())
    return 0 < num_splitting == len(_explicit_axes_of(mesh))


def _explicit_axes_of(mesh: Mesh | AbstractMesh) -> Axes:
    kinds = dict(zip(mesh.shape, mesh.axis_types, strict=True))
    return tuple(str(name) for name, size in mesh.shape.items() if size > 1 and kinds[name] is AxisType.Explicit)


def tracing_without_mesh() -> AbstractContextManager[Any]:
    """Context in which values that are traced have no mesh, whatever the user has set by `jax.set_mesh`."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def running_without_mesh() -> AbstractContextManager[Any]:
    """Context in which arrays of one device may be computed, whatever the user has set by `jax.set_mesh`."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
