"""Clocks of all IPUs over a program, and the timeline of its phases."""

from ipujax.runtime.timeline.clock_walk import TimelineStep as TimelineStep, Walk as Walk
from ipujax.runtime.timeline.clocks import PHASES as PHASES, SYNC as SYNC, ClockStep as ClockStep
from ipujax.runtime.timeline.machine_clocks import MachineClocks as MachineClocks, equal_ipus as equal_ipus
from ipujax.runtime.timeline.run_control import Recording as Recording
from ipujax.runtime.timeline.task_spans import TaskSpans as TaskSpans, TaskTotal as TaskTotal
from ipujax.runtime.timeline.timeline import MAX_STEPS as MAX_STEPS, Spans as Spans, Timeline as Timeline
