"""Slots, blocks and rings of every pipeline schedule, replayed against lists of tasks and their dependencies."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.lowering.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD, Kind, Task
from ipujax.lowering.schedules.schedule_plan import best_repetition
from ipujax.lowering.schedules.several_stages import Chimera, DualPipeV
from tests.lowering.schedules.schedule_helpers import (
    ALL_SCHEDULES,
    FixedSchedule,
    check_slots,
    every_schedule,
    in_domain,
    lists_of,
    names,
    plan_of,
)
from tests.lowering.schedules.schedule_simulator import letters, makespan, waits_for


@every_schedule
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_slots_hold_every_task_once_in_a_valid_order(schedule, training):
    for p, m in in_domain(schedule, (1, 2, 3, 4, 6, 8), (1, 2, 4, 7, 8, 16, 24, 40), training):
        plan = plan_of(schedule, p, m, training)
        tasks = check_slots(plan)
        split = {(s, j) for s, j, kind in tasks if kind == "I"}
        assert split == {(s, j) for s, j, kind in tasks if kind == "W"}
        all_pairs = {(s, j) for s in range(p) for j in range(m)}
        assert {(s, j) for s, j, kind in tasks if kind == "F"} == all_pairs
        assert {(s, j) for s, j, kind in tasks if kind == "B"} == (all_pairs - split if training else set())


@every_schedule
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_number_of_blocks_is_independent_of_micro_batches(schedule, training):
    for p in (2, 4, 6):
        if p % getattr(schedule, "chunks", 1):
            continue
        plans = [plan_of(schedule, p, m, training) for m in (48, 96, 384)]
        shapes = {tuple((len(block.slots), block.stride) for block in plan.blocks) for plan in plans}
        assert len(shapes) == 1
        assert sum(len(block.slots) for block in plans[0].blocks) <= 20 * p
        repeats = [[block.count for block in plan.blocks] for plan in plans]
        assert all(
            count == larger_count or count < larger_count
            for count, larger_count in zip(repeats[0], repeats[2], strict=True)
        )


@settings(max_examples=60)
@given(
    schedule=st.sampled_from(ALL_SCHEDULES),
    scale=st.tuples(st.integers(1, 6), st.integers(1, 60)),
    odd=st.integers(0, 5),
    training=st.booleans(),
)
def test_blocks_unroll_to_the_tasks_for_any_numbers(schedule, scale, odd, training):
    p = scale[0] * getattr(schedule, "chunks", 2 if isinstance(schedule, DualPipeV | Chimera) else 1)
    m = scale[1] * (p if schedule.domain(p, training).multiple > 1 else 1) + odd
    for num_stages, micro_batches in in_domain(schedule, (p,), (m, m - odd), training):
        check_slots(plan_of(schedule, num_stages, micro_batches, training))


@settings(max_examples=60)
@given(p=st.integers(1, 4), m=st.integers(1, 12), random=st.randoms(use_true_random=False))
def test_accepts_any_order_without_deadlock(p, m, random):
    """Each IPU runs any ready task at random, first in, first out; some backward work is split."""
    split = [random.random() < 0.5 for _ in range(p)]
    kinds = [("F", "I", "W") if split[s] else ("F", "B") for s in range(p)]
    finished = set()
    lists = [[] for _ in range(p)]
    all_tasks = {(s, j, kind) for s in range(p) for j in range(m) for kind in kinds[s]}
    while len(finished) < len(all_tasks):
        next_tasks = [
            min((t for t in all_tasks - finished if t[0] == s and t[2] == k), default=None)
            for s in range(p)
            for k in kinds[s]
        ]
        ready = [t for t in next_tasks if t and all(awaited in finished for awaited in waits_for(t, p, all_tasks))]
        task = random.choice(sorted(ready))
        finished.add(task)
        lists[task[0]].append(task)
    kind_of = dict(zip("FBIW", Kind, strict=True))
    plan = plan_of(FixedSchedule(*[[Task(s, j, kind_of[k]) for s, j, k in tasks] for tasks in lists]), p, m)
    check_slots(plan)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=8), st.integers(1, 5), st.data())
def test_finds_the_best_repetition(start, times, data):
    """Against all (offset, period, count), on sequences with some repetition."""
    repeated = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=4))
    slots = [*start, *repeated * times, *data.draw(st.lists(st.sampled_from([(0, 0), (1, 0), (0, 1)]), max_size=6))]
    numbers = np.array([number for number, _ in slots], np.int64)
    first = np.cumsum([step for _, step in slots], dtype=np.int64)

    def repeats(offset, period, count):
        shifts = {
            first[t + period] - first[t] if numbers[t + period] == numbers[t] else None
            for t in range(offset, offset + period * (count - 1))
        }
        return len(shifts) == 1 and None not in shifts

    saved = [
        (count - 1) * period
        for period in range(1, len(slots) // 3 + 1)
        for offset in range(len(slots))
        for count in range(3, (len(slots) - offset) // period + 1)
        if repeats(offset, period, count)
    ]
    repetition = best_repetition(numbers, first)
    if repetition is None:
        assert not saved
    else:
        offset, period, count = repetition
        assert offset + period * count <= len(slots) and repeats(*repetition)
        assert (count - 1) * period == max(saved)


@every_schedule
def test_blocks_stride_by_any_multiple(schedule):
    for p, m in in_domain(schedule, (4, 6), (8, 12, 24, 36)):
        plan = plan_of(schedule, p, m)
        for multiple in (1, 2, 3, 4, 6):
            blocks = plan.blocks_by(multiple)
            assert [slot for block in blocks for slot in block.unrolled()] == list(plan.slots())
            assert all(block.stride % multiple == 0 and (block.count > 1) == (block.stride > 0) for block in blocks)
        assert plan.blocks_by(1) == plan.blocks
        if len(strides := {block.stride for block in plan.blocks if block.count > 1}) == 1:
            assert plan.blocks_by(*strides) == plan.blocks  # they are multiples already


@every_schedule
def test_buffers_never_lengthen_a_step(schedule):
    """With senders that wait for a free buffer a step takes as long as with unlimited buffers."""
    random = Random(names(schedule))
    for p, m in in_domain(schedule, (2, 3, 4, 6), (6, 12, 24)):
        plan = plan_of(schedule, p, m)
        for _ in range(4):
            costs = [{kind: random.randint(1, 9) for kind in "FIW"} for _ in range(p)]
            costs = [cost | {"B": cost["I"] + cost["W"]} for cost in costs]
            assert buffered(plan, costs) == makespan(lists_of(plan), p, costs)


def buffered(plan, cost):
    """End time of the last IPU, if values occupy the buffers of the plan until the task that reads them has run."""
    clock = [0] * plan.num_ipus
    end = {}
    arrived = {}
    all_tasks = {letters(task) for tasks in plan.lists for task in tasks}
    kind_of = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD}
    for slot in plan.slots():
        tasks = [(letters(task), plan.ipus[task.stage]) for task in slot]
        for task, ipu in tasks:
            awaited_tasks = waits_for(task, plan.num_stages, all_tasks)
            start = max(
                [
                    clock[ipu],
                    *(
                        arrived[awaited]
                        for awaited in awaited_tasks
                        if awaited in arrived and plan.ipus[awaited[0]] != ipu
                    ),
                ]
            )
            clock[ipu] = end[task] = start + cost[task[0]][task[2]]
        for (stage, j, kind), ipu in tasks:
            reader = stage + (1 if kind == "F" else -1)
            if kind == "W" or not 0 <= reader < plan.num_stages or plan.ipus[reader] == ipu:
                continue
            buffers = plan.buffers((stage, kind_of[kind]), (reader, kind_of[kind]))
            previous_reads = [end[reader, j - buffers, k] for k in (kind, "B", "I") if (reader, j - buffers, k) in end]
            clock[ipu] = max([clock[ipu], *previous_reads[:1]])
            arrived[stage, j, kind] = clock[ipu]
    return max(clock)


@every_schedule
def test_a_ring_never_loses_a_micro_batch(schedule):
    """Rings of the plan's depth, replayed slot by slot; a ring with a slot less loses a value."""
    for p, m in in_domain(schedule, (2, 4, 6), (4, 12, 24)):
        plan = plan_of(schedule, p, m)
        pairs = [((s, FORWARD), (s, until)) for s in range(p) for until in (BACKWARD, BACKWARD_WEIGHT)]
        pairs += [((s, FORWARD), (s + 1, FORWARD)) for s in range(p - 1)]
        pairs += [((0, FORWARD), (p - 1, FORWARD)), ((0, FORWARD), (p - 1, BACKWARD))]
        pairs += [((s + 1, BACKWARD), (s, BACKWARD)) for s in range(p - 1)]
        for written, read in pairs:
            depth = plan.depth(written, read)
            assert not loses(plan, written, read, depth)
            assert depth == 1 or loses(plan, written, read, depth - 1)


def loses(plan, written, read, depth):
    """True if a ring of some depth is overwritten before it is read: a plain replay of the slots."""
    ring = {}
    for slot in plan.slots():
        tasks = [letters(task) for task in slot]
        if any(ring.get(j % depth) != j for s, j, kind in tasks if s == read[0] and kind in WORK[read[1]]):
            return True
        ring |= {j % depth: j for s, j, kind in tasks if s == written[0] and kind in WORK[written[1]]}
    return False


WORK = {FORWARD: "F", BACKWARD: "BI", BACKWARD_WEIGHT: "BW"}  # the letters of the tasks that do it
