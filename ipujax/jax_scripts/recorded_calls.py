"""Profiles of calls whose loops and branches depend on data: only what decides these is computed.

Input: a compiled function, flat arguments of calls. Output: the profile of each call, as `Compiled.profile_call`
returns it. The results are left out, and with them what XLA finds that they alone need.
Limits: the clocks take some 20 µs for a decision, so there are at most `MOST_DECISIONS`: calls beyond are not run, and
one call of more has no profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ipujax.lowering.jax_compat import Jaxpr, jaxprs_in_params
from ipujax.runtime.quick_jit import quick_jit
from ipujax.sharding import run_on_one_device

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile
    from ipujax.stages import Compiled


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
