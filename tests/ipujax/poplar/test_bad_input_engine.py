"""Invalid uses of engines: streams, callbacks, the size limit, loading and running.

Lines that errors must name are marked `# here`. After a refusal the engine is in its previous state.
"""

from __future__ import annotations

import threading
import time
import traceback

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar, popops, poputil
from ipujax.poplar import FLOAT, INT
from ipujax.poplar.program import Copy, Execute, Repeat, Sequence
from ipujax.runtime.errors import ArgumentError, EngineError, TargetError
from tests.ipujax.poplar.engine_helpers import DEVICE, constant, new_graph, variable
from tests.ipujax.poplar.refusals import refused

N = 4


class Setting:
    """An engine of two programs: take a transfer from stream "in" and hand it to stream "out"; add 1."""

    def __init__(self, repeats=1, options=None):
        self.graph = new_graph()
        self.x = variable(self.graph, [N], INT, "x")
        self.graph.create_host_read("x", self.x)
        self.graph.create_host_write("x", self.x)
        source = self.graph.add_host_to_device_fifo("in", INT, N)
        sink = self.graph.add_device_to_host_fifo("out", INT, N)
        self.echo = Repeat(repeats, Sequence(Copy(source, self.x), Copy(self.x, sink)))  # here
        self.add = Sequence()
        popops.add_in_place(self.graph, self.x, constant(self.graph, [1] * N, INT), self.add, "add")
        self.engine = poplar.Engine(self.graph, [self.echo, self.add], options)

    def loaded(self):
        self.engine.load(DEVICE)
        return self

    def connected(self):
        self.out = np.zeros(N, np.int32)
        self.engine.connect_stream("in", np.arange(N, dtype=np.int32))
        self.engine.connect_stream("out", self.out)
        return self


@pytest.fixture
def s():
    return Setting().loaded()


# --- loading and running ----------------------------------------------------------------------------------------------


def test_nothing_is_read_written_or_run_before_load():
    engine = Setting().connected().engine
    for action, act in {
        "run": lambda: engine.run(0),  # here
        "read_tensor": lambda: engine.read_tensor("x"),  # here
        "write_tensor": lambda: engine.write_tensor("x", [0] * N),  # here
    }.items():
        with refused(EngineError, rf"{action} before the engine is loaded[\s\S]*try: engine.load\(device\)"):
            act()
    engine.load(DEVICE)
    engine.run(1)
    np.testing.assert_array_equal(engine.read_tensor("x"), [1] * N)


@pytest.mark.parametrize("index", [2, -1, "0", 0.5, None])
def test_refuses_a_program_index_out_of_range(s, index):
    with refused(EngineError, r"there is no program [\s\S]*expected: 0 … 1"):
        s.engine.run(index)  # here
    s.engine.run(np.int64(1))
    np.testing.assert_array_equal(s.engine.read_tensor("x"), [1] * N)


@pytest.mark.parametrize("device", [None, poplar.IPUModel(), DEVICE.get_target()], ids=["none", "model", "target"])
def test_refuses_a_non_device(device):
    with refused(EngineError, r"loaded on a device[\s\S]*IPUModel\(\).create_device\(\)"):
        Setting().engine.load(device)  # here


def test_refuses_values_that_do_not_fit_a_handle(s):
    for value, got in (([1, 2, 3], r"int64\[3\]"), (["x"] * N, "<U1"), (np.zeros(N), r"float64\[4\]")):
        with refused(ArgumentError, rf"handle x cannot be written[\s\S]*int32\[4\][\s\S]*{got}"):
            s.engine.write_tensor("x", value)  # here
    with refused(EngineError, r"no host read handle is called 'y'[\s\S]*'x'"):
        s.engine.read_tensor("y")  # here
    np.testing.assert_array_equal(s.engine.read_tensor("x"), [0] * N)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["in", "out"])
def test_refuses_an_unconnected_stream(s, missing):
    s.connected()
    del s.engine._host.channels[missing]
    with refused(EngineError, rf"stream {missing} is not connected[\s\S]*try: engine.connect_stream"):
        s.engine.run(0)
    s.engine.run(1)  # a program without it runs
    np.testing.assert_array_equal(s.engine.read_tensor("x"), [1] * N)


