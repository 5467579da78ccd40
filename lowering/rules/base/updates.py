"""Where arrays may be written that several equations, one after the other, change in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.popops import SCATTERS
from ipujax.runtime.tensor import Tensor

_UPDATES = ("dynamic_update_slice", *SCATTERS)  # primitives whose result is their first operand but for some elements


def places_before_updates(eqns: Sequence[JaxprEqn], places: Mapping[Var, Tensor]) -> dict[Var, Tensor]:
    """Tensors that may be written at once, with those for what is updated on the way to a value that goes there.

    Args:
        eqns: equations in order.
        places: where values of some variables go.

    Returns:
        The same with more variables.
    """
    every = dict(places)
    for eqn in reversed(eqns):
        updated = eqn.invars[0] if eqn.primitive.name in _UPDATES else None
        if isinstance(updated, Var) and eqn.outvars[0] in every:
            every.setdefault(updated, every[eqn.outvars[0]])
    return every
