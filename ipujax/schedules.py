"""Pipeline schedules for users: those there are, and what one of one's own is made of.

from ipujax.schedules import BACKWARD, FORWARD, Schedule, Task

class AllForwardFirst(Schedule):
    def tasks(self, num_stages, micro_batches):  # for each IPU its tasks, in order
        return [[Task(stage, j, kind) for kind in (FORWARD, BACKWARD) for j in range(micro_batches)]
                for stage in range(num_stages)]

print(schedule_plan(AllForwardFirst(), num_stages=4, micro_batches=8).drawing())
"""

from ipujax.lowering.schedules import BACKWARD as BACKWARD
from ipujax.lowering.schedules import BACKWARD_INPUT as BACKWARD_INPUT
from ipujax.lowering.schedules import BACKWARD_WEIGHT as BACKWARD_WEIGHT
from ipujax.lowering.schedules import FORWARD as FORWARD
from ipujax.lowering.schedules import SCHEDULES as SCHEDULES
from ipujax.lowering.schedules import Domain as Domain
from ipujax.lowering.schedules import EagerOneForwardOneBackward as EagerOneForwardOneBackward
from ipujax.lowering.schedules import GPipe as GPipe
from ipujax.lowering.schedules import Grouped as Grouped
from ipujax.lowering.schedules import Interleaved as Interleaved
from ipujax.lowering.schedules import LoopedOneForwardOneBackward as LoopedOneForwardOneBackward
from ipujax.lowering.schedules import OneForwardOneBackward as OneForwardOneBackward
from ipujax.lowering.schedules import Schedule as Schedule
from ipujax.lowering.schedules import SchedulePlan as SchedulePlan
from ipujax.lowering.schedules import Sequential as Sequential
from ipujax.lowering.schedules import Task as Task
from ipujax.lowering.schedules import TaskList as TaskList
from ipujax.lowering.schedules import ZeroBubbleH1 as ZeroBubbleH1
from ipujax.lowering.schedules import schedule_plan as schedule_plan
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
