"""Pipeline schedules against closed forms, through an independent simulator.

Closed forms hold for equal stages, free copies and enough buffers: p IPUs, m micro-batches, v chunks an IPU.
Sources: GPipe, arXiv 1811.06965; Megatron-LM, arXiv 2104.04473; zero bubble, arXiv 2401.10241; PopART, pipelining.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.lowering.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, LoopedOneForwardOneBackward, as_schedule
from tests.lowering.schedules.schedule_helpers import in_domain, lists_of, plan_of
from tests.lowering.schedules.schedule_simulator import makespan

COSTS = [(1, 1), (1, 2), (2, 1), (3, 7), (4, 8)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "grouped", "interleaved"])
def test_idle_time_equals_the_closed_form(name):
    for p, m in in_domain(as_schedule(name), range(1, 9), range(1, 17)):
        lists = lists_of(plan_of(name, p, m))
        for f, b in COSTS:
            cost = {"F": f, "B": b}
            assert makespan(lists, p, [cost] * p) == (m + p - 1) * (f + b), (p, m, f, b)


def test_sequential_runs_one_task_at_a_time():
    for p, m in in_domain(as_schedule("sequential"), range(1, 6), range(1, 9)):
        plan = plan_of("sequential", p, m)
        cost = {"F": 3, "B": 7}
        assert makespan(lists_of(plan), p, [cost] * p) == m * p * 10
        assert all(len(slot) == 1 for slot in plan.slots())
        assert all(len(slot) == 1 for slot in plan_of("sequential", p, m, training=False).slots())


def test_looped_idles_a_chunk_for_each_other_ipu():
    for v in (1, 2, 3):
        schedule = LoopedOneForwardOneBackward(v)
        for p, groups in ((1, 3), (2, 1), (2, 4), (3, 3), (4, 1), (4, 4)):
            m = groups * p
            lists = lists_of(plan_of(schedule, v * p, m))
            for f, b in COSTS:
                cost = {"F": f, "B": b}
                makespan_ = makespan(lists, v * p, [cost] * (v * p))
                assert makespan_ == m * v * (f + b) + (p - 1) * (f + b), (v, p, m, f, b)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 6, 3), (2, 5, 2), (5, 3, 3)])
def test_zero_bubble_h1_idles_less_by_the_parameter_gradients(times):
    f, b, w = times
    assert w <= f and w <= b  # condition of the closed form
    cost = {"F": f, "I": b, "W": w, "B": b + w}
    for p, m in in_domain(as_schedule("zb-h1"), range(1, 9), range(1, 25)):
        makespan_ = makespan(lists_of(plan_of("zb-h1", p, m)), p, [cost] * p)
        assert makespan_ == m * (f + b + w) + (p - 1) * (f + b - w), (p, m)


def test_zero_bubble_splits_all_stages_but_the_first():
    plan = plan_of("zb-h1", 4, 8)
    kinds = [{task.kind.name for task in tasks} for tasks in plan.lists]
    split = {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    assert kinds == [{"FORWARD", "BACKWARD"}, split, split, split]


@pytest.mark.parametrize(
    "name, closed_form",
    [
        ("sequential", lambda p, m, s: 1),
        ("gpipe", lambda p, m, s: m),
        ("1f1b", lambda p, m, s: min(m, p - s)),
        ("eager-1f1b", lambda p, m, s: min(m, 2 * (p - 1 - s) + 1)),
        ("grouped", lambda p, m, s: 2 * (p - 1 - s) + 1),
        ("interleaved", lambda p, m, s: p - s),
        ("zb-h1", lambda p, m, s: p - s),
    ],
)
def test_micro_batches_in_flight_equal_the_closed_form(name, closed_form):
    for p, m in in_domain(as_schedule(name), range(1, 9), range(1, 20)):
        plan = plan_of(name, p, m)
        assert [plan.in_flight(s) for s in range(p)] == [closed_form(p, m, s) for s in range(p)], (p, m)


def test_zero_bubble_stashes_operands_of_weight_gradients_longer():
    for p, m in in_domain(as_schedule("zb-h1"), range(1, 7), range(1, 20)):
        plan = plan_of("zb-h1", p, m)
        in_flight = [plan.in_flight(s, BACKWARD_WEIGHT) for s in range(p)]
        assert in_flight == [min(m, p)] * p


def test_looped_stashes_as_many_chunks_as_the_closed_form():
    for v, p, groups in ((2, 2, 4), (2, 4, 4), (3, 2, 3), (3, 3, 3), (2, 3, 1)):
        m = groups * p
        for ipu, tasks in enumerate(lists_of(plan_of(LoopedOneForwardOneBackward(v), v * p, m))):
            stashed = np.cumsum([1 if kind == "F" else -1 for _, _, kind in tasks]).max()
            assert stashed == min(m * v, (v - 1) * p + 2 * (p - 1 - ipu) + 1)


def test_copies_delay_1f1b_at_every_round_trip():
    """Copies of 1 cycle between 4 IPUs: 2(p − 1) for schedules far enough ahead, more for 1F1B."""
    cost = {"F": 4, "B": 8}
    delays_of = {"gpipe": (0, 0, 0), "eager-1f1b": (0, 0, 0), "1f1b": (10, 22, 46)}
    for name, delays in delays_of.items():
        for m, delay in zip((8, 16, 32), delays, strict=True):
            makespan_ = makespan(lists_of(plan_of(name, 4, m)), 4, [cost] * 4, comm=1)
            assert makespan_ == (m + 3) * 12 + 2 * 3 + delay


def test_lockstep_cycles_of_grouped_and_interleaved():
    """IPUs that sync after every slot, T_F = 1, T_B = 2: grouped takes 3(m + p − 1), as 1F1B does without syncs.

    Interleaved takes 2 in each of its 2(m + p − 1) slots except the first p, before any backward task.
    """
    cost = {FORWARD: 1, BACKWARD: 2}
    for p, m in ((2, 4), (3, 6), (4, 8), (4, 32)):
        grouped, interleaved = (
            sum(max(cost[task.kind] for task in slot) for slot in plan_of(name, p, m).slots())
            for name in ("grouped", "interleaved")
        )
        assert grouped == 3 * (m + p - 1)
        assert interleaved == 2 * 2 * (m + p - 1) - p
