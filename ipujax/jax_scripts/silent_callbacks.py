"""A jaxpr whose Python functions are not called, but take the same time: what is run again must not print again.

Input: a jaxpr. Output: an equal one, whose calls of the host that return nothing do nothing.
Limits: `io_callback` with results is not run again, for its results are known to the host alone; nor is a function that
changes Refs. `pure_callback` is called again, as JAX may do too.
"""

from __future__ import annotations

from typing import Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import equations, with_equations, with_inner

_OF_DEBUG = ("debug_callback", "debug_print")
_OF_HOST = "io_callback"
HOST_CALLS = frozenset((*_OF_DEBUG, _OF_HOST, "pure_callback"))  # primitives that call functions of the host


def can_run_again(jaxpr: ClosedJaxpr) -> bool:
    """Return whether a function has no effects but calls of the host that return nothing."""
    effectful = (eqn for eqn in equations(jaxpr.jaxpr) if eqn.effects and not any(jaxprs_in_params(eqn.params)))
    return all(map(_returns_nothing, effectful))


def silent(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr whose calls of the host that return nothing do nothing; one without stays the same object."""
    eqns = [_silent_equation(eqn) for eqn in jaxpr.jaxpr.eqns]
    return with_equations(jaxpr, eqns)


def _silent_equation(eqn: JaxprEqn) -> JaxprEqn:
    if not _returns_nothing(eqn):
        return with_inner(eqn, silent)
    if eqn.primitive.name == "debug_print":  # it prints by itself, so a call takes its place
        like = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().eqns[0]
        return eqn.replace(primitive=like.primitive, params={**like.params, "callback": _nothing}, effects=like.effects)
    return eqn.replace(params={**eqn.params, "callback": _nothing})


def _returns_nothing(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _OF_DEBUG or (eqn.primitive.name == _OF_HOST and not eqn.outvars)


def _nothing(*_: Any) -> tuple[()]:
    return ()
