"""Recorded calls run again: a function with loops or branches on data, for what each of its calls took.

Only what decides loops and branches is computed: the results are left out, and with them what XLA finds that they alone
need. What is run again must not print again: calls of the host that return nothing do nothing, and take the same time.

Input: a jaxpr; a compiled function, and flat arguments of calls. Output: whether it can run again, and a jaxpr that is
silent; the profile of each call, as `Compiled.profile_call` returns it.
Limits: `io_callback` with results is not run again, for its results are known to the host alone; nor is a function that
changes Refs. `pure_callback` is called again, as JAX may do too. The clocks take some 20 µs for a decision, so there
are at most `MOST_DECISIONS`: calls beyond are not run, and one call of more has no profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import equations, with_equations, with_inner
from ipujax.runtime.quick_jit import quick_jit
from ipujax.sharding import run_on_one_device

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile
    from ipujax.stages import Compiled

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


MOST_DECISIONS = 200_000  # of all calls of one function


def least_decisions(jaxpr: Jaxpr) -> int:
    """Return how many decisions on data one call makes at least: loops whose trip count is data make one."""
    count = 0
    for eqn in jaxpr.eqns:
        times = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        inner = sum(least_decisions(getattr(each, "jaxpr", each)) for each in jaxprs_in_params(eqn.params))
        count += times * inner if eqn.primitive.name not in ("while", "cond") else 1
    return count


def profiles_of_calls(compiled: Compiled, calls: Sequence[tuple[Any, ...]]) -> list[Profile]:
    """Return the profiles of calls, the first ones; none if one makes more than `MOST_DECISIONS`.

    Args:
        compiled: the function.
        calls: arguments of each call, one array for each input.

    Raises:
        IpuError: a function that the program calls on the host has failed.
    """
    from ipujax.runtime.engine import DecisionLog
    from ipujax.runtime.host import wait_for_calls
    from ipujax.runtime.report import Profile

    log = DecisionLog(most_decisions=MOST_DECISIONS)

    @quick_jit
    def decide(*leaves: Any) -> tuple[()]:
        compiled.lowered.evaluate(*leaves, log=log)
        return ()

    profiles = []
    remaining = MOST_DECISIONS
    for args in calls:
        run_on_one_device(decide, args, ())
        decisions = log.decisions
        remaining -= sum(map(len, decisions.values()))
        if remaining < 0:
            break
        if compiled.lowered.calls is not None:
            wait_for_calls((), [compiled.lowered.calls])
        profiles.append(Profile(compiled.executable, decisions))
        log.clear()
    return profiles
