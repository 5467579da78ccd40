"""Pass `shard_map`: a user's `jax.shard_map` becomes the computation of each replica, one for each device of its mesh.

All replicas run the whole program, and compute equations outside of `shard_map` equally. Operands of a `shard_map`
are sliced, results are gathered. Collectives over axes of the mesh become collectives over groups of replicas, the
last axis varying fastest. Arguments that only `shard_map` reads, always split alike, come from the host split, and
results leave likewise.
Inside of a function of several replicas each replica has a mesh: its devices are numbered in turn, replica by replica.
Source: `jax.shard_map`, jax 0.10. Limits: one mesh size for the whole program; no axis left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    call_equation,
    closed,
    eliminate_dead_code,
    new_jaxpr_eqn,
    shape_of,
    trace_over_axis,
    without_manual_axes,
)
from ipujax.lowering.jaxpr import Rewrite, equations, once, substituted, variables, variables_read, with_inner
from ipujax.lowering.partition import sizes_of
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.replica_mesh import NO_OUTER_AXIS, OuterAxis, PartKey, ReplicaMesh, named_axes
from ipujax.lowering.replicas import (
    AXIS,
    HOST_CALLS,
    BlockSplit,
    Split,
    Splits,
    call_once,
    check_results,
    global_shape,
    local_shape,
    replicated_p,
    unwrapped,
)
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import ReplicaAxes


def shard_map(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr without `shard_map`: its devices are replicas, so all is one `replicated` equation.

    Equations outside of a `shard_map` run on all devices, with equal results. A program that is replicated already has
    a mesh in each replica: then all devices of all replicas are the replicas.
    """
    sizes = {_num_devices(eqn) for eqn in _shard_maps(jaxpr.jaxpr)}
    if not sizes:
        return jaxpr
    if len(sizes) > 1:
        raise GraphError("one program uses jax.shard_map over meshes of different sizes", got=sorted(sizes))
    if any(eqn.primitive is replicated_p for eqn in jaxpr.jaxpr.eqns):
        return _with_replicas(jaxpr)
    (replicas,) = sizes
    in_dims = _split_inputs(jaxpr.jaxpr)
    out_dims = _split_results(jaxpr.jaxpr)
    inner = inline(ClosedJaxpr(_of_one_replica(jaxpr.jaxpr, replicas, in_dims, out_dims), jaxpr.consts))
    return _as_replicated(inner, jaxpr, in_dims, out_dims, _axes(jaxpr.jaxpr, replicas))


