"""Meshes of devices: their specs in words and by leaf, and arrays between one device and those of a mesh.

One device of the host computes the program of all IPUs. A value may be an unreduced sum: then each device has a term of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr, to_device
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.partition import running_without_mesh, splits
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.signatures import describe


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


def run_on_one_device(run: Callable[..., Any], leaves: Sequence[Any], donated: Sequence[int]) -> Any:
    """Return the results of the program of all IPUs, which is computed on one device of the host.

    Args:
        run: the jitted program.
        leaves: arguments, on any devices.
        donated: numbers of arguments whose buffers may be reused; such arrays on other devices are deleted.
    """
    with running_without_mesh():
        local = list(map(to_one_device, leaves))
        outs = run(*map(to_device, local))
    for number in donated:
        if local[number] is not leaves[number]:
            leaves[number].delete()
    return outs


def to_one_device(leaf: Any) -> Any:
    """Return an array that is on several devices as one of the host; anything else as it is.

    Raises:
        ArgumentError: parts of it are in other processes.
    """
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices == 1:
        return leaf
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ArgumentError(
            "an argument is split over devices of several processes: each process computes the program of a mesh whole",
            expected="arrays of this process",
            got=f"{describe(leaf)}, {in_words(leaf.sharding)}",
            hint="jax.experimental.multihost_utils.process_allgather(x, tiled=True); or replicas=, without a mesh",
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.spec.unreduced:
        return _summed(leaf)
    # A copy by JAX would keep the mesh in the type of the array.
    return np.asarray(leaf)


def without_axes(x: jax.Array) -> jax.Array:
    """Return an array without axes in its type: `reduced` ones, which are for gradients, and those of one device.

    Operations of the program do not know them. Where a mesh with explicit axes is set, its type is over that mesh: JAX
    gives it to arrays that operations make, and combines no types over a mesh with types without.
    """
    aval = jax.typeof(x)
    sharding = _typed_sharding(aval)
    if sharding is not None:
        return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
    mesh = jax.sharding.get_abstract_mesh()
    has_type_over_mesh = AxisType.Explicit not in mesh.axis_types or not aval.sharding.mesh.empty
    return x if has_type_over_mesh else jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def with_axes(results: Sequence[jax.Array], avals: Sequence[Any]) -> list[jax.Array]:
    """Return results of the program with the axes that `without_axes` removes, of their abstract values."""
    shardings = map(_typed_sharding, avals)
    return [x if s is None else jax.sharding.reshard(x, s) for x, s in zip(results, shardings, strict=True)]


def _typed_sharding(aval: Any) -> NamedSharding | None:
    """Sharding in a type with axes, none of which splits the value over devices; None without."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or splits(sharding):
        return None
    return sharding if sharding.spec.reduced or any(padded(sharding.spec, 0)) else None


def on_devices(stack: jax.Array, axes: Sequence[str], sharding: NamedSharding) -> jax.Array:
    """Return the array whose devices have the terms of a sum, by the stack of them in order of `axes`."""
    mesh = sharding.mesh
    shape = stack.shape[1:]
    terms = np.asarray(stack)
    # JAX has no indices for sharding with a sum.
    parts = NamedSharding(mesh, PartitionSpec(*sharding.spec.partitions)).devices_indices_map(shape)
    numbers = NamedSharding(mesh, PartitionSpec(tuple(axes))).devices_indices_map((len(terms),))
    arrays = [jax.device_put(terms[numbers[device]][0][index], device) for device, index in parts.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _summed(array: jax.Array) -> np.ndarray:
    """Sum of the terms that devices have of an array over a mesh."""
    sharding: Any = array.sharding
    spec = sharding.spec
    names = sharding.mesh.axis_names
    parts = NamedSharding(sharding.mesh, PartitionSpec(*spec.partitions)).devices_indices_map(array.shape)
    axes = tuple(axis for axis in names if axis in spec.unreduced)
    copies = [axis for axis in sharding.mesh.axis_names if axis not in axes and axis not in _axes_of(spec)]
    result = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        # Of devices with the same term, one.
        position = dict(
            zip(sharding.mesh.axis_names, np.argwhere(sharding.mesh.devices == shard.device)[0], strict=True)
        )
        if all(position[axis] == 0 for axis in copies):
            result[parts[shard.device]] += np.asarray(shard.data)
    return result


def _axes_of(spec: PartitionSpec) -> set[str]:
    return {axis for part in padded(spec, 0) for axis in part}
