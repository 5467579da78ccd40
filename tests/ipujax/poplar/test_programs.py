"""Control programs: their results by engine and tile interpreter, and the errors of invalid ones."""

from __future__ import annotations

import io
import re

import jax
import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar import program
from ipujax.poplar.engine.streams import format_tensor
from ipujax.poplar.program import Copy, If, PrintTensor, Repeat, RepeatWhileFalse, RepeatWhileTrue, Sequence, Switch
from ipujax.runtime.compile import compile
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.errors import EngineError, GraphError
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.graph.program import HostStream, StreamIn, StreamOut
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from tests.ipujax.poplar.engine_helpers import DEVICE, both, constant, new_graph, variable

X_OUT = HostStream("x", (3,), poplar.FLOAT)


def counting(graph, limit):
    """A counter at 0, the flag `counter < limit` and the program that computes it, and one that counts."""
    counter = variable(graph, [], poplar.INT, "counter")
    flag = variable(graph, [], poplar.BOOL, "flag")
    test = Sequence()
    count = Sequence()
    is_less = popops.lt(graph, counter, constant(graph, limit, poplar.INT), test, "less")
    test.add(Copy(is_less, flag))
    popops.add_in_place(graph, counter, constant(graph, 1, poplar.INT), count, "count")
    return counter, flag, test, count


def test_copy_between_shapes_is_in_row_major_order():
    graph = new_graph()
    x = variable(graph, [2, 3], value=np.arange(6))
    y = variable(graph, [3, 2])
    outputs = both(graph, Copy(x, y), {"y": y})
    np.testing.assert_array_equal(outputs["y"], np.arange(6).reshape(3, 2))


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_repeat_while_true(limit):
    graph = new_graph()
    counter, flag, test, count = counting(graph, limit)
    assert both(graph, RepeatWhileTrue(test, flag, count), {"n": counter})["n"] == limit


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_repeat_while_false(limit):
    graph = new_graph()
    counter, flag, test, count = counting(graph, limit)
    popops.logical_not_in_place(graph, flag, test, "not")
    assert both(graph, RepeatWhileFalse(test, flag, count), {"n": counter})["n"] == limit
    assert f"until %{graph.variables.index(flag.variables()[0])}" in listing(graph, RepeatWhileFalse(test, flag, count))


@pytest.mark.parametrize("flag", [False, True])
def test_if_without_else(flag):
    graph = new_graph()
    x = variable(graph, [3], value=[1, 2, 3])
    body = Sequence()
    popops.neg_in_place(graph, x, body, "neg")
    outputs = both(graph, If(constant(graph, flag, poplar.BOOL), body), {"x": x})
    np.testing.assert_array_equal(outputs["x"], [-1, -2, -3] if flag else [1, 2, 3])


@pytest.mark.parametrize(("control", "expected"), [(-3, 1), (0, 9), (7, 2), (8, 9)])
def test_switch_by_values(control, expected):
    graph = new_graph()
    x = variable(graph, [2])

    def write(value):
        body = Sequence()
        popops.fill(graph, x, body, value, f"fill {value}")
        return body

    switch = Switch(constant(graph, control, poplar.INT), {-3: write(1), 7: write(2)}, write(9))
    np.testing.assert_array_equal(both(graph, switch, {"x": x})["x"], [expected] * 2)
    assert "case 7" in listing(graph, switch)


def test_function_is_called_several_times():
    graph = new_graph()
    x = variable(graph, [4], value=[1, 2, 3, 4])
    body = Sequence()
    popops.mul_in_place(graph, x, constant(graph, [2, 2, 2, 2]), body, "double")
    function = graph.add_function(body)
    prog = Sequence(program.Call(function), Repeat(2, program.Call(function)))
    np.testing.assert_array_equal(both(graph, prog, {"x": x})["x"], [8, 16, 24, 32])


def test_unwritten_memory_is_zero():
    graph = new_graph()
    x = variable(graph, [3])
    y = variable(graph, [3])
    np.testing.assert_array_equal(both(graph, Copy(x, y), {"y": y})["y"], [0, 0, 0])


