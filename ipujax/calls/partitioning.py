"""Shardings of a call: of arguments, of `in_shardings=` and `out_shardings=`, for the pass `partition`.

Input: the arguments of a call and the user's settings. Output: shapes with shardings to trace for, the sharding of
each leaf, and the mesh that results are put on. One device of a mesh is one IPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, to_device
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.partition import Notes, running_without_mesh, splits
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.signatures import describe

Tree = Any


@dataclass(frozen=True, slots=True)
class CallShardings:
    """Shardings of one call.

    Args:
        inputs: for each leaf of the arguments its sharding, None where it has none that splits it.
        outputs: pytree prefix of the results' shardings; None for any.
        mesh: mesh of devices that results are put on; None for results on one device.
    """

    inputs: tuple[NamedSharding | None, ...] = ()
    outputs: Tree = None
    mesh: Mesh | None = None

    def of_results(self, who: str, results: Tree) -> tuple[NamedSharding | None, ...]:
        """Return the sharding of each leaf of the results, a pytree of shapes; nothing where any will do."""
        return () if self.outputs is None else _leaves(f"out_shardings of {who}", self.outputs, results)

    @property
    def is_empty(self) -> bool:
        """True if nothing is asked for."""
        return self.mesh is None and self.outputs is None and all(s is None for s in self.inputs)


NO_SHARDINGS = CallShardings()


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """`in_shardings=` and `out_shardings=` of `ipu.jit`: pytree prefixes of named shardings, specs or None."""

    inputs: Tree = None
    outputs: Tree = None

    @property
    def is_empty(self) -> bool:
        """True if neither is set."""
        return self.inputs is None and self.outputs is None

    @staticmethod
    def of(inputs: Tree, outputs: Tree, replicas: int | None) -> ShardingSettings:
        """Return the settings of a function.

        Raises:
            ArgumentError: settings beside `replicas=`.
        """
        settings = ShardingSettings(inputs, outputs)
        if replicas is not None and not settings.is_empty:
            raise ArgumentError(
                "ipu.jit has shardings beside replicas",
                expected="replicas= with in_specs=, or in_shardings= over a mesh",
                got=f"replicas={replicas}, and a sharding",
                hint="an axis of the mesh for replicas: ipu.make_mesh((2, 4), ('replica', 'model'))",
            )
        return settings

    def may_partition(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether shardings of a call, which are not part of every trace, may partition the function."""
        if not self.is_empty:
            return True
        if jax.device_count() == 1:  # no array of the host is sharded
            return False
        return _current_mesh().size > 1 or any(map(is_on_mesh, jax.tree.leaves((args, dict(kwargs)))))

    def shaped(
        self,
        who: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: tuple[dict[int, Any], dict[str, Any]] | None,
    ) -> tuple[CallShardings, tuple[Any, ...], dict[str, Any]]:
        """Return the shardings of a call, and its arguments, sharded ones as shapes to trace for.

        Args:
            who: name of the function, for messages.
            args: positional arguments.
            kwargs: arguments by name.
            dynamic: those that are not static, by position and by name; None if no sharding counts.
        """
        if dynamic is None:
            return NO_SHARDINGS, args, kwargs
        positional, named = dynamic
        shardings = self.of_call(who, tuple(positional.values()), named)
        if all(sharding is None for sharding in shardings.inputs):
            return shardings, args, kwargs
        shapes, named_shapes = with_shardings(tuple(positional.values()), named, shardings)
        by_position = dict(zip(positional, shapes, strict=True))
        return shardings, tuple(by_position.get(n, x) for n, x in enumerate(args)), {**kwargs, **named_shapes}

    def of_call(self, who: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShardings:
        """Return the shardings of a call.

        Args:
            who: name of the function, for messages.
            args: positional arguments that are not static.
            kwargs: arguments by name.

        Raises:
            ArgumentError: specs of another structure, names that the mesh lacks, a dimension that does not divide, an
                argument with another sharding than its setting, arguments of different meshes.
        """
        leaves = jax.tree.leaves((args, dict(kwargs)))
        places = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((args, dict(kwargs)))]
        settings = _leaves(f"in_shardings of {who}", self.inputs, args) if self.inputs is not None else ()
        settings += (None,) * (len(leaves) - len(settings))
        inputs = tuple(
            _of_leaf(who, place, leaf, setting) for place, leaf, setting in zip(places, leaves, settings, strict=True)
        )
        given: list[NamedSharding | None] = [s for s in inputs if s is not None]
        given += [_named(f"out_shardings of {who}", s) for s in jax.tree.leaves(self.outputs, is_leaf=_is_sharding)]
        is_sharded = any(sharding is not None for sharding in inputs)
        return CallShardings(inputs if is_sharded else (), self.outputs, _device_mesh(given))


