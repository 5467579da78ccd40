"""Layers of several stages on one IPU share their code: the body of their loops becomes a function.

Input: a micro-batch whose loops over layers are cut, and the IPU of each stage. Output: the same, where loops of which
an IPU runs several shards call a function in each iteration, if that pays as it does for other runs, see the pass
`outline`. What is the same for all layers and all micro-batches is read where it lies; all else is copied, a layer's
parameters too, of which there is one more on the IPU while it runs.

Limits: a stage's forward part shares nothing with its backward part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
from ipujax.lowering.jaxpr import elements_of, stage_name, work_of
from ipujax.lowering.passes import function_call_p, gain_of
from ipujax.lowering.pipelining.row_shards import CutJaxpr, Source

_NAME = "layer"


def share_layers(found: CutJaxpr, ipus: Sequence[int], same: Collection[Var], byte_price: float) -> CutJaxpr:
    """Makes functions of the bodies of loops that an IPU runs several shards of.

    Args:
        found: a micro-batch in shards, its equations named after stages.
        ipus: the IPU of each stage.
        same: the variables that are the same for all micro-batches.
        byte_price: cycles that a byte on the fullest tile is worth.
    """
    pairs = zip(found.jaxpr.eqns, found.sources, strict=True)
    places = [_loop_and_ipu(eqn, source, ipus) for eqn, source in pairs]
    several = {place[0]: count for place, count in Counter(places).items() if place is not None and count > 1}
    bodies: dict[int, ClosedJaxpr] = {}
    eqns = []
    for eqn, place in zip(found.jaxpr.eqns, places, strict=True):
        if place is not None and place[0] in several:
            body = bodies.setdefault(place[0], _calling(eqn, same, several[place[0]], byte_price))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        eqns.append(eqn)
    return replace(found, jaxpr=ClosedJaxpr(found.jaxpr.jaxpr.replace(eqns=eqns), found.jaxpr.consts))


def _loop_and_ipu(eqn: JaxprEqn, source: Source | None, ipus: Sequence[int]) -> tuple[int, int] | None:
    """Which loop an equation is a shard of, and where it runs; None for what is none."""
    stage = stage_name(eqn).stage
    if source is None or not source.rows or stage is None or eqn.primitive.name != "scan":
        return None
    return source.number, ipus[stage]


def _calling(eqn: JaxprEqn, same: Collection[Var], calls: int, byte_price: float) -> ClosedJaxpr:
    """The body of a loop, as a function that is called, if that pays."""
    body: ClosedJaxpr = eqn.params["jaxpr"]
    consts = eqn.invars[: eqn.params["num_consts"]]
    is_fixed = [isinstance(atom, Literal) or atom in same for atom in consts]
    fixed = (*is_fixed, *(False for _ in body.jaxpr.invars[len(consts) :]))
    copied = [var for var, stays in zip(body.jaxpr.invars, fixed, strict=True) if not stays] + body.jaxpr.outvars
    if body.effects or gain_of(work_of(body.jaxpr), list(map(elements_of, copied)), calls, byte_price) <= 0:
        return body
    invars = [Var(var.aval) for var in body.jaxpr.invars]
    outvars = [Var(atom.aval) for atom in body.jaxpr.outvars]
    params = {"jaxpr": body, "name": _NAME, "fixed": fixed}
    call = new_jaxpr_eqn(invars, outvars, function_call_p, params, frozenset())  # of no stage alone
    names = body.jaxpr.debug_info.with_unknown_names()
    calling = body.jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=[call], debug_info=names)
    return ClosedJaxpr(calling, ())
