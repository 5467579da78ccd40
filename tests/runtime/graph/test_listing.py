"""The text of graphs and programs: every kind of node, view and index once, and nothing that varies between runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
    Function,
    HostStream,
    If,
    Program,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
    WriteUndef,
)
from ipujax.runtime.graph.vertex_group import NO_TILE, Access, Axis, Dim, Term, VertexGroup, block, element
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import even_cuts, grid, linear, on_one_tile
from ipujax.runtime.tensor.tensor import Tensor, concat
from ipujax.runtime.tensor.variable import Origin

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)


def new_graph() -> Graph:
    return Graph(preset("mk2").replace(tiles_per_ipu=16))


def codelet(name: str, *fields: str) -> Codelet:
    """A codelet that is only looked at, with float32 fields such as "in a"."""
    parsed = tuple(Field(field.split()[1], field.split()[0], F32) for field in fields)  # type: ignore[arg-type]
    return Codelet(name, parsed, lambda *_: None, lambda *_: np.zeros((), np.int64))


def matmul_graph() -> tuple[Graph, Program]:
    """A product split in m, n and k with partials, and their sum, as planners write it."""
    graph = new_graph()
    a = graph.add_variable((8, 6), F32, "a", linear(48, 4, 16))
    b = graph.add_variable((6, 4), F32, "b", grid((6, 4), (3, 2)))
    partials = graph.add_variable((3, 8, 4), F32, "partials", grid((3, 8, 4), (3, 2, 1)), monoid="add")
    out = graph.add_variable((8, 4), F32, "out")
    with graph.debug_origin(Origin("model.py:7 (loss)")):
        products = graph.add_compute_set("dot")
        sums = graph.add_compute_set("dot/reduce")
    axes = (Axis("m", even_cuts(8, 2)), Axis("n", even_cuts(4, 1)), Axis("k", even_cuts(6, 3), "reduce"))
    accesses = (
        Access(a, (element(0), element(2))),
        Access(b, (element(2), element(1))),
        Access(partials, (block(2), element(0), element(1))),
    )
    tiles = np.arange(6, dtype=np.int32).reshape(2, 1, 3)
    graph.add_vertices(products, VertexGroup(codelet("MatMul", "in a", "in b", "out c"), axes, accesses, tiles))
    axes = (Axis("e", even_cuts(32, 4)), Axis("p", even_cuts(3, 1), "reduce"))
    accesses = (Access(partials.reshape((3, 32)), (element(1), element(0))), Access(out.flatten(), (element(0),)))
    group = VertexGroup(codelet("Sum", "in x", "out y"), axes, accesses, np.arange(4, dtype=np.int32)[:, None])
    graph.add_vertices(sums, group)
    return graph, Sequence(Execute(products), Sequence(Execute(sums)))


def test_vertex_groups(golden: Callable[..., None]) -> None:
    golden(listing(*matmul_graph()))


def test_program_nodes(golden: Callable[..., None]) -> None:
    graph = new_graph()
    x, y = (graph.add_variable((4,), F32, name, on_one_tile(4, tile)) for tile, name in enumerate("xy"))
    flag = graph.add_variable((), np.dtype(np.bool_), "flag", on_one_tile(1, 3))
    case = graph.add_constant(np.int32(2), "two", on_one_tile(1, 0))
    graph.add_constant(np.zeros((2, 2), F32), "zeros")
    inner = Function(Copy(x, y, "in inner"), "inner")
    outer = Function(Sequence(), "outer")
    outer.body.add(Call(inner))  # type: ignore[attr-defined]
    origin = Origin("model.py:3 (f)")
    program = Sequence(
        StreamIn(HostStream("x", (4,), F32), x),
        StreamIn(HostStream("y", (4,), F32, resident=True), y),
        Repeat(5, Sequence(Copy(x, y), Repeat(2, Call(outer))), origin),
        RepeatWhile(Copy(y, x), flag, Copy(x, y), origin),
        If(flag, Call(inner), Sequence(), origin),
        Switch(case, (Copy(x, y, "first"), Copy(y, x, "second")), Call(outer), origin),
        WriteUndef(x),
        StreamOut(y, HostStream("out", (4,), F32)),
    )
    golden(listing(graph, program))


def view_lines(graph: Graph, *pairs: tuple[Tensor, Tensor]) -> list[str]:
    """The lines of copies between views, without the word copy."""
    text = listing(graph, Sequence(*(Copy(a, b) for a, b in pairs)))
    return [line.removeprefix('  copy "copy": ') for line in text.splitlines() if "->" in line]


def test_views() -> None:
    graph = new_graph()
    x, y = (graph.add_variable((4, 6), F32, name, linear(24, 4, 16)) for name in "xy")
    views = {
        "%0": x,
        "%0 as [2,12]": x.reshape((2, 12)),
        "%0@7(2:6, 3:1)": x.slice((1, 1), (3, 4)),
        "%0@0(6:1, 4:6)": x.transpose(),
        "%0@0(4:6, 6:1, 3:0)": x.broadcast_in_dim((4, 6, 3), (0, 1)),
        "%0@0(6:1.4:6)": x.transpose().reshape((24,)),
        "%0@3(1)": x[0, 3:4],
        "concat 1 (%0, %1)": concat([x, y], 1),
    }
    destinations = [graph.add_variable(view.shape, F32, "d", linear(view.size, 4, 16)) for view in views.values()]
    lines = view_lines(graph, *zip(views.values(), destinations, strict=True))
    assert [line.split(" -> ")[0] for line in lines] == list(views)


def test_reshaped_and_indexed_views() -> None:
    graph = new_graph()
    x, y = (graph.add_variable((64, 5), F32, name, linear(320, 4, 16)) for name in "xy")
    uneven = concat([x, y], 1).reshape((10, 64))
    d = graph.add_variable((10, 64), F32, "d", linear(640, 4, 16))
    assert view_lines(graph, (uneven, d), (uneven.transpose(), d.transpose())) == [
        "reshape [10,64] (concat 1 (%0, %1)) -> %2",
        "elements [64,10] of (%0, %1) -> %2@0(64:1, 10:64)",
    ]


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (element(0), "i"),
        (element(0, 2, -1), "2i-1"),
        (element(0, -1, 7), "-i+7"),
        (block(1), "#k"),
        (Dim((Term(0), Term(1)), -1, 2), "(i+k-1)/2"),
        (Dim((Term(0, 3, "block"), Term(1, -2))), "3#i-2k"),
        (Dim((), 4), "4"),
        (Dim(()), "0"),
        (Dim((), -3), "-3"),
    ],
)
def test_indices(dim: Dim, text: str) -> None:
    graph = new_graph()
    x, y = (graph.add_variable((8,), F32, name, linear(8, 4, 16)) for name in "xy")
    compute_set = graph.add_compute_set("only")
    axes = (Axis("i", even_cuts(8, 2)), Axis("k", even_cuts(3, 1), "literal"))
    accesses = (Access(x, (dim,), fill=0.5), Access(y, (element(0),)))
    tile = np.array([[3], [NO_TILE]], np.int32)
    graph.add_vertices(compute_set, VertexGroup(codelet("C", "in x", "inout y"), axes, accesses, tile))
    last = listing(graph, Execute(compute_set)).splitlines()[-1]
    assert last == f"    %1[i] = C(%0[{text}]?0.5, %1[i]) | i 8/2, k 3/1 literal | 1 vertex on 1 tile"


def test_equal_graphs_have_equal_texts() -> None:
    texts = {listing(*matmul_graph()) for _ in range(3)}
    assert len(texts) == 1


def test_every_change_of_the_graph_shows() -> None:
    graph, program = matmul_graph()
    before = listing(graph, program)
    out = next(v for v in graph.variables if v.name == "out")
    graph.set_tile_mapping(out, on_one_tile(32, 5))
    after = listing(graph, program)
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [('  %3 float32[8,4] "out", unmapped', '  %3 float32[8,4] "out", on tile 5')]


def test_foreign_variable_is_named_as_such() -> None:
    graph = new_graph()
    other = new_graph()
    x: Any = graph.add_variable((2,), F32, "x", on_one_tile(2, 0))
    y: Any = other.add_variable((2,), F32, "y", on_one_tile(2, 0))
    text = listing(graph, Copy(y, x))
    assert '  %1 float32[2] "y", unmapped, not of this graph' in text.splitlines()
