"""`ipu.auto_shard`: shardings of a function's arguments over a mesh of IPUs, searched, compiled and compared.

Input: a function without annotations, a mesh, and the shapes of its arguments. Output: `ShardingPlans`, a table, best
first; nothing is run.

    in_shardings                                                    cycles   worst tile   collectives
    ({'v': P('x',), 'w': P(None, 'x')}, P())                       125,675     61.2 KiB   1 all_reduce
    ({'v': P(), 'w': P()}, P('x',))                                140,210     60.1 KiB   none

Each mesh axis splits one dimension of an argument, or none. Arguments are decided one after the other, largest first,
while those that follow are left to propagation; a beam of the programs of least estimated cycles goes on to the next
one. The best of these, and of the programs with one argument split alone, are improved one argument at a time; then the
best are compiled. Small arguments, such as biases, are left to propagation.

Limits: results are where propagation has them; an axis splits each argument along one dimension; dimensions that the
axis does not divide stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ipujax.auto_sharding.sharding_search import (
    Candidate,
    Search,
    ShardingPlan as ShardingPlan,
    ShardingPlans as ShardingPlans,
)
from ipujax.device import IPUModel
from ipujax.jit import IpuFunction, jitted
from ipujax.lowering.passes.inline import inline
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, TileMemoryError
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.signatures import checking_calls

_KEPT = "donate_argnums", "donate_argnames", "offload_argnums", "keep_unused", "inline", "compiler_options"
_COMPILED = 6  # programs that are compiled, if they fit
_LIKE_THE_BEST = 2  # more programs, of the estimate of the best


@checking_calls("ipu.auto_shard")
def auto_shard(
    fun: Callable[..., Any], mesh: AbstractMesh | Mesh, args: Sequence[Any], *, device: IPUModel | None = None
) -> ShardingPlans:
    """Search the shardings of a function's arguments over a mesh, by predicted cycles of programs that fit.

    Use the best one as it is, or paste its row::

        plans = ipu.auto_shard(step, ipu.make_mesh((4,), ("x",)), (params, batch))
        print(plans)
        step = ipu.jit(step, device=ipu.IPUModel(num_ipus=4), in_shardings=plans.best().in_shardings)

    Args:
        fun: function of pytrees of arrays, or one of `ipu.jit`, whose options and donated arguments hold.
        mesh: mesh of IPUs, as from `ipu.make_mesh`; the compiler chooses along all of its axes.
        args: the positional arguments, or their shapes; none is static.
        device: `IPUModel(...)`; that of `fun`, or else one of as many IPUs as the mesh has, when None.

    Returns:
        A row for each plan that was compiled, best first.

    Raises:
        ArgumentError: a mesh larger than the device, a function with replicas, shardings or static arguments, no
            arguments, or arguments that are no tuple.
    """
    axes = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.shape))
    if not isinstance(args, list | tuple):
        problem = "ipu.auto_shard needs the positional arguments in a tuple"
        raise ArgumentTypeError(problem, expected="args=(params, batch)", got=type(args).__name__)
    function, args = jitted(fun, tuple(args))
    function.check_kept("ipu.auto_shard", _KEPT)
    machine = device or (function.device if isinstance(function.device, IPUModel) else IPUModel(num_ipus=axes.size))
    if axes.size > machine.target.num_ipus:
        raise ArgumentError(
            "the mesh of ipu.auto_shard is larger than the device",
            expected=f"at most {machine.target.num_ipus} IPUs",
            got=f"{axes.size} devices of the mesh",
            hint=f"device=ipu.IPUModel(num_ipus={axes.size})",
        )
    leaves, tree = jax.tree.flatten(args)
    if not leaves:
        raise ArgumentError("ipu.auto_shard needs arguments to split", expected="args=(params, batch)", got=args)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(_shaped, leaves)]
    trace = jax_jit(function.fun).trace(*jax.tree.unflatten(tree, shapes))
    search = Search(inline(trace.jaxpr), axes, machine.target, {})
    ranked = search.ranked(shapes)
    function = function.with_options(replace(function.options, allow_out_of_memory=False), device=machine)
    rows: dict[Candidate, ShardingPlan] = {}

    def add(candidates: Iterable[Candidate], limit: int) -> None:
        for candidate in candidates:
            if sum(row.fits for row in rows.values()) >= limit:
                break
            # One of more bytes than a program that does not fit would not fit either.
            too_many = min((c.cost.num_bytes for c, row in rows.items() if not row.fits), default=inf)
            if candidate in rows or candidate.cost.num_bytes >= too_many:
                continue
            shardings = jax.tree.unflatten(tree, [NamedSharding(axes, spec) for spec in candidate.specs])
            rows[candidate] = _compiled(function, jax.tree.unflatten(tree, shapes), shardings, candidate)

    # Of programs with one estimate the first; then others like the best.
    distinct: dict[Any, Candidate] = {}
    for candidate in ranked:
        distinct.setdefault(candidate.like, candidate)
    add(distinct.values(), _COMPILED)
    best = min(rows, key=lambda candidate: _rank(rows[candidate]))
    add([candidate for candidate in ranked if candidate.like == best.like], _COMPILED + _LIKE_THE_BEST)
    return ShardingPlans(tuple(sorted(rows.values(), key=_rank)), len(search.evaluated))


def _rank(row: ShardingPlan) -> tuple[bool, int]:
    return not row.fits, row.cycles if row.fits else row.worst_tile_bytes


def _shaped(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def _compiled(function: IpuFunction[..., Any], shapes: Any, shardings: Any, candidate: Candidate) -> ShardingPlan:
    """Compile the function with a candidate's shardings, and return its figures, also where it does not fit."""
    cycles = int(candidate.cost.cycles)
    try:
        compiled = function.with_options(in_shardings=shardings).lower(*shapes).compile()
    except TileMemoryError as error:
        return ShardingPlan(shardings, 0, error.needed_bytes, False, cycles, candidate.collectives)
    profile = compiled.profile
    return ShardingPlan(
        shardings, profile.cycles, int(profile.memory.max_tile_bytes), True, cycles, candidate.collectives
    )
