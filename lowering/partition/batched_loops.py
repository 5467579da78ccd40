"""Loops over a batch, those of `jax.vmap`, as loops with one condition.

    while (any(goes_on)) { state = select(goes_on, body(state), state) }

JAX gives a batched loop a predicate of each element of the batch. Written out, the selection has rules of partitioning
that keep predicate and state split alike, and all devices agree on whether any element goes on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import PIPELINE, Rewrite, everywhere, spliced, with_equations, with_inner


def with_scalar_conditions(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr whose loops, those inside of others and of micro-batches too, have scalar conditions."""
    return everywhere(_with_scalar_conditions_in)(jaxpr)


def _with_scalar_conditions_in(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    eqns = [_with_scalar_condition(_with_rewritten_bodies(eqn, rewrite)) for eqn in jaxpr.jaxpr.eqns]
    return with_equations(jaxpr, eqns)


def _with_rewritten_bodies(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    """Rewrites jaxprs in an equation, and the one that a pipeline has in its micro-batch."""
    if eqn.primitive.name == "shard_map":  # its values are a device's own
        return eqn
    eqn = with_inner(eqn, rewrite)
    if eqn.primitive.name != PIPELINE:
        return eqn
    micro_batch = eqn.params["micro_batch"]
    return eqn.replace(params={**eqn.params, "micro_batch": replace(micro_batch, jaxpr=rewrite(micro_batch.jaxpr))})


def _with_scalar_condition(eqn: JaxprEqn) -> JaxprEqn:
    """Makes the condition of a `while` that `jax.vmap` has batched a scalar: whether it holds for any element.

    The body then keeps the state of elements for which it does not hold, by a selection.
    """
    if eqn.primitive.name != "while" or not eqn.params["cond_jaxpr"].out_avals[0].shape:
        return eqn
    params = eqn.params
    num_cond = params["cond_nconsts"]
    cond_consts = eqn.invars[:num_cond]
    changes = {
        "cond_jaxpr": _condition_of_any(params["cond_jaxpr"], eqn),
        "body_jaxpr": _body_with_selection(params["cond_jaxpr"], params["body_jaxpr"], num_cond, eqn),
        "body_nconsts": num_cond + params["body_nconsts"],
    }
    # The body tests the state too.
    return eqn.replace(invars=[*cond_consts, *eqn.invars], params={**params, **changes})


def _condition_of_any(cond: ClosedJaxpr, like: JaxprEqn) -> ClosedJaxpr:
    """The condition of a batched loop as a scalar: true if it is true for any element of the batch."""
    body = cond.jaxpr
    (goes_on,) = body.outvars
    aval: Any = goes_on.aval
    any_goes_on = Var(aval.update(shape=(), sharding=None))
    params = {"axes": tuple(range(len(aval.shape)))}
    eqn = new_equation(lax.reduce_or_p, [goes_on], [any_goes_on], params, like)
    return ClosedJaxpr(body.replace(eqns=[*body.eqns, eqn], outvars=[any_goes_on]), cond.consts)


def _body_with_selection(cond: ClosedJaxpr, body: ClosedJaxpr, num_cond: int, like: JaxprEqn) -> ClosedJaxpr:
    """The body, whose results are new where the predicate is true, and the state before elsewhere.

    Args:
        cond: the condition, with a predicate for each element of the batch.
        body: the body; constants of the condition become its first inputs.
        num_cond: number of these constants.
        like: the loop, for the source of the new equations.
    """
    state = body.jaxpr.invars[len(body.jaxpr.invars) - len(body.jaxpr.outvars) :]
    cond_consts = [Var(var.aval) for var in cond.jaxpr.invars[:num_cond]]
    constvars = [Var(var.aval) for var in cond.jaxpr.constvars]
    inputs: dict[Var, Atom] = dict(zip(cond.jaxpr.invars, [*cond_consts, *state], strict=True))
    inputs.update(zip(cond.jaxpr.constvars, constvars, strict=True))
    eqns, (goes_on,) = spliced(cond.jaxpr, inputs)
    eqns += body.jaxpr.eqns
    results: list[Atom] = []
    for new, old in zip(body.jaxpr.outvars, state, strict=True):
        aval: Any = new.aval
        dims = tuple(range(len(shape_of(goes_on))))
        params = {"shape": aval.shape, "broadcast_dimensions": dims, "sharding": None}
        flags = Var(aval.update(dtype=np.dtype(bool), weak_type=False))
        result = Var(aval)
        eqns.append(new_equation(lax.broadcast_in_dim_p, [goes_on], [flags], params, like))
        eqns.append(new_equation(lax.select_n_p, [flags, old, new], [result], {}, like))
        results.append(result)
    changed = body.jaxpr.replace(
        constvars=[*constvars, *body.jaxpr.constvars],
        invars=[*cond_consts, *body.jaxpr.invars],
        eqns=eqns,
        outvars=results,
        effects=body.jaxpr.effects | cond.jaxpr.effects,
        debug_info=body.jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(changed, [*cond.consts, *body.consts])
