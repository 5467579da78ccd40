"""Loops over layers in a micro-batch: a `lax.scan` over stacked parameters may be cut between iterations.

    h, _ = lax.scan(layer, h, params)      params {"w": f32[24, 512, 512], …}

Input: the jaxpr of a micro-batch. Output: the same in shards, loop and gradient loop alike, with the parameters and
residuals of each shard; and the equation of the pipeline, with operands and results in shards.

Limits: loops that carry no gradient to a parameter stack are not cut, as those of a recurrent network over time; nor
are `lax.fori_loop`s that index their parameters.

Layers of several stages on one IPU share their code: loops that have several shards on an IPU call a function in each
iteration, if that pays by the same rule as in the pass `outline`. Values that are the same for all layers and all
micro-batches are read in place; all others are copied, so the parameters of a layer are on the IPU twice while it runs.
Limits: a stage's forward part shares nothing with its backward part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from ipujax.lowering.jaxpr import elements_of, scan_body, stage_name, value_bytes, variables, work_of
from ipujax.lowering.passes import CallCosts, Copied, function_call_p, gain_of
from ipujax.lowering.pipelining.primitive import MicroBatch, PipelineSpec
from ipujax.lowering.pipelining.row_shards import (
    Bounds,
    CutJaxpr,
    Replacement,
    Source,
    concat_eqn,
    cut,
    num_shards,
    shards_of,
    slice_eqn,
    spread,
    uncut,
)

_FUNCTION_NAME = "layer"  # of the function that layers share
_MOST_SHARDS = 32  # a loop of more iterations has several in each shard


def is_layer_loop(eqn: JaxprEqn, trained: Collection[Var]) -> bool:
    """True if a forward equation is a loop over layers; `trained` are parameters and values computed from them."""
    is_loop = eqn.primitive.name == "scan" and eqn.params["length"] > 1
    return is_loop and any(var in trained for var in _stacks_read(eqn))


def finest_bounds(length: int) -> Bounds:
    """Bounds of the finest cut of a loop: between all iterations, or evenly into the most shards."""
    return tuple(np.unique(np.linspace(0, length, min(length, _MOST_SHARDS) + 1).round().astype(int)).tolist())


def into_shards(jaxpr: ClosedJaxpr, spec: PipelineSpec, loops: Mapping[int, Bounds]) -> CutJaxpr:
    """The micro-batch with loops over layers cut to shorter loops, and the stacks that they read cut along their rows.

    Each stage of the pipeline then gets loops over its own layers, and their rows of parameters and gradients.

    Args:
        jaxpr: the micro-batch.
        spec: how micro-batches go through it.
        loops: bounds at which loops are cut, by the index of their equations.
    """
    if not loops:
        return uncut(jaxpr)
    body = jaxpr.jaxpr
    # The stacks of a loop are cut where the loop is, and so are the values computed row by row from them.
    seeds = {var: bounds for n, bounds in loops.items() for var in _stacks_of(body.eqns[n])}
    bounds = spread(body, seeds)
    whole_outside = _unsplit_values(body, spec, bounds)  # a user passes and gets batches and stacked results uncut
    return cut(jaxpr, bounds, whole_outside)


def share_bounds(jaxpr: Jaxpr, loops: Mapping[int, Bounds]) -> dict[int, Bounds]:
    """The bounds of loops, by the index of their equations, merged among loops that share rows."""
    # A stack that two loops read is cut where any of them is, so that no shard is sliced again.
    merged: dict[int, Bounds] = {}
    for n in loops:
        if n not in merged:
            same_rows = spread(jaxpr, dict.fromkeys(_stacks_of(jaxpr.eqns[n]), loops[n]))
            linked = [m for m in loops if m == n or not same_rows.keys().isdisjoint(_stacks_of(jaxpr.eqns[m]))]
            merged |= dict.fromkeys(linked, tuple(sorted({row for m in linked for row in loops[m]})))
    return merged


def _stacks_of(eqn: JaxprEqn) -> list[Var]:
    """Stacks that a loop reads and produces."""
    return [*_stacks_read(eqn), *eqn.outvars[scan_body(eqn.params).results.stacks]]


def _stacks_read(eqn: JaxprEqn) -> list[Var]:
    return variables(eqn.invars[scan_body(eqn.params).operands.stacks])


def _unsplit_values(body: Jaxpr, spec: PipelineSpec, bounds: Mapping[Var, Bounds]) -> set[Var]:
    """Inputs and results of a micro-batch that stay unsplit: batches, keys, stacked results.

    And a state whose next value is not cut alike, because one takes the variable of the other.

    Args:
        body: the micro-batch.
        spec: roles of its inputs, and reductions of its results.
        bounds: of all values that would be cut.
    """
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
    """The spec of a micro-batch in shards: a role for each shard of an operand, a reduction for each of a result."""
    in_counts = list(map(num_shards, shards.inputs))
    out_counts = list(map(num_shards, shards.outputs))
    roles = [role for role, count in zip(spec.roles, in_counts, strict=True) for _ in range(count)]
    kinds = [kind for kind, count in zip(spec.reduce, out_counts, strict=True) for _ in range(count)]
    # Flags of streams are empty if there are none.
    streamed = [flag for flag, count in zip(spec.streamed, in_counts, strict=False) for _ in range(count)]
    sent = [flag for flag, count in zip(spec.sent, out_counts, strict=False) for _ in range(count)]
    # Number of the first shard of each operand and result; a state and its next value have as many.
    first_in = list(accumulate(in_counts, initial=0))
    first_out = list(accumulate(out_counts, initial=0))
    carries = [
        (first_in[operand] + shard, first_out[result] + shard)
        for operand, result in spec.carries
        for shard in range(in_counts[operand])
    ]
    spec = replace(spec, streamed=tuple(streamed), sent=tuple(sent))
    return replace(spec, roles=tuple(roles), reduce=tuple(kinds), carries=tuple(carries), **changes)


def _loop_of_shards(loop: ClosedJaxpr, shards: CutJaxpr) -> ClosedJaxpr:
    """The loop of a pipeline on shards: operands are concatenated before it, results sliced after it.

    `shards` has for each operand and result the bounds of its shards, rows along its first axis; None for an uncut one.
    """
    if all(bounds is None for bounds in (*shards.inputs, *shards.outputs)):
        return loop
    body = loop.jaxpr
    invars = list[Var]()
    outvars = list[Any]()
    joins = list[JaxprEqn]()
    slices = list[JaxprEqn]()
    for var, bounds in zip(body.invars, shards.inputs, strict=True):
        operand_shards = [var] if bounds is None else shards_of(var, bounds)
        invars += operand_shards
        if bounds is not None:
            joins.append(concat_eqn(operand_shards, var, like=None))  # of no line of the user's source
    for out, bounds in zip(body.outvars, shards.outputs, strict=True):
        result_shards: Sequence[Any] = [out] if bounds is None else shards_of(out, bounds)
        outvars += result_shards
        if bounds is not None:
            for shard, (first, end) in zip(result_shards, pairwise(bounds), strict=True):
                slices.append(slice_eqn(out, shard, first, end, like=None))
    names = body.debug_info.with_unknown_names()
    eqns = [*joins, *body.eqns, *slices]
    return ClosedJaxpr(body.replace(invars=invars, outvars=outvars, eqns=eqns, debug_info=names), loop.consts)


def share_layers(shards: CutJaxpr, ipus: Sequence[int], same: Collection[Var], costs: CallCosts) -> CutJaxpr:
    """Lets loops over layers that were cut into shards share one function as body, where an IPU runs several of them.

    So the code of a layer is on an IPU once, if that saves more than copies of operands cost (`costs`).

    Args:
        shards: the micro-batch in shards, with equations named after stages.
        ipus: IPU of each stage.
        same: values that are equal for all micro-batches, which the function reads in place.
        costs: costs of code and of copies.
    """
    pairs = zip(shards.jaxpr.eqns, shards.sources, strict=True)
    loop_shards = [_loop_shard(eqn, source, ipus) for eqn, source in pairs]
    # By loop, as its shards share one body. Counts of several IPUs are hardly different: any of them will do.
    calls_of_loop = {
        shard.loop: count for shard, count in Counter(loop_shards).items() if shard is not None and count > 1
    }
    bodies: dict[int, ClosedJaxpr] = {}
    eqns = []
    for eqn, shard in zip(shards.jaxpr.eqns, loop_shards, strict=True):
        if shard is not None and shard.loop in calls_of_loop:
            body = bodies.setdefault(shard.loop, _body_as_call(eqn, same, calls_of_loop[shard.loop], costs))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        eqns.append(eqn)
    return replace(shards, jaxpr=ClosedJaxpr(shards.jaxpr.jaxpr.replace(eqns=eqns), shards.jaxpr.consts))


class _LoopShard(NamedTuple):
    """A shard of a loop over layers: index of the uncut loop, and the IPU of the shard's stage."""

    loop: int
    ipu: int


