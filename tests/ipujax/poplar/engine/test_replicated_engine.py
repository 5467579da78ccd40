"""Replicas of an entire graph: one program compiled once, the results of each replica, and the host's view of all."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar import BOOL, FLOAT, INT, UNSIGNED_INT, ReplicatedStreamMode, StreamCallback
from ipujax.poplar.engine.copies import split_large_copies
from ipujax.poplar.program import (
    AbortOn,
    Copy,
    CrossReplicaCopy,
    ErrorProgram,
    If,
    PrintTensor,
    Repeat,
    RepeatWhileTrue,
    Sequence,
)
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError, EngineError, GraphError, VerifyError
from tests.ipujax.poplar.replica_helpers import AddVertex, Feed, LessVertex, both, constant, device, placed, run, vertex

REPLICAS = 4


def graph_of(replicas: int = REPLICAS, ipus_each: int = 1, tiles: int = 4) -> tuple[poplar.Device, poplar.Graph]:
    """A device and a replicated graph that has all of it."""
    on = device(replicas * ipus_each, tiles)
    return on, poplar.Graph(on, replication_factor=replicas)


# --- the graph --------------------------------------------------------------------------------------------------------


def test_a_replica_has_an_equal_share_of_the_ipus():
    on, graph = graph_of(4, 2)
    assert graph.get_target().get_num_ipus() == 2 and graph.get_replication_factor() == 4
    assert graph.system_target == on.get_target()
    assert graph.create_virtual_graph(3).get_replication_factor() == 4
    for replicas in (3, 0, -1, 16):
        with pytest.raises(GraphError, match="a divisor of 8 IPUs"):
            poplar.Graph(on, replication_factor=replicas)


def test_refuses_operations_that_need_a_parent():
    on, graph = graph_of()
    for part in (graph, graph.create_virtual_graph(2)):
        with pytest.raises(GraphError, match="no graph above them"):
            part.get_top_level_graph()
        with pytest.raises(GraphError, match=r"no graph that sees them all[\s\S]*create_replicated_graph"):
            part.get_non_replicated_tensor(placed(part, [2], "x"))
    engine = poplar.Engine(graph, Sequence())
    with pytest.raises(EngineError, match="another machine"):
        engine.load(device(1))
    engine.load(on)


def test_a_factor_of_one_is_a_plain_graph():
    on = device(1)
    graph = poplar.Graph(on, replication_factor=1)
    assert graph.get_top_level_graph() is graph and graph.get_target() == on.get_target()
    index = graph.add_replication_index_constant()
    assert int(index.variables()[0].value) == 0 and not index.variables()[0].by_replica


# --- tensors, streams -------------------------------------------------------------------------------------------------


def test_the_host_writes_and_reads_all_replicas():
    on, graph = graph_of()
    x = placed(graph, [2, 2], "x")
    y = placed(graph, [4], "y")
    index = graph.add_replication_index_constant()
    number = placed(graph, [], "number", UNSIGNED_INT)
    c = constant(graph, [1.0, 2.0])
    graph.set_tile_mapping(index, 1)
    graph.set_initial_value(x, [[1, 2], [3, 4]])
    for name, tensor in (("x", x), ("y", y), ("number", number), ("c", c), ("column", x[:, 1])):
        graph.create_host_read(name, tensor)
    graph.create_host_write("column", x[:, 1])
    engine = poplar.Engine(graph, Sequence(Copy(x, y), Copy(index, number)))
    engine.load(on)
    assert engine.read_tensor("x").tolist() == [[[1, 2], [3, 4]]] * REPLICAS
    engine.write_tensor("column", np.arange(8.0).reshape(4, 2).astype(np.float32))
    engine.run(0)
    expected = [[[1, 2 * r], [3, 2 * r + 1]] for r in range(REPLICAS)]
    assert engine.read_tensor("y").reshape(REPLICAS, 2, 2).tolist() == expected
    assert engine.read_tensor("column").shape == (REPLICAS, 2)
    assert engine.read_tensor("number").tolist() == [0, 1, 2, 3]
    assert engine.read_tensor("c").tolist() == [[1, 2]] * REPLICAS and engine.read_tensor(index).tolist() == [
        0,
        1,
        2,
        3,
    ]
    with pytest.raises(ArgumentError, match=r"float32\[4, 2\][\s\S]*float32\[2\]"):
        engine.write_tensor("column", np.zeros(2, np.float32))


@pytest.mark.parametrize("broadcast", [False, True])
def test_streams_deliver_separate_or_broadcast_data(broadcast):
    on, graph = graph_of()
    mode = ReplicatedStreamMode.BROADCAST if broadcast else ReplicatedStreamMode.REPLICATE
    stream = graph.add_host_to_device_fifo("in", FLOAT, 2, mode)
    out = graph.add_device_to_host_fifo("out", FLOAT, 2)
    x = placed(graph, [2], "x")
    y = placed(graph, [2], "y")
    program = Repeat(3, Sequence(Copy(stream, x), vertex(graph, AddVertex, x, x, y), Copy(y, out)))
    rows = np.arange(24.0, dtype=np.float32).reshape(REPLICAS, 3, 2)
    feed = rows[:1] if broadcast else rows
    outputs = both(graph, on, program, {"in": feed}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"], 2 * np.broadcast_to(feed, rows.shape))
    engine = poplar.Engine(graph, split_large_copies(program, limit_bytes=4))  # in two copies of one element
    engine.load(on)
    result = np.zeros((REPLICAS, 6), np.float32)
    engine.connect_stream("in", feed.reshape(6).copy() if broadcast else feed.reshape(REPLICAS, 6).copy())
    engine.connect_stream("out", result)
    engine.run(0)
    np.testing.assert_array_equal(result.reshape(rows.shape), 2 * np.broadcast_to(feed, rows.shape))


@pytest.mark.parametrize("depth", [0, 3])
def test_one_callback_answers_all_replicas_in_order(depth):
    on, graph = graph_of()
    stream = graph.add_host_to_device_fifo("in", INT, 1)
    out = graph.add_device_to_host_fifo("out", INT, 1)
    x = placed(graph, [1], "x", INT)
    engine = poplar.Engine(graph, Repeat(50, Sequence(Copy(stream, x), Copy(x, out))), {"streams.prefetchDepth": depth})
    engine.load(on)

    class Counting(StreamCallback):
        def __init__(self):
            self.number = 0
            self.lock = threading.Lock()

        def fetch(self, buffer):
            with self.lock:
                buffer[:] = self.number
                self.number += 1

        def prefetch(self, buffer):
            self.fetch(buffer)
            return True

    values_out: list[int] = []
    engine.connect_stream_to_callback(stream, Counting())
    engine.connect_stream_to_callback(out, lambda buffer: values_out.append(int(buffer[0])))
    engine.run(0)
    assert values_out == list(range(50 * REPLICAS))


def test_replicas_are_connected_one_by_one():
    on, graph = graph_of(2)
    stream = graph.add_host_to_device_fifo("in", FLOAT, 1)
    shared = graph.add_host_to_device_fifo("all", FLOAT, 1, ReplicatedStreamMode.BROADCAST)
    x = placed(graph, [1], "x")
    graph.create_host_read("x", x)
    engine = poplar.Engine(graph, [Copy(stream, x), Copy(shared, x)])
    engine.load(on)
    with pytest.raises(EngineError, match="stream in is not connected\n"):
        engine.run(0)
    engine.connect_stream_to_callback("in", Feed([[1], [2]])(), replica=0)
    with pytest.raises(EngineError, match="stream in is not connected for replica 1"):
        engine.run(0)
    engine.connect_stream_to_callback("in", Feed([[10], [20]])(), replica=1)
    engine.run(0)
    assert engine.read_tensor("x").tolist() == [[1], [10]]
    for wrong in (2, -1, "0"):
        with pytest.raises(EngineError, match=r"stream in has no replica[\s\S]*0 … 1"):
            engine.connect_stream_to_callback("in", Feed([[1]])(), replica=wrong)
    with pytest.raises(EngineError, match="stream all is broadcast"):
        engine.connect_stream_to_callback("all", Feed([[1]])(), replica=0)
    for wrong in (np.zeros(2, np.float32), np.zeros((3, 1), np.float32), [[1.0], [2.0]]):
        with pytest.raises(ArgumentError, match=r"stream in has data for each replica[\s\S]*an array \[2, …\]"):
            engine.connect_stream("in", wrong)
    with pytest.raises(ArgumentError, match="float32, n × 1"):
        engine.connect_stream("in", np.zeros((2, 1), np.float64))
    with pytest.raises(GraphError, match="replication mode of stream other"):
        graph.add_host_to_device_fifo("other", FLOAT, 1, "broadcast")


def test_libraries_know_that_an_index_differs_between_replicas():
    on, graph = graph_of()
    index = graph.add_replication_index_constant()
    x = placed(graph, [], "x", UNSIGNED_INT)
    graph.set_tile_mapping(index, 1)
    graph.set_initial_value(x, 10)
    out = graph.add_device_to_host_fifo("out", UNSIGNED_INT, 1)
    program = Sequence()
    y = popops.add(graph, x, index, program, "sum")
    program.add(Copy(y.reshape((1,)), out))
    assert both(graph, on, program, {}, {"out": REPLICAS})["out"].reshape(-1).tolist() == [10, 11, 12, 13]


def test_a_callback_that_raises_leaves_the_engine_usable():
    on, graph = graph_of(2)
    stream = graph.add_host_to_device_fifo("in", FLOAT, 1)
    x = placed(graph, [1], "x")
    graph.create_host_read("x", x)
    engine = poplar.Engine(graph, Copy(stream, x))
    engine.load(on)

    def broken(buffer):
        raise ValueError("no data for replica 1")

    engine.connect_stream_to_callback("in", Feed([[1], [2]])(), replica=0)
    engine.connect_stream_to_callback("in", broken, replica=1)
    with pytest.raises(ValueError, match="no data for replica 1"):
        engine.run(0)
    engine.connect_stream("in", np.float32([[3], [4]]))
    engine.run(0)
    assert engine.read_tensor("x").tolist() == [[3], [4]]


def test_printing_and_aborting_name_the_replica():
    on, graph = graph_of(2)
    x = placed(graph, [2], "x")
    flag = placed(graph, [], "flag", BOOL)
    for name, tensor in (("x", x), ("flag", flag)):
        graph.create_host_write(name, tensor)
    engine = poplar.Engine(graph, [Sequence(PrintTensor(x), AbortOn(flag, "too far")), ErrorProgram("see", x)])
    engine.load(on)
    printed = io.StringIO()
    engine.set_print_stream(printed)
    engine.write_tensor("x", np.float32([[1, 2], [3, 4]]))
    engine.run(0)
    assert printed.getvalue() == "x (replica 0): {1,2}\nx (replica 1): {3,4}\n"
    engine.write_tensor("flag", np.array([False, True]))
    with pytest.raises(EngineError, match=r"ended itself \(replica 1\): too far"):
        engine.run(0)
    with pytest.raises(EngineError, match=r"ended itself \(replica 0\): see[\s\S]*\{1,2\}"):
        engine.run(1)


def test_remote_buffers_are_of_each_replica_and_outlive_runs():
    on, graph = graph_of()
    buffer = graph.add_remote_buffer("far", FLOAT, 2, repeats=3)
    row = constant(graph, np.int32([2]), INT)
    x = placed(graph, [2], "x")
    y = placed(graph, [2], "y")
    graph.create_host_write("x", x)
    graph.create_host_read("y", y)
    engine = poplar.Engine(graph, [Copy(x, buffer, row), Copy(buffer, y, row)])
    engine.load(on)
    values = np.arange(8.0, dtype=np.float32).reshape(REPLICAS, 2)
    engine.write_tensor("x", values)
    engine.run(0)
    engine.write_tensor("x", 0 * values)
    engine.run(1)
    np.testing.assert_array_equal(engine.read_tensor("y"), values)


# --- computing, meeting, deciding -------------------------------------------------------------------------------------


def test_a_step_of_data_parallel_training():
    """Each replica's gradient, a ring all-reduce, and the update: as numpy on the whole batch."""
    on, graph = graph_of(REPLICAS, 1, 8)
    rng = np.random.default_rng(0)
    rate = np.float32(0.125)
    x = graph.add_host_to_device_fifo("x", FLOAT, 8)
    w = placed(graph, [8], "w")
    batch = placed(graph, [8], "batch", tile=2)
    graph.create_host_write("w", w)
    graph.create_host_read("w", w)
    grad = placed(graph, [8], "grad", tile=3)
    sent = placed(graph, [8], "sent", tile=4)
    received = placed(graph, [8], "received", tile=5)
    program = Sequence(Copy(x, batch))
    program.add(Copy(popops.sub(graph, w, batch, program, "gradient"), grad))
    program.add(Copy(grad, sent))
    ring = {r: (r + 1) % REPLICAS for r in range(REPLICAS)}
    body = Sequence(CrossReplicaCopy(sent, received, ring))
    popops.add_in_place(graph, grad, received, body, "reduce")
    program.add(Repeat(REPLICAS - 1, Sequence(body, Copy(received, sent))))
    popops.scaled_add_to(graph, w, grad, -float(rate) / REPLICAS, program, "update")
    engine = poplar.Engine(graph, Repeat(5, program))
    engine.load(on)
    engine.write_tensor("w", np.zeros((REPLICAS, 8), np.float32))
    data = rng.integers(-8, 8, (REPLICAS, 5, 8)).astype(np.float32)
    engine.connect_stream("x", data)
    engine.run(0)
    expected = np.zeros(8, np.float32)
    for step in range(5):
        expected = expected - rate / REPLICAS * np.sum(expected - data[:, step], axis=0)
    got = engine.read_tensor("w")
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-6, atol=1e-6)
    assert engine.profile.phase_cycles["global_exchange"] > 0