UNSET = ShardingSettings()


def _of_leaf(who: str, place: str, leaf: Any, setting: NamedSharding | None) -> NamedSharding | None:
    own = leaf.sharding if is_on_mesh(leaf) else None
    # JAX refuses a committed array of another sharding too.
    if setting is not None and own is not None and not _are_alike(own, setting, len(leaf.shape)):
        raise ArgumentError(
            f"argument {place} of {who} is sharded otherwise than in_shardings",
            expected=in_words(setting),
            got=f"{describe(leaf)}, {in_words(own)}",
            hint="jax.device_put(x, sharding) moves it; or leave in_shardings out",
        )
    sharding = setting if setting is not None else own
    if sharding is not None:
        _check_divides(who, place, leaf, sharding)
    return sharding


def _are_alike(a: NamedSharding, b: NamedSharding, rank: int) -> bool:
    return dict(a.mesh.shape) == dict(b.mesh.shape) and _padded(a.spec, rank) == _padded(b.spec, rank)


def _padded(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec.partitions]
    return (*parts, *((),) * (rank - len(parts)))


def _check_divides(who: str, place: str, leaf: Any, sharding: NamedSharding) -> None:
    shape = tuple(jax.numpy.shape(leaf))
    parts = _padded(sharding.spec, 0)
    if len(parts) > len(shape):
        raise ArgumentValueError(
            f"argument {place} of {who} has fewer dimensions than its sharding",
            expected=f"{len(parts)} dimensions or more",
            got=f"shape {shape}, {in_words(sharding)}",
        )
    for dim, axes in enumerate(parts):
        blocks = _size(sharding.mesh, axes)
        if shape[dim] % blocks:
            raise ArgumentValueError(
                f"argument {place} of {who} was given the sharding of {in_words(sharding)}, which implies that the"
                f" global size of its dimension {dim} should be divisible by {blocks}, but it is equal to {shape[dim]}"
                f" (full shape: {shape})"
            )


def _size(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _leaves(name: str, shardings: Tree, values: Tree) -> tuple[NamedSharding | None, ...]:
    """Sharding of each leaf of a pytree, by a prefix of it."""
    if isinstance(values, tuple) and isinstance(shardings, list):
        shardings = tuple(shardings)
    boxed = jax.tree.map(lambda s: _Box(_named(name, s)), shardings, is_leaf=_is_sharding)
    try:
        full = jax.tree.broadcast(boxed, values, is_leaf=lambda x: isinstance(x, _Box))
    except ValueError as error:
        raise ArgumentError(
            f"{name} do not match the structure of their arrays",
            expected=f"a prefix of {jax.tree.map(lambda _: '*', values)}",
            got=shardings,
            hint="one sharding, or None, for each argument or result, or for a subtree of it",
        ) from error
    return tuple(box.sharding for box in jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, _Box)))


@dataclass(frozen=True, slots=True)
class _Box:
    """A leaf, as None is none of a pytree."""

    sharding: NamedSharding | None


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, NamedSharding | PartitionSpec)


