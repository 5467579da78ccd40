"""Host streams: circular buffers, callbacks, prefetching, errors in callbacks, the size limit."""

from __future__ import annotations

import threading
import time
import traceback

import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar.engine.copies import check_stream_sizes, split_large_copies
from ipujax.poplar.engine.streams import StreamPart
from ipujax.poplar.program import Copy, Repeat, RepeatWhileTrue, Sequence
from ipujax.runtime.errors import ArgumentError, EngineError
from ipujax.runtime.graph.program import StreamIn, Sync
from ipujax.runtime.graph.walks import distinct
from tests.ipujax.poplar.engine_helpers import DEVICE, both, constant, new_graph, variable

N = 4


class Counter(poplar.StreamCallback):
    """Delivers 0, 1, 2, … and records its calls; prefetches unless told otherwise, slowly if told so."""

    def __init__(self, available=lambda number: True, delay=0.0):
        self.next = 0
        self.completed = 0
        self.prefetched = 0
        self.fetched = 0
        self._available = available
        self._delay = delay
        self._lock = threading.Lock()

    def _fill(self, buffer):
        with self._lock:
            buffer[:] = self.next
            self.next += 1

    def fetch(self, buffer):
        self.fetched += 1
        self._fill(buffer)

    def prefetch(self, buffer):
        time.sleep(self._delay)
        if not self._available(self.next):
            return False
        self.prefetched += 1
        self._fill(buffer)
        return True

    def complete(self):
        self.completed += 1


def echo(count):
    """A program that hands `count` transfers from stream "in" to stream "out"."""
    graph = new_graph()
    x = variable(graph, [N], poplar.INT, "x")
    source = graph.add_host_to_device_fifo("in", poplar.INT, N)
    sink = graph.add_device_to_host_fifo("out", poplar.INT, N)
    return graph, Repeat(count, Sequence(Copy(source, x), Copy(x, sink)))


def engine_of(graph, program, options=None):
    engine = poplar.Engine(graph, program, options)
    engine.load(DEVICE)
    return engine


def test_circular_buffers_wrap_around():
    graph, program = echo(5)
    engine = engine_of(graph, program)
    data = np.arange(3 * N, dtype=np.int32)
    out = np.zeros((2, N), np.int32)
    engine.connect_stream("in", data)
    engine.connect_stream("out", out)
    engine.run()
    # transfers 0 1 2 0 1 of the source; the fifth is back at the first part of the sink
    np.testing.assert_array_equal(out, [data[N : 2 * N], data[:N]])
    engine.run()  # goes on where it was: 2 0 1 2 0
    np.testing.assert_array_equal(out, [data[2 * N :], data[:N]])


def test_a_buffer_is_read_at_the_transfer():
    graph, program = echo(1)
    engine = engine_of(graph, program)
    data = np.zeros(N, np.int32)
    out = np.zeros(N, np.int32)
    engine.connect_stream("in", data)
    engine.connect_stream("out", out)
    for value in (1, 2):
        data[:] = value
        engine.run()
        np.testing.assert_array_equal(out, [value] * N)


def test_engine_and_interpreter_agree_on_streams():
    graph = new_graph()
    total = variable(graph, [N], name="total")
    x = variable(graph, [N], name="x")
    source = graph.add_host_to_device_fifo("in", poplar.FLOAT, N)
    body = Sequence(Copy(source, x))
    popops.add_in_place(graph, total, x, body)
    outputs = both(graph, Repeat(4, body), {"total": total}, {"in": Counter})
    np.testing.assert_array_equal(outputs["total"], [0 + 1 + 2 + 3] * N)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_10000_transfers_come_once_each_and_in_order(depth):
    count = 10_000
    graph, program = echo(count)
    engine = engine_of(graph, program, {"streams.prefetchDepth": depth})
    callback = Counter()
    transfers = []
    engine.connect_stream_to_callback("in", callback)
    engine.connect_stream_to_callback("out", lambda buffer: transfers.append(buffer))
    engine.run()
    np.testing.assert_array_equal(np.stack(transfers), np.repeat(np.arange(count), N).reshape(count, N))
    assert callback.completed == count
    assert callback.fetched == (count if depth == 0 else 1)


