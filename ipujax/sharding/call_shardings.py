"""Shardings of a call: of arguments, of `in_shardings=` and `out_shardings=`, for the pass `partition`.

Input: the arguments of a call and the user's settings. Output: shapes with shardings to trace for, the sharding of
each leaf, and the mesh that results are put on. One device of a mesh is one IPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, line_of
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.signatures import describe
from ipujax.sharding.meshes import current_mesh, in_words, is_on_mesh, num_blocks, padded

Tree = Any
# Kind of the default of `jax.jit(in_shardings=)`, which libraries pass on.
_Unspecified = type(signature(jax_jit).parameters["in_shardings"].default)


_UNEQUAL_BLOCKS = re.compile(
    r"array axis (\d+) is partitioned (\d+) times, but the dimension size is (\d+) \(full shape: (\([^)]*\))"
)


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
        if self.outputs is None:
            return ()
        shardings = _leaves(f"out_shardings of {who}", self.outputs, results)
        if not any(map(_asks, shardings)):
            return ()
        for number, (leaf, sharding) in enumerate(zip(jax.tree.leaves(results), shardings, strict=True)):
            if sharding is not None:
                _check_divides(f"result {number} of {who}", leaf, sharding)
        return shardings

    @property
    def is_empty(self) -> bool:
        """True if nothing is asked for."""
        return self.mesh is None and self.outputs is None and all(s is None for s in self.inputs)


NO_SHARDINGS = CallShardings()


def _is_of_one_device(sharding: Any) -> bool:
    return isinstance(sharding, Sharding) and sharding.num_devices == 1


def _asks(sharding: Any) -> bool:
    """Return whether a sharding, or a spec for the mesh that is set, may ask for more than one device."""
    return sharding is not None and not _is_of_one_device(sharding)


def _stores(sharding: Any) -> bool:
    """Return whether a sharding asks for the host's memory, of one device."""
    return _is_of_one_device(sharding) and sharding.memory_kind == "pinned_host"


def _is_typed(sharding: Any) -> bool:
    """Return whether a sharding gives a type over explicit axes, also by none of them, to a result on one device."""
    is_named = isinstance(sharding, NamedSharding) and sharding.mesh.size == 1
    return is_named and AxisType.Explicit in sharding.mesh.axis_types


def _of_explicit_axes(sharding: NamedSharding) -> NamedSharding:
    """Sharding by the explicit axes alone, those that types have."""
    mesh = sharding.mesh
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    parts = [tuple(axis for axis in axes if axis in explicit) for axes in padded(sharding.spec, 0)]
    return sharding.update(spec=PartitionSpec(*(axes or None for axes in parts)))


