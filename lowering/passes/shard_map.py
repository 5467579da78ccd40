"""Pass `shard_map`: a user's `jax.shard_map` becomes the computation of each replica, one for each device of its mesh.

All replicas run the whole program, and compute equations outside of `shard_map` equally. Operands of a `shard_map`
are sliced, results are gathered. Collectives over axes of the mesh become collectives over groups of replicas, the
last axis varying fastest. Arguments that only `shard_map` reads, always split alike, come from the host split, and
results leave likewise.
Inside of a function of several replicas each replica has a mesh: its devices are numbered in turn, replica by replica.
Source: `jax.shard_map`, jax 0.10. Limits: one mesh size for the whole program; no axis left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.gcl import Groups, axis_rank
from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call_equation,
    closed,
    eliminate_dead_code,
    new_jaxpr_eqn,
    shape_of,
    trace_over_axis,
    without_manual_axes,
)
from ipujax.lowering.jaxpr import Rewrite, equations, once, with_inner
from ipujax.lowering.partition import sizes_of
from ipujax.lowering.passes.inline import inline
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
    """Returns an equal jaxpr without `shard_map`."""
    sizes = {_size(eqn) for eqn in _shard_maps(jaxpr.jaxpr)}
    if not sizes:
        return jaxpr
    if len(sizes) > 1:
        raise GraphError("one program uses jax.shard_map over meshes of different sizes", got=sorted(sizes))
    if any(eqn.primitive is replicated_p for eqn in jaxpr.jaxpr.eqns):
        return _with_replicas(jaxpr)
    (replicas,) = sizes
    in_dims = _split_inputs(jaxpr.jaxpr)
    out_dims = _split_results(jaxpr.jaxpr)
    inner = inline(ClosedJaxpr(_local(jaxpr.jaxpr, replicas, in_dims, out_dims), jaxpr.consts))
    return _as_replicated(inner, jaxpr, in_dims, out_dims, _axes(jaxpr.jaxpr, replicas))


def _shard_maps(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    return (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")


def _with_replicas(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr of one `replicated` equation over all devices of the meshes of its replicas."""
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
    devices = _size(eqn)
    total = function.replicas * devices
    outer = _Axis(function.axis_name, function.replicas)
    # Collectives inside of a `shard_map` know both axes, those outside that of the replicas only.
    over_all = _over_replicas(_Mesh({outer.name: outer.size}, devices), total, rewrites_inside=False)(function.jaxpr)
    body = over_all.jaxpr
    in_dims = _split_inputs(body)
    out_dims = _split_results(body)
    inner = inline(ClosedJaxpr(_local(body, devices, in_dims, out_dims, outer), over_all.consts))
    ranks = [len(v.aval.shape) for v in (*body.invars, *body.outvars)]
    pairs = [*zip(function.in_dims, in_dims, strict=True), *zip(function.out_dims, out_dims, strict=True)]
    splits = tuple(
        _composed(first, second, rank, function.replicas, devices)
        for (first, second), rank in zip(pairs, ranks, strict=True)
    )
    axes = (outer.name, outer.size), *_axes(function.jaxpr.jaxpr, devices)
    return _as_replicated(inner, jaxpr, splits[: len(in_dims)], splits[len(in_dims) :], axes)


def _axes(jaxpr: Jaxpr, devices: int) -> ReplicaAxes:
    """Name and size of each axis of the mesh; one axis of all devices if a program has several meshes."""
    meshes = {tuple(sizes_of(eqn.params["mesh"]).items()) for eqn in _shard_maps(jaxpr)}
    return next(iter(meshes)) if len(meshes) == 1 else (("devices", devices),)


def _composed(outer: Split, inner: Split, rank: int, replicas: int, devices: int) -> Split:
    """Split over replicas, and of a replica's part over the devices of its mesh."""
    if outer is None and inner is None:
        return None
    (outer_counts, outer_places), (inner_counts, inner_places) = (
        _places(outer, rank, replicas),
        _places(inner, rank, devices),
    )
    counts = tuple(a * b for a, b in zip(outer_counts, inner_counts, strict=True))
    places = outer_places[:, None] * np.array(inner_counts, np.int64) + inner_places[None]
    blocks = np.ravel_multi_index(tuple(places.reshape(-1, rank).T), counts)
    split = [dim for dim, count in enumerate(counts) if count > 1]
    if len(split) == 1 and blocks.tolist() == list(range(replicas * devices)):
        return split[0]
    return BlockSplit(counts, tuple(map(int, blocks)))


