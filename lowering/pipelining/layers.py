"""Loops over layers in a micro-batch: a `lax.scan` over stacked parameters may be cut between iterations.

    h, _ = lax.scan(layer, h, params)      params {"w": f32[24, 512, 512], …}

Input: the jaxpr of a micro-batch. Output: the same in shards, loop and gradient loop alike, with the parameters, and
with what is kept for the gradients, of each shard; and the pipeline's equation, with operands and results in shards.

Limits: loops that carry no gradient to a parameter stack are not cut, as those of a recurrent network over time; nor
are `lax.fori_loop`s that index their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.pipelining.primitive import MicroBatch, PipelineSpec
from ipujax.lowering.pipelining.row_shards import (
    Bounds,
    CutJaxpr,
    Replacement,
    cut,
    join_of,
    num_shards,
    shards_of,
    slice_of,
    spread,
    uncut,
)

_MOST_SHARDS = 32  # of a loop of more iterations, several make one shard


def is_layer_loop(eqn: JaxprEqn, trained: Collection[Var]) -> bool:
    """Whether a forward equation is a loop over layers.

    Args:
        eqn: the equation.
        trained: the parameters, and what is computed of them.
    """
    return (
        eqn.primitive.name == "scan" and eqn.params["length"] > 1 and any(var in trained for var in _stacks(eqn, "in"))
    )


def finest(length: int) -> Bounds:
    """The finest cut of a loop: between all iterations, or evenly into the most shards."""
    return tuple(np.unique(np.linspace(0, length, min(length, _MOST_SHARDS) + 1).round().astype(int)).tolist())


def into_shards(jaxpr: ClosedJaxpr, spec: PipelineSpec, loops: Mapping[int, Bounds]) -> CutJaxpr:
    """Cuts loops over layers, and all that has the same rows.

    Args:
        jaxpr: computes one micro-batch.
        spec: how micro-batches go through it.
        loops: where to cut each loop, by the number of its equation; loops over the same stacks are cut alike.
    """
    if not loops:
        return uncut(jaxpr)
    body = jaxpr.jaxpr
    seeds = {var: bounds for n, bounds in loops.items() for var in _stacks(body.eqns[n])}
    bounds = spread(body, seeds)
    return cut(jaxpr, bounds, _whole(body, spec, bounds))


def together(jaxpr: Jaxpr, loops: Mapping[int, Bounds]) -> dict[int, Bounds]:
    """The same loops, each cut wherever one is that has the same rows."""
    done: dict[int, Bounds] = {}
    for n in loops:
        if n not in done:
            reached = spread(jaxpr, dict.fromkeys(_stacks(jaxpr.eqns[n]), loops[n]))
            alike = [m for m in loops if m == n or not reached.keys().isdisjoint(_stacks(jaxpr.eqns[m]))]
            done |= dict.fromkeys(alike, tuple(sorted({row for m in alike for row in loops[m]})))
    return done


def _stacks(eqn: JaxprEqn, which: str = "both") -> list[Var]:
    """The stacks a loop reads and makes, or one kind of them."""
    before = eqn.params["num_consts"] + eqn.params["num_carry"]
    read = [atom for atom in eqn.invars[before:] if not isinstance(atom, Literal)]
    return read if which == "in" else [*read, *eqn.outvars[eqn.params["num_carry"] :]]


def _whole(body: Jaxpr, spec: PipelineSpec, bounds: Mapping[Var, Bounds]) -> set[Var]:
    """The inputs and results of a micro-batch that are not cut: rows of a batch, keys, and what is stacked anew."""
    states = {body.invars[operand]: body.outvars[result] for operand, result in spec.carries}
    whole = {var for var, role in zip(body.invars, spec.roles, strict=True) if role in ("batch", "key")}
    whole |= {var for var, kind in zip(body.outvars, spec.reduce, strict=True) if kind == "stack" and var in bounds}  # type: ignore[misc]
    for state, following in states.items():
        at = None if isinstance(following, Literal) else bounds.get(following)
        if at is None or at != bounds.get(state) or following in whole:
            whole |= {state} if isinstance(following, Literal) else {state, following}
    return whole


# --- the pipeline -----------------------------------------------------------------------------------------------------


def replacement(eqn: JaxprEqn, found: CutJaxpr) -> Replacement:
    """The pipeline whose micro-batch is cut: an equation of as many operands and results more.

    Args:
        eqn: the pipeline.
        found: its micro-batch in shards, with equations named after stages.
    """
    params = {
        **eqn.params,
        "spec": spec_of_shards(eqn.params["spec"], found, stages=None),
        "micro_batch": MicroBatch(found.jaxpr, is_ready=True),
        "loop": _loop_of_shards(eqn.params["loop"], found),
    }
    return Replacement(found.inputs, found.outputs, params)


def spec_of_shards(spec: PipelineSpec, found: CutJaxpr, **changes: Any) -> PipelineSpec:
    """The spec of a function that is cut into row shards."""
    first_in = list(accumulate(map(num_shards, found.inputs), initial=0))
    first_out = list(accumulate(map(num_shards, found.outputs), initial=0))
    roles = [role for role, at in zip(spec.roles, found.inputs, strict=True) for _ in range(num_shards(at))]
    kinds = [kind for kind, at in zip(spec.reduce, found.outputs, strict=True) for _ in range(num_shards(at))]
    carries = [
        (first_in[operand] + k, first_out[result] + k)
        for operand, result in spec.carries
        for k in range(num_shards(found.inputs[operand]))
    ]
    return replace(spec, roles=tuple(roles), reduce=tuple(kinds), carries=tuple(carries), **changes)


def _loop_of_shards(loop: ClosedJaxpr, found: CutJaxpr) -> ClosedJaxpr:
    """The loop of a pipeline on row shards: operands are concatenated before it, results sliced after it."""
    if all(at is None for at in (*found.inputs, *found.outputs)):
        return loop
    body, invars, outvars = loop.jaxpr, list[Var](), list[Any]()
    before, behind = list[JaxprEqn](), list[JaxprEqn]()
    for var, at in zip(body.invars, found.inputs, strict=True):
        parts = [var] if at is None else shards_of(var, at)
        invars += parts
        if at is not None:
            before.append(join_of(parts, var, None))
    for out, at in zip(body.outvars, found.outputs, strict=True):
        made: Sequence[Any] = [out] if at is None else shards_of(out, at)
        outvars += made
        for part, (a, b) in zip(made, pairwise(at or ()), strict=False):
            behind.append(slice_of(out, part, a, b, None))
    names = body.debug_info.with_unknown_names()
    eqns = [*before, *body.eqns, *behind]
    return ClosedJaxpr(body.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=names), loop.consts)
