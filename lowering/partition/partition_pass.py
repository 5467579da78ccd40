"""Pass `partition`: a program with shardings becomes the program of one IPU of a mesh, with collectives.

The result is one `jax.shard_map` over the whole mesh, which plain JAX evaluates to the same numbers and the pass
`shard_map` lowers. Shardings are those in types (explicit axes), of constraints, and of arguments and results. A
program without any that splits a value stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, eliminate_dead_code, shape_of
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.partition.batched_loops import with_scalar_conditions
from ipujax.lowering.partition.block_evaluation import evaluate_on_blocks
from ipujax.lowering.partition.block_values import Block, Notes, Scope
from ipujax.lowering.partition.pipelines import with_inlined_micro_batches
from ipujax.lowering.partition.program_shardings import NONE, Shardings, splits
from ipujax.lowering.partition.propagation import Propagation
from ipujax.lowering.partition.resharding import reshard, unreduced_by_reshards
from ipujax.lowering.partition.specs import MeshAxes, Spec, spec_of, tracing_without_mesh, whole
from ipujax.lowering.partition.stored_rows import split_stored_rows
from ipujax.lowering.replicas import on_one_replica, unwrapped
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError
from ipujax.runtime.target import Target, preset


class _ReplicaAxis(NamedTuple):
    """Axis of the replicas around a mesh, as `jax.make_jaxpr` takes it."""

    name: str
    size: int


def partition(jaxpr: ClosedJaxpr, shardings: Shardings = NONE, notes: Notes | None = None) -> ClosedJaxpr:
    """Returns an equal jaxpr of one `shard_map` if shardings split a value, else the jaxpr.

    A result that is an unreduced sum becomes the stack of the devices' partial sums.

    Args:
        jaxpr: the program, inlined.
        shardings: of its arguments and results.
        notes: filled with the collectives, and with the equations that are computed whole.

    Raises:
        GraphError: shardings over different meshes, a mesh larger than the machine.
    """
    notes = Notes() if notes is None else notes
    function = unwrapped(jaxpr)
    # A program without replicas is its own function of one replica. With them, each replica has a mesh.
    is_replicated = function.jaxpr is not jaxpr
    replica_axis = _ReplicaAxis(function.axis_name, function.replicas) if is_replicated else None

    def partition_replica(replica_jaxpr: ClosedJaxpr, program_inputs: Sequence[int | None]) -> ClosedJaxpr:
        """Rewrite of one replica; which inputs of the program it reads makes no difference."""
        return _partition_one_replica(replica_jaxpr, shardings, notes, replica_axis)

    return on_one_replica(jaxpr, partition_replica)


def _partition_one_replica(
    jaxpr: ClosedJaxpr, shardings: Shardings, notes: Notes, replica_axis: _ReplicaAxis | None = None
) -> ClosedJaxpr:
    """The jaxpr of one `shard_map` if shardings split a value, else the jaxpr; updates `notes`."""
    mesh = _mesh_of_shardings(jaxpr.jaxpr, shardings)
    if mesh is None:
        return jaxpr
    jaxpr = with_scalar_conditions(with_inlined_micro_batches(jaxpr))
    # A value that nothing reads would be reduced for nothing.
    jaxpr = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    target = shardings.target or preset("mk2", mesh.num_devices)
    _check_fits_machine(mesh, target, 1 if replica_axis is None else replica_axis.size)
    user_mesh = _user_mesh(jaxpr.jaxpr, shardings) or mesh.abstract()
    specs = _propagated_specs(jaxpr, shardings, mesh, target, notes, user_mesh)
    stored_rows = split_stored_rows(jaxpr.jaxpr, specs, mesh)
    specs.update((stack, Spec(((), *row.dims), row.unreduced)) for stack, row in stored_rows.items())
    notes.stored_rows.extend(stored_rows.values())
    in_specs = tuple(_spec_or_whole(specs, var) for var in jaxpr.jaxpr.invars)
    out_specs = _output_specs(jaxpr, shardings, specs, mesh)
    notes.unreduced.extend(tuple(axis for axis in mesh.names if axis in spec.unreduced) for spec in out_specs)
    may_stay = unreduced_by_reshards(jaxpr.jaxpr, specs, mesh)
    scope = Scope(mesh, target, specs, notes, user_mesh, may_stay_unreduced=may_stay, stored_rows=stored_rows)

    def on_one_device(*arrays: Any) -> list[Any]:
        """The program on the blocks of one device."""
        # An argument that is an unreduced sum comes reduced: resharded, one device's partial sum is all of it.
        operands = [reshard(x, spec.reduced(), spec, mesh) for x, spec in zip(arrays, in_specs, strict=True)]
        blocks = [Block(x, s, aval) for x, s, aval in zip(operands, in_specs, jaxpr.in_avals, strict=True)]
        results = evaluate_on_blocks(scope, jaxpr, blocks)
        returned = [scope.to_spec(block, spec).array for block, spec in zip(results, out_specs, strict=True)]
        return [x[None] if axes else x for x, axes in zip(returned, notes.unreduced, strict=True)]

    # A result that is an unreduced sum has one row for each device's partial sum.
    stacks = [Spec((axes, *spec.dims)) if axes else spec for spec, axes in zip(out_specs, notes.unreduced, strict=True)]
    return _traced_shard_map(on_one_device, jaxpr, mesh, [spec.reduced() for spec in in_specs], stacks, replica_axis)


def _check_fits_machine(mesh: MeshAxes, target: Target, replicas: int) -> None:
    """Refuses a mesh with more devices, in all replicas, than the machine has IPUs."""
    num_ipus = mesh.num_devices * replicas
    if num_ipus > target.num_ipus:
        raise GraphError(
            f"shardings are over {mesh}, which is larger than the device",
            expected=f"at most {target.num_ipus} IPUs",
            got=f"{mesh.num_devices} devices of the mesh" + (f", {replicas} replicas" if replicas > 1 else ""),
            hint=f"ipu.IPUModel(num_ipus={num_ipus}): one device of a mesh is one IPU",
        )


def _mesh_of_shardings(jaxpr: Jaxpr, shardings: Shardings) -> MeshAxes | None:
    """The one mesh whose axes split a value; None if nothing is split.

    Raises:
        GraphError: shardings over different meshes.
    """
    first_equation: dict[MeshAxes, JaxprEqn | None] = {}  # None for a sharding of an argument or a result
    for stated in _splitting_shardings(jaxpr, shardings):
        first_equation.setdefault(MeshAxes.of(stated.sharding.mesh), stated.eqn)
    if len(first_equation) > 1:
        (first, _), (other, eqn), *_ = first_equation.items()
        raise GraphError(
            "one program has shardings over different meshes",
            where=(source_line(eqn) if eqn is not None else "") or None,
            expected=str(first),
            got=str(other),
        )
    return next(iter(first_equation), None)


def _user_mesh(jaxpr: Jaxpr, shardings: Shardings) -> Mesh | None:
    """Mesh with devices of a sharding that splits a value; None if no sharding names devices."""
    meshes = (stated.sharding.mesh for stated in _splitting_shardings(jaxpr, shardings))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


class _StatedSharding(NamedTuple):
    """A sharding, and the equation that states it; None for that of an argument or a result."""

    sharding: NamedSharding
    eqn: JaxprEqn | None = None


def _splitting_shardings(jaxpr: Jaxpr, shardings: Shardings) -> Iterator[_StatedSharding]:
    """Yields all shardings of a program that split a value, with the equation that states each, if one does.

    They are those of arguments and results, of their types and of types inside, and of constraints.
    """
    for sharding in (*shardings.inputs, *shardings.outputs):
        if sharding is not None and splits(sharding):
            yield _StatedSharding(sharding)
    for var in (*jaxpr.invars, *jaxpr.constvars):
        yield from map(_StatedSharding, _splitting_sharding_of_type(var))
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "sharding_constraint" and splits(eqn.params["sharding"]):
            yield _StatedSharding(eqn.params["sharding"], eqn)
        elif eqn.primitive.name != "shard_map":  # its results are whole or sharded by its own specs
            for var in eqn.outvars:
                yield from (_StatedSharding(sharding, eqn) for sharding in _splitting_sharding_of_type(var))


def _splitting_sharding_of_type(var: Any) -> Iterable[NamedSharding]:
    sharding = getattr(var.aval, "sharding", None)
    return (sharding,) if isinstance(sharding, NamedSharding) and splits(sharding) else ()


def _propagated_specs(
    jaxpr: ClosedJaxpr, shardings: Shardings, mesh: MeshAxes, target: Target, notes: Notes, user_mesh: Any
) -> dict[Var, Spec]:
    """Spec of each value that has one; `notes` receives the conflicts of annotations."""
    body = jaxpr.jaxpr
    propagation = Propagation(mesh, target, user_mesh=user_mesh)
    propagation.annotate_types(body)
    for atoms, shardings_of in ((body.invars, shardings.inputs), (body.outvars, shardings.outputs)):
        for var, sharding in zip(atoms, shardings_of, strict=False):
            # Given shardings are none when empty. A value with a spec of its type, or that is an argument and a result,
            # keeps the first.
            if sharding is not None and isinstance(var, Var) and not propagation.is_annotated(var):
                propagation.annotate(var, spec_of(sharding.spec, len(shape_of(var)), mesh))
    propagation.spread(jaxpr)
    notes.conflicts.extend(propagation.conflicts.values())
    return propagation.specs


def _output_specs(jaxpr: ClosedJaxpr, shardings: Shardings, specs: dict[Var, Spec], mesh: MeshAxes) -> tuple[Spec, ...]:
    """Spec of each result: that of its sharding, else that of its value."""
    outputs = shardings.outputs or (None,) * len(jaxpr.jaxpr.outvars)
    return tuple(
        _spec_or_whole(specs, var) if sharding is None else spec_of(sharding.spec, len(shape_of(var)), mesh)
        for var, sharding in zip(jaxpr.jaxpr.outvars, outputs, strict=True)
    )


def _spec_or_whole(specs: dict[Var, Spec], var: Any) -> Spec:
    rank = len(shape_of(var))
    return specs.get(var, whole(rank)) if isinstance(var, Var) else whole(rank)


def _traced_shard_map(
    on_one_device: Callable[..., list[Any]],
    jaxpr: ClosedJaxpr,
    mesh: MeshAxes,
    in_specs: Sequence[Spec],
    out_specs: Sequence[Spec],
    replica_axis: _ReplicaAxis | None,
) -> ClosedJaxpr:
    """Jaxpr of one `shard_map` over the mesh, with the inputs of `jaxpr`, their types without shardings.

    Args:
        on_one_device: function from a device's blocks of the inputs to a list of its blocks of the results.
        jaxpr: the program of whole values, whose types of inputs and names of arguments stay.
        mesh: the mesh of IPUs.
        in_specs: spec of each input.
        out_specs: spec of each result.
        replica_axis: name and size of the axis of replicas around the mesh; None without one.
    """
    mapped = jax.shard_map(
        on_one_device,
        mesh=mesh.abstract(),
        in_specs=tuple(spec.partition_spec() for spec in in_specs),
        out_specs=[spec.partition_spec() for spec in out_specs],
        # Which values are equal on all devices follows from the rules.
        check_vma=False,
    )
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in jaxpr.in_avals]
    # The mesh of the user's `jax.set_mesh` has its axes explicit.
    with tracing_without_mesh():
        traced = jax.make_jaxpr(mapped, axis_env=() if replica_axis is None else (replica_axis,))(*avals)
    # The function was traced in the compiler's own code, which its body names as the file of its equations; equations
    # beside the `shard_map` are JAX's, and name no such file.
    eqns = [_without_function_file(eqn) if eqn.primitive.name == "shard_map" else eqn for eqn in traced.jaxpr.eqns]
    return ClosedJaxpr(traced.jaxpr.replace(eqns=eqns, debug_info=jaxpr.jaxpr.debug_info), traced.consts)


def _without_function_file(eqn: JaxprEqn) -> JaxprEqn:
    """A call whose function names no file, so that its equations, traced in this file, keep the user's lines."""
    body = eqn.params["jaxpr"]
    body = body.replace(debug_info=body.debug_info._replace(func_src_info=None))
    return eqn.replace(params={**eqn.params, "jaxpr": body})
