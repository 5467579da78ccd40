"""Shardings of modules for several devices, as constraints of JAX over meshes without devices.

Limits: those of Shardy; a sharding of GSPMD that splits an array, or of parts of an axis, has no counterpart here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import mlir, sdy, sharding_constraint_p
from ipujax.lowering.stablehlo.translation import Operation, Rule, Scope, UntranslatedError, Values, text

ir = mlir.ir
_TILES_OF_GSPMD = re.compile(r"devices=\[([\d,]+)\]")


def meshes_of(module: Any) -> dict[str, AbstractMesh]:
    """Mesh by name, of those that a module defines."""
    operations = [op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return {text(op, "sym_name"): _mesh_of_attribute(sdy.MeshAttr(op.attributes["mesh"])) for op in operations}


def _mesh_of_attribute(attribute: Any) -> AbstractMesh:
    axes = [sdy.MeshAxisAttr(axis) for axis in attribute.axes]
    return _automatic_mesh(tuple(int(axis.size) for axis in axes), tuple(str(axis.name) for axis in axes))


def _automatic_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def constrained(x: Any, sharding: Any) -> Any:
    """An array with the sharding of an exported function; the array where that is None."""
    if sharding is None:
        return x
    if not isinstance(sharding, NamedSharding):
        raise UntranslatedError(f"the sharding {sharding}")
    mesh = _automatic_mesh(tuple(sharding.mesh.axis_sizes), tuple(sharding.mesh.axis_names))
    return _constrain(x, mesh, sharding.spec)


def _constrain(x: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    """An array with the constraint to be sharded over a mesh; the array itself for a mesh of one device.

    Args:
        x: the array.
        mesh: the mesh.
        spec: axes of the mesh that each dimension is sharded over.
    """
    if mesh.size <= 1:  # 0 without axes
        return x
    return sharding_constraint_p.bind(
        x,
        sharding=NamedSharding(mesh, spec),
        layout=None,
        context_mesh=None,
        unconstrained_dims=frozenset(n for n, part in enumerate(spec) if part is PartitionSpec.UNCONSTRAINED),
    )


def shardings_of(exported: Any, meshes: Mapping[str, AbstractMesh]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shardings of the arguments and the results of an exported function; None for those without.

    Exports have meshes of their own, whatever the types of their axes; older ones have shardings of HLO, to which the
    module's only mesh gives names.
    """
    # The attribute is no documented one, but those that are cannot tell: stored exports have both kinds.
    is_named = exported._has_named_shardings or all(
        x is None for x in (*exported.in_shardings_hlo, *exported.out_shardings_hlo)
    )
    if not is_named and len(meshes) != 1:
        raise UntranslatedError("shardings without a mesh")
    mesh: Any = None if is_named else next(iter(meshes.values()))  # named ones have meshes
    return exported.in_shardings_jax(mesh), exported.out_shardings_jax(mesh)


def constraint_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`sdy.sharding_constraint`: the array, with the constraint as JAX's; refuses a sharding that JAX cannot state."""
    attribute = sdy.TensorShardingAttr(op.attributes["sharding"])
    reference = attribute.mesh_or_ref
    name = str(reference).lstrip("@")
    mesh = _mesh_of_attribute(sdy.MeshAttr(reference)) if sdy.MeshAttr.isinstance(reference) else scope.meshes.get(name)
    if mesh is None or list(attribute.unreduced_axes):
        raise UntranslatedError(f"the sharding {attribute}")
    return [_constrain(operands[0], mesh, PartitionSpec(*map(_axes_of_dimension, attribute.dimension_shardings)))]


def _axes_of_dimension(attribute: Any) -> Any:
    """Axes that split a dimension."""
    dimension = sdy.DimensionShardingAttr(attribute)
    axes = [sdy.AxisRefAttr(axis) for axis in dimension.axes]
    if any(axis.sub_axis_info is not None for axis in axes):
        raise UntranslatedError(f"the sharding {attribute} by a part of an axis")
    return tuple(str(axis.name) for axis in axes) or (None if dimension.is_closed else PartitionSpec.UNCONSTRAINED)


def check_is_whole(op: Operation) -> None:
    """Refuse a sharding of GSPMD that splits an array."""
    tiles = _TILES_OF_GSPMD.search(text(op, "mhlo.sharding"))
    if tiles is not None and prod(map(int, tiles[1].split(","))) > 1:
        raise UntranslatedError(f"the sharding {text(op, 'mhlo.sharding')} of GSPMD")


RULES: dict[str, Rule] = {"sdy.sharding_constraint": constraint_rule}
