"""Pipeline schedules as data: which IPU does which task when.

A schedule gives each IPU its tasks in order (`schedule`); they are checked (`validate`), laid out in slots (`grid`),
and written as blocks that repeat (`blocks`). `names.SCHEDULES` has those a user calls by name; `schedule_plan`
makes one definite.
"""

from ipujax.lowering.schedules.blocks import Block as Block
from ipujax.lowering.schedules.common import EagerOneForwardOneBackward as EagerOneForwardOneBackward
from ipujax.lowering.schedules.common import GPipe as GPipe
from ipujax.lowering.schedules.common import OneForwardOneBackward as OneForwardOneBackward
from ipujax.lowering.schedules.common import Sequential as Sequential
from ipujax.lowering.schedules.graphcore import Grouped as Grouped
from ipujax.lowering.schedules.graphcore import Interleaved as Interleaved
from ipujax.lowering.schedules.looped import LoopedOneForwardOneBackward as LoopedOneForwardOneBackward
from ipujax.lowering.schedules.names import SCHEDULES as SCHEDULES
from ipujax.lowering.schedules.names import as_schedule as as_schedule
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