def test_remote_buffer_rows():
    graph = new_graph()
    buffer = graph.add_remote_buffer("far", poplar.FLOAT, 3, repeats=4)
    x = variable(graph, [2, 3], value=np.arange(6))
    rows = constant(graph, [3, 1], poplar.UNSIGNED_INT)
    out = variable(graph, [3])
    all_rows = variable(graph, [4, 3])
    row_number = constant(graph, [1], poplar.INT)
    prog = Sequence(Copy(x, buffer, rows), Copy(buffer, out, row_number), Copy(buffer, all_rows))
    outputs = both(graph, prog, {"out": out, "all rows": all_rows})
    np.testing.assert_array_equal(outputs["out"], [3, 4, 5])
    np.testing.assert_array_equal(outputs["all rows"], [[0, 0, 0], [3, 4, 5], [0, 0, 0], [0, 1, 2]])


def test_rows_beyond_a_remote_buffer():
    graph = new_graph()
    buffer = graph.add_remote_buffer("far", poplar.FLOAT, 2, repeats=2)
    x = variable(graph, [2, 2], value=np.arange(1, 5))
    out = variable(graph, [3, 2])
    rows = constant(graph, [5, 1], poplar.INT)
    read_rows = constant(graph, [0, 1, -1], poplar.INT)
    prog = Sequence(Copy(x, buffer, rows), Copy(buffer, out, read_rows))
    np.testing.assert_array_equal(both(graph, prog, {"out": out})["out"], [[0, 0], [3, 4], [0, 0]])


def test_remote_buffer_in_a_loop_and_between_runs():
    graph = new_graph()
    buffer = graph.add_remote_buffer("far", poplar.FLOAT, 2)
    x = variable(graph, [2])
    body = Sequence(Copy(buffer, x))
    popops.add_in_place(graph, x, constant(graph, [1, 2]), body, "add")
    body.add(Copy(x, buffer))
    graph.create_host_read("x", x)
    engine = poplar.Engine(graph, Repeat(3, body))
    engine.load(DEVICE)
    for total in (3, 6):
        engine.run()
        np.testing.assert_array_equal(engine.read_tensor("x"), [total, 2 * total])
    engine.load(DEVICE)
    engine.run()
    np.testing.assert_array_equal(engine.read_tensor("x"), [3, 6])


def test_sync_costs_cycles_and_is_in_the_profile():
    graph = new_graph()
    x = variable(graph, [3], value=[1, 2, 3])
    y = variable(graph, [3])
    plain = poplar.Engine(graph, Copy(x, y)).profile
    prog = Sequence(Copy(x, y), program.Sync("external"), program.Sync("internal"))
    synced = poplar.Engine(graph, prog).profile
    target = graph.target
    assert synced.cycles == plain.cycles + target.global_sync_cycles + target.internal_sync_cycles
    steps = synced.execution()["simulation"]["steps"]
    assert steps[-2:] == [{"type": "Sync", "syncType": "External"}, {"type": "Sync", "syncType": "Internal"}]
    np.testing.assert_array_equal(both(graph, prog, {"y": y})["y"], [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32([1, 1.5, 2, 2.5]), "{1,1.5,2,2.5}"),
        (np.float32([[5, 4.5], [4, 3.5]]), "{\n {5,4.5},\n {4,3.5}\n}"),
        (np.int32([[[1], [2]], [[3], [4]]]), "{\n {\n  {1},\n  {2}\n },\n {\n  {3},\n  {4}\n }\n}"),
        (np.float32(0.1), "0.1"),
        (np.array([True, False]), "{1,0}"),
        (np.float16([1e-5, 65504]), "{1.00136e-05,65504}"),
        (np.zeros(0, np.float32), "{}"),
    ],
)
def test_text_of_tensors(value, text):
    assert format_tensor(value) == text


def test_print_tensor_goes_to_stderr_or_a_given_stream(capsys):
    graph = new_graph()
    x = variable(graph, [2], name="x", value=[1, 2])
    engine = poplar.Engine(graph, Sequence(PrintTensor("title", x), PrintTensor(x)))
    engine.load_and_run(DEVICE)
    assert capsys.readouterr() == ("", "title: {1,2}\nx: {1,2}\n")
    engine.set_print_stream(out := io.StringIO())
    engine.run()
    assert out.getvalue() == "title: {1,2}\nx: {1,2}\n"
    assert capsys.readouterr() == ("", "")


