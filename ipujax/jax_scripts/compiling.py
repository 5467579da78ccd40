"""A recorded function, compiled for an IPU from its trace: none of the script's code runs again.

Input: a record. Output: `Compiled`, whose profile is static; a loop that depends on data is run once on the recorded
arguments.
"""

from __future__ import annotations

import jax

from ipujax.arguments import FunctionName
from ipujax.caching import find_or_lower
from ipujax.calls import CallArguments, Traced, check_jaxpr
from ipujax.device import IPUModel
from ipujax.fit import first_choice
from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile

# One plan, whether it fits or not: a search for one that does would take several times as long as the script.
OPTIONS = Options(allow_out_of_memory=True)


def profile_of(record: FunctionRecord, device: IPUModel) -> Profile:
    """Return the profile of one call of a recorded function.

    Raises:
        IpuError: the function cannot be compiled for the device.
    """
    assert record.traced is not None
    name = FunctionName(record.name, device, None, record.name.file)
    with collecting_rarely(), tracing_without_mesh():
        check_jaxpr(name, record.traced.jaxpr, None)
        plan = LoweringPlan.of(name, _traced(record, record.traced), record.line, device.target, OPTIONS, None)
        choice = first_choice(OPTIONS, plan.argument_bytes_per_tile)
        compiled = find_or_lower(plan, lambda: plan.lowered(choice)).compile()
    profile: Profile = compiled.profile
    if record.sample is None or _has_cycles(profile):
        return profile
    args, kwargs = record.sample
    _, profile = compiled.profile_call(*args, **kwargs)
    return profile


def _traced(record: FunctionRecord, traced: jax.stages.Traced) -> Traced:
    """Return a trace of JAX as one of `ipu.jit`, which the plan lowers."""
    info = traced.args_info
    donated = tuple(bool(leaf.donated) for leaf in jax.tree.leaves(info))
    counts = (*(len(jax.tree.leaves(part)) for part in info[0]), len(jax.tree.leaves(info[1])))
    return Traced(traced, record.arguments, CallArguments(traced.in_tree, counts, donated), {}, lambda _: None)


def _has_cycles(profile: Profile) -> bool:
    try:
        return profile.cycles >= 0
    except ProfileError:  # a trip count is data
        return False
