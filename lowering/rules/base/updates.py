"""Destinations of arrays that several equations, one after the other, update in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.popops import SCATTERS
from ipujax.runtime.tensor import Tensor

_UPDATES = ("dynamic_update_slice", *SCATTERS)  # the result is the first operand but for some elements


def places_before_updates(eqns: Sequence[JaxprEqn], places: Mapping[Var, Tensor]) -> dict[Var, Tensor]:
    """Destinations of variables, with the same destination for every array that is updated on the way to one."""
    destinations = dict(places)
    # From last to first, so that a whole chain of updates gets one destination.
    for eqn in reversed(eqns):
        updated = eqn.invars[0] if eqn.primitive.name in _UPDATES else None
        if isinstance(updated, Var) and eqn.outvars[0] in destinations:
            destinations.setdefault(updated, destinations[eqn.outvars[0]])
    return destinations