def test_print_in_a_loop_comes_in_order():
    graph = new_graph()
    n = variable(graph, [], poplar.INT, "n")
    body = Sequence(PrintTensor("n", n))
    popops.add_in_place(graph, n, constant(graph, 1, poplar.INT), body)
    engine = poplar.Engine(graph, Repeat(4, body))
    engine.set_print_stream(out := io.StringIO())
    engine.load_and_run(DEVICE)
    assert out.getvalue() == "n: 0\nn: 1\nn: 2\nn: 3\n"


def test_abort_on_ends_an_infinite_loop():
    graph = new_graph()
    n = variable(graph, [], poplar.INT, "n")
    always = constant(graph, True, poplar.BOOL)
    body = Sequence()
    popops.add_in_place(graph, n, constant(graph, 1, poplar.INT), body)
    too_many = popops.gt(graph, n, constant(graph, 5, poplar.INT), body, "too many")
    body.add(program.AbortOn(too_many, "too many turns"))
    graph.create_host_read("n", n)
    engine = poplar.Engine(graph, [RepeatWhileTrue(Sequence(), always, body), Copy(constant(graph, 1, poplar.INT), n)])
    engine.load(DEVICE)
    with pytest.raises(EngineError, match=r"too many turns\n  at: test_programs.py:\d+ \(test_abort"):
        engine.run(0)
    assert engine.read_tensor("n") == 6
    engine.run(1)
    assert engine.read_tensor("n") == 1


def test_error_program_shows_its_tensor():
    graph = new_graph()
    x = variable(graph, [2], value=[1, 2])
    engine = poplar.Engine(graph, program.ErrorProgram("bad", x))
    with pytest.raises(EngineError, match=r"bad(.|\n)*got: \{1,2\}"):
        engine.load_and_run(DEVICE)


def _wrong_programs(graph):
    x = variable(graph, [3], name="x")
    y = variable(graph, [4], name="y")
    half = variable(graph, [3], poplar.HALF, "half")
    to_device = graph.add_host_to_device_fifo("to", poplar.FLOAT, 3)
    from_device = graph.add_device_to_host_fifo("from", poplar.FLOAT, 3)
    far = graph.add_remote_buffer("far", poplar.FLOAT, 3, 2)
    empty = Sequence()
    return {
        "sizes": (lambda: Copy(x, y), r"different sizes(.|\n)*float32\[3\] of .*\(x(.|\n)*float32\[4\] of .*\(y"),
        "types": (lambda: Copy(x, half), "different sizes or types"),
        "stream size": (lambda: Copy(to_device, y), r"stream to (.|\n)*float32\[3\](.|\n)*float32\[4\]"),
        "stream type": (lambda: Copy(half, from_device), "stream from"),
        "direction": (lambda: Copy(x, to_device), "stream to has the wrong direction"),
        "streams": (lambda: Copy(to_device, from_device), "tensor on one side"),
        "remote size": (lambda: Copy(x, far), r"2 rows of remote buffer far(.|\n)*\[2, 3\]"),
        "offset": (lambda: Copy(x, x, y), "only copies of remote buffers"),
        "predicate": (lambda: If(x, empty), "a predicate must be one element"),
        "switch": (lambda: Switch(y[0], [(1, empty), (1, empty)]), "two programs"),
        "sync": (lambda: program.Sync("all"), "unknown kind of sync"),
        "print": (lambda: PrintTensor("x"), "must have a tensor"),
    }


@pytest.mark.parametrize("name", sorted(_wrong_programs(new_graph())))
def test_refuses_invalid_programs(name):
    make, message = _wrong_programs(new_graph())[name]
    with pytest.raises(GraphError) as error:
        make()
    assert re.search(message, str(error.value))
    assert "at: test_programs.py:" in str(error.value)


