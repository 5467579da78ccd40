"""Meshes and specs of JAX in words, and the spec of a leaf by its sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.partition import splits


def padded(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dimension of a spec, for a value of some rank."""
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec.partitions]
    return (*parts, *((),) * (rank - len(parts)))


def split_axes(mesh: Mesh | AbstractMesh, spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the axes that split each dimension, without those of size 1."""
    return tuple(tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in padded(spec, rank))


def num_blocks(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    """Return the number of blocks of a dimension that is split over axes."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def current_mesh() -> Mesh | AbstractMesh:
    """Return the mesh that is set; within a trace that of the trace, which has no devices."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # JAX refuses the question within a trace
        return jax.sharding.get_abstract_mesh()


def mesh_of_constraints(jaxpr: ClosedJaxpr) -> Mesh | None:
    """Return the mesh of devices of the first constraint in a jaxpr that splits a value; None without."""
    for eqn in equations(jaxpr.jaxpr):
        settings = [
            *eqn.params.get("in_shardings", ()),
            *eqn.params.get("out_shardings", ()),
            eqn.params.get("sharding"),
        ]
        for sharding in settings:
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and splits(sharding):
                return sharding.mesh
    return None


def in_words(sharding: Any) -> str:
    """Return a sharding as text: its spec, and the axes of its mesh."""
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    return f"{sharding.spec} over {mesh_in_words(sharding.mesh)}"


def mesh_in_words(mesh: Mesh | AbstractMesh) -> str:
    """Return the axes of a mesh as text."""
    return f"a mesh of {', '.join(f'{name}: {size} ({kind.name})' for name, size, kind in _axes(mesh))}"


def _axes(mesh: Mesh | AbstractMesh) -> Iterator[tuple[str, int, AxisType]]:
    """Yield name, size and type of each axis of a mesh."""
    for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True):
        yield str(name), size, kind


def is_on_mesh(leaf: Any) -> bool:
    """Return whether a leaf has a sharding over a mesh of several devices."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def without_splits(constant: Any) -> Any:
    """Return a constant as a whole array, if it is split over devices."""
    is_split = isinstance(constant, jax.Array) and splits(constant.sharding)
    return np.asarray(constant) if is_split else constant