def test_engine_and_interpreter_agree_on_copies_between_replicas_of_two_ipus():
    on, graph = graph_of(3, 2)
    x = placed(graph, [4], "x", tile=6)
    y = placed(graph, [4], "y", tile=1)
    into = graph.add_host_to_device_fifo("in", FLOAT, 4)
    out = graph.add_device_to_host_fifo("out", FLOAT, 4)
    program = Sequence(Copy(into, x), Copy(x, y), CrossReplicaCopy(x[::2], y[1:3], [(0, 1), (0, 2)]), Copy(y, out))
    values = np.arange(12.0, dtype=np.float32).reshape(3, 1, 4)
    expected = values.copy()
    expected[1:, 0, 1:3] = values[0, 0, ::2]
    np.testing.assert_array_equal(both(graph, on, program, {"in": values}, {"out": 3})["out"], expected)


def deciding(graph):
    """Program in which x grows to 5, or is doubled if it is greater."""
    x = placed(graph, [1], "x")
    y = placed(graph, [1], "y")
    flag = placed(graph, [1], "flag", BOOL)
    limit = constant(graph, [5.0])
    increment = constant(graph, [1.0])
    into = graph.add_host_to_device_fifo("in", FLOAT, 1)
    out = graph.add_device_to_host_fifo("out", FLOAT, 1)
    test = vertex(graph, LessVertex, x[0], limit[0], flag[0])
    incremented = Sequence(vertex(graph, AddVertex, x, increment, y), Copy(y, x))
    twice = Sequence(vertex(graph, AddVertex, x, x, y), Copy(y, x))
    loop = RepeatWhileTrue(test, flag, incremented)
    return Sequence(Copy(into, x), test, If(flag, loop, twice), Copy(x, out)), loop


