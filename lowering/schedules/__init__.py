"""Pipeline schedules as data: the task of each IPU at each time.

A schedule gives each IPU its tasks in order (`schedule`); they are checked (`validate`), assigned to slots (`grid`),
and written as blocks that repeat. `names.SCHEDULES` has the schedules with a name; `schedule_plan` does all of this for
a number of stages and micro-batches.
"""

from ipujax.lowering.schedules.names import (
    SCHEDULE_NAMES as SCHEDULE_NAMES,
    SCHEDULES as SCHEDULES,
    ScheduleName as ScheduleName,
    as_schedule as as_schedule,
    default_schedule as default_schedule,
)
from ipujax.lowering.schedules.schedule import (
    BACKWARD as BACKWARD,
    BACKWARD_INPUT as BACKWARD_INPUT,
    BACKWARD_WEIGHT as BACKWARD_WEIGHT,
    FORWARD as FORWARD,
    Domain as Domain,
    Kind as Kind,
    Schedule as Schedule,
    Task as Task,
    TaskList as TaskList,
)
from ipujax.lowering.schedules.schedule_plan import (
    SchedulePlan as SchedulePlan,
    Slot as Slot,
    schedule_plan as schedule_plan,
)
from ipujax.lowering.schedules.several_stages import (
    Chimera as Chimera,
    DualPipeV as DualPipeV,
    LoopedOneForwardOneBackward as LoopedOneForwardOneBackward,
)
from ipujax.lowering.schedules.single_stage import (
    EagerOneForwardOneBackward as EagerOneForwardOneBackward,
    GPipe as GPipe,
    Grouped as Grouped,
    Interleaved as Interleaved,
    OneForwardOneBackward as OneForwardOneBackward,
    Sequential as Sequential,
    ZeroBubbleH1 as ZeroBubbleH1,
)
