"""Small programs whose cycles and bytes can be worked out by hand."""

from __future__ import annotations

import numpy as np

from ipujax.runtime.compile import compile
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Copy,
    Execute,
    HostStream,
    If,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.tensor.mapping import grid, on_one_tile
from ipujax.runtime.tensor.variable import Origin
from tests.runtime.helpers import F32 as F32, TARGET as TARGET

BOOL = np.dtype(bool)
SYNC = TARGET.internal_sync_cycles
SIZE = 16


def codelet(name, cycles, state_bytes=16, code_bytes=256):
    fields = (Field("x", "in", F32), Field("y", "out", F32))
    return Codelet(name, fields, lambda x: x, lambda shapes, _: cycles * shapes[1][0], state_bytes, code_bytes)


def apply(graph, code, x, y, blocks, line="", file=""):
    """Executes a codelet from x to y, both of SIZE floats, on the first `blocks` tiles."""
    with graph.debug_origin(Origin(line, file=str(file))):
        compute_set = graph.add_compute_set(f"{code.name}/compute")
    cuts = grid((SIZE,), (blocks,)).cuts[0]
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (x, y))
    graph.add_vertices(compute_set, VertexGroup(code, (Axis("i", cuts),), accesses, np.arange(blocks, dtype=np.int32)))
    return Execute(compute_set)


def variables(graph, *names):
    return tuple(graph.add_variable((SIZE,), F32, name, grid((SIZE,), (4,))) for name in names)


def inputs(*tensors):
    """Streams that bring tensors in without moving bytes."""
    return [StreamIn(HostStream(f"in {i}", t.shape, t.dtype, resident=True), t) for i, t in enumerate(tensors)]


def output(tensor):
    return StreamOut(tensor, HostStream("out", tensor.shape, tensor.dtype))


def trained_program():
    """Ten iterations of a cheap and a dear step on four tiles, then the result goes to the host."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    cheap = apply(graph, codelet("popops::Cheap", 3), a, b, 4, "model.py:3 (forward)")
    dear = apply(graph, codelet("popops::Dear", 50, state_bytes=8, code_bytes=100), b, a, 4, "model.py:9 (loss)")
    program = Sequence(*inputs(a), Repeat(10, Sequence(cheap, dear)), output(a))
    return compile(graph, program)


def host_cycles(size):
    return int(np.ceil((TARGET.host_latency_seconds + size / TARGET.host_bytes_per_second) * TARGET.clock_hz))


def looping():
    """A loop that runs while a flag is set, whose body takes either of two branches."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    flag = graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
    read_flag = StreamIn(HostStream("flag", (), BOOL, resident=True), flag)
    light = apply(graph, codelet("light", 1), a, b, 4)
    heavy = apply(graph, codelet("heavy", 100), a, b, 4)
    decide = If(flag, light, heavy, Origin("model.py:20 (pick)"))
    loop = RepeatWhile(read_flag, flag, decide, Origin("model.py:18 (decode)"))
    return graph, Sequence(*inputs(a), loop), loop, decide


def two_ipus():
    """Five times from IPU 0 to IPU 1, which then computes for a while."""
    graph = Graph(TARGET.replace(num_ipus=2))
    a = graph.add_variable((SIZE,), F32, "a", grid((SIZE,), (4,)))
    b, c = (graph.add_variable((SIZE,), F32, name, grid((SIZE,), (4,), 4)) for name in "bc")
    code = codelet("second", 500)
    compute_set = graph.add_compute_set("second")
    cuts = grid((SIZE,), (4,)).cuts[0]
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (b, c))
    graph.add_vertices(compute_set, VertexGroup(code, (Axis("i", cuts),), accesses, np.arange(4, 8, dtype=np.int32)))
    program = Sequence(*inputs(a), Repeat(5, Sequence(Copy(a, b), Execute(compute_set))), output(c))
    return compile(graph, program)
