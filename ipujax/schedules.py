"""Pipeline schedules for users: built-in schedules, and the base class for your own.

::

    from ipujax.schedules import BACKWARD, FORWARD, Schedule, Task

    class AllForwardFirst(Schedule):
        def tasks(self, num_stages, micro_batches):  # for each IPU its tasks, in order
            return [[Task(stage, j, kind) for kind in (FORWARD, BACKWARD) for j in range(micro_batches)]
                    for stage in range(num_stages)]

    print(schedule_plan(AllForwardFirst(), num_stages=4, micro_batches=8).drawing())
"""

from ipujax.lowering.schedules import (
    BACKWARD as BACKWARD,
    BACKWARD_INPUT as BACKWARD_INPUT,
    BACKWARD_WEIGHT as BACKWARD_WEIGHT,
    FORWARD as FORWARD,
    SCHEDULES as SCHEDULES,
    Chimera as Chimera,
    Domain as Domain,
    DualPipeV as DualPipeV,
    EagerOneForwardOneBackward as EagerOneForwardOneBackward,
    GPipe as GPipe,
    Grouped as Grouped,
    Interleaved as Interleaved,
    LoopedOneForwardOneBackward as LoopedOneForwardOneBackward,
    OneForwardOneBackward as OneForwardOneBackward,
    Schedule as Schedule,
    SchedulePlan as SchedulePlan,
    Sequential as Sequential,
    Task as Task,
    TaskList as TaskList,
    ZeroBubbleH1 as ZeroBubbleH1,
    schedule_plan as schedule_plan,
)
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
