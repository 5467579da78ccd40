"""Liveness against a simulation of live sets over unrolled programs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.analysis.liveness import liveness, step_effects
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Function,
    HostStream,
    If,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
)
from ipujax.runtime.tensor.mapping import grid, on_one_tile
from tests.runtime.helpers import SIZE, graph_of_variables, stream


def live_names(graph, program):
    """The names of the live variables at each step."""
    actual = liveness(program, EffectsOf(graph))
    return [sorted(v.name for v in actual.live_at(step)) for step in range(len(actual.steps))]


# --- against simulation -----------------------------------------------------------------------------------------------


def simulate(steps, effects):
    """Live sets of a straight line of steps, by looking ahead from every step for every variable."""
    facts = [step_effects(step, effects) for step in steps]
    touched = [fact.reads | fact.writes for fact in facts]
    variables = set().union(*touched) if touched else set()
    live = [set() for _ in steps]
    for v in variables:
        for s in range(len(steps)):
            later = next((t for t in range(s + 1, len(steps)) if v in facts[t].reads or v in facts[t].kills), None)
            needed = later is not None and v in facts[later].reads
            earlier = next((t for t in range(len(steps)) if v in touched[t]), s)
            defined = v in facts[earlier].reads or earlier <= s
            if v in touched[s] or (needed and defined):
                live[s].add(v)
    return live


def unrolled(program):
    """The leaves a program runs, iteration by iteration."""
    if isinstance(program, Repeat):
        return unrolled(program.body) * program.count
    if isinstance(program, (Sequence, Call)):
        return [leaf for child in program.children() for leaf in unrolled(child)]
    return [program]


def expected_live(program, effects):
    """Live sets by leaf: those of all its runs together."""
    steps = unrolled(program)
    result = {}
    for step, live in zip(steps, simulate(steps, effects), strict=True):
        result.setdefault(step, set()).update(live)
    return result


_pairs = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])


@st.composite
def copies(draw, tensors, partial):
    source, destination = draw(_pairs)
    start, stop = draw(st.sampled_from([(0, SIZE), (0, 4), (4, SIZE)] if partial else [(0, SIZE)]))
    return Copy(tensors[source][start:stop], tensors[destination][start:stop])


@settings(max_examples=100)
@given(st.data(), st.integers(0, 12))
def test_straight_line_equals_simulation(data, length):
    graph, tensors = graph_of_variables()
    first = [StreamIn(stream(), tensor) for tensor in tensors if data.draw(st.booleans())]
    program = Sequence(*first, *(data.draw(copies(tensors, partial=True)) for _ in range(length)))
    effects = EffectsOf(graph)
    actual = liveness(program, effects)
    expected = expected_live(program, effects)
    for position, step in enumerate(actual.steps):
        assert actual.live_at(position) == expected[step], (position, step)


@settings(max_examples=100)
@given(st.data(), st.booleans())
def test_loops_equal_simulation_of_unrolled_loops(data, partial):
    graph, tensors = graph_of_variables()

    def block(depth):
        parts = []
        for _ in range(data.draw(st.integers(0, 3))):
            if depth and data.draw(st.booleans()):
                parts.append(Repeat(3, block(depth - 1)))
            else:
                parts.append(data.draw(copies(tensors, partial)))
        return Sequence(*parts)

    program = Sequence(*(StreamIn(stream(), tensor) for tensor in tensors), block(2), StreamOut(tensors[0], stream()))
    effects = EffectsOf(graph)
    actual = liveness(program, effects)
    expected = expected_live(program, effects)
    for position, step in enumerate(actual.steps):
        assert actual.live_at(position) == expected[step], (position, step)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 10))
def test_no_variable_has_overlapping_intervals(data, length):
    graph, tensors = graph_of_variables()
    body = Sequence(*(data.draw(copies(tensors, partial=True)) for _ in range(length)))
    program = Sequence(*(StreamIn(stream(), tensor) for tensor in tensors[:2]), Repeat(2, body), body)
    actual = liveness(program, EffectsOf(graph))
    for step in range(len(actual.steps)):
        here = [i.variable for i in actual.intervals if i.first <= step <= i.last]
        assert len(here) == len(set(here))


@settings(max_examples=30)
@given(st.data(), st.integers(1, 10))
def test_intervals_are_in_the_order_of_the_graph(data, length):
    """They come from sets of variables, which have another order in each process."""
    graph, tensors = graph_of_variables()
    body = Sequence(*(data.draw(copies(tensors, partial=True)) for _ in range(length)))
    program = Sequence(*(StreamIn(stream(), tensor) for tensor in tensors), Repeat(2, body), body)
    actual = [(i.variable.name, i.first) for i in liveness(program, EffectsOf(graph)).intervals]
    assert actual == sorted(actual)  # the names v0, v1… are in order of creation


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_loop_carried_variable_is_live_through_the_loop():
    graph, (a, b, c, d) = graph_of_variables()
    # a carries a value from one iteration to the next; b and c are temporaries; d is read only.
    body = Sequence(Copy(a, b), Copy(b, c), Copy(d, b), Copy(c, a))
    program = Sequence(StreamIn(stream(), a), StreamIn(stream(), d), Repeat(5, body), StreamOut(a, stream()))
    assert live_names(graph, program) == [
        ["v0"],
        ["v0", "v3"],
        ["v0", "v1", "v3"],
        ["v1", "v2", "v3"],
        ["v1", "v2", "v3"],
        ["v0", "v2", "v3"],
        ["v0"],
    ]


def test_buffer_written_piece_by_piece_is_live_from_its_first_piece():
    graph, (a, b, _, _) = graph_of_variables()
    program = Sequence(StreamIn(stream(), a), Copy(a[:4], b[:4]), Copy(a[4:], b[4:]), StreamOut(b, stream()))
    assert live_names(graph, program) == [["v0"], ["v0", "v1"], ["v0", "v1"], ["v1"]]


def test_buffer_written_piece_by_piece_in_a_loop_is_live_through_the_loop():
    # Pieces of earlier iterations are live before the last step, which writes the next one; v3 begins behind the loop.
    graph, (a, b, c, d) = graph_of_variables()
    body = Sequence(Copy(a, b), Copy(b, a), Copy(a[0], c[0]))
    program = Sequence(
        StreamIn(stream(), a), Repeat(2, body), Copy(a[0], d[0]), StreamOut(c, stream()), StreamOut(d, stream())
    )
    assert live_names(graph, program) == [
        ["v0"],
        ["v0", "v1", "v2"],
        ["v0", "v1", "v2"],
        ["v0", "v2"],
        ["v0", "v2", "v3"],
        ["v2", "v3"],
        ["v3"],
    ]


def test_branches_do_not_see_each_other():
    graph, (a, b, c, d) = graph_of_variables()
    flag = graph.add_variable((), np.dtype(bool), "flag", on_one_tile(1, 0))
    decide = If(flag, Sequence(Copy(a, b), Copy(b, d)), Sequence(Copy(a, c), Copy(c, d)))
    start = Sequence(StreamIn(stream(), a), StreamIn(HostStream("f", (), np.dtype(bool)), flag))
    assert live_names(graph, Sequence(start, decide, StreamOut(d, stream()))) == [
        ["v0"],
        ["flag", "v0"],
        ["flag", "v0"],
        ["v0", "v1"],
        ["v1", "v3"],
        ["v0", "v2"],
        ["v2", "v3"],
        ["v3"],
    ]


def test_switch_reads_its_selector_before_any_case():
    graph, (a, b, c, _) = graph_of_variables()
    selector = graph.add_variable((), np.dtype("int32"), "selector", on_one_tile(1, 0))
    choose = Switch(selector, (Copy(a, c),), Copy(b, c))
    start = [StreamIn(stream(), a), StreamIn(stream(), b), StreamIn(HostStream("i", (), np.dtype("int32")), selector)]
    assert live_names(graph, Sequence(*start, choose, StreamOut(c, stream())))[2:] == [
        ["selector", "v0", "v1"],
        ["selector", "v0", "v1"],
        ["v0", "v2"],
        ["v1", "v2"],
        ["v2"],
    ]


def test_operands_of_a_while_condition_are_live_through_the_loop():
    graph, (a, b, c, _) = graph_of_variables()
    flag = graph.add_variable((SIZE,), np.dtype("float32"), "flag", grid((SIZE,), (1,)))
    loop = RepeatWhile(Copy(a, flag), flag[0], Sequence(Copy(b, c), Copy(c, a)))
    start = Sequence(StreamIn(stream(), a), StreamIn(stream(), b))
    assert live_names(graph, Sequence(start, loop, StreamOut(a, stream()))) == [
        ["v0"],
        ["v0", "v1"],
        ["flag", "v0", "v1"],
        ["flag", "v0", "v1"],
        ["v1", "v2"],
        ["v0", "v1", "v2"],
        ["v0"],
    ]


def test_function_has_one_frame_live_during_its_calls():
    graph, (a, b, c, d) = graph_of_variables()
    function = Function(Sequence(Copy(a, c), Copy(c, b)))  # c is the function's own
    program = Sequence(
        StreamIn(stream(), a), Call(function), Copy(b, d), Copy(d, a), Call(function), StreamOut(b, stream())
    )
    actual = liveness(program, EffectsOf(graph))
    assert [sorted(v.name for v in actual.live_at(step)) for step in range(6)] == [
        ["v0"],
        ["v0", "v1"],
        ["v1", "v3"],
        ["v0", "v3"],
        ["v0", "v1"],
        ["v1"],
    ]
    frame = actual.functions[function]
    assert [sorted(v.name for v in frame.live_at(step)) for step in range(2)] == [["v2"], ["v2"]]


def test_function_that_keeps_a_value_between_calls_keeps_its_memory():
    graph, (a, b, c, d) = graph_of_variables()
    # b is read before it is written: its value from the call before is needed.
    function = Function(Sequence(Copy(b, c), Copy(a, b), Copy(c, a)))
    program = Sequence(
        StreamIn(stream(), a), StreamIn(stream(), b), Call(function), StreamIn(stream(), d), Copy(d, a), Call(function)
    )
    names = live_names(graph, program)
    assert "v1" in names[3] and "v2" not in names[3]


def test_a_variable_is_in_the_frame_of_the_only_function_that_uses_it():
    graph, (a, b, c, d) = graph_of_variables()
    inner = Function(Sequence(Copy(a, c), Copy(c, b)))
    outer = Function(Sequence(Call(inner), Copy(b, d), Copy(d, b)))
    program = Sequence(StreamIn(stream(), a), Call(outer), Call(inner), StreamOut(b, stream()))
    actual = liveness(program, EffectsOf(graph))
    names = [{i.variable.name for i in frame.intervals} for frame in (actual, actual.functions[outer])]
    assert names == [{"v0", "v1"}, {"v3"}]
    assert {i.variable.name for i in actual.functions[inner].intervals} == {"v2"}
