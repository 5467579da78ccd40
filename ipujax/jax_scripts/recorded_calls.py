"""Profiles of calls whose loops and branches depend on data: only what decides these is computed.

Input: a compiled function, flat arguments of calls. Output: the profile of each call, as `Compiled.profile_call`
returns it. The results are left out, and with them what XLA finds that they alone need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ipujax.runtime.graph import Program
from ipujax.runtime.names_at_import import jax_jit
from ipujax.sharding import run_on_one_device

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile
    from ipujax.stages import Compiled


def profiles_of_calls(compiled: Compiled, calls: Sequence[tuple[Any, ...]]) -> list[Profile]:
    """Return the profiles of calls.

    Args:
        compiled: the function.
        calls: arguments of each call, one array for each input.

    Raises:
        IpuError: a function that the program calls on the host has failed.
    """
    from ipujax.runtime.host import wait_for_calls
    from ipujax.runtime.report import Profile

    decisions: dict[Program, list[int]] = {}

    def record(node: Program, decision: Any) -> None:
        decisions.setdefault(node, []).append(int(decision))

    @jax_jit
    def decide(*leaves: Any) -> tuple[()]:
        compiled.lowered.evaluate(*leaves, record=record)
        return ()

    profiles = []
    for args in calls:
        run_on_one_device(decide, args, ())
        jax.effects_barrier()  # decisions arrive by callbacks
        if compiled.lowered.calls is not None:
            wait_for_calls((), [compiled.lowered.calls])
        profiles.append(Profile(compiled.executable, dict(decisions)))
        decisions.clear()
    return profiles