def _shard_maps(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")


def _with_replicas(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites a jaxpr of one `replicated` equation whose function has `shard_map`s inside: a mesh in each replica.

    The result is a jaxpr of one `replicated` equation over all devices of all replicas, those of a replica one after
    the other, without `shard_map`.
    """
    function = unwrapped(jaxpr)
    check_results(function)
    body = function.jaxpr.jaxpr
    eqn = next(_shard_maps(body))
    if function.axis_name in eqn.params["mesh"].shape:
        raise GraphError(
            f"a mesh has an axis of the same name as the replicas, {function.axis_name!r}",
            where=source_line(eqn) or None,
            expected="names of its own for each axis of the mesh",
            got=list(eqn.params["mesh"].shape),
            hint=f"axis_name={'replicas' if function.axis_name != 'replicas' else 'data'!r} of ipu.jit",
        )
    devices = _num_devices(eqn)
    total = function.replicas * devices
    outer = OuterAxis(function.axis_name, function.replicas)
    # Collectives inside of a `shard_map` know both axes, those outside that of the replicas only.
    mesh = ReplicaMesh({outer.name: outer.size}, devices)
    # Still with its `shard_map`s, and with the shapes of one replica.
    over_all = _over_replicas(mesh, total, rewrites_inside=False)(function.jaxpr)
    of_replica = over_all.jaxpr
    in_dims = _split_inputs(of_replica)
    out_dims = _split_results(of_replica)
    inner = inline(ClosedJaxpr(_of_one_replica(of_replica, devices, in_dims, out_dims, outer), over_all.consts))
    # Arrays were split over replicas, and their parts over devices: now both at once.
    ranks = [len(v.aval.shape) for v in (*of_replica.invars, *of_replica.outvars)]
    pairs = [*zip(function.in_dims, in_dims, strict=True), *zip(function.out_dims, out_dims, strict=True)]
    splits = tuple(
        _composed(over_replicas, over_devices, rank, function.replicas, devices)
        for (over_replicas, over_devices), rank in zip(pairs, ranks, strict=True)
    )
    axes = (outer.name, outer.size), *_axes(function.jaxpr.jaxpr, devices)
    return _as_replicated(inner, jaxpr, splits[: len(in_dims)], splits[len(in_dims) :], axes)


def _axes(jaxpr: Jaxpr, devices: int) -> ReplicaAxes:
    """Name and size of each axis of the mesh; one axis of all devices if a program has several meshes."""
    meshes = {tuple(sizes_of(eqn.params["mesh"]).items()) for eqn in _shard_maps(jaxpr)}
    return next(iter(meshes)) if len(meshes) == 1 else (("devices", devices),)


def _composed(outer: Split, inner: Split, rank: int, replicas: int, devices: int) -> Split:
    """Joins two splits of an array: over replicas, and of each replica's part over the devices of its mesh.

    Args:
        outer: split over the replicas: a dimension, blocks, or None for an array that all have entirely.
        inner: split of a part over the devices, likewise.
        rank: number of dimensions of the array.
        replicas: number of replicas.
        devices: number of devices of a replica.

    Returns:
        The split over all devices, those of a replica one after the other.
    """
    if outer is None and inner is None:
        return None
    # Blocks along each dimension, and the coordinates of each device's block: of the inner ones within an outer one.
    outer_counts, outer_places = _blocks(outer, rank, replicas)
    inner_counts, inner_places = _blocks(inner, rank, devices)
    counts = tuple(a * b for a, b in zip(outer_counts, inner_counts, strict=True))
    places = outer_places[:, None] * np.array(inner_counts, np.int64) + inner_places[None]
    blocks = np.ravel_multi_index(tuple(places.reshape(-1, rank).T), counts)
    split = [dim for dim, count in enumerate(counts) if count > 1]
    # Device by device along one dimension: that is all of the split.
    if len(split) == 1 and blocks.tolist() == list(range(replicas * devices)):
        return split[0]
    return BlockSplit(counts, tuple(map(int, blocks)))


def _blocks(split: Split, rank: int, devices: int) -> tuple[tuple[int, ...], np.ndarray[Any, Any]]:
    """Number of blocks along each dimension, and the place of each device's block, [devices, dimensions]."""
    if isinstance(split, BlockSplit):
        return split.counts, np.stack(np.unravel_index(np.array(split.blocks), split.counts), -1)
    counts = tuple(devices if dim == split else 1 for dim in range(rank))
    places = np.zeros((devices, rank), np.int64)
    if split is not None:
        places[:, split] = np.arange(devices)
    return counts, places


def _num_devices(eqn: JaxprEqn) -> int:
    """Number of devices of a `shard_map`; raises if it leaves axes of its mesh to be split by the compiler."""
    mesh = eqn.params["mesh"]
    manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    if manual is not None and set(manual) != set(mesh.axis_names):
        raise GraphError(
            "jax.shard_map leaves axes of its mesh to the compiler",
            where=source_line(eqn) or None,
            expected=f"all of {list(mesh.axis_names)}",
            got=sorted(manual),
            hint="name all axes, or none, in axis_names=",
        )
    return prod(sizes_of(mesh).values())


def _split_dim(spec: Any, mesh: Any, rank: int) -> Split:
    """Converts JAX's `PartitionSpec` of an array of `rank` dimensions over a mesh to the split that `replicated` has.

    None for a spec that splits nothing; the number of the dimension if a single one is split over all axes of the mesh
    in their order; else `BlockSplit`: blocks along each dimension, and the number of each device's block.
    """
    sizes = sizes_of(mesh)
    axes_of_dims = [[n for n in names if sizes[n] > 1] for names in map(named_axes, spec.partitions)]
    axes_of_mesh = [name for name in mesh.axis_names if sizes[name] > 1]
    split_dims = [dim for dim, names in enumerate(axes_of_dims) if names]
    if not split_dims:
        return None
    if len(split_dims) == 1 and axes_of_dims[split_dims[0]] == axes_of_mesh:
        return split_dims[0]
    counts = [prod(sizes[n] for n in names) for names in axes_of_dims]
    coordinates = dict(zip(mesh.axis_names, np.indices(tuple(sizes.values())), strict=True))
    block = np.zeros(mesh.size, np.int64)
    # The number of a device's block, row-major: the first axis of the first dimension counts most.
    for name in (name for names in axes_of_dims for name in names):
        block = block * sizes[name] + coordinates[name].reshape(-1)
    return BlockSplit((*counts, *(1,) * (rank - len(counts))), tuple(map(int, block)))


def _split_inputs(jaxpr: Jaxpr) -> Splits:
    """For each input the split by which devices can get their parts alone; None for one that all need entirely.

    It is that of the `shard_map`s that read it, if they split it alike and nothing else reads it.
    """
    uses: dict[Var, set[Split]] = {var: set() for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for number, atom in enumerate(eqn.invars):
            if isinstance(atom, Var) and atom in uses:
                is_sharded = eqn.primitive.name == "shard_map"
                uses[atom].add(_split_by(eqn, "in_specs", number, atom) if is_sharded else None)
    returned = set(variables(jaxpr.outvars))  # as the whole array
    return tuple(
        next(iter(splits)) if len(splits) == 1 and var not in returned else None for var, splits in uses.items()
    )


def _split_results(jaxpr: Jaxpr) -> Splits:
    """For each result the split by which devices can return their parts alone; None for one that all compute entirely.

    It is that of the `shard_map` that computes it, if no equation reads the result.
    """
    read = {var for eqn in jaxpr.eqns for var in variables_read(eqn)}
    splits: dict[Var, Split] = {
        var: _split_by(eqn, "out_specs", number, var)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "shard_map"
        for number, var in enumerate(eqn.outvars)
        if var not in read
    }
    return tuple(splits.get(atom) if isinstance(atom, Var) else None for atom in jaxpr.outvars)


def _split_by(eqn: JaxprEqn, specs: str, number: int, atom: Atom) -> Split:
    """Split of a value by a `shard_map`, by the spec of its number in a parameter."""
    return _split_dim(eqn.params[specs][number], eqn.params["mesh"], len(shape_of(atom)))


def _of_one_replica(
    jaxpr: Jaxpr, devices: int, in_dims: Splits = (), out_dims: Splits = (), outer: OuterAxis = NO_OUTER_AXIS
) -> Jaxpr:
    """Rewrites a jaxpr over all devices of a mesh as that of one device, without `shard_map`.

    In place of each `shard_map` is a call of what one device computes in it, between slices of operands and gathers of
    results where other equations have them entirely.

    Args:
        jaxpr: the jaxpr over all devices.
        devices: number of devices of the mesh.
        in_dims: split of each input, which comes as the device's part; none is split when empty.
        out_dims: split of each result, which leaves as the device's part; none is split when empty.
        outer: axis of replicas that each have such a mesh.
    """

    @once
    def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(_of_one_replica(inner.jaxpr, devices, outer=outer), inner.consts)

    # Inputs and results that are the device's part get variables of the part's shape.
    split = {v: d for v, d in zip(jaxpr.invars, in_dims, strict=False) if d is not None}
    leaving = {v: d for v, d in zip(jaxpr.outvars, out_dims, strict=False) if d is not None and isinstance(v, Var)}
    local = {v: Var(_local_aval(v.aval, d, devices)) for v, d in {**split, **leaving}.items()}

    def localised(atoms: Sequence[Any]) -> list[Any]:
        return [substituted(atom, local) for atom in atoms]

    replicas = devices * outer.size
    eqns = []
    local_parts: _LocalParts = {}
    for eqn in jaxpr.eqns:
        # A split value is read, or computed, by `shard_map`s alone, see `_split_inputs` and `_split_results`: all other
        # equations are of values that every device has entirely.
        if eqn.primitive.name in HOST_CALLS:  # devices of one mesh call once
            call = partial(call_once, eqn, sharing=devices)
            eqns.append(_call(eqn, lambda *xs, call=call: call(xs), eqn.invars, eqn.outvars, replicas))
        elif eqn.primitive.name == "shard_map":
            eqns += _shard_map_calls(eqn, localised(eqn.invars), localised(eqn.outvars), replicas, outer, local_parts)
        else:
            eqns.append(_rewrite_bodies(eqn, rewrite))
    body = jaxpr.replace(invars=localised(jaxpr.invars), eqns=eqns, outvars=localised(jaxpr.outvars))
    # A result that only other computations read, by its parts, is gathered for nothing.
    return eliminate_dead_code(body) if local_parts else body


def _rewrite_bodies(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    """Rewrite jaxprs of an equation; of a pipeline that of one micro-batch too."""
    eqn = with_inner(eqn, rewrite)
    micro_batch = eqn.params.get("micro_batch")
    if micro_batch is None:
        return eqn
    rewritten = replace(micro_batch, jaxpr=rewrite(micro_batch.jaxpr))
    return eqn.replace(params={**eqn.params, "micro_batch": rewritten})


def _local_aval(aval: Any, dim: Split, devices: int) -> Any:
    return aval.update(shape=local_shape(aval.shape, dim, devices), sharding=None)


_LocalParts = dict[PartKey, Var]  # the part of each device, where known, of values that all devices have entirely


def _shard_map_calls(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    results: Sequence[Any],
    replicas: int,
    outer: OuterAxis,
    local_parts: _LocalParts,
) -> Iterator[JaxprEqn]:
    """Yields the equations of one device for a `shard_map`: slices of operands, the computation, gathers of results.

    Args:
        eqn: the `shard_map`.
        operands: its operands: parts where they come split, else entire arrays, which the device cuts its part from.
        results: its results: parts where they leave split, else entire arrays, which are gathered from all devices.
        replicas: number of devices of all meshes.
        outer: axis of replicas that each have such a mesh.
        local_parts: parts of entire arrays that the device has from earlier `shard_map`s, and so need no slice; those
            of the results are added.
    """
    params = eqn.params
    mesh = ReplicaMesh.of(params["mesh"], outer)
    body = closed(params["jaxpr"])
    local_operands: list[Atom] = []
    for atom, inner, spec in zip(operands, body.jaxpr.invars, params["in_specs"], strict=True):
        local_operands.append(atom)
        if shape_of(atom) == shape_of(inner):
            continue
        if (part := local_parts.get(mesh.part_key(atom, spec))) is not None:
            local_operands[-1] = part
        else:
            local_operands[-1] = Var(without_manual_axes(inner.aval))
            yield _call(eqn, partial(mesh.part, spec=spec), [atom], [local_operands[-1]], replicas)
    local_results = [
        var if shape_of(var) == shape_of(inner) else Var(without_manual_axes(inner.aval))
        for var, inner in zip(results, body.jaxpr.outvars, strict=True)
    ]
    yield call_equation(local_operands, local_results, _over_replicas(mesh, replicas)(body), eqn)
    for local, var, spec in zip(local_results, results, params["out_specs"], strict=True):
        if local is not var:
            local_parts[mesh.part_key(var, spec)] = local
            yield _call(eqn, partial(mesh.gathered, spec=spec), [local], [var], replicas)


def _call(like: JaxprEqn, fun: Callable[..., Any], operands: Any, results: Any, replicas: int) -> JaxprEqn:
    """Call of a JAX function over the axis of replicas, with the source line of `like`."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
    return call_equation(operands, results, trace_over_axis(fun, shapes, AXIS, replicas)[0], like)


def _axes_of_rule(eqn: JaxprEqn) -> set[str]:
    """Names of axes that an equation communicates over; of a cast of types those that it changes."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return {axis for axis in named_axes(axes) if isinstance(axis, str)}


def _over_replicas(mesh: ReplicaMesh, replicas: int, *, rewrites_inside: bool = True) -> Rewrite:
    """Makes the rewrite of jaxprs that turns collectives over axes of a mesh into collectives over replicas.

    Args:
        mesh: the mesh, whose devices are replicas.
        replicas: number of replicas.
        rewrites_inside: False to leave the computation of a `shard_map` as it is.

    Returns:
        Rewrite of a jaxpr; the mesh's axes are dropped from the types of its values too.
    """
    rules = mesh.rules()

    def with_replica_collectives(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name == "shard_map" and not rewrites_inside:
            return eqn
        rule = rules.get(eqn.primitive.name)
        if rule is None or not (_axes_of_rule(eqn) & mesh.sizes.keys()):
            return _rewrite_bodies(eqn, rewrite)
        return _call(eqn, partial(rule, **eqn.params), eqn.invars, eqn.outvars, replicas)

    @once
    def rewrite(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Rewrites the equations of a jaxpr, on variables whose types have no manual axes of the mesh any more.

        Lowering rules are for one IPU, and know no such axes.
        """
        body = jaxpr.jaxpr
        new: dict[Var, Var] = {}  # variable → the one of the new type, itself if the type is the same

        def retyped(atom: Any) -> Any:
            if not isinstance(atom, Var) or isinstance(atom, DropVar):
                return atom
            if atom not in new:
                aval = without_manual_axes(atom.aval)
                new[atom] = atom if aval is atom.aval else Var(aval)
            return new[atom]

        def all_retyped(atoms: Sequence[Any]) -> list[Any]:
            return list(map(retyped, atoms))

        eqns = [
            eqn.replace(invars=all_retyped(eqn.invars), outvars=all_retyped(eqn.outvars))
            for eqn in map(with_replica_collectives, body.eqns)
        ]
        boundary = {name: all_retyped(getattr(body, name)) for name in ("constvars", "invars", "outvars")}
        return ClosedJaxpr(body.replace(eqns=eqns, **boundary), jaxpr.consts)

    return rewrite


def _as_replicated(
    inner: ClosedJaxpr, outer: ClosedJaxpr, in_dims: Splits, out_dims: Splits, axes: ReplicaAxes
) -> ClosedJaxpr:
    """Wraps the function of one replica in a `replicated` equation, in the place of the jaxpr that it was made from.

    Args:
        inner: function of one replica, on parts of arrays.
        outer: the jaxpr on entire arrays whose inputs the new one takes over.
        in_dims: split of each input over replicas; None for one that all have.
        out_dims: split of each result likewise.
        axes: name and size of each axis that numbers the replicas.
    """
    replicas = prod(size for _, size in axes)
    avals = [
        aval.update(shape=global_shape(aval.shape, d, replicas))
        for aval, d in zip(inner.out_avals, out_dims, strict=True)
    ]
    results: list[Atom] = [Var(aval) for aval in avals]
    # Common results are equal on all replicas: JAX has checked that, unless `check_vma=False`.
    params = {"jaxpr": inner, "replicas": replicas, "in_dims": in_dims, "out_dims": out_dims}
    params |= {"is_checked": True, "axis_name": AXIS, "mesh": axes}
    eqn = new_jaxpr_eqn(outer.jaxpr.invars, results, replicated_p, params, inner.jaxpr.effects)
    body = outer.jaxpr.replace(constvars=[], eqns=[eqn], outvars=results)
    return ClosedJaxpr(body, ())