def test_a_slow_host_with_gaps_keeps_the_order():
    count = 200
    graph, program = echo(count)
    engine = engine_of(graph, program, {"streams.prefetchDepth": "4"})
    rng = np.random.default_rng(0)
    callback = Counter(lambda number: rng.random() < 0.7, delay=0.0005)
    transfers = []
    engine.connect_stream_to_callback("in", callback)
    engine.connect_stream_to_callback("out", lambda buffer: transfers.append(buffer[0]))
    for _ in range(2):  # transfers prefetched at the end of one run are for the next
        engine.run()
    assert transfers == list(range(2 * count))
    assert callback.fetched > 10
    assert callback.prefetched > 100


def test_a_function_is_never_called_ahead_of_time():
    graph, program = echo(3)
    engine = engine_of(graph, program, {"streams.prefetchDepth": 4})
    calls = []
    transfers = []

    def fill(buffer):
        calls.append(len(transfers))
        buffer[:] = len(calls)

    engine.connect_stream_to_callback("in", fill)
    engine.connect_stream_to_callback("out", lambda buffer: transfers.append(buffer[0]))
    engine.run()
    assert (calls, transfers) == ([0, 1, 2], [1, 2, 3])


class Broken(Exception):
    pass


@pytest.mark.parametrize("depth", [0, 3])
def test_a_callback_that_raises_leaves_the_engine_usable(depth):
    graph = new_graph()
    x = variable(graph, [N], name="x")
    total = variable(graph, [N], name="total")
    source = graph.add_host_to_device_fifo("in", poplar.FLOAT, N)
    body = Sequence(Copy(source, x))
    popops.add_in_place(graph, total, x, body)
    graph.create_host_read("total", total)
    engine = engine_of(graph, Repeat(6, body), {"streams.prefetchDepth": depth})

    class Failing(Counter):
        def _fill(self, buffer):
            if self.next == 2:
                self.next += 1
                raise Broken("no third value")
            super()._fill(buffer)

    engine.connect_stream_to_callback("in", callback := Failing())
    with pytest.raises(Broken, match="no third value") as error:
        engine.run()
    assert any(frame.name == "_fill" for frame in traceback.extract_tb(error.value.__traceback__))
    np.testing.assert_array_equal(engine.read_tensor("total"), [1] * N)  # 0 + 1, and nothing after the failure
    engine.run()
    np.testing.assert_array_equal(engine.read_tensor("total"), [1 + 3 + 4 + 5 + 6 + 7 + 8] * N)
    assert callback.completed == 2 + 6


def test_a_failing_callback_ends_a_loop_that_waits_for_its_data():
    graph = new_graph()
    flag = variable(graph, [1], poplar.BOOL, "flag", value=True)
    source = graph.add_host_to_device_fifo("in", poplar.BOOL, 1)
    x = variable(graph, [], poplar.INT, "x")
    count = Sequence()
    popops.add_in_place(graph, x, constant(graph, 1, poplar.INT), count)
    always = constant(graph, True, poplar.BOOL)
    engine = engine_of(graph, RepeatWhileTrue(Copy(source, flag), always, count))

    def fail(buffer):
        raise Broken

    engine.connect_stream_to_callback("in", fail)
    with pytest.raises(Broken):
        engine.run()


def test_large_transfers_through_a_callback():
    graph = poplar.Graph(device := poplar.IPUModel().create_device())
    size = 1_000_000
    x = graph.add_variable(poplar.FLOAT, [size], "x")
    graph.set_tile_mapping(x, np.arange(size) * 1472 // size)
    source = graph.add_host_to_device_fifo("in", poplar.FLOAT, size)
    sink = graph.add_device_to_host_fifo("out", poplar.FLOAT, size)
    engine = poplar.Engine(graph, Repeat(3, Sequence(Copy(source, x), Copy(x, sink))))
    engine.load(device)
    transfers = []
    engine.connect_stream_to_callback("in", lambda buffer: buffer.__setitem__(slice(None), len(transfers)))
    engine.connect_stream_to_callback("out", lambda buffer: transfers.append(buffer.sum()))
    engine.run()
    assert transfers == [0, size, 2 * size]


def test_refuses_an_unconnected_stream():
    graph, program = echo(1)
    engine = engine_of(graph, program)
    engine.connect_stream("in", np.zeros(N, np.int32))
    with pytest.raises(EngineError, match=r"stream out is not connected\n  at: test_streams.py:\d+ \(echo\)"):
        engine.run()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (np.zeros(N, np.float32), r"int32(.|\n)*got: float32\[4\]"),
        (np.zeros(N + 1, np.int32), r"whole number of transfers(.|\n)*5 elements"),
        (np.zeros(0, np.int32), r"whole number of transfers"),
        (np.zeros(2 * N, np.int32)[::2], "contiguous"),
        ([0] * N, "got: list"),
    ],
)
def test_refuses_an_unfit_buffer(buffer, message):
    graph, program = echo(1)
    with pytest.raises(ArgumentError, match=message):
        engine_of(graph, program).connect_stream("in", buffer)