def _places(sharding: Any) -> bool:
    """Return whether a sharding, or a spec for the mesh that is set, changes memory or type of a result on one device.

    A spec over more devices partitions the function.
    """
    if isinstance(sharding, PartitionSpec):
        return jax.sharding.get_abstract_mesh().shape_tuple != () and current_mesh().size == 1
    return _stores(sharding) or _is_typed(sharding)


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """`in_shardings=` and `out_shardings=` of `ipu.jit`.

    Args:
        inputs: pytree prefix of named shardings, specs or None, for any sharding.
        outputs: likewise.

    Attributes:
        has_any: whether a leaf asks for more than one device; a value, as each call asks.
    """

    inputs: Tree = None
    outputs: Tree = None
    has_any: bool = field(init=False)

    def __post_init__(self) -> None:
        leaves = jax.tree.leaves((self.inputs, self.outputs))
        object.__setattr__(self, "has_any", any(map(_asks, leaves)))

    def placed(self, who: str, results: Tree) -> Tree:
        """Return results while a function is traced, in the memory and of the type that `out_shardings` ask for.

        Only shardings over one device are for this: others partition the function.

        Args:
            who: name of the function, for messages.
            results: the results.
        """
        if not any(map(_places, jax.tree.leaves(self.outputs, is_leaf=_is_sharding))):
            return results
        leaves, tree = jax.tree.flatten(results)
        shardings = _leaves(f"out_shardings of {who}", self.outputs, results)
        names = [f"result {n} of {who}" for n in range(len(leaves))]
        return jax.tree.unflatten(tree, map(_placed, names, leaves, shardings))

    @property
    def without_effect(self) -> list[str]:
        """A line for each setting whose shardings name a memory but for results on one device, see `placed`."""
        settings = {"in_shardings": self.inputs, "out_shardings": self.outputs}
        kinds = {
            (name, sharding.memory_kind)
            for name, shardings in settings.items()
            for sharding in jax.tree.leaves(shardings)
            if isinstance(sharding, Sharding) and sharding.memory_kind not in (None, "device")
            if name == "in_shardings" or not _stores(sharding)
        }
        hint = "jax.device_put(x, jax.memory.Space.Host) puts values into streaming memory"
        return [f"memory_kind={kind!r} of {name} has no effect: {hint}" for name, kind in sorted(kinds)]

    @staticmethod
    def of(inputs: Tree, outputs: Tree, replicas: int | None) -> ShardingSettings:
        """Return the settings of a function.

        Raises:
            ArgumentError: settings beside `replicas=`.
        """
        inputs = _without_unspecified(inputs)
        outputs = _without_unspecified(outputs)
        settings = ShardingSettings(inputs, outputs)
        if replicas is not None and settings.has_any:
            raise ArgumentError(
                "ipu.jit has shardings beside replicas",
                expected="replicas= with in_specs=, or in_shardings= over a mesh",
                got=f"replicas={replicas}, and a sharding",
                hint="an axis of the mesh for replicas: ipu.make_mesh((2, 4), ('replica', 'model'))",
            )
        return settings

    def may_partition(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether shardings of a call, which are not part of every trace, may partition the function."""
        if self.has_any:
            return True
        if jax.device_count() == 1:  # no array of the host is sharded
            return False
        return current_mesh().size > 1 or any(map(is_on_mesh, jax.tree.leaves((args, dict(kwargs)))))

    def of_whole_call(self, who: str, args: tuple[Any, ...]) -> CallShardings:
        """Return the shardings of a call that they do not partition, whose Nones must match its structure.

        Args:
            who: name of the function, for messages.
            args: positional arguments that are not static.

        Raises:
            ArgumentError: another structure.
        """
        if self.inputs is not None:
            _leaves(f"in_shardings of {who}", self.inputs, args)
        return NO_SHARDINGS if self.outputs is None else CallShardings(outputs=self.outputs)

    def shaped(
        self,
        who: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: tuple[dict[int, Any], dict[str, Any]] | None,
        names: Sequence[str] = (),
    ) -> tuple[CallShardings, tuple[Any, ...], dict[str, Any]]:
        """Return the shardings of a call, and its arguments, sharded ones as shapes to trace for.

        Args:
            who: name of the function, for messages.
            args: positional arguments.
            kwargs: arguments by name.
            dynamic: those that are not static, by position and by name; None if no sharding counts.
            names: of the positional arguments, for messages.
        """
        if dynamic is None:
            return NO_SHARDINGS, args, kwargs
        positional, named = dynamic
        shardings = self.of_call(who, tuple(positional.values()), named, [names[n] for n in positional if names])
        if all(sharding is None for sharding in shardings.inputs):
            return shardings, args, kwargs
        shapes, named_shapes = with_shardings(tuple(positional.values()), named, shardings)
        by_position = dict(zip(positional, shapes, strict=True))
        return shardings, tuple(by_position.get(n, x) for n, x in enumerate(args)), {**kwargs, **named_shapes}

    def of_call(
        self, who: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()
    ) -> CallShardings:
        """Return the shardings of a call.

        Args:
            who: name of the function, for messages.
            args: positional arguments that are not static.
            kwargs: arguments by name.
            names: of the positional arguments, for messages; their positions without.

        Raises:
            ArgumentError: specs of another structure, names that the mesh lacks, a dimension that does not divide, an
                argument with another sharding than its setting, arguments of different meshes.
        """
        leaves = jax.tree.leaves((args, dict(kwargs)))
        names = names or [str(n) for n in range(len(args))]
        places = [place_in_call(names, path) for path, _ in jax.tree_util.tree_leaves_with_path((args, dict(kwargs)))]
        settings = _leaves(f"in_shardings of {who}", self.inputs, args) if self.inputs is not None else ()
        settings += (None,) * (len(leaves) - len(settings))
        inputs = tuple(
            _of_leaf(who, place, leaf, setting) for place, leaf, setting in zip(places, leaves, settings, strict=True)
        )
        shardings: list[NamedSharding | None] = [s for s in inputs if s is not None]
        shardings += [_named(f"out_shardings of {who}", s) for s in jax.tree.leaves(self.outputs, is_leaf=_is_sharding)]
        is_sharded = any(sharding is not None for sharding in inputs)
        return CallShardings(inputs if is_sharded else (), self.outputs, _device_mesh(shardings))


UNSET = ShardingSettings()


def _of_leaf(who: str, place: str, leaf: Any, setting: NamedSharding | None) -> NamedSharding | None:
    """Return the sharding of an argument: as set, else as the array has it; refuse one that contradicts."""
    placed = leaf.sharding if is_on_mesh(leaf) else None
    # JAX refuses a committed array of another sharding too.
    if setting is not None and placed is not None and not _are_alike(placed, setting, len(leaf.shape)):
        raise ArgumentError(
            f"argument {place} of {who} has another sharding than in_shardings",
            expected=in_words(setting),
            got=f"{describe(leaf)}, {in_words(placed)}",
            hint="jax.device_put(x, sharding) moves it; or leave in_shardings out",
        )
    sharding = setting if setting is not None else placed
    if sharding is not None:
        _check_divides(f"argument {place} of {who}", leaf, sharding)
    return sharding


def place_in_call(names: Sequence[str], path: Sequence[Any]) -> str:
    """Return the Python expression of a leaf of `(args, kwargs)`."""
    kind, argument, *rest = path
    return f"{names[argument.idx] if kind.idx == 0 else argument.key}{jax.tree_util.keystr(tuple(rest))}"


def _are_alike(a: NamedSharding, b: NamedSharding, rank: int) -> bool:
    return dict(a.mesh.shape) == dict(b.mesh.shape) and padded(a.spec, rank) == padded(b.spec, rank)


def _check_divides(name: str, leaf: Any, sharding: NamedSharding) -> None:
    """Refuse a sharding whose blocks are not equal, as no IPU pads: by dimension, with sizes that fit."""
    shape = tuple(jax.numpy.shape(leaf))
    parts = padded(sharding.spec, 0)
    if len(parts) > len(shape):
        raise ArgumentValueError(
            f"{name} has fewer dimensions than its sharding",
            expected=f"{len(parts)} dimensions or more",
            got=f"shape {shape}, {in_words(sharding)}",
        )
    for dim, axes in enumerate(parts):
        blocks = num_blocks(sharding.mesh, axes)
        if shape[dim] % blocks:
            of_axes = " and ".join(f"{axis!r} ({sharding.mesh.shape[axis]})" for axis in axes)
            raise ArgumentValueError(
                f"{name} cannot be split into equal blocks: its dimension {dim} should be divisible by {blocks}, but"
                f" it is equal to {shape[dim]}",
                expected=f"a multiple of {blocks} in dimension {dim}, the IPUs along mesh axis {of_axes}",
                got=f"shape {shape}, {in_words(sharding)}",
                hint=f"{-(-shape[dim] // blocks) * blocks} elements there, as of jnp.pad; None there in the spec, "
                "which leaves the dimension whole; or another mesh",
            )


def check_blocks(who: str, error: Exception) -> None:
    """Raise in place of the error of JAX's trace about a function of `jax.jit` inside whose blocks are not equal.

    Args:
        who: name of the function that is traced.
        error: what the trace has raised.
    """
    match = _UNEQUAL_BLOCKS.search(str(error)) if isinstance(error, ValueError) else None
    if match is None:
        return
    dim, blocks, size, shape = match.groups()
    raise ArgumentValueError(
        f"{who} calls a function of jax.jit with a sharding that splits an array into unequal blocks: its dimension "
        f"{dim} should be divisible by {blocks}, but it is equal to {size}",
        where=line_of(error),
        expected=f"a multiple of {blocks} in dimension {dim}",
        got=f"shape {shape}",
        hint="jnp.pad, or None in the spec, which leaves the dimension whole; or another mesh",
    ) from error


def _without_unspecified(shardings: Tree) -> Tree:
    """Pytree with None in place of what `jax.jit` has as default, which asks for nothing either."""
    is_leaf = lambda x: isinstance(x, _Unspecified)  # noqa: E731
    return jax.tree.map(lambda s: None if is_leaf(s) else s, shardings, is_leaf=is_leaf)


def _leaves(name: str, shardings: Tree, values: Tree) -> tuple[NamedSharding | None, ...]:
    """Sharding of each leaf of a pytree, by a prefix of it."""
    if isinstance(values, tuple) and isinstance(shardings, list):
        shardings = tuple(shardings)
    prefix = jax.tree.map(lambda s: _Leaf(_named(name, s)), shardings, is_leaf=_is_sharding)
    try:
        full = jax.tree.broadcast(prefix, values, is_leaf=lambda x: isinstance(x, _Leaf))
    except ValueError as error:
        raise ArgumentValueError(
            f"{name} do not match the structure of their arrays",
            expected=f"a prefix of {jax.tree.map(lambda _: '*', values)}",
            got=shardings,
            hint="one sharding, or None, for each argument or result, or for a subtree of it",
        ) from error
    return tuple(leaf.sharding for leaf in jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, _Leaf)))


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Leaf with a sharding or None, which alone would be an empty subtree of a pytree."""

    sharding: NamedSharding | None


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, Sharding | PartitionSpec)