BUFFERS = {
    "another type": (np.zeros(N, np.float32), r"got: float32\[4\]"),
    "wider numbers": (np.zeros(N, np.int64), r"got: int64\[4\]"),
    "half a transfer more": (np.zeros(6, np.int32), r"not a whole number of transfers[\s\S]*got: 6 elements"),
    "nothing": (np.zeros(0, np.int32), r"not a whole number of transfers[\s\S]*got: 0 elements"),
    "gaps": (np.zeros(2 * N, np.int32)[::2], "contiguous"),
    "a list": ([0] * N, "got: list"),
    "an array of JAX": (jnp.zeros(N, jnp.int32), "got: "),
    "None": (None, "got: NoneType"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_refuses_an_unfit_buffer(s, name):
    buffer, message = BUFFERS[name]
    for stream in ("in", "out"):
        with refused(ArgumentError, rf"stream {stream} [\s\S]*int32, n × 4 elements[\s\S]*{message}|{message}"):
            s.engine.connect_stream(stream, buffer)  # here


def test_refuses_a_non_stream_and_a_non_callback(s):
    with refused(EngineError, r"no stream is called 'inn'[\s\S]*'in'"):
        s.engine.connect_stream("inn", np.zeros(N, np.int32))  # here
    with refused(ArgumentError, "cannot be called"):
        s.engine.connect_stream_to_callback("in", np.zeros(N))  # here


def test_a_copy_over_the_stream_limit_names_limit_and_option_and_runs_with_it():
    device = poplar.IPUModel().create_device()
    size = device.get_target().stream_buffer_limit_bytes // 4 + 1
    graph = poplar.Graph(device)
    x = graph.add_variable(FLOAT, [size], "x")
    poputil.map_tensor_linearly(graph, x)
    copy = Copy(graph.add_host_to_device_fifo("big", FLOAT, size), x)  # here
    message = (
        r"stream big is over the stream buffer size limit[\s\S]*at most 134,217,728 bytes an IPU"
        r"[\s\S]*got: 134,217,732 bytes[\s\S]*streams\.splitLargeCopies"
    )
    with refused(EngineError, message):
        poplar.Engine(graph, copy)
    engine = poplar.Engine(graph, copy, {"streams.splitLargeCopies": "true"})
    engine.load(device)
    data = np.arange(size, dtype=np.float32)
    engine.connect_stream("big", data)
    engine.run()
    np.testing.assert_array_equal(engine.read_tensor(x), data)


# --- callbacks --------------------------------------------------------------------------------------------------------


class HostFault(Exception):
    pass


def fault(buffer):
    raise HostFault("the host's own words")


@pytest.mark.parametrize("stream", ["in", "out"])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_callback_that_raises_shows_its_own_traceback_and_leaves_the_engine_usable(stream, depth):
    s = Setting(repeats=5, options={"streams.prefetchDepth": depth}).loaded().connected()
    s.engine.run(1)
    s.engine.connect_stream_to_callback(stream, fault)
    with pytest.raises(HostFault, match="the host's own words") as error:
        s.engine.run(0)
    assert [frame.name for frame in traceback.extract_tb(error.value.__traceback__)][-1] == "fault"
    s.connected().engine.run(0)
    np.testing.assert_array_equal(s.out, np.arange(N))
    s.engine.run(1)
    np.testing.assert_array_equal(s.engine.read_tensor("x"), np.arange(N) + 1)


def test_passes_on_an_interrupt_of_a_callback(s):
    def interrupt(buffer):
        raise KeyboardInterrupt

    s.connected().engine.connect_stream_to_callback("in", interrupt)
    with pytest.raises(KeyboardInterrupt):
        s.engine.run(0)
    s.connected().engine.run(0)
    np.testing.assert_array_equal(s.out, np.arange(N))


def test_refuses_a_callback_that_returns_data(s):
    s.connected()

    def give(buffer):
        return np.ones(N, np.int32)  # a natural mistake

    s.engine.connect_stream_to_callback("in", give)
    with pytest.raises(EngineError, match=r"give does not fill its buffer[\s\S]*ndarray[\s\S]*buffer\[:\] = data"):
        s.engine.run(0)


def test_refuses_a_callback_that_uses_its_engine(s):
    calls = {
        "run": lambda: s.engine.run(1),  # here
        "read_tensor": lambda: s.engine.read_tensor("x"),  # here
        "write_tensor": lambda: s.engine.write_tensor("x", [0] * N),  # here
    }
    for action, call in calls.items():
        s.connected().engine.connect_stream_to_callback("in", lambda buffer, call=call: call())
        with refused(EngineError, rf"{action} while a program of the engine runs"):
            s.engine.run(0)
    s.connected().engine.run(0)
    np.testing.assert_array_equal(s.out, np.arange(N))


class Slow(poplar.StreamCallback):
    """Hands out 0, 1, 2, …; every hundredth time it takes a millisecond or two."""

    def __init__(self):
        self.next = 0
        self.completed = 0
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(0)

    def fetch(self, buffer):
        with self.lock:
            if self.next % 100 == 0:
                time.sleep(self.rng.uniform(0.001, 0.002))
            buffer[:] = self.next
            self.next += 1

    def prefetch(self, buffer):
        self.fetch(buffer)
        return True

    def complete(self):
        self.completed += 1


def test_10000_transfers_with_prefetch_depth_4_and_a_slow_host_come_once_each_and_in_order():
    count = 10_000
    s = Setting(repeats=count, options={"streams.prefetchDepth": 4}).loaded()
    transfers = []

    def take(buffer):
        if len(transfers) % 500 == 0:
            time.sleep(0.005)
        transfers.append(buffer)

    s.engine.connect_stream_to_callback("in", callback := Slow())
    s.engine.connect_stream_to_callback("out", take)
    s.engine.run(0)
    np.testing.assert_array_equal(np.stack(transfers), np.repeat(np.arange(count), N).reshape(count, N))
    assert callback.completed == count
    assert count <= callback.next <= count + 4  # prefetched transfers are for the next run


# --- many vertices, and devices ---------------------------------------------------------------------------------------


class Sum(poplar.Vertex):
    in_: poplar.Input[poplar.Vector[FLOAT]]
    out: poplar.Output[FLOAT]

    def compute(in_):
        return jnp.sum(in_)


def test_100000_vertices_are_added_one_by_one_and_run_by_an_engine_within_20_seconds():
    """Every element, vertex and connection by a call of its own, as the guide writes its loops; about 7 s."""
    number = 100_000  # of this process alone: other tests run beside it
    start = time.process_time()
    device = poplar.IPUModel().create_device()
    graph = poplar.Graph(device)
    num_tiles = graph.get_target().get_num_tiles()
    x = graph.add_variable(FLOAT, [number, 2], "x")
    out = graph.add_variable(FLOAT, [number], "out")
    compute_set = graph.add_compute_set("sums")
    for i in range(number):
        tile = i * num_tiles // number
        graph.set_tile_mapping(x[i], tile)
        graph.set_tile_mapping(out[i], tile)
        vertex = graph.add_vertex(compute_set, Sum)
        graph.connect(vertex["in"], x[i])
        graph.connect(vertex["out"], out[i])
        graph.set_tile_mapping(vertex, tile)
    graph.create_host_write("x", x)
    graph.create_host_read("out", out)
    engine = poplar.Engine(graph, Execute(compute_set))
    engine.load(device)
    values = np.random.default_rng(0).standard_normal((number, 2)).astype(np.float32)
    engine.write_tensor("x", values)
    engine.run()
    np.testing.assert_allclose(engine.read_tensor("out"), values.sum(1), rtol=1e-6)
    assert time.process_time() - start < 20


def test_devices_are_selected_by_type_and_ipus_and_attached_once():
    manager = poplar.DeviceManager.create_device_manager(2)
    assert len(manager.get_devices("IPU_MODEL", 2)) == manager.get_num_devices() == 3
    assert manager.get_devices("CPU") == manager.get_devices(num_ipus=1) == ()
    devices = [manager.acquire_available_device(2) for _ in range(3)]
    assert [device.get_id() for device in devices] == [0, 1, 2] and all(device.is_attached for device in devices)
    with refused(TargetError, r"no device of 2 IPUs is free[\s\S]*3, all taken[\s\S]*detach"):
        manager.acquire_available_device(2)  # here
    devices[1].detach()
    assert manager.acquire_available_device(2) is devices[1]
    with refused(TargetError, r"no device of 4 IPUs is free[\s\S]*DeviceManager\(4\)"):
        manager.acquire_available_device(4)  # here
    with refused(TargetError, r"no devices of type 'IPU'[\s\S]*IPU_MODEL, CPU"):
        manager.get_devices("IPU")  # here
