"""Helpers for tests of schedules: plans by name, combinations in a domain, and a replay of slots."""

from __future__ import annotations

import pytest

from ipujax.lowering.schedules import SCHEDULES, LoopedOneForwardOneBackward, Schedule, schedule_plan
from ipujax.runtime.errors import ScheduleError
from tests.lowering.schedules.schedule_simulator import letters, waits_for

ALL_SCHEDULES = (*SCHEDULES.values(), LoopedOneForwardOneBackward(1), LoopedOneForwardOneBackward(3))


def names(schedule):
    return schedule.name + (str(schedule.chunks) if isinstance(schedule, LoopedOneForwardOneBackward) else "")


every_schedule = pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=names)


def plan_of(schedule, num_stages, micro_batches, training=True):
    return schedule_plan(schedule, num_stages, micro_batches, training)


def lists_of(plan):
    return [[letters(task) for task in tasks] for tasks in plan.lists]


def in_domain(schedule, stages, micro_batches, training=True):
    """The combinations a schedule accepts."""
    for num_stages in stages:
        for number in micro_batches:
            try:
                schedule.check(num_stages, number, training)
            except ScheduleError:
                continue
            yield num_stages, number


def check_slots(plan):
    """Checks that a plan's unrolled blocks are its lists, each task after those it waits for; returns slots by task."""
    by_ipu = [[] for _ in plan.lists]
    slot_of = {}
    for number, slot in enumerate(plan.slots()):
        assert slot
        assert len({plan.ipus[task.stage] for task in slot}) == len(slot)
        for task in slot:
            by_ipu[plan.ipus[task.stage]].append(letters(task))
            slot_of[letters(task)] = number
    assert by_ipu == lists_of(plan)
    for task, slot in slot_of.items():
        assert all(slot_of[awaited] < slot for awaited in waits_for(task, plan.num_stages, slot_of))
    return slot_of


class FixedSchedule(Schedule):
    """A schedule of fixed lists."""

    def __init__(self, *lists):
        self.lists = lists

    def tasks(self, num_stages, micro_batches):
        return self.lists
