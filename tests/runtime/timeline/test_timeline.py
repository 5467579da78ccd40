"""Clocks of several IPUs against plain iteration, and timelines against closed forms worked out by hand."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    ComputeSet,
    Copy,
    Execute,
    Function,
    HostStream,
    If,
    PipelineLayout,
    PipelineTask,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    Switch,
    Wait,
)
from ipujax.runtime.options import Options
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import linear, on_one_tile
from ipujax.runtime.tensor.tensor import Tensor
from ipujax.runtime.tensor.variable import Origin, Variable
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clock_walk import Walk
from ipujax.runtime.timeline.clocks import COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, PHASES, SYNC, ClockStep
from ipujax.runtime.timeline.timeline import timeline

FLAG = Tensor.of(Variable((), np.dtype(bool), "flag"))
NUM_IPUS = 3


def work(**phases):
    """int64[NUM_IPUS, 5] from cycles of each IPU by phase."""
    table = np.zeros((NUM_IPUS, len(PHASES)), np.int64)
    for name, cycles in phases.items():
        table[:, PHASES.index(name)] = cycles
    return table


def leaf(name="leaf"):
    return Execute(ComputeSet(name))


def local(*cycles):
    return ClockStep(work(compute=cycles), tuple(i for i, c in enumerate(cycles) if c))


def meeting(*cycles, sync=7):
    everyone = tuple(range(NUM_IPUS))
    return ClockStep(work(global_exchange=cycles, sync=sync), everyone, barriers=(everyone,))


def run(program, steps, **known):
    return timeline(Walk.of(program, steps, NUM_IPUS, known.pop("slots", 0), **known))


# --- max-plus ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 40), st.randoms(use_true_random=False))
def test_power_equals_iteration(size, count, random):
    a = np.array([[random.choice([maxplus.NEVER, random.randint(0, 50)]) for _ in range(size)] for _ in range(size)])
    np.fill_diagonal(a, [random.randint(0, 9) for _ in range(size)])
    x = np.array([[random.randint(0, 1000)] for _ in range(size)])
    expected = x.copy()
    for _ in range(count):
        expected = np.array([[max(a[i, j] + expected[j, 0] for j in range(size))] for i in range(size)])
    np.testing.assert_array_equal(maxplus.apply_power(a, count, x), expected)


def test_product_in_pieces(monkeypatch):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 99, (7, 5))
    b = rng.integers(0, 99, (5, 4))
    full = maxplus.product(a, b)
    monkeypatch.setattr(maxplus, "_TEMPORARY_ELEMENTS", 45)
    np.testing.assert_array_equal(maxplus.product(a, b), full)
    assert full[2, 3] == max(a[2, k] + b[k, 3] for k in range(5))


# --- loops against plain iteration ------------------------------------------------------------------------------------

SLOTS = 2
_rows = st.lists(st.integers(0, 30), min_size=NUM_IPUS, max_size=NUM_IPUS)
_ipus = st.lists(st.integers(0, NUM_IPUS - 1), unique=True, min_size=1).map(lambda ipus: tuple(sorted(ipus)))
_slots = st.lists(st.integers(NUM_IPUS, NUM_IPUS + SLOTS - 1), unique=True, max_size=SLOTS).map(tuple)


@st.composite
def clock_steps(draw):
    cycles = work(compute=draw(_rows), sync=draw(_rows))
    ipus = draw(_ipus)
    kind = draw(st.sampled_from(["local", "meet", "send"]))
    if kind == "meet":
        split = draw(st.integers(0, len(ipus)))
        return ClockStep(cycles, ipus, barriers=tuple(group for group in (ipus[:split], ipus[split:]) if group))
    if kind == "send":
        delivers = tuple((slot, draw(_ipus)) for slot in draw(_slots))
        return ClockStep(cycles, ipus, senders=draw(_ipus), fills=draw(_slots), frees=draw(_slots), delivers=delivers)
    awaits = tuple((ipu, slot) for slot in draw(_slots) for ipu in draw(_ipus))
    return ClockStep(cycles, ipus, frees=draw(_slots), awaits=awaits)


class Choice(NamedTuple):
    """Shape of a branch."""

    then: object
    otherwise: object


class Solver(NamedTuple):
    """Shape of a loop whose trip count is data."""

    test: object
    body: object


def programs(depth=3, choices=False):
    if depth == 0:
        return st.just(None)
    inner = st.deferred(lambda: programs(depth - 1, choices))
    return st.one_of(
        st.just(None),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(st.integers(0, 9), inner),
        *([st.builds(Choice, inner, inner), st.builds(Solver, inner, inner)] if choices else ()),
    )


def build(shape, draw, steps):
    """A program from a shape (None is a leaf, a list a sequence, a pair a loop) with a drawn step for each leaf."""
    if isinstance(shape, Choice):
        node = If(FLAG, *(build(part, draw, steps) for part in shape))
        steps[node] = draw(clock_steps())
        return node
    if isinstance(shape, Solver):
        test, body = (build(part, draw, steps) for part in shape)
        node = RepeatWhile(test, FLAG, body, NOWHERE)
        steps[node] = draw(clock_steps())
        return node
    if shape is None:
        node = leaf()
        steps[node] = draw(clock_steps())
        return node
    if isinstance(shape, list):
        return Sequence(*(build(part, draw, steps) for part in shape))
    return Repeat(shape[0], build(shape[1], draw, steps))


def run_step(step, clocks, done):
    """The living definition of a step: one IPU after the other, in plain integers."""
    for i, slot in step.awaits:
        clocks[i] = max(clocks[i], clocks[slot])
    for group in step.barriers:
        met = max(clocks[i] for i in group)
        for i in group:
            clocks[i] = met
    for i in step.senders if step.fills else ():
        clocks[i] = max([clocks[i], *(clocks[slot] for slot in step.fills)])
    for i in range(NUM_IPUS):
        clocks[i] += int(step.work[i].sum())
        done[i] += step.work[i]
    for slot in step.frees:
        clocks[slot] = max([clocks[slot], *(clocks[i] for i in step.senders or step.ipus)])
    for slot, senders in step.delivers:
        clocks[slot] = max([clocks[slot], *(clocks[i] for i in senders)])


def iterate(program, steps, clocks, done, choose=None):
    """The living definition of a program: every iteration."""

    def visit(node):
        match node:
            case Repeat(count, body):
                for _ in range(count):
                    visit(body)
            case Sequence():
                for child in node.children():
                    visit(child)
            case If():
                run_step(steps[node], clocks, done)
                visit(node.children()[0 if choose(node, 1) else 1])
            case RepeatWhile():
                trips = choose(node, 3)
                for trip in range(trips + 1):
                    visit(node.condition)
                    run_step(steps[node], clocks, done)
                    if trip < trips:
                        visit(node.body)
            case _:
                run_step(steps[node], clocks, done)

    visit(program)


@settings(max_examples=75)
@given(programs(depth=4, choices=True), st.randoms(use_true_random=False), st.data())
def test_recorded_control_equals_iterating(shape, random, data):
    steps = {}
    program = build((3, shape), data.draw, steps)
    recording = {node: [] for node in steps if isinstance(node, If | RepeatWhile)}

    def choose(node, most):
        recording[node].append(random.randint(0, most))
        return recording[node][-1]

    clocks = [0] * (NUM_IPUS + SLOTS)
    done = np.zeros((NUM_IPUS, len(PHASES)), np.int64)
    iterate(program, steps, clocks, done, choose)
    actual = run(program, steps, slots=SLOTS, recording=recording)
    assert actual.clocks.tolist() == clocks[:NUM_IPUS]
    np.testing.assert_array_equal(actual.work, done)
    runs = {n: len(c) + (sum(c) if isinstance(n, RepeatWhile) else 0) for n, c in recording.items()}
    assert {node: actual.executions.get(node, 0) for node in recording} == runs


@settings(max_examples=75)
@given(programs(), st.data())
def test_jumping_over_loops_equals_iterating(shape, data):
    steps = {}
    program = build(shape, data.draw, steps)
    clocks = [0] * (NUM_IPUS + SLOTS)
    done = np.zeros((NUM_IPUS, len(PHASES)), np.int64)
    iterate(program, steps, clocks, done)
    actual = run(program, steps, slots=SLOTS)
    assert actual.clocks.tolist() == clocks[:NUM_IPUS]
    np.testing.assert_array_equal(actual.work, done)
    for ipu in range(NUM_IPUS):
        phases = actual.phase_cycles(ipu)
        assert sum(phases.values()) == actual.cycles and phases["idle"] >= actual.cycles - clocks[ipu]


def test_a_million_iterations_cost_no_more_than_three():
    node = leaf()
    body = Sequence(node, leaf("meet"))
    steps = {node: local(5, 11, 2), body.children()[1]: meeting(1, 1, 1)}
    actual = run(Repeat(10**6, body), steps)
    assert actual.cycles == 10**6 * (11 + 7 + 1)
    assert actual.phase_cycles(0)["idle"] == 10**6 * 6
    assert actual.executions[node] == 10**6


def test_the_longest_repeats_are_exact_and_longer_ones_are_refused():
    node = leaf()
    many = (1 << 32) - 1
    steps = {node: local(5, 0, 0)}
    inner = Repeat(1 << 20, node)
    actual = run(Repeat(many, inner), steps)
    assert actual.cycles == actual.phase_cycles(0)["compute"] == 5 * many << 20
    assert actual.executions[node] == many << 20
    for program in (Repeat(many, Repeat(many, node)), Sequence(*[Repeat(many, Repeat(1 << 25, node))] * 2)):
        for inside in (program, If(FLAG, node, program)):
            with pytest.raises(ProfileError, match=r"2\^60 cycles or more"):
                run(inside, steps | {inside: local(0, 0, 0)})


def test_slow_ipu_overtakes_after_a_transient():
    # IPU 1 starts 1000 ahead and waits for IPU 0, which is slower: the increments of its clock change at iteration 200.
    start = leaf()
    slow = leaf()
    send = leaf()
    wait = leaf()
    steps = {
        start: local(0, 1000, 0),
        slow: local(10, 5, 0),
        send: ClockStep(work(), (0,), senders=(0,), delivers=((NUM_IPUS, (0,)),)),
        wait: ClockStep(work(), (1,), awaits=((1, NUM_IPUS),)),
    }
    for count in (100, 199, 200, 201, 1000):
        actual = run(Sequence(start, Repeat(count, Sequence(slow, send, wait))), steps, slots=1)
        assert actual.clocks.tolist() == [10 * count, max(1000 + 5 * count, 10 * count), 0]


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_lockstep_pipeline_has_the_bubble_of_its_fill():
    # Three stages, each n micro-batches; a cycle lasts as long as its slowest stage that works, plus meeting.
    fill = [leaf() for _ in range(2)]
    main = leaf()
    drain = [leaf() for _ in range(2)]
    exchange = leaf()
    steps = {
        fill[0]: local(10, 0, 0),
        fill[1]: local(10, 20, 0),
        main: local(10, 20, 30),
        drain[0]: local(0, 20, 30),
        drain[1]: local(0, 0, 30),
        exchange: meeting(2, 2, 2),
    }
    n = 50
    program = Sequence(fill[0], exchange, fill[1], exchange, Repeat(n - 2, Sequence(main, exchange)), *drain)
    actual = run(program, steps)
    # The last drain needs no meeting, so IPU 2 runs its last two micro-batches back to back.
    assert actual.cycles == 10 + 20 + (n - 2) * 30 + 30 + 30 + n * (7 + 2)
    assert actual.phase_cycles(2) == {
        "compute": n * 30,
        "exchange": 0,
        "global_exchange": n * 2,
        "host_exchange": 0,
        "sync": n * 7,
        "idle": 10 + 20,
    }


def test_buffered_sender_waits_for_its_slot():
    produce = leaf()
    send = leaf()
    consume = leaf()
    slot = NUM_IPUS
    arrival = NUM_IPUS + 1
    sent = work(global_exchange=(10, 0, 0))
    steps = {
        produce: local(5, 0, 0),
        send: ClockStep(sent, (0, 1), senders=(0,), fills=(slot,), delivers=((arrival, (0,)),)),
        consume: ClockStep(work(compute=(0, 30, 0)), (1,), frees=(slot,), awaits=((1, arrival),)),
    }
    n = 40
    actual = run(Repeat(n, Sequence(produce, send, consume)), steps, slots=2)
    # The first message takes 15; from then on a send starts when the consumer has read the one before.
    assert actual.clocks.tolist() == [15 + (n - 1) * 40, 15 + 30 + (n - 1) * 40, 0]
    assert actual.phase_cycles(1)["idle"] == 15 + (n - 1) * 10
    assert actual.phase_cycles(2)["idle"] == actual.cycles


def test_steps_tell_when_each_ipu_worked():
    first = leaf("first")
    meet = leaf("meet")
    actual = run(Repeat(4, Sequence(first, meet)), {first: local(5, 11, 0), meet: meeting(1, 1, 0)})
    (loop,) = actual.steps
    assert (loop.repeats, loop.ipus, loop.starts) == (4, (0, 1, 2), (0, 0, 0))
    assert loop.ends == (4 * 19, 4 * 19, 4 * 18 + 3)  # IPU 2 does not exchange, so it ends 1 before the others
    ran, met = loop.children
    assert (ran.ipus, ran.starts, ran.ends) == ((0, 1), (0, 0), (5, 11))
    assert (met.starts, met.ends) == ((11, 11, 11), (19, 19, 18))
    assert [step.program for step in actual.walk()] == [loop.program, first, meet]


def test_functions_run_at_every_call():
    node = leaf()
    function = Function(Sequence(node, node))
    actual = run(Sequence(Call(function), Repeat(3, Call(function))), {node: local(4, 0, 0)})
    assert actual.cycles == 4 * 2 * 4
    assert actual.executions == {node: 8}


def test_nothing_takes_no_time():
    actual = run(Sequence(Repeat(0, leaf())), {})
    assert (actual.cycles, actual.steps, actual.executions) == (0, (), {})
    assert sum(actual.phase_cycles(0).values()) == 0


# --- control that is data ---------------------------------------------------------------------------------------------


NOWHERE = Origin()


def loop_with(origin=NOWHERE):
    condition = leaf("condition")
    body = leaf("body")
    loop = RepeatWhile(condition, FLAG, body, origin)
    return loop, {condition: local(3, 0, 0), body: local(10, 0, 0), loop: local(1, 0, 0)}


def test_unknown_trip_count_names_the_loop():
    loop, steps = loop_with(Origin("model.py:7 (decode)"))
    with pytest.raises(ProfileError, match=r"trip count of loop 'model.py:7 \(decode\)'.*\n.*at: model.py:7") as error:
        run(loop, steps)
    assert "'while[0]'" in str(error.value) and "trip_counts=" in str(error.value)


@pytest.mark.parametrize("name", ["while[1]", "model.py:7 (decode)", "decode/while"])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_trip_count_by_any_name(name, count):
    other, steps = loop_with()
    loop, more = loop_with(Origin("model.py:7 (decode)", "decode/while"))
    actual = run(Sequence(other, loop), steps | more, trip_counts={name: count, "while[0]": 2})
    assert actual.cycles == (4 + 2 * 14) + (4 + count * 14)
    assert actual.executions[loop] == count + 1
    assert sum(actual.phase_cycles(0).values()) == actual.cycles


def test_static_decisions_take_the_costlier_branch():
    cheap = leaf()
    dear = leaf()
    dearest = leaf()
    decide = If(FLAG, cheap, dear)
    select = Switch(FLAG, (cheap, dearest), dear)
    steps = {cheap: local(1, 1, 1), dear: local(9, 0, 0), dearest: local(0, 0, 20)}
    steps |= {decide: local(2, 2, 2), select: local(2, 2, 2)}
    assert run(decide, steps).cycles == 11
    assert run(select, steps).cycles == 22
    assert run(Repeat(5, select), steps).executions == {select: 5, dearest: 5}


def test_recorded_decisions_and_trips():
    then = leaf("then")
    otherwise = leaf("otherwise")
    decide = If(FLAG, then, otherwise)
    loop, steps = loop_with()
    steps |= {then: local(100, 0, 0), otherwise: local(5, 0, 0), decide: local(1, 0, 0)}
    program = Repeat(4, Sequence(decide, loop))
    actual = run(program, steps, recording={decide: [1, 0, 0, 1], loop: [0, 3, 2, 0]})
    assert actual.executions[then] == 2 and actual.executions[otherwise] == 2
    assert actual.cycles == 2 * 100 + 2 * 5 + 4 * 1 + 4 * 4 + 5 * 14
    assert actual.steps[0].repeats == 4 and len(actual.steps[0].children) == 4  # decision, its branch, test, no loop


def test_recording_goes_before_trip_counts():
    loop, steps = loop_with()
    assert run(loop, steps, trip_counts={"while[0]": 50}, recording={loop: [1]}).cycles == 4 + 14


def test_recorded_switch_takes_its_default():
    cases = [leaf(), leaf(), leaf()]
    select = Switch(FLAG, (cases[0], cases[1]), cases[2])
    steps = {case: local(10**i, 0, 0) for i, case in enumerate(cases)} | {select: local(0, 0, 0)}
    actual = run(Repeat(3, select), steps, recording={select: [0, 2, 2]})
    assert actual.cycles == 1 + 100 + 100


def test_short_recording_is_refused():
    loop, steps = loop_with()
    with pytest.raises(ProfileError, match=r"recording ends before while\[0\] runs"):
        run(Repeat(2, loop), steps, recording={loop: [1]})


def test_recorded_loop_of_static_body_is_jumped_over():
    loop, steps = loop_with()
    actual = run(loop, steps, recording={loop: [10**9]})
    assert actual.cycles == 4 + 14 * 10**9


def test_recorded_loops_of_static_bodies_inside_others_are_jumped_over():
    loop, steps = loop_with()
    actual = run(Repeat(3, loop), steps, recording={loop: [1, 10**9, 0]})
    assert actual.cycles == 3 * 4 + 14 * (1 + 10**9)
    assert actual.executions[loop] == 3 + 1 + 10**9


@pytest.mark.parametrize("has_tasks", [False, True])
def test_every_run_has_the_part_of_its_call(has_tasks: bool) -> None:
    """Origins that differ in parts alone are equal, and a call is a block: both have led runs to another part."""
    loop, steps = loop_with()
    solver = Function(loop)
    task = PipelineTask(PipelineLayout("model", "gpipe", (0,), 4, ((0, "forward"),), ()), 0, "forward")
    call_of_part = {part: Call(solver, Origin("model.py:1 (f)", part=part)) for part in ("forward", "backward")}
    stage = leaf("stage")
    steps[stage] = local(1, 0, 0)
    task_call = Call(Function(stage), Origin("model.py:2 (f)", part="recomputed"), task)
    program = Repeat(4, Sequence(*call_of_part.values(), task_call))
    walk = Walk.of(program, steps, NUM_IPUS, recording={loop: [1] * 8})
    clocks = walk.clocks_at_start()
    deque(replace(walk, has_tasks=has_tasks).run(clocks), maxlen=0)
    assert {part: clocks.sums.runs[part, loop.body] for part in call_of_part} == {"forward": 4, "backward": 4}
    assert clocks.sums.runs == Counter(
        {
            (part, node): 4 * runs
            for part in call_of_part
            for node, runs in ((loop.body, 1), (loop, 2), (loop.condition, 2))
        }
        | {("recomputed", stage): 4}
    )


def test_phases_are_kept_apart():
    node = leaf()
    actual = run(node, {node: ClockStep(work(compute=(1, 0, 0), exchange=(20, 0, 0), sync=(300, 0, 0)), (0,))})
    assert actual.work[0, [COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, SYNC]].tolist() == [1, 20, 0, 300]


def test_transfers_that_follow_each_other_pay_one_latency() -> None:
    target = preset("mk2").replace(tiles_per_ipu=4)
    graph = Graph(target)
    streams = [HostStream(f"s{n}", (1000,), np.dtype(np.float32)) for n in range(3)]
    tensors = [graph.add_variable((1000,), np.dtype(np.float32), mapping=linear(1000, 4, 4)) for _ in streams]
    ins = [StreamIn(s, t) for s, t in zip(streams, tensors, strict=True)]
    together = compile(graph, Sequence(*ins)).timeline_of(None).cycles
    apart = sum(compile(graph, Sequence(step)).timeline_of(None).cycles for step in ins)
    latency = target.host_latency_seconds * target.clock_hz
    assert apart - together == pytest.approx(2 * latency, abs=3)


def test_an_ipu_without_part_in_a_copy_does_not_sync() -> None:
    target = preset("mk2").replace(tiles_per_ipu=4, num_ipus=2)
    graph = Graph(target)
    source, destination = (
        graph.add_variable((64,), np.dtype(np.float32), mapping=on_one_tile(64, tile)) for tile in (0, 1)
    )
    executable = compile(graph, Copy(source, destination), options=Options(verify_undefined=False))
    assert executable.timeline_of(None).work[:, SYNC].astype(bool).tolist() == [True, False]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_load_waits_for_the_store_of_io_tiles_on_another_ipu(overlaps: bool) -> None:
    """The other IPU has nothing to wait for but the buffer: it loads when that is stored, by I/O tiles or not."""
    target = preset("mk2").replace(tiles_per_ipu=4, num_ipus=2, host_latency_seconds=0)
    graph = Graph(target)
    stored, loaded = (
        graph.add_variable((4096,), np.dtype(np.float32), mapping=on_one_tile(4096, tile)) for tile in (3, 7)
    )
    buffer = graph.add_off_chip((4096,), np.dtype(np.float32))
    store = RemoteOut(stored, buffer, overlaps=True)
    load = RemoteIn(buffer, loaded, overlaps=overlaps)
    executable = compile(
        graph, Sequence(store, load, Wait(loaded), Wait(stored)), options=Options(verify_undefined=False)
    )
    spans = {step.program: (step.starts, step.ends) for step in executable.timeline_of(None).steps}
    transfer = ceil(4096 * 4 / target.streaming_bytes_per_second * target.clock_hz)
    assert spans[store] == ((0,), (transfer,))
    assert spans[load] == ((transfer,), (2 * transfer,))
