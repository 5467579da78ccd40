"""Pass `dce`: drops equations whose results nothing uses, in loops, branches and functions too; effects stay.

Constants of the whole that nothing uses go as well.
"""

from __future__ import annotations

from functools import partial

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, Var, eliminate_dead_code
from ipujax.lowering.jaxpr import Rewrite, once, primitive_names, rewritten_params

_FUNCTION = "function_call"  # JAX does not know that it may look inside


def dce(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr without dead equations; inputs and outputs keep their number and order."""
    live = eliminate_dead_code(jaxpr.jaxpr)
    if _FUNCTION in primitive_names(live):
        function = once(lambda body: dce(body))  # all of its results stay: some call needs them
        live = _inside(live, function, once(lambda body: _inside_closed(body, function)))
    used = {atom for eqn in live.eqns for atom in eqn.invars if isinstance(atom, Var)}
    used |= {atom for atom in live.outvars if isinstance(atom, Var)}
    held = [n for n, var in enumerate(live.constvars) if var in used]
    live = live.replace(constvars=[live.constvars[n] for n in held])
    return ClosedJaxpr(live, [jaxpr.consts[n] for n in held])


def _inside_closed(jaxpr: ClosedJaxpr, function: Rewrite) -> ClosedJaxpr:
    return ClosedJaxpr(_inside(jaxpr.jaxpr, function, partial(_inside_closed, function=function)), jaxpr.consts)


def _inside(jaxpr: Jaxpr, function: Rewrite, other: Rewrite) -> Jaxpr:
    """Rewrites the functions that a jaxpr calls, in the jaxprs that it holds too."""
    eqns = [
        eqn.replace(params=rewritten_params(eqn.params, function if eqn.primitive.name == _FUNCTION else other))
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns)
