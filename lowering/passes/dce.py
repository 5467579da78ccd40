"""Pass `dce`: drops equations without a live result, in loops and branches too, and unused constants; effects stay."""

from __future__ import annotations

from ipujax.lowering.jax_compat import ClosedJaxpr, Var, eliminate_dead_code
from ipujax.lowering.jaxpr import Rewrite, everywhere, with_inner


def dce(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr without dead equations; inputs and outputs keep their number and order."""
    live = _live_inside(jaxpr).jaxpr
    used = {atom for eqn in live.eqns for atom in eqn.invars if isinstance(atom, Var)}
    used |= {atom for atom in live.outvars if isinstance(atom, Var)}
    used_numbers = [n for n, var in enumerate(live.constvars) if var in used]
    live = live.replace(constvars=[live.constvars[n] for n in used_numbers])
    return ClosedJaxpr(live, [jaxpr.consts[n] for n in used_numbers])


def _live_inside(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Jaxpr without dead equations, in nested jaxprs too, of which JAX drops none of a `while`."""

    def live(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        # First here, so that bodies of dead loops are not visited.
        pruned = eliminate_dead_code(body.jaxpr)
        eqns = [with_inner(eqn, rewrite) for eqn in pruned.eqns]
        return ClosedJaxpr(pruned.replace(eqns=eqns), body.consts)

    return everywhere(live)(jaxpr)