def constrained(name: str, shardings: Tree, values: Tree) -> Tree:
    """Return values that are traced, a pytree, with constraints to shardings, a prefix of it; None asks for nothing.

    Args:
        name: name of the setting, for messages.
        shardings: its value.
        values: the arrays.
    """
    if shardings is None:
        return values
    leaves, tree = jax.tree.flatten(values)
    return jax.tree.unflatten(tree, map(_constrained, leaves, _leaves(name, shardings, values)))


def _constrained(x: Any, sharding: NamedSharding | None) -> Any:
    """Constrain a traced array to a sharding, by the function that JAX has for the kind of its mesh axes."""
    if sharding is None:
        return x
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return (jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint)(x, sharding)


def _placed(name: str, x: Any, sharding: NamedSharding | None) -> Any:
    """Bring a traced argument to its sharding, where that is a part of its type, and to its memory."""
    if sharding is not None and _is_typed(sharding):
        _check_divides(name, x, sharding)
        x = jax.sharding.reshard(x, _of_explicit_axes(sharding))
    return jax.device_put(x, jax.memory.Space.Host) if _stores(sharding) else x


def _named(name: str, value: Any) -> NamedSharding | None:
    """Named sharding of a setting; a bare spec is one over the mesh that is set, one device is a mesh of it."""
    if value is None or isinstance(value, NamedSharding):
        return value
    if _is_of_one_device(value):
        of_device = Mesh(np.array(list(value.device_set)), ("device",), axis_types=(AxisType.Auto,))
        return NamedSharding(of_device, PartitionSpec(), memory_kind=value.memory_kind)
    if not isinstance(value, PartitionSpec):
        expected = "a tree of jax.sharding.NamedSharding, PartitionSpec, SingleDeviceSharding or None"
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
    current = current_mesh()
    return current if isinstance(current, Mesh) and current.size > 1 else None


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
    # That of the array: a setting names none.
    memory = leaf.sharding.memory_kind if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) and leaf.sharding else None
    abstract_sharding = NamedSharding(abstract, sharding.spec, memory_kind=memory)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=abstract_sharding, weak_type=weak)


def in_explicit_mesh(shardings: CallShardings) -> AbstractContextManager[Any]:
    """Return a context with the mesh of an argument whose axes are explicit, for operations without such operands."""
    for sharding in shardings.inputs:
        if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types:
            mesh = sharding.mesh
            return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)
    return nullcontext()
