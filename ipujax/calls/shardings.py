"""Refusal of shardings where `ipu.jit` does not partition: beside replicas, of Refs, and of transfers.

Input: the arguments of a call, and its jaxpr. Output: nothing, or an error with the argument or the user's line.
Elsewhere a sharding that splits a value partitions the program, see the room `sharding`.

Accepted are shardings that split nothing: one device, axes of size 1, a copy on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.signatures import describe
from ipujax.sharding import in_words

_EXPECTED = "arrays that are whole on each device"
_REMEDY = (
    "leave the sharding out (jax.device_get(x) is whole); without replicas=, shardings partition a program over IPUs,"
    " and so does jax.shard_map inside ipu.jit"
)
_CONSTRAINT = (
    "jax.lax.with_sharding_constraint(x, sharding) splits a value inside of a function;"
    " jax.device_put(x, jax.memory.Space.Host) puts its blocks into streaming memory"
)
# Public function by primitive with a sharding.
_PUBLIC_NAMES = {
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "reshard": "jax.sharding.reshard",
    "device_put": "jax.device_put",
    "jit": "jax.jit with in_shardings= or out_shardings=",
}


def check_whole(
    who: str,
    names: Callable[[], Sequence[str]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    refs_only: bool = False,
) -> None:
    """Refuse arguments that are split over several devices.

    Args:
        who: name of the function, for messages.
        names: returns the names of the positional arguments.
        args: pytrees of arrays, `jax.ShapeDtypeStruct`s and other objects.
        kwargs: likewise.
        refs_only: True to accept arrays, and refuse Refs only.

    Raises:
        ArgumentError: with the argument.
    """

    def is_refused(leaf: Any) -> bool:
        return _is_split(leaf) and (isinstance(leaf, jax.Ref) or not refs_only)

    if not any(map(is_refused, jax.tree.leaves((args, kwargs)))):
        return
    for name, value in (*zip(names(), args, strict=True), *kwargs.items()):
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if is_refused(leaf):
                raise ArgumentError(
                    f"argument {name}{jax.tree_util.keystr(path)} of {who} is sharded over"
                    f" {leaf.sharding.num_devices} devices",
                    expected=_EXPECTED,
                    got=f"{describe(leaf)}, {in_words(leaf.sharding)}",
                    hint=_REMEDY,
                )


def check_jaxpr(who: str, jaxpr: ClosedJaxpr, axis_name: str | None) -> None:
    """Refuse a jaxpr with shardings that nothing obeys: of Refs, of transfers, and over the axis of replicas.

    Args:
        who: name of the function, for messages.
        jaxpr: the traced jaxpr.
        axis_name: name of the axis of replicas; None without.

    Raises:
        ArgumentError: with the line of the equation that splits a value.
    """
    for constant in jaxpr.consts:
        if isinstance(constant, jax.Ref) and _is_split(constant):
            raise ArgumentError(
                f"a jax.Ref that {who} takes from outside is sharded over {constant.sharding.num_devices} devices",
                expected=_EXPECTED,
                got=f"{describe(constant)}, {in_words(constant.sharding)}",
                hint=_REMEDY,
            )
    for eqn in equations(jaxpr.jaxpr):
        name = eqn.primitive.name
        if name == "shard_map" or (axis_name is None and name != "device_put"):
            continue
        shardings = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        for sharding in shardings:
            if isinstance(sharding, Sharding) and _splits(sharding):
                if isinstance(sharding, NamedSharding) and name != "device_put":
                    _check_axes(sharding, axis_name, eqn)
                    continue
                problem = f"{_PUBLIC_NAMES.get(name, name)} splits a value over {sharding.num_devices} devices"
                hint = _CONSTRAINT if name == "device_put" and axis_name is None else _REMEDY
                raise _refusal(f"{problem} inside {who}", eqn, in_words(sharding), hint)


def _check_axes(sharding: NamedSharding, axis_name: str | None, eqn: JaxprEqn) -> None:
    """Refuse a mesh of a replica that has an axis of the name of the replicas."""
    if axis_name in sharding.mesh.axis_names:
        raise _refusal(
            f"a mesh has an axis of the same name as the replicas, {axis_name!r}",
            eqn,
            in_words(sharding),
            "rename the axis of the mesh, or the axis of replicas: axis_name= of ipu.jit",
        )


def check_mesh_of_devices(who: str, error: Exception, where: object) -> None:
    """Replace an error of JAX about a mesh without devices, which only programs for IPUs can use.

    Args:
        who: name of the function, for the message.
        error: error of JAX's compilation.
        where: device or transformation of the compilation.

    Raises:
        ArgumentError: in its place.
    """
    if "GlobalToLocalShape" in str(error):  # custom call of XLA, implemented for devices only
        raise ArgumentError(
            f"{who} uses jax.shard_map over an AbstractMesh, which jax.jit cannot run either",
            expected="devices for its mesh",
            got=where,
            hint="give ipu.jit an ipu.IPUModel and transform inside of it, or jax.shard_map a mesh of real devices",
        ) from error


def _refusal(problem: str, eqn: JaxprEqn | None, got: str, hint: str = _REMEDY) -> ArgumentError:
    line = None if eqn is None else source_line(eqn) or None
    return ArgumentError(problem, where=line, expected=_EXPECTED, got=got, hint=hint)


def _is_split(leaf: Any) -> bool:
    """Return whether an argument or a constant is an array, or the shape of one, that a sharding splits."""
    kinds = jax.Array, jax.ShapeDtypeStruct, jax.Ref
    is_array = isinstance(leaf, kinds) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.sharding is not None and _splits(leaf.sharding)


def _splits(sharding: Sharding) -> bool:
    """Return whether devices have different parts of a value, or different terms of a sum."""
    return not sharding.is_fully_replicated
