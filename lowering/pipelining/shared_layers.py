"""Layers of several stages on one IPU share their code: the body of their loops becomes a function.

Input: a micro-batch whose loops over layers are cut, and the IPU of each stage. Output: the same, in which loops that
have several shards on an IPU call a function in each iteration, if that pays by the same rule as in the pass
`outline`. Values that are the same for all layers and all micro-batches are read in place; all others are copied, so
the parameters of a layer are on the IPU twice while it runs.

Limits: a stage's forward part shares nothing with its backward part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from ipujax.lowering.jaxpr import elements_of, scan_body, stage_name, work_of
from ipujax.lowering.passes import function_call_p, gain_of
from ipujax.lowering.pipelining.row_shards import CutJaxpr, Source

_NAME = "layer"


def share_layers(shards: CutJaxpr, ipus: Sequence[int], same: Collection[Var], byte_cost: float) -> CutJaxpr:
    """Replaces loop bodies by functions, for loops with several shards on an IPU; `shards` has named stages."""
    pairs = zip(shards.jaxpr.eqns, shards.sources, strict=True)
    loops_and_ipus = [_loop_and_ipu(eqn, source, ipus) for eqn, source in pairs]
    calls_of_loop = {
        loop_and_ipu[0]: count
        for loop_and_ipu, count in Counter(loops_and_ipus).items()
        if loop_and_ipu is not None and count > 1
    }
    bodies: dict[int, ClosedJaxpr] = {}
    eqns = []
    for eqn, loop_and_ipu in zip(shards.jaxpr.eqns, loops_and_ipus, strict=True):
        if loop_and_ipu is not None and loop_and_ipu[0] in calls_of_loop:
            body = bodies.setdefault(loop_and_ipu[0], _calling(eqn, same, calls_of_loop[loop_and_ipu[0]], byte_cost))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        eqns.append(eqn)
    return replace(shards, jaxpr=ClosedJaxpr(shards.jaxpr.jaxpr.replace(eqns=eqns), shards.jaxpr.consts))


def _loop_and_ipu(eqn: JaxprEqn, source: Source | None, ipus: Sequence[int]) -> tuple[int, int] | None:
    """Index of the loop that an equation is a shard of, and its IPU; None for other equations."""
    stage = stage_name(eqn).stage
    if source is None or not source.rows or stage is None or eqn.primitive.name != "scan":
        return None
    return source.number, ipus[stage]


def _calling(eqn: JaxprEqn, same: Collection[Var], calls: int, byte_cost: float) -> ClosedJaxpr:
    """The body of a loop as one call of a function, if that pays; else the body."""
    inside = scan_body(eqn.params)
    body = inside.jaxpr
    consts = eqn.invars[inside.operands.constants]
    is_fixed = [isinstance(atom, Literal) or atom in same for atom in consts]
    fixed = (*is_fixed, *(False for _ in body.jaxpr.invars[len(consts) :]))
    copied = [
        var for var, is_fixed_var in zip(body.jaxpr.invars, fixed, strict=True) if not is_fixed_var
    ] + body.jaxpr.outvars
    if body.effects or gain_of(work_of(body.jaxpr), list(map(elements_of, copied)), calls, byte_cost) <= 0:
        return body
    invars = [Var(var.aval) for var in body.jaxpr.invars]
    outvars = [Var(atom.aval) for atom in body.jaxpr.outvars]
    params = {"jaxpr": body, "name": _NAME, "fixed": fixed}
    call = new_jaxpr_eqn(invars, outvars, function_call_p, params, frozenset())  # no source: several stages share it
    names = body.jaxpr.debug_info.with_unknown_names()
    calling = body.jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=[call], debug_info=names)
    return ClosedJaxpr(calling, ())
