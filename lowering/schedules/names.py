"""The schedules with a name, and the default schedule.

A named schedule has the defaults of its parameters; a schedule with other parameters is passed as an object.
"""

from __future__ import annotations

from typing import Literal, get_args

from ipujax.lowering.schedules import several_stages, single_stage
from ipujax.lowering.schedules.schedule import Schedule
from ipujax.runtime.errors import ScheduleError
from ipujax.runtime.target import GlobalExchange, nearest

ScheduleName = Literal[
    "sequential",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "grouped",
    "interleaved",
    "looped-1f1b",
    "zb-h1",
    "dualpipev",
    "chimera",
]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        single_stage.Sequential(),
        single_stage.GPipe(),
        single_stage.OneForwardOneBackward(),
        single_stage.EagerOneForwardOneBackward(),
        single_stage.Grouped(),
        single_stage.Interleaved(),
        several_stages.LoopedOneForwardOneBackward(),
        single_stage.ZeroBubbleH1(),
        several_stages.DualPipeV(),
        several_stages.Chimera(),
    )
}


def as_schedule(schedule: str | Schedule) -> Schedule:
    """Looks up a schedule by its name; a schedule is returned as it is.

    Args:
        schedule: a name in `SCHEDULES`, or a schedule.

    Raises:
        ScheduleError: for an unknown name (the error has the nearest), or another type.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return SCHEDULES[schedule]
    raise ScheduleError(
        f"no pipeline schedule is called {schedule!r}"
        if isinstance(schedule, str)
        else "schedule must be a name or a Schedule",
        expected=f"one of {', '.join(map(repr, SCHEDULES))}, or a Schedule",
        got=repr(schedule),
        hint=nearest(schedule, SCHEDULES)
        if isinstance(schedule, str)
        else f"{schedule.__name__}()"
        if isinstance(schedule, type) and issubclass(schedule, Schedule)
        else None,
    )


def default_schedule(exchange: GlobalExchange, num_stages: int, micro_batches: int, training: bool) -> Schedule:
    """The schedule that suits a target: `grouped` if all IPUs sync at every copy between stages, else `1f1b`."""
    # With such syncs a slot lasts as long as its longest task, so all IPUs should run tasks of one kind together; too
    # few micro-batches for that take 1f1b. Source: PopART's pipelines, docs/notes/transforms/pipelining.md.
    grouped = SCHEDULES["grouped"]
    fits = micro_batches >= grouped.domain(num_stages, training).least
    return grouped if exchange == "lockstep" and fits else SCHEDULES["1f1b"]
