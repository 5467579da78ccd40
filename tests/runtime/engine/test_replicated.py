"""Replicas in the runtime: each runs as it would alone, and copies between them follow the replica map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.engine.engine import engine_function, prepare_engine
from ipujax.runtime.engine.single import EngineProgram
from ipujax.runtime.errors import GraphError, VerifyError
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.graph.program import (
    Copy,
    CrossReplicaCopy,
    Execute,
    HostStream,
    If,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.interpreter.tile_memory import InterpreterError
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import even_cuts, linear, on_one_tile
from ipujax.runtime.tensor.tensor import Tensor
from ipujax.runtime.tensor.variable import Variable
from ipujax.runtime.verify import verify
from tests.lowering.helpers import assert_rounded_alike

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
BOOL = np.dtype(bool)
TILES = 4


def binary(name: str, fun: Callable[..., Any], out: Any) -> Codelet:
    """An elementwise codelet of two float operands."""
    fields = (Field("a", "in", F32), Field("b", "in", F32), Field("out", "out", out))
    return Codelet(f"test::{name}", fields, fun, lambda shapes, target: 10 + shapes[0][0])


ADD = binary("Add", jnp.add, F32)
LESS = binary("Less", jnp.less, BOOL)


class Replicated:
    """A graph of several replicas, with helpers that add to its program."""

    def __init__(self, replicas: int, num_ipus: int = 1, tiles: int = TILES) -> None:
        target = preset("mk2").replace(tiles_per_ipu=tiles, num_ipus=num_ipus)
        self.graph = Graph(target, replicas)
        self.program = Sequence()
        self.inputs: dict[HostStream, Any] = {}

    def variable(self, size: int, dtype: Any = F32, name: str = "v", tile: int | None = None) -> Tensor:
        mapping = linear(size, 64, self.graph.target.num_tiles) if tile is None else on_one_tile(size, tile)
        return self.graph.add_variable((size,), dtype, name, mapping)

    def given(self, value: Any, name: str = "x", broadcast: bool = False, tile: int | None = None) -> Tensor:
        """A variable that the host fills, with a row a replica unless it is broadcast."""
        value = np.asarray(value)
        tensor = self.variable(value.shape[-1], value.dtype, name, tile)
        stream = HostStream(name, tensor.shape, tensor.dtype, broadcast=broadcast)
        self.program.add(StreamIn(stream, tensor))
        self.inputs[stream] = value
        return tensor

    def constant(self, value: Any) -> Tensor:
        value = np.asarray(value)
        return self.graph.add_constant(value, "c", on_one_tile(value.size, 0))

    def replica_index(self) -> Tensor:
        """A number of its own for each replica."""
        index = np.arange(self.graph.replication_factor, dtype=np.float32)[:, None]
        variable = Variable((1,), F32, "replica", index, by_replica=True)
        return self.graph._add(variable, on_one_tile(1, 0))

    def apply(self, code: Codelet, a: Tensor, b: Tensor, out: Tensor) -> Execute:
        """Runs a codelet on each element."""
        compute_set = self.graph.add_compute_set(code.name)
        blocks = min(TILES, a.size)
        axis = Axis("i", even_cuts(a.size, blocks))
        accesses = tuple(Access(t, (element(0),)) for t in (a, b, out))
        tile = np.arange(axis.blocks, dtype=np.int32)
        self.graph.add_vertices(compute_set, VertexGroup(code, (axis,), accesses, tile))
        return Execute(compute_set)

    def run(self, *outputs: Tensor) -> list[np.ndarray]:
        """The outputs of all replicas by engine, literal engine and tile interpreter, which agree but for roundings."""
        streams = [HostStream(f"out{n}", t.shape, t.dtype) for n, t in enumerate(outputs)]
        program = Sequence(self.program, *map(StreamOut, outputs, streams))
        compile(self.graph, program)
        by_engine = jax.jit(lambda *held: _run(self.graph, program, self.inputs, held, streams))(*self.inputs.values())
        literally = engine_function(self.graph, program, exact_splits=True)(self.inputs)
        by_tiles = interpret(self.graph, program, self.inputs)
        for stream, value in zip(streams, by_engine, strict=True):
            assert_rounded_alike(value, by_tiles[stream])
            assert_rounded_alike(literally[stream], by_tiles[stream])
        return [np.asarray(value) for value in by_engine]


def _run(graph: Graph, program: Sequence, inputs: Mapping[HostStream, Any], held: Any, streams: Any) -> list[Any]:
    actual = engine_function(graph, program)(dict(zip(inputs, held, strict=True)))
    return [actual[stream] for stream in streams]


# --- copies between replicas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs",
    [
        ((0, 1), (1, 2), (2, 3), (3, 0)),
        ((3, 1), (1, 3)),
        ((2, 0), (2, 1), (2, 2), (2, 3)),
        ((1, 1), (0, 2)),
        (),
    ],
    ids=["ring", "swap of two", "one to all", "to itself and another", "nobody"],
)
def test_a_copy_follows_the_replica_map(pairs):
    b = Replicated(4)
    rng = np.random.default_rng(0)
    source, held = rng.normal(size=(2, 4, 12)).astype(np.float32)
    x = b.given(source)
    y = b.given(held, "y", tile=2)
    b.program.add(CrossReplicaCopy(x[2:10].reverse(0), y[::-1][4:12], pairs))
    (got,) = b.run(y)
    expected = held.copy()
    for sender, receiver in pairs:
        expected[receiver, :8] = source[sender, 2:10]  # both views are reversed
    np.testing.assert_array_equal(got, expected)


def test_a_copy_goes_along_a_ring_and_back():
    b = Replicated(3, 2)
    values = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    there, back = (b.given(x, name) for x, name in zip(values, ("there", "back"), strict=True))
    received = [b.variable(8, name=name) for name in ("from before", "from behind")]
    ring = ((0, 1), (1, 2), (2, 0))
    b.program.add(CrossReplicaCopy(there, received[0], ring, back=(back, received[1])))
    got = b.run(*received)
    np.testing.assert_array_equal(got, [values[0][[2, 0, 1]], values[1][[1, 2, 0]]])


def test_a_copy_back_has_one_sender_each():
    b = Replicated(3, 2)
    x, y = b.given(np.ones((3, 8), np.float32)), b.given(np.ones((3, 8), np.float32), "y")
    b.program.add(CrossReplicaCopy(x, x, ((0, 1), (0, 2)), back=(y, y)))
    with pytest.raises(VerifyError, match="writes twice to replica 0"):
        b.run(x)


def test_a_ring_of_copies_sums_over_replicas():
    replicas = 4
    b = Replicated(replicas, 2)
    values = np.arange(32.0, dtype=np.float32).reshape(replicas, 8)
    sent = b.given(values)
    received = b.variable(8, name="received")
    total = b.variable(8, name="total")
    ring = tuple((r, (r + 1) % replicas) for r in range(replicas))
    b.program.add(Copy(sent, total))
    step = [CrossReplicaCopy(sent, received, ring), b.apply(ADD, total, received, total_next := b.variable(8))]
    b.program.add(Repeat(replicas - 1, Sequence(*step, Copy(total_next, total), Copy(received, sent))))
    (got,) = b.run(total)
    np.testing.assert_array_equal(got, np.broadcast_to(values.sum(0), values.shape))


def test_constants_broadcast_streams_and_remote_buffers_by_replica():
    b = Replicated(3)
    x = b.given(np.array([[1.0], [2.0], [3.0]], np.float32))
    shared = b.given(np.array([10.0], np.float32), "shared", broadcast=True)
    a = b.variable(1, name="a")
    c = b.variable(1, name="c")
    back = b.variable(1, name="back")
    buffer = RemoteBuffer.of("far", F32, 1, 2)
    b.program.add(b.apply(ADD, x, shared, a))
    b.program.add(b.apply(ADD, a, b.replica_index(), c))
    row = b.constant(np.array([1], np.int32))
    b.program.add(RemoteOut(c.reshape((1, 1)), buffer, row))
    b.program.add(RemoteIn(buffer, back.reshape((1, 1)), row))
    (got,) = b.run(back)
    np.testing.assert_array_equal(got[:, 0], [11, 13, 15])


# --- control ----------------------------------------------------------------------------------------------------------


def controlled(replicas: int, kind: str, values: np.ndarray) -> list[np.ndarray]:
    """A program with data-dependent control, in one graph of some replicas."""
    b = Replicated(replicas)
    x = b.given(values)
    one = b.constant(np.float32([1]))
    limit = b.constant(np.float32([5]))
    count = b.variable(1, name="count")
    goes_on = b.variable(1, BOOL, "goes on")
    b.program.add(Copy(b.constant(np.float32([0])), count))
    nxt = b.variable(1, name="next")
    doubled = b.variable(1, name="doubled")
    step = Sequence(b.apply(ADD, x, one, nxt), Copy(nxt, x), b.apply(ADD, count, one, nxt), Copy(nxt, count))
    test = b.apply(LESS, x, limit, goes_on)
    if kind == "while":
        b.program.add(RepeatWhile(test, goes_on, step))
    elif kind == "until in repeat":
        b.program.add(Repeat(3, Sequence(RepeatWhile(test, goes_on, step), Copy(count, x))))
    elif kind == "if":
        body = Sequence(b.apply(ADD, x, x, doubled), Copy(doubled, x))
        b.program.add(Sequence(test, If(goes_on.reshape(()), body, step)))
    else:
        selector = b.variable(1, I32, "selector")
        b.program.add(Copy(b.constant(np.int32([7])), selector))
        b.program.add(Sequence(test, If(goes_on.reshape(()), Copy(b.constant(np.int32([1])), selector), Sequence())))
        b.program.add(Switch(selector.reshape(()), (step, Repeat(4, step)), Copy(limit, x)))
    return b.run(x, count)


@pytest.mark.parametrize("kind", ["while", "until in repeat", "if", "switch"])
def test_replicas_that_disagree_compute_as_single_ones(kind):
    values = np.array([[0.0], [7.0], [3.5], [-2.0]], np.float32)
    together = controlled(4, kind, values)
    for replica, value in enumerate(values):
        alone = controlled(1, kind, value)
        for got, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(got[replica], expected)
    assert len(np.unique(together[0])) > 1


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_meet_in_control_that_is_the_same_for_all(shared):
    b = Replicated(2)
    x = b.given(np.array([[1.0], [2.0]], np.float32))
    count = b.given(np.float32([0] if shared else [[0], [1]]), "count", broadcast=shared)
    one = b.constant(np.float32([1]))
    limit = b.constant(np.float32([3]))
    nxt = b.variable(1, name="next")
    goes_on = b.variable(1, BOOL, "goes on")
    swap = CrossReplicaCopy(x, x, ((0, 1), (1, 0)))
    body = Sequence(swap, b.apply(ADD, count, one, nxt), Copy(nxt, count))
    b.program.add(RepeatWhile(b.apply(LESS, count, limit, goes_on), goes_on, body))
    if shared:
        (got,) = b.run(x)
        np.testing.assert_array_equal(got, [[2], [1]])
        return
    with pytest.raises(VerifyError, match=r"\[divergent-control\] replicas may disagree at this RepeatWhile"):
        b.run(x)
    with pytest.raises(VerifyError, match="divergent-control"):
        engine_function(b.graph, b.program)
    with pytest.raises(InterpreterError, match="divergent-control"):
        interpret(b.graph, b.program, b.inputs)


@pytest.mark.parametrize("pairs", [((0, 1), (1, 0), (2, 3), (3, 2)), ((0, 2), (2, 0), (1, 3), (3, 1))])
def test_replicas_that_meet_in_control_agree(pairs):
    """Replicas 0 and 1, and 2 and 3, run a loop equally often: copies inside may be between these alone."""
    b = Replicated(4)
    x = b.given(np.array([[1.0], [2.0], [3.0], [4.0]], np.float32))
    count = b.given(np.float32([[0], [0], [2], [2]]), "count")
    stream = next(stream for stream in b.inputs if stream.name == "count")
    blocks = HostStream("count", (1,), F32, blocks=(0, 0, 1, 1))
    b.inputs[blocks] = b.inputs.pop(stream)
    b.program.replace_all(
        [StreamIn(blocks, count) if getattr(step, "stream", None) is stream else step for step in b.program.children()]
    )
    one = b.constant(np.float32([1]))
    limit = b.constant(np.float32([3]))
    nxt = b.variable(1, name="next")
    goes_on = b.variable(1, BOOL, "goes on")
    received = b.variable(1, name="received")
    total = b.variable(1, name="total")
    body = Sequence(
        CrossReplicaCopy(x, received, pairs),
        b.apply(ADD, x, received, total),
        Copy(total, x),
        b.apply(ADD, count, one, nxt),
        Copy(nxt, count),
    )
    b.program.add(RepeatWhile(b.apply(LESS, count, limit, goes_on), goes_on, body))
    b.program.add(If(goes_on.reshape(()), Sequence(), CrossReplicaCopy(x, x, ((0, 1),))))
    if (0, 2) in pairs:
        with pytest.raises(VerifyError, match=r"\[divergent-control\] replicas may disagree at this RepeatWhile"):
            b.run(x)
        with pytest.raises(InterpreterError, match="divergent-control"):
            interpret(b.graph, b.program, b.inputs)
        return
    (got,) = b.run(x)
    np.testing.assert_array_equal(got[:, 0], [12, 12, 7, 7])


def test_divergence_spreads_and_ends():
    """A flag is equal on replicas once equal values are written to all of it, except under a decision."""
    for under_decision in (False, True):
        b = Replicated(2)
        flag = b.given(np.array([[True], [False]]), "flag")
        x = b.given(np.ones((2, 1), np.float32))
        agreed = Copy(b.constant(np.array([True])), flag)
        other = b.given(np.array([[True], [False]]), "other")
        b.program.add(If(other.reshape(()), agreed, Sequence()) if under_decision else agreed)
        b.program.add(If(flag.reshape(()), CrossReplicaCopy(x, x, ((0, 1),)), Sequence()))
        if under_decision:
            with pytest.raises(VerifyError, match="divergent-control"):
                verify(b.graph, b.program)
        else:
            verify(b.graph, b.program)
            b.run(x)


def test_a_copy_to_all_replicas_makes_a_value_the_same():
    b = Replicated(3)
    flag = b.given(np.array([[True], [False], [False]]), "flag")
    x = b.given(np.float32([[1], [2], [3]]))
    b.program.add(CrossReplicaCopy(flag, flag, ((1, 0), (1, 1), (1, 2))))
    b.program.add(If(flag.reshape(()), Sequence(), CrossReplicaCopy(x, x, ((2, 0),))))
    got, flags = b.run(x, flag)
    assert got[:, 0].tolist() == [3, 2, 3] and not flags.any()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "pairs", "match"),
    [
        (1, ((0, 0),), "the graph is not replicated"),
        (2, ((0, 2),), r"names replicas that the graph lacks[\s\S]*0 … 1[\s\S]*\[2\]"),
        (2, ((-1, 0),), "names replicas that the graph lacks"),
        (3, ((0, 1), (2, 1)), r"writes twice to replica 1[\s\S]*\[\(0, 1\), \(2, 1\)\]"),
    ],
)
def test_refuses_invalid_replica_maps(replicas, pairs, match):
    b = Replicated(replicas)
    x = b.given(np.ones((replicas, 2), np.float32))
    b.program.add(CrossReplicaCopy(x, x, pairs))
    with pytest.raises(VerifyError, match=match) as caught:
        verify(b.graph, b.program)
    assert caught.value.rule == "cross-replica"
    with pytest.raises(VerifyError, match=match):
        engine_function(b.graph, b.program)


def test_a_copy_joins_tensors_of_one_type_and_writes_memory_that_can_be_written():
    b = Replicated(2)
    x = b.given(np.ones((2, 2), np.float32))
    with pytest.raises(GraphError, match=r"joins different tensors[\s\S]*float32\[2\][\s\S]*float32\[1\]"):
        CrossReplicaCopy(x, x[:1], ((0, 1),))
    with pytest.raises(GraphError, match="int32"):
        CrossReplicaCopy(x, b.variable(2, I32), ((0, 1),))
    for destination in (b.constant(np.ones(2, np.float32)), x[:1].broadcast(2)):
        with pytest.raises(VerifyError, match="read-only-output"):
            verify(b.graph, Sequence(b.program, CrossReplicaCopy(x, destination, ((0, 1),))))


def test_a_replica_that_receives_nothing_has_nothing_to_read():
    b = Replicated(2)
    x = b.given(np.ones((2, 2), np.float32))
    y = b.variable(2, name="empty")
    for pairs in (((0, 1), (1, 0)), ((0, 1),)):
        program = Sequence(b.program, CrossReplicaCopy(x, y, pairs), StreamOut(y, HostStream("out", (2,), F32)))
        if len(pairs) == 2:
            verify(b.graph, program)
            continue
        with pytest.raises(VerifyError, match=r"\[undefined-read\].*empty"):
            verify(b.graph, program)
        with pytest.raises(InterpreterError, match="undefined-read"):
            interpret(b.graph, program, b.inputs)


# --- costs, listing, one replica --------------------------------------------------------------------------------------


def link_cycles(num_bytes: int, links: int, target: Any) -> int:
    """Cycles of some bytes over some of the ten IPU-Links of an IPU, in closed form."""
    rate = target.ipu_link_bytes_per_second * target.ipu_link_efficiency / target.clock_hz
    return int(np.ceil(num_bytes / (rate * links)))


def cycles_of(replicas: int, pairs: tuple[tuple[int, int], ...], size: int) -> dict[str, int]:
    """The phases of one copy between replicas of an IPU with so many tiles that links limit it."""
    b = Replicated(replicas, tiles=64)
    x = b.variable(size, name="x")
    y = b.variable(size, name="y")
    resident = StreamIn(HostStream("x", (size,), F32, resident=True), x)
    return Profile(compile(b.graph, Sequence(resident, CrossReplicaCopy(x, y, pairs)))).phase_cycles


def test_a_copy_costs_the_links_it_loads_and_no_more():
    target = preset("mk2")
    latency = round(target.global_exchange_latency_seconds * target.clock_hz)
    size = 65536
    pair = cycles_of(2, ((0, 1),), size)
    assert pair["global_exchange"] == latency + link_cycles(
        size * 4, 4, target
    )  # four links between the IPUs of a rung
    assert pair["sync"] == target.global_sync_cycles and pair["compute"] == pair["exchange"] == 0
    # Both ways at once, and in eight pairs, as one pair one way; but up the ladder there are two links.
    assert cycles_of(2, ((0, 1), (1, 0)), size) == pair
    assert cycles_of(16, tuple((r, r ^ 1) for r in range(16)), size) == pair
    assert cycles_of(4, ((0, 2),), size)["global_exchange"] == latency + link_cycles(size * 4, 2, target)
    # Flows up the two sides of the ladder share nothing, up one side they do; so do two copies of one value.
    assert cycles_of(6, ((0, 4), (2, 5)), size)["global_exchange"] == latency + link_cycles(size * 4, 2, target)
    assert cycles_of(8, ((0, 4), (2, 6)), size)["global_exchange"] == latency + link_cycles(2 * size * 4, 2, target)
    assert cycles_of(8, ((0, 2), (0, 4)), size)["global_exchange"] == latency + link_cycles(2 * size * 4, 2, target)


def test_a_copy_within_tiles_of_one_replica_is_an_exchange_between_two():
    """On few tiles their ports limit it: each receives its share, 4 bytes a cycle."""
    b = Replicated(2)
    x = b.given(np.zeros((2, 4096), np.float32))
    b.program.add(CrossReplicaCopy(x, x, ((0, 1),)))
    phases = Profile(compile(b.graph, b.program)).phase_cycles
    target = b.graph.target
    latency = round(target.global_exchange_latency_seconds * target.clock_hz)
    least = max(latency, 4096 * 4 / TILES / target.exchange_bytes_per_cycle)
    assert least <= phases["global_exchange"] <= least + latency + target.exchange_startup_cycles + 100


def test_replicas_cost_as_much_as_one_and_take_its_memory():
    def built(replicas: int) -> Profile:
        b = Replicated(replicas, 2)
        x = b.given(np.zeros((replicas, 64), np.float32), tile=0)
        y = b.variable(64, tile=1)
        z = b.variable(64, tile=5)
        b.program.add(Repeat(5, b.apply(ADD, x, x, y)))
        b.program.add(Copy(y, z))
        b.program.add(StreamOut(z, HostStream("out", (64,), F32)))
        return Profile(compile(b.graph, b.program))

    one = built(1)
    many = built(16)
    # All but what they share, the links to the hosts of their machines.
    on_device = ("compute", "exchange", "global_exchange", "sync")
    assert all(one.phase_cycles[phase] == many.phase_cycles[phase] for phase in on_device)
    assert one.phase_cycles["global_exchange"] > 0
    assert one.phase_cycles["host_exchange"] <= many.phase_cycles["host_exchange"]
    np.testing.assert_array_equal(one.memory.tile_bytes, many.memory.tile_bytes)
    assert many.execution()["simulation"]["cycles"] == many.cycles


def test_the_listing_names_replicas():
    b = Replicated(3)
    x = b.given(np.float32([1, 2]), broadcast=True)
    b.replica_index()
    b.program.add(CrossReplicaCopy(x, x, ((0, 1), (1, 2)), "shift"))
    lines = [line.strip() for line in listing(b.graph, b.program).splitlines()]
    assert lines[0] == "target mk2, 1 IPU of 4 tiles, 3 replicas"
    assert '%1 float32[1] "replica", on tile 0, constant of each replica' in lines
    assert lines[-2:] == ['in "x" (broadcast) -> %0', 'copy "shift" replica 0->1, 1->2: %0 -> %0']


def test_one_replica_runs_the_plain_engine():
    b = Replicated(1)
    b.given(np.ones(4, np.float32))
    assert type(prepare_engine(b.graph, b.program)) is EngineProgram