def _places(split: Split, rank: int, ranks: int) -> tuple[tuple[int, ...], np.ndarray[Any, Any]]:
    """Number of blocks along each dimension, and the block of each rank, [ranks, dimensions]."""
    if isinstance(split, BlockSplit):
        return split.counts, np.stack(np.unravel_index(np.array(split.blocks), split.counts), -1)
    counts = tuple(ranks if dim == split else 1 for dim in range(rank))
    places = np.zeros((ranks, rank), np.int64)
    if split is not None:
        places[:, split] = np.arange(ranks)
    return counts, places


def _size(eqn: JaxprEqn) -> int:
    """Number of devices of a `shard_map`, which must name all axes of its mesh."""
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
    """Dimension that a spec splits over the whole mesh, or its blocks; None for one that splits nothing."""
    sizes = sizes_of(mesh)
    axes = [[n for n in names if sizes[n] > 1] for names in map(_names, spec.partitions)]
    split = [(dim, names) for dim, names in enumerate(axes) if names]
    used = [name for name in mesh.axis_names if sizes[name] > 1]
    if not split:
        return None
    if len(split) == 1 and split[0][1] == used:
        return split[0][0]
    counts = [prod(sizes[n] for n in names) for names in axes]
    coordinates = dict(zip(mesh.axis_names, np.indices(tuple(sizes.values())), strict=True))
    block = np.zeros(mesh.size, np.int64)
    for name in (name for names in axes for name in names):
        block = block * sizes[name] + coordinates[name].reshape(-1)
    return BlockSplit((*counts, *(1,) * (rank - len(counts))), tuple(map(int, block)))


Axes = tuple[str, ...]


def _names(part: Any) -> Axes:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _split_inputs(jaxpr: Jaxpr) -> Splits:
    """For each input the dimension along which every use of it, a `shard_map`, splits it; else None."""
    uses: dict[Var, list[Split]] = {var: [] for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        for number, atom in enumerate(eqn.invars):
            if isinstance(atom, Var) and atom in uses:
                sharded = eqn.primitive.name == "shard_map"
                spec = eqn.params["in_specs"][number] if sharded else ()
                uses[atom].append(_split_dim(spec, eqn.params["mesh"], len(shape_of(atom))) if sharded else None)
    # A returned input is the whole array.
    returned = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    return tuple(dims[0] if dims and len(set(dims)) == 1 and v not in returned else None for v, dims in uses.items())


def _split_results(jaxpr: Jaxpr) -> Splits:
    """For each result the dimension along which it leaves split, a result of `shard_map` without reader; else None."""
    sharded_results = {
        v: (eqn, n) for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map" for n, v in enumerate(eqn.outvars)
    }
    used = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var)}
    dims: list[Split] = []
    for atom in jaxpr.outvars:
        if isinstance(atom, Literal) or atom not in sharded_results or atom in used:
            dims.append(None)
            continue
        eqn, number = sharded_results[atom]
        dims.append(_split_dim(eqn.params["out_specs"][number], eqn.params["mesh"], len(shape_of(atom))))
    return tuple(dims)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Axis of replicas, each of which has a mesh."""

    name: str
    size: int


_NO_REPLICAS = _Axis("", 1)


def _local(
    jaxpr: Jaxpr, replicas: int, in_dims: Splits = (), out_dims: Splits = (), outer: _Axis = _NO_REPLICAS
) -> Jaxpr:
    """Jaxpr with a call for each `shard_map`, on local arrays where they come or leave split."""

    @once
    def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(_local(inner.jaxpr, replicas, outer=outer), inner.consts)

    split = {v: d for v, d in zip(jaxpr.invars, in_dims, strict=False) if d is not None}
    leaving = {v: d for v, d in zip(jaxpr.outvars, out_dims, strict=False) if d is not None and isinstance(v, Var)}
    new = {v: Var(_local_aval(v.aval, d, replicas)) for v, d in {**split, **leaving}.items()}

    def renamed(atom: Any) -> Any:
        return new.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = []
    parts: _Parts = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in HOST_CALLS:
            call = partial(call_once, eqn, sharing=replicas)
            eqns.append(_call(eqn, lambda *xs, call=call: call(xs), eqn.invars, eqn.outvars, replicas * outer.size))
            continue
        if eqn.primitive.name != "shard_map":
            eqns.append(_with_inner(eqn, rewrite))
            continue
        operands = [renamed(atom) for atom in eqn.invars]
        results = [renamed(var) for var in eqn.outvars]
        eqns += _calls(eqn, operands, results, replicas * outer.size, outer, parts)
    body = jaxpr.replace(
        invars=[renamed(v) for v in jaxpr.invars], eqns=eqns, outvars=[renamed(v) for v in jaxpr.outvars]
    )
    # A result that only other computations read, by its parts, is gathered for nothing.
    return eliminate_dead_code(body) if parts else body


def _with_inner(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    """Rewrite jaxprs of an equation; of a pipeline that of one micro-batch too."""
    eqn = with_inner(eqn, rewrite)
    micro_batch = eqn.params.get("micro_batch")
    if micro_batch is None:
        return eqn
    rewritten = replace(micro_batch, jaxpr=rewrite(micro_batch.jaxpr))
    return eqn.replace(params={**eqn.params, "micro_batch": rewritten})


def _local_aval(aval: Any, dim: Split, replicas: int) -> Any:
    return aval.update(shape=local_shape(aval.shape, dim, replicas), sharding=None)


# Part of a common result that each replica has already, by the result, the mesh, and the axes of each dimension.
_Parts = dict[tuple[Var, ReplicaAxes, tuple[Axes, ...]], Var]


def _calls(
    eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[Any], replicas: int, outer: _Axis, parts: _Parts
) -> Iterator[JaxprEqn]:
    """Equations of a `shard_map`: slices of common operands, the computation, gathers of common results.

    Operands are taken from `parts` where they are there, and parts of results are added.
    """
    params = eqn.params
    mesh = _Mesh.of(params["mesh"], outer)
    body = closed(params["jaxpr"])
    local_operands: list[Atom] = []
    for atom, inner, spec in zip(operands, body.jaxpr.invars, params["in_specs"], strict=True):
        local_operands.append(atom)
        if shape_of(atom) == shape_of(inner):
            continue
        if (part := parts.get(mesh.part_of(atom, spec))) is not None:
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
            parts[mesh.part_of(var, spec)] = local
            yield _call(eqn, partial(mesh.gathered, spec=spec), [local], [var], replicas)


def _call(like: JaxprEqn, fun: Callable[..., Any], operands: Any, results: Any, replicas: int) -> JaxprEqn:
    """Call of a JAX function over the axis of replicas, with the source line of `like`."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
    return call_equation(operands, results, trace_over_axis(fun, shapes, AXIS, replicas)[0], like)


