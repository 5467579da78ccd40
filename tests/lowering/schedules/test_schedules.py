"""Pipeline schedules against closed forms, through an independent simulator.

Closed forms hold for equal stages, free copies and enough buffers: p IPUs, m micro-batches, v chunks an IPU.
Sources: GPipe, arXiv 1811.06965; Megatron-LM, arXiv 2104.04473; zero bubble, arXiv 2401.10241; PopART, pipelining.md;
DualPipeV, github.com/deepseek-ai/DualPipe; Chimera, arXiv 2107.06925.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

import numpy as np
import pytest

from ipujax.lowering.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, LoopedOneForwardOneBackward, as_schedule
from ipujax.runtime.errors import ScheduleError
from tests.lowering.schedules.schedule_helpers import in_domain, lists_of, plan_of
from tests.lowering.schedules.schedule_simulator import makespan, waits_for

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
        ("dualpipev", lambda p, m, s: p - s),
        ("chimera", lambda p, m, s: min(m, p // 2, p - s)),
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


def dualpipev_calls(ipu, p, m):
    """Calls of DualPipeV's source on one IPU, each with the tasks that it runs as one; "B" is not in halves."""
    below = p - 1 - ipu
    count = Counter()
    calls = []
    waiting = deque()

    def call(*tasks):
        calls.append([])
        for direction, kind in tasks:
            if kind == "W":
                calls[-1].append((*waiting.popleft(), "W"))
                continue
            number = direction, "F" if kind == "F" else "B"
            task = (ipu, 2 * p - 1 - ipu)[direction], count[number]
            count[number] += 1
            calls[-1].append((*task, kind))
            if kind == "I":
                waiting.append(task)

    for _ in range(2 * below):
        call((0, "F"))
    for _ in range(ipu + 1):
        call((0, "F"))
        call((1, "F"))
    for _ in range(below):
        call((1, "I"))
        call((1, "W"))
        call((1, "F"))
    for n in range(m - 2 * p + ipu + 1):
        if n == 0 and ipu == p - 1:  # the source does not overlap these
            call((0, "F"))
            call((1, "B"))
        else:
            call((0, "F"), (1, "B"))
        call((1, "F"), (0, "B"))
    for _ in range(below):
        call((1, "B"))
        call((1, "F"), (0, "B"))
    for n in range(2 * (ipu + 1)):
        call((1 - n % 2, "B" if n <= ipu else "I"))
    for _ in range(below):
        call((0, "W"))
        call((0, "I"))
    for _ in range(ipu + 1):
        call((0, "W"))
    return calls


def makespan_of_calls(calls, num_stages, cost):
    """Makespan where the tasks of a call begin and end together."""
    queues = [list(of_ipu) for of_ipu in calls]
    all_tasks = {task for of_ipu in calls for call in of_ipu for task in call}
    end = {}
    clock = [0] * len(calls)
    while len(end) < len(all_tasks):
        for ipu, queue in enumerate(queues):
            call = queue[0] if queue else []
            awaited = [w for task in call for w in waits_for(task, num_stages, all_tasks)]
            if call and all(w in end for w in awaited):
                clock[ipu] = max([clock[ipu], *(end[w] for w in awaited)]) + sum(cost[kind] for _, _, kind in call)
                end.update(dict.fromkeys(queue.pop(0), clock[ipu]))
    return max(clock)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (3, 3, 2), (5, 5, 1)])
def test_dualpipev_idles_as_published(times):
    """Of 2p stages (p − 1)(F&B + B − 3W), where F&B is a forward and a backward task that end together.

    Tasks here are those of the source, one after the other, so that the gradients of inputs leave as soon as they are
    there: T_I less for each of p − 1 IPUs.
    """
    f, i, w = times
    b = i + w
    cost = {"F": f, "I": i, "W": w, "B": b}
    for stages, m in in_domain(as_schedule("dualpipev"), (2, 4, 6, 12), (2, 4, 7, 12, 25)):
        lists = lists_of(plan_of("dualpipev", stages, m))
        p = stages // 2
        calls = [dualpipev_calls(ipu, p, m) for ipu in range(p)]
        for tasks, of_ipu in zip(lists, calls, strict=True):
            halves = [(*task, k) for call in of_ipu for *task, kind in call for k in ("IW" if kind == "B" else kind)]
            # The first stage has no gradients of inputs; its halves follow one another.
            first = {(0, j, "I"): None for j in range(m)} | {(0, j, "W"): (0, j, "B") for j in range(m)}
            assert tasks == [first.get(task, task) for task in halves if first.get(task, task)]
        work = 2 * m * (f + b)
        assert makespan_of_calls(calls, stages, cost) == work + (p - 1) * ((f + b) + b - 3 * w), (p, m)
        assert makespan(lists, stages, [cost] * stages) == work + (p - 1) * (f + i - w), (p, m)


def test_dualpipev_delays_parameter_gradients_in_its_last_ramp_alone():
    """As the eight steps of the source: p of them on each IPU but the first, which delays none."""
    plan = plan_of("dualpipev", 8, 20)
    assert plan.ipus == (0, 1, 2, 3, 3, 2, 1, 0)
    for ipu, tasks in enumerate(lists_of(plan)):
        delayed = 0
        for before, task in pairwise(tasks):
            delayed += before[2] == "I" and task != (*before[:2], "W")
        assert delayed == (4 if ipu else 0), ipu


@pytest.mark.parametrize("f, b", COSTS)
def test_chimera_idles_as_published(f, b):
    """In units of p; of one unit (D − 2)/(2N + D − 2) with equal tasks, (D − 2)/(3N/2 + D − 2) with 1 and 2."""
    for p in range(1, 6):
        for units in (1, 2, 5):
            m = units * p
            total = makespan(lists_of(plan_of("chimera", 2 * p, m)), 2 * p, [{"F": f, "B": b}] * 2 * p)
            idle = total - 2 * m * (f + b)
            assert idle == 2 * (p - 1) * (max(f, b) + (units - 1) * abs(b - f)), (p, units)
            if units == 1 and (f, b) in ((1, 1), (1, 2)):
                depth = count = 2 * p
                share = (depth - 2) / ((2 if f == b else 1.5) * count + depth - 2)
                assert idle / total == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("name", ["dualpipev", "chimera"])
def test_v_shaped_schedules_need_an_even_number_of_stages(name):
    with pytest.raises(ScheduleError, match=r"two stages on every IPU(.|\n)*4 stages on 2 IPUs"):
        plan_of(name, 3, 8)


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