def _named(name: str, value: Any) -> NamedSharding | None:
    """Named sharding of a setting; a bare spec is one over the mesh that is set."""
    if value is None or isinstance(value, NamedSharding):
        return value
    if not isinstance(value, PartitionSpec):
        expected = "a tree of jax.sharding.NamedSharding, PartitionSpec or None"
        raise ArgumentTypeError(f"{name} of ipu.jit", expected=expected, got=repr(value))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.shape:
        raise ArgumentError(
            f"{name} has a PartitionSpec, and no mesh is set",
            expected="jax.sharding.NamedSharding(mesh, spec)",
            got=value,
            hint='mesh = ipu.make_mesh((2, 4), ("data", "model")); jax.sharding.use_abstract_mesh(mesh) sets it',
        )
    try:
        return NamedSharding(mesh, value)
    except ValueError as error:
        raise ArgumentError(f"{name}: {error}", expected=f"axes among {list(mesh.axis_names)}", got=value) from error


def _device_mesh(shardings: Sequence[NamedSharding | None]) -> Mesh | None:
    """Mesh of devices of the first sharding that has one, else the one that is set; None without."""
    for sharding in shardings:
        if sharding is not None and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    current = _current_mesh()
    return current if isinstance(current, Mesh) and current.size > 1 else None


def _current_mesh() -> Mesh | AbstractMesh:
    """Mesh that is set; within a trace that of the trace, which has no devices."""
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