def _loop_shard(eqn: JaxprEqn, source: Source | None, ipus: Sequence[int]) -> _LoopShard | None:
    """The shard of a loop that an equation is; None for other equations."""
    stage = stage_name(eqn).stage
    if source is None or not source.rows or stage is None or eqn.primitive.name != "scan":
        return None
    return _LoopShard(source.number, ipus[stage])


def _body_as_call(eqn: JaxprEqn, same_in_all: Collection[Var], calls: int, costs: CallCosts) -> ClosedJaxpr:
    """The body of a loop as one call of a function that `calls` stages share, if that pays; else the body.

    Constants of the loop that are `same_in_all` micro-batches are read in place; what else the body reads, and what it
    computes, is copied, which counts against the code that is saved.
    """
    inside = scan_body(eqn.params)
    body = inside.jaxpr
    consts = eqn.invars[inside.operands.constants]
    is_fixed = [isinstance(atom, Literal) or atom in same_in_all for atom in consts]
    fixed = (*is_fixed, *(False for _ in body.jaxpr.invars[len(consts) :]))
    copied = [
        var for var, is_fixed_var in zip(body.jaxpr.invars, fixed, strict=True) if not is_fixed_var
    ] + body.jaxpr.outvars
    copies = Copied(list(map(elements_of, copied)), sum(value_bytes(var.aval) for var in copied))
    if body.effects or gain_of(work_of(body.jaxpr), copies, calls, costs) <= 0:
        return body
    invars = [Var(var.aval) for var in body.jaxpr.invars]
    outvars = [Var(atom.aval) for atom in body.jaxpr.outvars]
    params = {"jaxpr": body, "name": _FUNCTION_NAME, "fixed": fixed}
    call = new_jaxpr_eqn(invars, outvars, function_call_p, params, frozenset())  # no source: several stages share it
    names = body.jaxpr.debug_info.with_unknown_names()
    calling = body.jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=[call], debug_info=names)
    return ClosedJaxpr(calling, ())
