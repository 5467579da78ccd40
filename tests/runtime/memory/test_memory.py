"""Tile memory against sums over live sets, hand counts, and the guide's example; layout in the two regions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.compile import compile, leaf_costs
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
    Function,
    HostStream,
    Repeat,
    Sequence,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.memory.always_live import CONTROL_BYTES_PER_STEP, HOST_CODE_BYTES, HOST_HEADER_BYTES, STACK_BYTES
from ipujax.runtime.memory.arena import unshared_bytes
from ipujax.runtime.memory.report import CATEGORIES, memory_report
from ipujax.runtime.options import Options
from ipujax.runtime.tensor.mapping import grid, on_one_tile
from tests.runtime.helpers import F32, SIZE, TARGET, graph_of_variables, stream


def report_of(graph, program):
    return memory_report(graph, program, EffectsOf(graph), leaf_costs(graph, program))


def round_up(values, unit=8):
    return -(-np.asarray(values) // unit) * unit


_pairs = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])


@st.composite
def copies(draw, tensors):
    source, destination = draw(_pairs)
    start, stop = draw(st.sampled_from([(0, SIZE), (0, 4), (4, SIZE)]))
    return Copy(tensors[source][start:stop], tensors[destination][start:stop])


@settings(max_examples=30)
@given(st.data(), st.integers(0, 10))
def test_peak_of_every_tile_equals_the_largest_live_sum(data, length):
    graph, tensors = graph_of_variables()
    body = Sequence(*(data.draw(copies(tensors)) for _ in range(length)))
    program = Sequence(*(StreamIn(stream(), tensor) for tensor in tensors), Repeat(2, body))
    report = report_of(graph, program)
    actual = liveness(program, EffectsOf(graph))
    sums = [
        sum(graph.mappings[v].elements_per_tile(4) * 4 for v in actual.live_at(step))
        for step in range(len(actual.steps))
    ]
    np.testing.assert_array_equal(report.by_category["variable"], np.max(sums, axis=0))
    assert tuple(report.by_category) == CATEGORIES
    np.testing.assert_array_equal(report.tile_bytes, sum(report.by_category[name] for name in CATEGORIES))
    assert sum(item.num_bytes for item in report.largest) == report.max_tile_bytes
    assert report.tile_bytes[report.worst_tile] == report.max_tile_bytes
    for tile in range(4):
        assert sum(item.num_bytes for item in report.at_peak(tile)[2]) == report.tile_bytes[tile]


@settings(max_examples=30)
@given(st.data())
def test_shared_memory_is_between_the_peak_and_all_apart(data):
    """Of programs with functions that call each other, several tiles and variables of several sizes."""
    graph = Graph(TARGET)
    tensors = [
        graph.add_variable((n,), F32, f"v{i}", grid((n,), (data.draw(st.integers(1, 4)),)))
        for i, n in enumerate(data.draw(st.lists(st.integers(4, 40), min_size=6, max_size=6)))
    ]

    def body(callable_):
        parts = [Copy(tensors[0][:4], tensors[0][:4])]
        for _ in range(data.draw(st.integers(1, 5))):
            if callable_ and data.draw(st.booleans()):
                parts.append(Call(data.draw(st.sampled_from(callable_))))
            else:
                source, destination = data.draw(_pairs)
                parts.append(Copy(tensors[source][:4], tensors[destination + 2][:4]))
        return Sequence(*parts)

    functions = []
    for number in range(3):
        functions.append(Function(body(functions), f"f{number}"))
    program = Sequence(*(StreamIn(HostStream("in", t.shape, F32), t) for t in tensors[:2]), body(functions))
    report = report_of(graph, program)
    peak = sum(report.by_category[name] for name in ("variable", "message", "rearrangement", "outputEdge", "borrowed"))
    assert (report.shared_bytes >= peak).all()
    assert (report.shared_bytes <= unshared_bytes(report.occupancy)).all()
    assert (report.gap_bytes >= 0).all()
    np.testing.assert_array_equal(report.tile_bytes, sum(report.by_category.values()))


def test_every_byte_by_hand():
    graph = Graph(TARGET)
    a = graph.add_variable((SIZE,), F32, "a", on_one_tile(SIZE, 1))
    b = graph.add_variable((SIZE,), F32, "b", on_one_tile(SIZE, 2))
    k = graph.add_constant(np.ones(SIZE, np.float16), "k", grid((SIZE,), (4,)))
    c = graph.add_variable((SIZE,), np.dtype("float16"), "c", grid((SIZE,), (4,)))
    graph.add_variable((10**6,), F32, "never used", on_one_tile(10**6, 0))
    program = Sequence(
        StreamIn(stream(), a),
        Copy(a, b),
        Copy(k, c),
        StreamOut(c, HostStream("c", (SIZE,), c.dtype)),
        StreamOut(b, stream()),
    )
    report = report_of(graph, program)
    layers = {name: layer.tolist() for name, layer in report.by_category.items()}
    assert layers["variable"] == [4, 32, 32 + 4, 4]
    assert layers["constant"] == [4, 4, 4, 4]
    assert layers["controlCode"] == [5 * CONTROL_BYTES_PER_STEP] * 4
    assert layers["stack"] == [STACK_BYTES] * 4
    # Tile 2 waits, sets source and address of one part, and closes the port; tile 1 sends once; 4 bytes an instruction.
    assert layers["internalExchangeCode"] == [0, 4, 16, 0]
    # `a` comes in on tile 1, `b` goes out on tile 2, and `c` on all four.
    assert layers["hostExchangePacketHeader"] == [HOST_HEADER_BYTES * n for n in (1, 2, 2, 1)]
    assert layers["hostExchangeCode"] == [HOST_CODE_BYTES * n for n in (1, 2, 2, 1)]
    # Variables, code and other data each begin and end at whole 8 bytes: on tile 2 the 4 bytes of c take 8.
    code = np.array([45 + 79, 45 + 4 + 158, 45 + 16 + 158, 45 + 79])
    data = np.array([4 + 4, 4 + 8, 4 + 8, 4 + 4]) + STACK_BYTES
    shared = np.array([8, 32, 40, 8])
    np.testing.assert_array_equal(report.tile_bytes, round_up(code) + round_up(data) + shared)
    np.testing.assert_array_equal(report.gap_bytes, report.tile_bytes - code - data - layers["variable"])
    np.testing.assert_array_equal(report.code_bytes, code)
    assert report.worst_tile == 2


def test_temporaries_share_memory_and_gaps_are_reported():
    """Three variables one after the other, the middle one largest: a and c lie where b lay before or after."""
    graph = Graph(TARGET)
    a, b, c = (graph.add_variable((n,), F32, name, on_one_tile(n, 0)) for name, n in (("a", 3), ("b", 9), ("c", 4)))
    chain = Sequence(
        StreamIn(HostStream("a", (3,), F32), a),
        Copy(a, b[:3]),
        Copy(b[:4], c),
        StreamOut(c, HostStream("c", (4,), F32)),
    )
    report = report_of(graph, chain)
    assert report.by_category["variable"][0] == 36 + 16  # b and c at the second copy
    assert report.shared_bytes[0] == 40 + 16  # 36 bytes rounded up to 40, then 16, where a lay before
    assert report.gap_bytes[0] >= 4


def test_frame_of_a_function_counts_at_its_calls_only():
    graph, (a, b, c, d) = graph_of_variables()
    body = Sequence(Copy(a, c), Copy(c, b))
    called = Sequence(StreamIn(stream(), a), Call(Function(body)), Copy(b, d), StreamOut(d, stream()))
    inlined = Sequence(StreamIn(stream(), a), body, Copy(b, d), StreamOut(d, stream()))
    size = {t: graph.mappings[t.variables()[0]].elements_per_tile(4) * 4 for t in (a, b, c, d)}
    expected = np.maximum(size[a] + size[b] + size[c], size[b] + size[d])
    np.testing.assert_array_equal(report_of(graph, called).by_category["variable"], expected)
    assert report_of(graph, inlined).max_tile_bytes <= report_of(graph, called).max_tile_bytes
    report = report_of(graph, called)
    assert {item.name for item in report.largest if item.category == "variable"} == {
        repr(t.variables()[0]) for t in (a, b, c)
    }


def test_a_frame_has_one_place_for_all_its_calls():
    """A function called while different things are kept: its 32 bytes lie above both, not once above each."""
    graph = Graph(TARGET)
    x, y, small, large = (
        graph.add_variable((n,), F32, name, on_one_tile(n, 0)) for name, n in (("x", 2), ("y", 2), ("s", 4), ("l", 16))
    )
    inner = graph.add_variable((8,), F32, "inner", on_one_tile(8, 0))
    function = Function(Sequence(Copy(x, inner[:2]), Copy(inner[:2], y)), "f")
    program = Sequence(
        StreamIn(HostStream("x", (2,), F32), x),
        StreamIn(HostStream("s", (4,), F32), small),
        Call(function),
        StreamOut(small, HostStream("s2", (4,), F32)),
        StreamIn(HostStream("l", (16,), F32), large),
        Call(function),
        StreamOut(large, HostStream("l2", (16,), F32)),
        StreamOut(y, HostStream("y", (2,), F32)),
    )
    report = report_of(graph, program)
    # At the second call x, y, large and the frame live: 8 + 8 + 64 + 32 bytes; small is dead and its place is free.
    assert report.by_category["variable"][0] == 8 + 8 + 64 + 32
    assert 112 <= report.shared_bytes[0] <= 128


# --- regions ----------------------------------------------------------------------------------------------------------


def wide_program(interleaved, size=64, target=TARGET):
    """Reads x, squares it on four tiles into y, writes y."""
    graph = Graph(target)
    x, y = (graph.add_variable((size,), F32, name, grid((size,), (4,))) for name in "xy")
    codelet = Codelet(
        "square", (Field("x", "in", F32), Field("y", "out", F32, interleaved)), lambda x: x * x, lambda *_: np.int64(9)
    )
    cuts = np.arange(5) * size // 4
    accesses = (Access(x, (element(0),)), Access(y, (element(0),)))
    compute_set = graph.add_compute_set("square")
    graph.add_vertices(compute_set, VertexGroup(codelet, (Axis("i", cuts),), accesses, np.arange(4, dtype=np.int32)))
    host = HostStream("x", (size,), F32), HostStream("y", (size,), F32)
    return graph, Sequence(StreamIn(host[0], x), Execute(compute_set), StreamOut(y, host[1]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_variables_accessed_128_bits_at_a_time_are_on_top(interleaved):
    memory = compile(*wide_program(interleaved)).memory
    assert memory.is_from_top.tolist() == [interleaved] * 4
    assert memory.shared_bytes.tolist() == [2 * 64] * 4
    assert (memory.shared_bytes <= unshared_bytes(memory.occupancy)).all()


def test_a_tile_without_interleaved_memory_has_no_top():
    offset = TARGET.interleaved_offset_bytes
    target = TARGET.replace(bytes_per_tile=offset, interleaved_offset_bytes=offset)
    assert not compile(*wide_program(True, target=target)).memory.is_from_top.any()


def test_interleaved_memory_is_padded_to_16_bytes():
    assert compile(*wide_program(True, size=12)).memory.shared_bytes.tolist() == [16 + 16] * 4  # 12 B each: 16, 16
    assert compile(*wide_program(True, size=20)).memory.shared_bytes.tolist() == [32 + 24] * 4  # 20 B each: 32, 24
    assert compile(*wide_program(False, size=20)).memory.shared_bytes.tolist() == [24 + 24] * 4


# --- what the guide's example says ------------------------------------------------------------------------------------


def test_constants_reproduce_the_guides_example():
    """Poplar's user guide, "Profile summary output": 1,216 tiles, 43 compute sets."""
    assert 1216 * STACK_BYTES == 3_852_288
    assert abs(1216 * 43 * CONTROL_BYTES_PER_STEP / 467_696 - 1) < 0.01
    assert abs(10_720 / HOST_HEADER_BYTES * HOST_CODE_BYTES / 211_132 - 1) < 0.01
    assert (
        abs(5_564 * Codelet("mean", (), lambda: None, lambda *_: np.int64(0)).state_bytes / (65_768 + 24_052) - 1)
        < 0.02
    )