def with_shardings(args: tuple[Any, ...], kwargs: Mapping[str, Any], shardings: CallShardings) -> tuple[Any, Any]:
    """Return the arguments with sharded leaves as shapes over abstract meshes, which need no devices to trace for."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    shapes: list[Any] = [
        leaf if sharding is None else _shape(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings.inputs, strict=True)
    ]
    return jax.tree.unflatten(tree, shapes)


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    mesh = sharding.mesh
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(abstract, sharding.spec), weak_type=weak)


def in_explicit_mesh(shardings: CallShardings) -> AbstractContextManager[Any]:
    """Return a context with the mesh of an argument whose axes are explicit, for operations without such operands."""
    for sharding in shardings.inputs:
        if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
            mesh = sharding.mesh
            return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)
    return nullcontext()


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


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A program over the IPUs of a mesh.

    Args:
        mesh: its mesh, axes left to the compiler.
        argument_specs: spec of each leaf of the arguments.
        output_specs: spec of each result of the program.
        notes: collectives that partitioning has added, and equations that each IPU computes whole.
        devices: mesh of devices that results are put on; None for results on one device.
    """

    mesh: AbstractMesh
    argument_specs: tuple[PartitionSpec, ...]
    output_specs: tuple[PartitionSpec, ...]
    notes: Notes
    devices: Mesh | None = None

    @staticmethod
    def of(
        jaxprs: Mapping[str, ClosedJaxpr],
        notes: Notes,
        positions: Sequence[int],
        num_leaves: int,
        devices: Mesh | None,
    ) -> Partitioning | None:
        """Return the partitioning of a program; None if the pass has changed nothing.

        Args:
            jaxprs: jaxpr after each pass.
            notes: of the pass.
            positions: for each input of the program the number of its leaf.
            num_leaves: number of leaves of the arguments.
            devices: mesh of devices that results are put on, if any.
        """
        after = jaxprs["partition"]
        if after is jaxprs["memory_spaces"]:
            return None
        (eqn,) = after.eqns
        # Operands may include constants, and come in any order.
        spec_of_var = dict(zip(eqn.invars, eqn.params["in_specs"], strict=True))
        specs = [PartitionSpec()] * num_leaves
        for position, var in zip(positions, after.jaxpr.invars, strict=False):
            if position < num_leaves:
                specs[position] = spec_of_var.get(var, PartitionSpec())
        return Partitioning(eqn.params["mesh"], tuple(specs), tuple(eqn.params["out_specs"]), notes, devices)

    def argument_shardings(self) -> list[NamedSharding]:
        """Return the sharding of each leaf of the arguments."""
        return [NamedSharding(self.devices or self.mesh, spec) for spec in self.argument_specs]

    def result_shardings(self, avals: Sequence[Any]) -> list[NamedSharding]:
        """Return the sharding of each leaf of the results, by their types."""
        specs = iter(self.output_specs)
        # float0 holds no data, and is no result of the program.
        made = [PartitionSpec() if is_float0(aval) else next(specs) for aval in avals]
        mesh = self.devices or self.mesh
        return [NamedSharding(mesh, _typed(aval) or spec) for aval, spec in zip(avals, made, strict=True)]

    def text(self, names: Sequence[str]) -> str:
        """Return the shardings of arguments and results, and the collectives, a line each; `names` of the arguments."""
        lines = [f"argument {name}: {spec}" for name, spec in zip(names, self.argument_specs, strict=True)]
        lines += [f"result {number}: {spec}" for number, spec in enumerate(self.output_specs)]
        for move in self.notes.moves:
            axes = ", ".join(move.step.axes)
            place = f" at {move.line}" if move.line else ""
            lines.append(f"{move.step.kind} over {axes}: {move.num_bytes:,} B of each IPU, for {move.primitive}{place}")
        lines += [f"gathered, no partition rule: {name} at {line}" for name, line in self.notes.gathered]
        return "\n".join([mesh_in_words(self.mesh), *lines])

    def placed(self, results: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
        """Return results on the devices of the mesh, if it has any."""
        if self.devices is None:
            return list(results)
        return [jax.device_put(x, s) for x, s in zip(results, self.result_shardings(avals), strict=True)]


def _typed(aval: Any) -> PartitionSpec | None:
    """Spec in a type over explicit axes, with the Nones that the user wrote."""
    sharding = getattr(aval, "sharding", None)
    is_typed = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.mesh.are_all_axes_explicit
    return sharding.spec if sharding is not None and is_typed else None


def check_split_alike(who: str, names: Sequence[str], leaves: Sequence[Any], partitioning: Partitioning) -> None:
    """Refuse an argument that is split otherwise than the program was compiled for, as `jax.stages.Compiled` does.

    Args:
        who: name of the function, for the message.
        names: name of each leaf.
        leaves: arguments.
        partitioning: specs that the program was compiled for.

    Raises:
        ArgumentError: with the argument.
    """
    shape = dict(partitioning.mesh.shape)
    for name, leaf, spec in zip(names, leaves, partitioning.argument_specs, strict=True):
        sharding: Any = getattr(leaf, "sharding", None)
        if not splits(sharding):
            continue
        rank = len(leaf.shape)
        if dict(sharding.mesh.shape) != shape or _padded(sharding.spec, rank) != _padded(spec, rank):
            raise ArgumentError(
                f"argument {name} of {who} is sharded otherwise than the program was compiled for",
                expected=f"{spec} over {mesh_in_words(partitioning.mesh)}",
                got=in_words(sharding),
                hint="call the ipu.jit function itself, which compiles anew; or jax.device_put(x, sharding)",
            )


def run_on_one_device(run: Callable[..., Any], leaves: Sequence[Any], donated: Sequence[int]) -> Any:
    """Return the results of the program of all IPUs, which is computed on one device of the host.

    Args:
        run: the jitted program.
        leaves: arguments, on any devices.
        donated: numbers of arguments whose buffers may be reused; such arrays on other devices are deleted.
    """
    with running_without_mesh():
        local = list(map(_to_one_device, leaves))
        outs = run(*map(to_device, local))
    for number in donated:
        if local[number] is not leaves[number]:
            leaves[number].delete()
    return outs


def _to_one_device(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices == 1:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # A copy by JAX would keep the mesh in the type of the array.
    return np.asarray(leaf)
