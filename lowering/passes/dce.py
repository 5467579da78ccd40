"""Pass `dce`: drops equations whose results nothing uses, in loops and branches too; effects stay.

Constants of the whole that nothing uses go as well.
"""

from __future__ import annotations

from ipujax.lowering.jax_compat import ClosedJaxpr, Var, eliminate_dead_code
from ipujax.lowering.jaxpr import Rewrite, everywhere, with_inner


def dce(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr without dead equations; inputs and outputs keep their number and order."""
    live = _live_inside(jaxpr).jaxpr
    used = {atom for eqn in live.eqns for atom in eqn.invars if isinstance(atom, Var)}
    used |= {atom for atom in live.outvars if isinstance(atom, Var)}
    held = [n for n, var in enumerate(live.constvars) if var in used]
    live = live.replace(constvars=[live.constvars[n] for n in held])
    return ClosedJaxpr(live, [jaxpr.consts[n] for n in held])


def _live_inside(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Without dead equations, in the bodies of those that stay too, of which JAX drops none for a `while`."""

    def live(body: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
        kept = eliminate_dead_code(body.jaxpr)
        eqns = [with_inner(eqn, inside) for eqn in kept.eqns]
        return ClosedJaxpr(kept.replace(eqns=eqns), body.consts)

    return everywhere(live)(jaxpr)
