"""Loops over layers in a micro-batch: a `lax.scan` over stacked parameters may be cut between iterations.

    h, _ = lax.scan(layer, h, params)      params {"w": f32[24, 512, 512], …}

Input: the jaxpr of a micro-batch. Output: the same in shards, loop and gradient loop alike, with the parameters and
residuals of each shard; and the equation of the pipeline, with operands and results in shards.

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
from ipujax.lowering.jaxpr import scan_body, variables
from ipujax.lowering.pipelining.primitive import MicroBatch, PipelineSpec
from ipujax.lowering.pipelining.row_shards import (
    Bounds,
    CutJaxpr,
    Replacement,
    concat_eqn,
    cut,
    num_shards,
    shards_of,
    slice_eqn,
    spread,
    uncut,
)

_MOST_SHARDS = 32  # a loop of more iterations has several in each shard


def is_layer_loop(eqn: JaxprEqn, trained: Collection[Var]) -> bool:
    """True if a forward equation is a loop over layers; `trained` are parameters and values computed from them."""
    return (
        eqn.primitive.name == "scan" and eqn.params["length"] > 1 and any(var in trained for var in _stacks(eqn, "in"))
    )


def finest_bounds(length: int) -> Bounds:
    """Bounds of the finest cut of a loop: between all iterations, or evenly into the most shards."""
    return tuple(np.unique(np.linspace(0, length, min(length, _MOST_SHARDS) + 1).round().astype(int)).tolist())


def into_shards(jaxpr: ClosedJaxpr, spec: PipelineSpec, loops: Mapping[int, Bounds]) -> CutJaxpr:
    """The micro-batch with loops over layers (equation index: bounds), and values with the same rows, in shards."""
    if not loops:
        return uncut(jaxpr)
    body = jaxpr.jaxpr
    seeds = {var: bounds for n, bounds in loops.items() for var in _stacks(body.eqns[n])}
    bounds = spread(body, seeds)
    return cut(jaxpr, bounds, _unsplit(body, spec, bounds))


def share_bounds(jaxpr: Jaxpr, loops: Mapping[int, Bounds]) -> dict[int, Bounds]:
    """The loops with bounds merged among those that share rows, so that all of them are cut alike."""
    merged: dict[int, Bounds] = {}
    for n in loops:
        if n not in merged:
            same_rows = spread(jaxpr, dict.fromkeys(_stacks(jaxpr.eqns[n]), loops[n]))
            linked = [m for m in loops if m == n or not same_rows.keys().isdisjoint(_stacks(jaxpr.eqns[m]))]
            merged |= dict.fromkeys(linked, tuple(sorted({row for m in linked for row in loops[m]})))
    return merged


def _stacks(eqn: JaxprEqn, which: str = "both") -> list[Var]:
    """Stacks that a loop reads and produces, or only those it reads."""
    body = scan_body(eqn.params)
    operands = variables(eqn.invars[body.operands.stacks])
    return operands if which == "in" else [*operands, *eqn.outvars[body.results.stacks]]


def _unsplit(body: Jaxpr, spec: PipelineSpec, bounds: Mapping[Var, Bounds]) -> set[Var]:
    """Inputs and results of a micro-batch that stay unsplit: batch rows, keys, stacked results."""
    # A state is cut only if its next value is cut alike, because one takes the variable of the other.
    states = {body.invars[operand]: body.outvars[result] for operand, result in spec.carries}
    unsplit = {var for var, role in zip(body.invars, spec.roles, strict=True) if role in ("batch", "key")}
    unsplit |= {var for var, kind in zip(body.outvars, spec.reduce, strict=True) if kind == "stack" and var in bounds}  # type: ignore[misc]
    for state, following in states.items():
        bounds_of_result = None if isinstance(following, Literal) else bounds.get(following)
        if bounds_of_result is None or bounds_of_result != bounds.get(state) or following in unsplit:
            unsplit |= {state} if isinstance(following, Literal) else {state, following}
    return unsplit


def replacement(eqn: JaxprEqn, shards: CutJaxpr) -> Replacement:
    """The pipeline equation for a micro-batch in shards, with an operand and a result for each shard."""
    params = {
        **eqn.params,
        "spec": spec_of_shards(eqn.params["spec"], shards, stages=None),
        "micro_batch": MicroBatch(shards.jaxpr, is_ready=True),
        "loop": _loop_of_shards(eqn.params["loop"], shards),
    }
    return Replacement(shards.inputs, shards.outputs, params)


def spec_of_shards(spec: PipelineSpec, shards: CutJaxpr, **changes: Any) -> PipelineSpec:
    """The spec of a micro-batch in shards."""
    first_in = list(accumulate(map(num_shards, shards.inputs), initial=0))
    first_out = list(accumulate(map(num_shards, shards.outputs), initial=0))
    roles = [role for role, at in zip(spec.roles, shards.inputs, strict=True) for _ in range(num_shards(at))]
    kinds = [kind for kind, at in zip(spec.reduce, shards.outputs, strict=True) for _ in range(num_shards(at))]
    streamed = [x for x, at in zip(spec.streamed, shards.inputs, strict=False) for _ in range(num_shards(at))]
    sent = [x for x, at in zip(spec.sent, shards.outputs, strict=False) for _ in range(num_shards(at))]
    carries = [
        (first_in[operand] + k, first_out[result] + k)
        for operand, result in spec.carries
        for k in range(num_shards(shards.inputs[operand]))
    ]
    spec = replace(spec, streamed=tuple(streamed), sent=tuple(sent))
    return replace(spec, roles=tuple(roles), reduce=tuple(kinds), carries=tuple(carries), **changes)


def _loop_of_shards(loop: ClosedJaxpr, shards: CutJaxpr) -> ClosedJaxpr:
    """The loop of a pipeline on shards: operands are concatenated before it, results sliced after it."""
    if all(at is None for at in (*shards.inputs, *shards.outputs)):
        return loop
    body = loop.jaxpr
    invars = list[Var]()
    outvars = list[Any]()
    joins = list[JaxprEqn]()
    slices = list[JaxprEqn]()
    for var, at in zip(body.invars, shards.inputs, strict=True):
        operand_shards = [var] if at is None else shards_of(var, at)
        invars += operand_shards
        if at is not None:
            joins.append(concat_eqn(operand_shards, var, None))
    for out, at in zip(body.outvars, shards.outputs, strict=True):
        result_shards: Sequence[Any] = [out] if at is None else shards_of(out, at)
        outvars += result_shards
        for shard, (a, b) in zip(result_shards, pairwise(at or ()), strict=False):
            slices.append(slice_eqn(out, shard, a, b, None))
    names = body.debug_info.with_unknown_names()
    eqns = [*joins, *body.eqns, *slices]
    return ClosedJaxpr(body.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=names), loop.consts)