def test_reports_cannot_be_changed():
    memory = compile(*wide_program(False), options=Options()).memory
    for array in (memory.tile_bytes, *memory.by_category.values()):
        assert not array.flags.writeable
    with pytest.raises(TypeError):
        memory.by_category["stack"] = None


def test_memory_is_only_packed_where_that_decides():
    graph = Graph(TARGET)
    a, b, c = (graph.add_variable((400,), F32, name, on_one_tile(400, 0)) for name in "abc")
    steps = StreamIn(stream(400), a), Copy(a, b), Copy(b, c), StreamOut(c, stream(400))

    def report(num_bytes):
        graph.target = TARGET.replace(bytes_per_tile=num_bytes, interleaved_offset_bytes=num_bytes)
        return report_of(graph, Sequence(*steps))

    roomy = report(2**19)
    exact = roomy.max_tile_bytes
    least = int(roomy.least_bytes.max())
    unpacked = exact + 400 * 4
    assert least <= exact < unpacked
    for num_bytes, expected, packs in (
        (unpacked, 0, False),
        (unpacked - 1, exact, True),
        (exact, exact, True),
        (least - 1, least, False),
    ):
        actual = report(num_bytes)
        assert actual.rough_bytes == expected and ("tile_bytes" in vars(actual)) == packs


def test_a_tile_has_the_code_of_steps_of_its_own_ipu():
    target = TARGET.replace(num_ipus=2, tiles_per_ipu=2)
    graph = Graph(target)
    a, b = (graph.add_variable((SIZE,), F32, name, on_one_tile(SIZE, tile)) for name, tile in (("a", 2), ("b", 3)))
    report = report_of(graph, Sequence(StreamIn(stream(), a), Copy(a, b), StreamOut(b, stream())))
    assert report.by_category["controlCode"].tolist() == [0, 0, 3 * CONTROL_BYTES_PER_STEP, 3 * CONTROL_BYTES_PER_STEP]