def rule_axes(eqn: JaxprEqn) -> set[str]:
    """Names of axes that an equation communicates over; of a cast all."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return {axis for axis in _names(axes) if isinstance(axis, str)}


def _over_replicas(mesh: _Mesh, replicas: int, *, rewrites_inside: bool = True) -> Rewrite:
    """Rewrites collectives over mesh axes to collectives over replicas, and drops the axes from types.

    Args:
        mesh: the mesh.
        replicas: number of replicas.
        rewrites_inside: False to leave the computation of a `shard_map` as it is.
    """
    rules = mesh.rules()

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name == "shard_map" and not rewrites_inside:
            return eqn
        rule = rules.get(eqn.primitive.name)
        if rule is None or not (rule_axes(eqn) & mesh.sizes.keys()):
            return _with_inner(eqn, rewrite)
        return _call(eqn, partial(rule, **eqn.params), eqn.invars, eqn.outvars, replicas)

    @once
    def rewrite(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """A jaxpr whose values have types without manual axes, which rules of one IPU do not know."""
        body = jaxpr.jaxpr
        new: dict[Var, Var] = {}

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
            for eqn in map(rewritten, body.eqns)
        ]
        boundary = {name: all_retyped(getattr(body, name)) for name in ("constvars", "invars", "outvars")}
        return ClosedJaxpr(body.replace(eqns=eqns, **boundary), jaxpr.consts)

    return rewrite


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Mesh of replicas; the last axis varies fastest, and devices that no axis tells apart in turn."""

    sizes: Mapping[str, int]
    devices: int = 1  # of each point of the mesh

    @staticmethod
    def of(mesh: Any, outer: _Axis = _NO_REPLICAS) -> _Mesh:
        return _Mesh(({outer.name: outer.size} if outer.name else {}) | sizes_of(mesh))

    def groups(self, names: Sequence[str], within: Any = None) -> Groups:
        """Groups of replicas that differ in these axes only, by rank along them; or groups of those ranks."""
        axes = list(self.sizes)
        # Axes that are not named first, so that each row of the table is a group.
        shape = [*(self.sizes[n] for n in axes), self.devices]
        numbers = np.arange(prod(shape)).reshape(shape)
        order = [*(a for a, n in enumerate(axes) if n not in names), len(axes), *(axes.index(n) for n in names)]
        table = numbers.transpose(order).reshape(-1, prod(self.sizes[n] for n in names))
        tables = [table] if within is None else [table[:, list(group)] for group in within]
        return tuple(tuple(map(int, row)) for table in tables for row in table)

    def index(self, names: Sequence[str]) -> jax.Array:
        """Rank of a replica along some axes, int32."""
        rank_of = {replica: rank for group in self.groups(names) for rank, replica in enumerate(group)}
        return axis_rank([rank_of[replica] for replica in range(len(rank_of))])

    def part_of(self, value: Any, spec: Any) -> tuple[Any, ReplicaAxes, tuple[Axes, ...]]:
        """A value and its split, equal for equal parts."""
        axes = [tuple(name for name in names if self.sizes[name] > 1) for names in map(_names, spec.partitions)]
        while axes and not axes[-1]:
            axes.pop()
        return value, tuple(self.sizes.items()), tuple(axes)

    def part(self, x: jax.Array, spec: Any) -> jax.Array:
        """A replica's slice of a common array."""
        for dim, names in enumerate(map(_names, spec.partitions)):
            ranks = prod(self.sizes[n] for n in names)
            if ranks > 1:
                size = x.shape[dim] // ranks
                x = lax.dynamic_slice_in_dim(x, self.index(names) * size, size, dim)
        return x

    def gathered(self, x: jax.Array, spec: Any) -> jax.Array:
        """The common array of the slices of all replicas."""
        for dim, names in enumerate(map(_names, spec.partitions)):
            if prod(self.sizes[n] for n in names) > 1:
                x = lax.all_gather(x, AXIS, axis_index_groups=self.groups(names), axis=dim, tiled=True)
        return x

    def rules(self) -> dict[str, Callable[..., Any]]:
        """What evaluates each collective of a `shard_map`, by primitive."""
        return {
            "psum": self._reduce(lax.psum),
            "psum_invariant": self._reduce(lax.psum),
            "pmax": self._reduce(lax.pmax),
            "pmin": self._reduce(lax.pmin),
            **dict.fromkeys(("pvary", "preduced", "reduced_vary_cast_p", "vary_unreduced_cast_p"), lambda x, **_: x),
            "all_gather": self._gather,
            "all_gather_invariant": self._gather,
            "reduce_scatter": self._scatter,
            "all_to_all": self._exchange,
            "ppermute": self._permute,
            "pbroadcast": self._broadcast,
            "axis_index": lambda axis_name: self.index(_names(axis_name)),
        }

    def _reduce(self, fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, axes, axis_index_groups=None: fun(
            x, AXIS, axis_index_groups=self.groups(_names(axes), axis_index_groups)
        )

    def _gather(
        self, x: jax.Array, *, all_gather_dimension: int, axis_name: Any, tiled: bool, **params: Any
    ) -> jax.Array:
        groups = self.groups(_names(axis_name), params.get("axis_index_groups"))
        return lax.all_gather(x, AXIS, axis_index_groups=groups, axis=all_gather_dimension, tiled=tiled)

    def _scatter(
        self, x: jax.Array, *, scatter_dimension: int, axis_name: Any, tiled: bool, **params: Any
    ) -> jax.Array:
        groups = self.groups(_names(axis_name), params.get("axis_index_groups"))
        return lax.psum_scatter(x, AXIS, scatter_dimension=scatter_dimension, axis_index_groups=groups, tiled=tiled)

    def _exchange(self, x: jax.Array, *, split_axis: int, concat_axis: int, axis_name: Any, **params: Any) -> jax.Array:
        groups = self.groups(_names(axis_name), params.get("axis_index_groups"))
        return lax.all_to_all(x, AXIS, split_axis, concat_axis, axis_index_groups=groups, tiled=True)

    def _permute(self, x: jax.Array, *, axis_name: Any, perm: Sequence[tuple[int, int]]) -> jax.Array:
        # Pairs are ranks along the axis, the same in every group of replicas.
        pairs = [(group[s], group[d]) for group in self.groups(_names(axis_name)) for s, d in perm]
        return lax.ppermute(x, AXIS, pairs)

    def _broadcast(self, x: jax.Array, *, axis_name: Any, source: int, **params: Any) -> jax.Array:
        groups = self.groups(_names(axis_name), params.get("axis_index_groups"))
        return lax.ppermute(x, AXIS, [(group[source], replica) for group in groups for replica in group])


def _as_replicated(
    inner: ClosedJaxpr, outer: ClosedJaxpr, in_dims: Splits, out_dims: Splits, axes: ReplicaAxes
) -> ClosedJaxpr:
    """Jaxpr of one `replicated` equation, with the inputs and results of the outer jaxpr."""
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
