"""Pass `dce`: drops equations whose results nothing uses, in loop bodies and branches too; effects stay."""

from __future__ import annotations

from ipujax.lowering.jax_compat import ClosedJaxpr, eliminate_dead_code


def dce(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr without dead equations; inputs and outputs keep their number and order."""
    live = eliminate_dead_code(jaxpr.jaxpr)
    return ClosedJaxpr(live, jaxpr.consts)
