"""A variable of which some elements have no tile: every error names the variable, the ranges and their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipujax import IpuError, poplar, poplin, popops, poputil
from ipujax.poplar.program import Copy, PrintTensor, Repeat, Sequence
from ipujax.runtime.compile import compile
from ipujax.runtime.graph import element_ranges
from tests.ipujax.poplar.helpers import placed, small_graph
from tests.ipujax.poplar.test_bad_input_graph import SumVertex

RANGES = r"v: float32\[8\]\).* is mapped in part: elements 2 to 4, 6 of it have no tile"
NUMBER = r"[\s\S]*got: 4 of 8 elements without a tile"


class Setting:
    """A variable `v` of eight elements, of which 2, 3, 4 and 6 have no tile."""

    def __init__(self, graph: poplar.Graph | None = None) -> None:
        self.graph = small_graph() if graph is None else graph
        self.v = self.graph.add_variable(poplar.FLOAT, [8], "v")
        for begin, end in ((0, 2), (5, 6), (7, 8)):
            self.graph.set_tile_mapping(self.v[begin:end], begin % 2)
        self.w = placed(self.graph, poplar.FLOAT, [8], "w")

    def engine(self, program: Any) -> poplar.Engine:
        return poplar.Engine(self.graph.get_top_level_graph(), program)


def vertex(s: Setting) -> Any:
    compute_set = s.graph.add_compute_set("cs")
    out = placed(s.graph, poplar.FLOAT, [], "out")
    s.graph.set_tile_mapping(s.graph.add_vertex(compute_set, SumVertex, {"in": s.v, "out": out}), 0)
    return s.engine(Sequence(poplar.program.Execute(compute_set)))


USES: dict[str, Callable[[Setting], Any]] = {
    "copy": lambda s: s.engine(Copy(s.v, s.w)),
    "copy to itself": lambda s: s.engine(Copy(s.v, s.v)),
    "copy of a part with tiles": lambda s: s.engine(Copy(s.v[:2], s.w[:2])),
    "loop": lambda s: s.engine(Repeat(2, Copy(s.w, s.v))),
    "stream in": lambda s: s.engine(Copy(s.graph.add_host_to_device_fifo("in", poplar.FLOAT, 8), s.v)),
    "stream out": lambda s: s.engine(Copy(s.v, s.graph.add_device_to_host_fifo("out", poplar.FLOAT, 8))),
    "remote buffer": lambda s: s.engine(Copy(s.graph.add_remote_buffer("buffer", poplar.FLOAT, 8), s.v)),
    "print": lambda s: s.engine(PrintTensor("v", s.v)),
    "vertex": vertex,
    "operation": lambda s: popops.add(s.graph, s.v, s.w, Sequence(), "add"),
    "operation in place": lambda s: popops.add_in_place(s.graph, s.v, s.w, Sequence(), "add"),
    "product": lambda s: poplin.mat_mul(s.graph, s.v.reshape([1, 8]), s.w.reshape([8, 1]), Sequence(), "mm"),
    "imbalance": lambda s: poputil.get_tile_imbalance(s.graph, s.v),
    "compile": lambda s: compile(s.graph, Sequence(Copy(s.v, s.w))),
    "replicated graph": lambda s: s.engine(in_replicas(s)),
}


def in_replicas(s: Setting) -> Any:
    inner = Setting(s.graph.create_replicated_graph(2))
    return Copy(inner.v, inner.w)


@pytest.mark.parametrize("name", USES)
def test_error_names_the_elements(name: str) -> None:
    with pytest.raises(IpuError, match=RANGES + NUMBER):
        USES[name](Setting())


def test_queries_name_the_elements_of_the_view() -> None:
    s = Setting()
    for query in (s.graph.get_tile_mapping, s.graph.clone):
        with pytest.raises(IpuError, match=r"elements 2 to 4, 6 of it have no tile" + NUMBER):
            query(s.v)
    with pytest.raises(IpuError, match=r"element 0 of it has no tile\n[\s\S]*got: 1 of 2 elements"):
        s.graph.get_tile_mapping(s.v[4:6])
    assert s.graph.get_tile_mapping(s.v[:2])[0] == [(0, 2)]


def test_virtual_graph_says_that_the_tiles_are_not_its_own() -> None:
    graph = small_graph()
    v = graph.add_variable(poplar.FLOAT, [8], "v")
    graph.set_tile_mapping(v[:6], 0)
    graph.set_tile_mapping(v[6:], 1)
    part = graph.create_virtual_graph(0, 1)
    with pytest.raises(IpuError, match=r"elements 6 to 7 of it have no tile of this virtual graph"):
        part.get_tile_mapping(v)
    with pytest.raises(IpuError, match=r"operand .*elements 6 to 7 of it have no tile of this virtual graph"):
        popops.neg(part, v, Sequence(), "neg")


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        ([3], "element 3"),
        ([0, 1, 2], "elements 0 to 2"),
        ([0, 2, 4], "elements 0, 2, 4"),
        ([0, 2, 4, 6], "elements 0, 2, 4 and 1 more range"),
        ([0, 1, 3, 5, 7, 9], "elements 0 to 1, 3, 5 and 2 more ranges"),
    ],
)
def test_ranges_as_text(elements: list[int], text: str) -> None:
    assert element_ranges(np.array(elements)) == text


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ([[(0, 4)], [(2, 6)], [(6, 8)]], r"maps elements 2 to 3 twice\n[\s\S]*got: tile 0 and \(2, 6\) on tile 1"),
        ([[(0, 2), (5, 8)]], r"leaves elements 2 to 4 out\n[\s\S]*expected: 8 elements\n[\s\S]*got: 5"),
    ],
)
def test_intervals_name_elements_mapped_twice_or_left_out(mapping: Any, text: str) -> None:
    s = Setting()
    with pytest.raises(IpuError, match=text):
        s.graph.set_tile_mapping(s.w, mapping)
    assert s.graph.get_tile_mapping(s.w)[0] == [(0, 8)]
