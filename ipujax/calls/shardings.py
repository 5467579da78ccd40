"""Refusal of shardings over several devices, which JAX obeys and programs for IPUs do not.

Input: the arguments of a call, and its jaxpr. Output: nothing, or an error with the argument or the user's line.
Refused are values that a sharding splits, be it the sharding of an argument, of a constant, in a parameter of an
equation or in the type of its result; and equations under a mesh with explicit axes.

Accepted are shardings that split nothing: one device, axes of size 1, a copy on each device. `jax.shard_map` has specs
in place of shardings: it splits whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, context_mesh
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.signatures import describe

_EXPECTED = "arrays that are whole on each device: ipu.jit does not partition a program by shardings"
_REMEDY = (
    "leave the sharding out (jax.device_get(x) is whole), and split by jax.shard_map inside ipu.jit, over a mesh of"
    " AxisType.Auto, or by replicas=N with in_specs="
)
_REMEDY_FOR_MESHES = (
    "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,)), or a call outside of jax.set_mesh; split by"
    " jax.shard_map inside ipu.jit, or by replicas=N with in_specs="
)
# Remedy by keyword of `jax.jit` that `ipu.jit` lacks.
INSTEAD_OF_SHARDINGS = {
    "in_shardings": "in_specs= with replicas=N, or jax.shard_map inside the function",
    "out_shardings": "out_specs= with replicas=N, or jax.shard_map inside the function",
}
# Public function by primitive with a sharding.
_PUBLIC_NAMES = {
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "reshard": "jax.sharding.reshard",
    "device_put": "jax.device_put",
    "jit": "jax.jit with in_shardings= or out_shardings=",
}


def check_whole(who: str, names: Callable[[], Sequence[str]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that are split over several devices; `names` returns names of the positional arguments."""
    if not any(map(_is_split, jax.tree.leaves((args, kwargs)))):
        return
    for name, value in (*zip(names(), args, strict=True), *kwargs.items()):
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if _is_split(leaf):
                raise ArgumentError(
                    f"argument {name}{jax.tree_util.keystr(path)} of {who} is sharded over"
                    f" {leaf.sharding.num_devices} devices",
                    expected=_EXPECTED,
                    got=f"{describe(leaf)}, {_in_words(leaf.sharding)}",
                    hint=_REMEDY,
                )


def check_jaxpr_whole(who: str, jaxpr: ClosedJaxpr) -> None:
    """Refuse a traced jaxpr in which a value, at any depth, is split over several devices."""
    _check_jaxpr(who, jaxpr.jaxpr, jaxpr.consts)


def check_mesh_of_devices(who: str, error: Exception, where: object) -> None:
    """Raise in place of JAX's error about a mesh without devices, which only programs for IPUs can use."""
    if "GlobalToLocalShape" in str(error):  # custom call of XLA, implemented for devices only
        raise ArgumentError(
            f"{who} uses jax.shard_map over an AbstractMesh, which jax.jit cannot run either",
            expected="devices for its mesh",
            got=where,
            hint="give ipu.jit an ipu.IPUModel and transform inside of it, or jax.shard_map a mesh of real devices",
        ) from error


def _check_jaxpr(who: str, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
    for var, constant in zip(jaxpr.constvars, consts, strict=False):  # constants of an open jaxpr are operands
        if _is_split(constant):
            user = next((eqn for eqn in jaxpr.eqns if var in eqn.invars), None)
            problem = f"{who} closes over an array that is sharded over {constant.sharding.num_devices} devices"
            raise _refusal(problem, user, f"{describe(constant)}, {_in_words(constant.sharding)}")
    for eqn in jaxpr.eqns:
        inner = list(_inner(eqn.params))
        _check_equation(who, eqn, has_jaxprs=bool(inner))
        for inner_jaxpr, inner_consts in inner:
            _check_jaxpr(who, inner_jaxpr, inner_consts)


def _check_equation(who: str, eqn: JaxprEqn, *, has_jaxprs: bool) -> None:
    name = eqn.primitive.name
    shardings: list[Sharding | None] = [value for value in _items(eqn.params) if isinstance(value, Sharding)]
    if not has_jaxprs:  # else an equation inside splits the value, and has the user's line
        shardings += [getattr(var.aval, "sharding", None) for var in eqn.outvars]
    for sharding in shardings:
        if sharding is not None and _splits(sharding):
            problem = f"{_PUBLIC_NAMES.get(name, name)} splits a value over {sharding.num_devices} devices inside {who}"
            raise _refusal(problem, eqn, _in_words(sharding))
    mesh = context_mesh(eqn)
    if not has_jaxprs and any(size > 1 and kind is AxisType.Explicit for _, size, kind in _axes(mesh)):
        problem = f"{who} is traced under a mesh with explicit axes over {mesh.size} devices"
        raise _refusal(problem, eqn, _mesh_in_words(mesh), _REMEDY_FOR_MESHES)


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


def _items(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parameters of an equation, those in tuples one by one."""
    for value in params.values():
        yield from value if isinstance(value, tuple) else (value,)


def _inner(params: Mapping[str, Any]) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """Yield the jaxprs in the parameters of an equation, with their constants."""
    for value in _items(params):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr, value.consts
        elif isinstance(value, Jaxpr):
            yield value, ()


def _in_words(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} over {_mesh_in_words(sharding.mesh)}"
    return repr(sharding)


def _mesh_in_words(mesh: Mesh | AbstractMesh) -> str:
    return f"a mesh of {', '.join(f'{name}: {size} ({kind.name})' for name, size, kind in _axes(mesh))}"


def _axes(mesh: Mesh | AbstractMesh) -> list[tuple[str, int, AxisType]]:
    """Return name, size and type of each axis of a mesh."""
    return [(str(n), size, kind) for (n, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)]