def test_refuses_a_read_only_buffer_for_output():
    graph, program = echo(1)
    buffer = np.zeros(N, np.int32)
    buffer.setflags(write=False)
    engine = engine_of(graph, program)
    engine.connect_stream("in", buffer)
    with pytest.raises(ArgumentError, match="read-only"):
        engine.connect_stream("out", buffer)


def test_refuses_an_unknown_stream_and_a_non_callback():
    graph, program = echo(1)
    engine = engine_of(graph, program)
    with pytest.raises(EngineError, match=r"'inn'(.|\n)*try: .*in"):
        engine.connect_stream("inn", np.zeros(N, np.int32))
    with pytest.raises(ArgumentError, match="cannot be called"):
        engine.connect_stream_to_callback("in", 3)


def test_refuses_a_copy_over_the_limit_naming_limit_and_option():
    for num_ipus in (1, 2):
        device = poplar.IPUModel(num_ipus=num_ipus).create_device()
        size = device.get_target().stream_buffer_limit_bytes // 4 + 1
        graph = poplar.Graph(device)
        x = graph.add_variable(poplar.FLOAT, [size], "x")
        graph.set_tile_mapping(x, (np.arange(size) * graph.target.num_tiles // size).astype(np.int32))
        program = Copy(graph.add_host_to_device_fifo("in", poplar.FLOAT, size), x)
        if num_ipus == 2:  # each IPU has a limit of its own
            check_stream_sizes(graph, program)
            continue
        with pytest.raises(
            EngineError, match=r"stream in (.|\n)*134,217,728 bytes(.|\n)*134,217,732(.|\n)*streams.splitLarge"
        ):
            poplar.Engine(graph, program)


def test_the_limit_is_the_targets():
    target = poplar.IPUModel(tiles_per_ipu=4).create_device().get_target().replace(stream_buffer_limit_bytes=16)
    graph = poplar.Graph(target)
    x = variable(graph, [10], poplar.INT, "x")
    copy = Copy(graph.add_host_to_device_fifo("in", poplar.INT, 10), x)
    check_stream_sizes(graph, split_large_copies(copy, 16))
    with pytest.raises(EngineError, match=r"at most 16 bytes an IPU"):
        poplar.Engine(graph, copy)
    poplar.Engine(graph, copy, {"streams.splitLargeCopies": "true"})


def test_splits_a_large_copy_with_syncs_in_one_host_transfer():
    graph = new_graph()
    size = 10
    limit = 4 * 4
    x = variable(graph, [size], poplar.INT, "x")
    source = graph.add_host_to_device_fifo("in", poplar.INT, size)
    sink = graph.add_device_to_host_fifo("out", poplar.INT, size)
    body = graph.add_function(Sequence(Copy(source, x), Copy(x, sink)))
    program = split_large_copies(Repeat(2, Sequence(poplar.program.Call(body))), limit)
    nodes = list(distinct(program))
    parts = [node.stream for node in nodes if isinstance(node, StreamIn)]
    assert [(part.start, part.stop) for part in parts if isinstance(part, StreamPart)] == [(0, 4), (4, 8), (8, 10)]
    assert sum(isinstance(node, Sync) for node in nodes) == 4
    engine = engine_of(graph, program)
    out = np.zeros((2, size), np.int32)
    engine.connect_stream("in", np.arange(2 * size, dtype=np.int32))
    engine.connect_stream("out", out)
    engine.run()
    np.testing.assert_array_equal(out.ravel(), np.arange(2 * size))
