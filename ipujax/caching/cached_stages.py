"""Lowering of functions whose programs may be in the cache: one that is there is lowered only if its graph is read.

Input: a lowering plan. Output: `Lowered`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ipujax.caching.program_entry import entry_of
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering_plan import LoweringPlan, compilation_steps
from ipujax.lowering_plan.call_program import CallProgram
from ipujax.runtime.cache import set_basis
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log, step, watch_compilation
from ipujax.runtime.names_at_import import replaced_values
from ipujax.stages import Lowered
from ipujax.storage import requested_directory

if TYPE_CHECKING:
    from ipujax.lowering_plan.planned_program import PlannedProgram

_LOG = Log("cache")


def find_or_lower(plan: LoweringPlan) -> Lowered:
    """Return the program of a plan from the cache of its options; without one, or if it is not there, lower it."""
    # Plans in memory were made by the passes, rules and planners of that time.
    set_basis(replaced_values())
    directory = requested_directory(plan.settings.options.cache_dir)
    entry = None
    if directory is not None:
        timings = dict(plan.timings)
        with step(_LOG, "cache", timings):
            entry = entry_of(plan, directory)
            figures = None if entry is None else entry.figures()
        if figures is not None:
            # Stored programs have results without Refs, and close over no arrays of the host.
            are_weak = tuple(aval.weak_type for aval in plan.jaxpr.out_avals)
            stored = CallProgram(
                plan, figures.used_ipus, are_weak, (), None, None, timings, figures.warnings, is_stored=True
            )
            return Lowered(plan, partial(_lowered_later, plan), entry, stored)
    # Imported here, as a program of the cache is called without the compiler.
    from ipujax.lowering_plan.planned_program import planned_program
    from ipujax.storage.stored_values import with_stored_values

    planned = with_stored_values(plan.settings.options.cache_dir, partial(planned_program, plan))
    return Lowered(plan, lambda: planned, entry)


def _lowered_later(plan: LoweringPlan) -> PlannedProgram:
    """Lower a program of the cache whose graph is read, as a compilation of its own."""
    from ipujax.lowering_plan.planned_program import planned_program
    from ipujax.storage.stored_values import with_stored_values

    settings = plan.settings
    spent_seconds = sum(plan.timings.values())
    watching = watch_compilation(settings.name, compilation_steps, settings.options.progress, spent_seconds)
    with collecting_rarely(), watching, tracing_without_mesh():
        return with_stored_values(settings.options.cache_dir, partial(planned_program, plan))
