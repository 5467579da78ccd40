"""Pipeline schedules as data: which IPU does which task when.

A schedule gives each IPU its tasks in order (`schedule`); they are checked (`validate`), laid out in slots (`grid`),
and written as blocks that repeat (`blocks`). `SCHEDULES` has those a user calls by name; `schedule_plan` makes one
definite.
"""

from __future__ import annotations

from ipujax.lowering.schedules.blocks import Block as Block
from ipujax.lowering.schedules.common import EagerOneForwardOneBackward as EagerOneForwardOneBackward
from ipujax.lowering.schedules.common import GPipe as GPipe
from ipujax.lowering.schedules.common import OneForwardOneBackward as OneForwardOneBackward
from ipujax.lowering.schedules.common import Sequential as Sequential
from ipujax.lowering.schedules.graphcore import Grouped as Grouped
from ipujax.lowering.schedules.graphcore import Interleaved as Interleaved
from ipujax.lowering.schedules.looped import LoopedOneForwardOneBackward as LoopedOneForwardOneBackward
from ipujax.lowering.schedules.plan import SchedulePlan as SchedulePlan
from ipujax.lowering.schedules.plan import schedule_plan as schedule_plan
from ipujax.lowering.schedules.schedule import Domain as Domain
from ipujax.lowering.schedules.schedule import Schedule as Schedule
from ipujax.lowering.schedules.tasks import BACKWARD as BACKWARD
from ipujax.lowering.schedules.tasks import BACKWARD_INPUT as BACKWARD_INPUT
from ipujax.lowering.schedules.tasks import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from ipujax.lowering.schedules.tasks import FORWARD as FORWARD
from ipujax.lowering.schedules.tasks import Kind as Kind
from ipujax.lowering.schedules.tasks import Task as Task
from ipujax.lowering.schedules.tasks import TaskList as TaskList
from ipujax.lowering.schedules.zero_bubble import ZeroBubbleH1 as ZeroBubbleH1
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
        hint=nearest(schedule, SCHEDULES) if isinstance(schedule, str) else None,
    )
