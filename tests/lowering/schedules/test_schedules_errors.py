"""Pipeline schedules by name, their domains, and an error for each invalid schedule."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

from ipujax import schedules
from ipujax.lowering.schedules import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    SCHEDULE_NAMES,
    SCHEDULES,
    Kind,
    LoopedOneForwardOneBackward,
    Schedule,
    Task,
    TaskList,
    as_schedule,
)
from ipujax.runtime.errors import ArgumentError, ScheduleError
from tests.lowering.schedules.schedule_helpers import FixedSchedule, check_slots, in_domain, plan_of


def test_finds_schedules_by_name():
    assert tuple(SCHEDULES) == SCHEDULE_NAMES
    for name, schedule in SCHEDULES.items():
        assert as_schedule(name) is schedule
        assert as_schedule(schedule) is schedule
    assert LoopedOneForwardOneBackward(2) == SCHEDULES["looped-1f1b"] != LoopedOneForwardOneBackward(3)
    with pytest.raises(ScheduleError, match=r"(?s)called 'gpip'.*try: 'gpipe', the nearest known name"):
        as_schedule("gpip")
    with pytest.raises(ArgumentError, match="must be a name or a Schedule"):
        as_schedule(3)


@pytest.mark.parametrize(
    "name, stages, micro_batches, message",
    [
        ("grouped", 4, 4, r"at least 7 micro-batches: that many fill its 7 pipeline stages"),
        ("interleaved", 3, 2, r"at least 3 micro-batches: they go round the 3 IPUs"),
        ("interleaved", 3, 7, r"(?s)multiple of 3 micro-batches.*micro_batches=6 or 9"),
        ("looped-1f1b", 8, 2, r"at least 4 micro-batches: they go through the 2 chunks of each IPU in groups of 4"),
        ("looped-1f1b", 8, 6, r"(?s)multiple of 4 micro-batches.*micro_batches=4 or 8"),
        ("looped-1f1b", 3, 6, r"(?s)puts 2 stages on every IPU.*that 2 divides.*3 stages"),
        ("zb-h1", 4, 3, r"at least 4 micro-batches: stage 3 puts off 3"),
        ("1f1b", 4, 0, r"at least one micro-batch"),
        ("1f1b", 0, 4, r"at least one stage"),
    ],
)
def test_refuses_numbers_outside_a_domain_with_the_reason(name, stages, micro_batches, message):
    with pytest.raises(ScheduleError, match=message):
        plan_of(name, stages, micro_batches)


def test_accepts_the_numbers_of_each_domain():
    """Accepted numbers out of 2 to 4 stages and 1, 4, 7, 16 micro-batches."""
    everything = {(p, m) for p in (2, 3, 4) for m in (1, 4, 7, 16)}
    accepted = {name: set(in_domain(s, (2, 3, 4), (1, 4, 7, 16))) for name, s in SCHEDULES.items()}
    for name in ("sequential", "gpipe", "1f1b", "eager-1f1b"):
        assert accepted[name] == everything
    assert accepted["grouped"] == {(p, m) for p, m in everything if m >= 2 * p - 1}
    assert accepted["interleaved"] == {(p, m) for p, m in everything if m % p == 0}
    assert accepted["looped-1f1b"] == {(2, m) for m in (1, 4, 7, 16)} | {(4, 4), (4, 16)}
    assert accepted["zb-h1"] == {(p, m) for p, m in everything if m >= p}


def test_inference_needs_fewer_micro_batches():
    for name in ("sequential", "gpipe", "1f1b", "eager-1f1b", "zb-h1"):
        assert check_slots(plan_of(name, 4, 1, training=False))
    assert check_slots(plan_of("grouped", 4, 4, training=False))
    with pytest.raises(ScheduleError, match="at least 4 micro-batches"):
        plan_of("grouped", 4, 3, training=False)


def test_refuses_a_looped_schedule_without_chunks():
    with pytest.raises(ScheduleError, match="at least one chunk"):
        LoopedOneForwardOneBackward(0)


F00, F01, B00, B01 = (Task(0, j, kind) for kind in (FORWARD, BACKWARD) for j in (0, 1))
F10, F11, B10, B11 = (Task(1, j, kind) for kind in (FORWARD, BACKWARD) for j in (0, 1))
GOOD = ([F00, F01, B00, B01], [F10, F11, B10, B11])


def test_accepts_a_good_schedule():
    assert check_slots(plan_of(FixedSchedule(*GOOD), 2, 2))


@pytest.mark.parametrize(
    "lists, message",
    [
        (([F00, F01, B00], [F10, F11, B10, B11]), r"BACKWARD\(stage 0, micro-batch 1\) is missing"),
        (([F00, B00, B01], [F10, F11, B10, B11]), r"FORWARD\(stage 0, micro-batch 1\) is missing"),
        (([F00, F01, F01, B00, B01], GOOD[1]), r"FORWARD\(stage 0, micro-batch 1\) occurs more than once"),
        (([F00, F01, B00, Task(0, 0, Kind.BACKWARD_INPUT), B01], GOOD[1]), r"BACKWARD\(stage 0.*unsplit and split"),
        (([F00, F01, Task(0, 0, Kind.BACKWARD_INPUT), B01], GOOD[1]), r"BACKWARD_WEIGHT\(stage 0, .* 0\) is missing"),
        (([F00, F01, Task(0, 0, BACKWARD_WEIGHT), B01], GOOD[1]), r"BACKWARD_INPUT\(stage 0, .* 0\) is missing"),
        (
            ([F00, F01, B00, Task(0, 1, Kind.BACKWARD_INPUT), Task(0, 1, BACKWARD_WEIGHT)], GOOD[1]),
            r"(?s)stage 0 has unsplit backward tasks and tasks in two halves.*in the place of BACKWARD",
        ),
        (([F01, F00, B00, B01], GOOD[1]), r"(?s)FORWARD\(stage 0, micro-batch 0\) comes after micro-batch 1.*first in"),
        (
            ([F00, F01, B01, B00], GOOD[1]),
            r"(?s)BACKWARD\(stage 0, micro-batch 0\) comes after micro-batch 1.*first in",
        ),
        (
            ([F00, B00, B01, F01], GOOD[1]),
            r"BACKWARD\(stage 0, micro-batch 1\) reads a stash before FORWARD\(stage 0, micro-batch 1",
        ),
        ((GOOD[0], [F10, B10, B11, F11]), r"BACKWARD\(stage 1, micro-batch 1\) reads a stash"),
        (
            ([F00, B00, F01, B01], GOOD[1]),
            r"(?s)deadlock: BACKWARD\(stage 0, .* 0\) never.*BACKWARD\(stage 1, .* 0\) can",
        ),
        (([*GOOD[0], F10], GOOD[1][1:]), r"FORWARD\(stage 1, micro-batch 1\) is on IPU 1, but stage 1 is on IPU 0"),
        ((GOOD[0], []), r"no tasks for IPU 1"),
        ((GOOD[0],), r"stage 1 has no tasks"),
        ((), r"no list of tasks"),
        (
            ([*GOOD[0], Task(2, 0, FORWARD)], GOOD[1]),
            r"(?s)task 4 of IPU 0 is of a stage that does not exist.*0 to 1.*got: 2",
        ),
        (([Task(0, 2, FORWARD), *GOOD[0]], GOOD[1]), r"(?s)task 0 of IPU 0 is of a micro-batch.*0 to 1.*got: 2"),
        (([Task(0, -1, FORWARD), *GOOD[0]], GOOD[1]), r"(?s)task 0 of IPU 0 is of a micro-batch.*0 to 1.*got: -1"),
        (([Task(0, 0, 4), *GOOD[0]], GOOD[1]), r"(?s)task 0 of IPU 0 is of a kind.*FORWARD.*got: 4"),
    ],
)
def test_refuses_a_bad_schedule_by_its_first_bad_task(lists, message):
    with pytest.raises(ScheduleError, match=message):
        plan_of(FixedSchedule(*lists), 2, 2)


class NoLists(Schedule):
    """Returns nothing, as if a return statement were missing."""

    def tasks(self, num_stages, micro_batches):
        return None


def test_refuses_values_that_are_not_lists_of_tasks():
    with pytest.raises(ScheduleError, match=r"(?s)item 1 in the list of an IPU is not a Task.*\(0, 1\)"):
        plan_of(FixedSchedule([F00, (0, 1)]), 1, 1)
    for schedule in (NoLists(), FixedSchedule(None)):
        with pytest.raises(ScheduleError, match="no tasks"):
            plan_of(schedule, 1, 1)
    for stage in (None, np.array([0, 1]), 0.5):
        with pytest.raises(ScheduleError, match="task 1 of an IPU has a field that is not an integer"):
            plan_of(FixedSchedule([F00, Task(stage, 0, Kind.FORWARD)]), 1, 1)
    with pytest.raises(ScheduleError, match=r"(?s)schedule must be a name or a Schedule.*try: NoLists\(\)"):
        as_schedule(NoLists)
    with pytest.raises(ScheduleError, match="2 stages, but not as many micro_batches"):
        TaskList([0, 0], [0], [0, 0])
    with pytest.raises(ScheduleError, match="2 stages, but not as many slots"):
        TaskList([0, 0], [0, 1], [0, 0], [1])


def test_checks_slots_that_a_schedule_sets():
    def with_slots(tasks, slots):
        tasks = TaskList.of(tasks)
        return TaskList(tasks.stages, tasks.micro_batches, tasks.kinds, slots)

    list_of_ipu_1 = with_slots(GOOD[1], [1, 2, 3, 5])
    assert [
        len(slot) for slot in plan_of(FixedSchedule(with_slots(GOOD[0], [0, 1, 7, 9]), list_of_ipu_1), 2, 2).slots()
    ] == [
        1,
        2,
        1,
        1,
        1,
        1,
        1,
    ]
    for slots, message in (
        ([0, 1, 1, 9], r"(?s)slots of IPU 0 do not rise at BACKWARD\(stage 0, micro-batch 0\)"),
        ([1, 2, 7, 9], r"(?s)FORWARD\(stage 1, micro-batch 0\) on IPU 1 is in a slot before .*after 1.*slot 1"),
        ([0, 1, 4, 5], r"(?s)BACKWARD\(stage 0, micro-batch 1\) on IPU 0 is in a slot before .*after 5.*slot 5"),
    ):
        with pytest.raises(ScheduleError, match=message):
            plan_of(FixedSchedule(with_slots(GOOD[0], slots), list_of_ipu_1), 2, 2)
    with pytest.raises(ScheduleError, match="slots of all its tasks or of none"):
        plan_of(FixedSchedule(GOOD[0], list_of_ipu_1), 2, 2)


def test_a_user_schedule_needs_one_method():
    class FirstBackward(Schedule):
        def tasks(self, num_stages, micro_batches):
            return [
                [Task(s, j, kind) for kind in (FORWARD, BACKWARD) for j in range(micro_batches)]
                for s in range(num_stages)
            ]

    user_plan = plan_of(FirstBackward(), 3, 20)
    gpipe = plan_of("gpipe", 3, 20)
    assert user_plan.schedule.name == "FirstBackward"
    assert user_plan.drawing() == gpipe.drawing()
    assert user_plan.blocks == gpipe.blocks
    assert plan_of(FirstBackward(), 3, 20, training=False).blocks == plan_of("gpipe", 3, 20, training=False).blocks


def test_runs_the_example_of_the_public_module(capsys):
    _, example = schedules.__doc__.split("::\n")
    exec(textwrap.dedent(example), {"schedule_plan": schedules.schedule_plan})
    assert capsys.readouterr().out.rstrip() == plan_of("gpipe", 4, 8).drawing()


def test_draws_1f1b_as_in_the_paper():
    assert plan_of("1f1b", 2, 3).drawing().splitlines() == [
        "F0.0 F0.1      B0.0 F0.2 B0.1      B0.2",
        "     F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    ]