@pytest.mark.parametrize("instrument", [False, True])
def test_replicas_with_different_branches_run_as_if_alone(instrument):
    on, graph = graph_of()
    program, loop = deciding(graph)
    values = np.float32([1, 7, 4.5, -2]).reshape(REPLICAS, 1, 1)
    outputs = both(graph, on, program, {"in": values}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"].reshape(-1), [5, 14, 5.5, 5])
    if instrument:
        values_out: list[float] = []
        engine = run(
            graph,
            on,
            program,
            {"in": [Feed(row) for row in values], "out": [lambda: lambda buffer: values_out.append(float(buffer[0]))]},
            **{"debug.instrument": "true"},
        )
        assert values_out == [5, 14, 5.5, 5]
        # The recorded run is replica 0's, as if it were alone.
        one_on = device(1)
        alone = poplar.Graph(device(1))
        alone_program, _ = deciding(alone)
        feeds = {"in": [Feed(values[0])], "out": [lambda: lambda buffer: None]}
        single = run(alone, one_on, alone_program, feeds, **{"debug.instrument": "true"})
        assert engine.execution.device_cycles == single.execution.device_cycles  # the link to the host is shared
        assert engine.execution.timeline.executions[loop] == 5  # four trips and the end


def test_refuses_a_collective_under_control_flow_of_each_replica():
    _, graph = graph_of()
    x = placed(graph, [1], "x")
    flag = placed(graph, [], "flag", BOOL)
    graph.create_host_write("flag", flag)
    for inside in (CrossReplicaCopy(x, x, {0: 1}), PrintTensor(x)):
        with pytest.raises(VerifyError, match=r"\[divergent-control\] replicas may disagree at this If"):
            poplar.Engine(graph, If(flag, inside))
    agreed = Copy(constant(graph, np.array(True), BOOL), flag)
    poplar.Engine(graph, Sequence(agreed, If(flag, PrintTensor(x))))


def test_profiles_are_of_one_replica():
    def profile(replicas):
        on = device(2 * replicas, 8)
        graph = poplar.Graph(on, replication_factor=replicas)
        x = placed(graph, [64], "x", tile=1)
        y = placed(graph, [64], "y", tile=2)
        z = placed(graph, [64], "z", tile=9)
        step = vertex(graph, AddVertex, x, x, y, tile=3)
        into = graph.add_host_to_device_fifo("in", FLOAT, 64)
        return poplar.Engine(graph, Repeat(3, Sequence(Copy(into, x), step, Copy(y, z)))).profile

    profile_of_one = profile(1)
    profile_of_many = profile(16)
    of_one, of_many = profile_of_one.phase_cycles, profile_of_many.phase_cycles
    assert of_one.pop("host_exchange") < of_many.pop("host_exchange")  # two replicas share the host link of a machine
    assert of_one == of_many and min(of_one.values()) >= 0
    np.testing.assert_array_equal(profile_of_one.memory.tile_bytes, profile_of_many.memory.tile_bytes)
    assert "Replicas" in profile_of_many.summary() and "Replicas" not in profile_of_one.summary()


def test_the_graph_is_compiled_as_one_replica():
    _, graph = graph_of(8)
    x = placed(graph, [4], "x")
    executable = compile(graph, Copy(constant(graph, np.zeros(4)), x))
    assert executable.target.num_ipus == 1 and executable.graph.replication_factor == 8
