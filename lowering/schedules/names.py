"""The schedules a user can call by name.

A schedule with numbers of its own stands here with its default; others of its kind are passed as values.
"""

from __future__ import annotations

from ipujax.lowering.schedules.common import EagerOneForwardOneBackward, GPipe, OneForwardOneBackward, Sequential
from ipujax.lowering.schedules.graphcore import Grouped, Interleaved
from ipujax.lowering.schedules.looped import LoopedOneForwardOneBackward
from ipujax.lowering.schedules.schedule import Schedule
from ipujax.lowering.schedules.zero_bubble import ZeroBubbleH1
from ipujax.runtime.errors import ScheduleError
from ipujax.runtime.target import nearest

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Sequential(),
        GPipe(),
        OneForwardOneBackward(),
        EagerOneForwardOneBackward(),
        Grouped(),
        Interleaved(),
        LoopedOneForwardOneBackward(),
        ZeroBubbleH1(),
    )
}


def as_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of a name, or a schedule as it is.

    Args:
        schedule: a name in `SCHEDULES`, or a schedule.

    Raises:
        ScheduleError: there is none of that name (the nearest is named), or it is something else.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return SCHEDULES[schedule]
    raise ScheduleError(
        f"no pipeline schedule is called {schedule!r}" if isinstance(schedule, str) else "this is no pipeline schedule",
        expected=f"one of {', '.join(map(repr, SCHEDULES))}, or a Schedule",
        got=None if isinstance(schedule, str) else repr(schedule),
        hint=nearest(schedule, SCHEDULES)
        if isinstance(schedule, str)
        else f"{schedule.__name__}()"
        if isinstance(schedule, type) and issubclass(schedule, Schedule)
        else None,
    )