@pytest.mark.parametrize("control", [0, 3, 2**31, 2**32 - 1])
def test_switch_by_values_of_an_unsigned_element(control):
    graph = new_graph()
    out = variable(graph, [1], name="out")
    cases = {value: Copy(constant(graph, [float(n)]), out) for n, value in enumerate((3, 2**31, 2**32 - 1))}
    switch = Switch(constant(graph, control, poplar.UNSIGNED_INT), cases, Copy(constant(graph, [9.0]), out))
    expected = {3: 0, 2**31: 1, 2**32 - 1: 2}.get(control, 9)
    assert both(graph, switch, {"out": out})["out"] == expected


# --- long repeats -----------------------------------------------------------------------------------------------------


def additions(jaxpr):
    """Number of additions of arrays in a jaxpr, those in loops once for each iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [additions(p.jaxpr) for p in eqn.params.values() if hasattr(p, "jaxpr")]
        total += sum(inner) * eqn.params.get("length", 1) if inner else (eqn.primitive.name == "add")
    return total


def test_the_longest_repeat_has_a_profile_and_is_traced():
    def counted(count):
        graph = new_graph()
        x = variable(graph, [3])
        body = Sequence()
        popops.add_in_place(graph, x, constant(graph, [1, 1, 1]), body, "n")
        host = HostStream("x", (3,), poplar.FLOAT)
        executable = compile(graph, Sequence(StreamIn(host, x), Repeat(count, body), StreamOut(x, host)))
        traced = jax.make_jaxpr(executable.function)({host: np.zeros(3, np.float32)})
        profile = Profile(executable)
        profile.to_json(io.StringIO())
        assert profile.program_costs.cycles == profile.cycles  # on one IPU, which never waits
        return profile.cycles, additions(traced.jaxpr), profile.summary()

    longest = 2**32 - 1
    cycles_of_one, _, _ = counted(1)
    cycles_of_two, _, _ = counted(2)
    cycles, added, summary = counted(longest)
    assert cycles == cycles_of_one + (longest - 1) * (cycles_of_two - cycles_of_one)
    assert added == longest
    assert f"{cycles:,}" in summary


# --- sequences --------------------------------------------------------------------------------------------------------


def adding(graph, x):
    """A program that adds 1 to all of a variable."""
    step = Sequence()
    popops.add_in_place(graph, x, constant(graph, np.ones(x.shape)), step, "add")
    return step


@pytest.mark.parametrize("inside_out", [False, True])
def test_deeply_nested_sequences_are_one(inside_out):
    graph = new_graph()
    x = variable(graph, [3], value=[1, 2, 3])
    step = adding(graph, x)
    copy = Copy(variable(graph, [3], value=[0, 0, 0]), x)
    nested = Sequence(copy)
    for n in range(3000):
        last = Sequence(step) if n % 1000 == 0 else Sequence()
        nested = Sequence(last, nested) if inside_out else Sequence(nested, last)
    flat = Sequence(step, step, step, copy) if inside_out else Sequence(copy, step, step, step)
    assert listing(graph, nested) == listing(graph, flat)
    np.testing.assert_array_equal(both(graph, nested, {"x": x})["x"], [0] * 3 if inside_out else [3] * 3)
    reports = [Profile(compile(graph, each, options=Options(verify_undefined=False))) for each in (nested, flat)]
    assert reports[0].execution() == reports[1].execution()
    assert reports[0].graph()["programs"] == reports[1].graph()["programs"]
    assert reports[0].summary() == reports[1].summary()


def test_refuses_a_sequence_inside_itself():
    first = Sequence()
    second = Sequence()
    first.add(second)
    second.add(first)
    with pytest.raises(GraphError, match="a sequence cannot be inside of itself"):
        listing(new_graph(), first)


@pytest.mark.parametrize("times", [15, 16, 1000])
def test_many_executions_in_a_row_are_traced_as_one_loop(times):
    graph = new_graph()
    x = variable(graph, [3], value=[1, 2, 3])
    program = Sequence(*[adding(graph, x)] * times)
    np.testing.assert_array_equal(both(graph, program, {"x": x})["x"], np.arange(1, 4) + times)
    traced = jax.make_jaxpr(lambda: engine_function(graph, Sequence(program, StreamOut(x, X_OUT)))({}))()
    assert ("scan" in str(traced)) == (times >= 16)
    assert additions(traced.jaxpr) == times
