"""Virtual graphs: selections of tiles, additions on the parent's tiles, and libraries inside them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from ipujax.runtime.errors import GraphError, MappingError, VerifyError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.program import Execute, Sequence
from ipujax.runtime.tensor.mapping import blocked_mapping, owners
from tests.ipujax.poplar.helpers import compiled, placed, run_both, small_graph


class SumVertex(Vertex):
    in_: Input[Vector[FLOAT]]
    out: Output[FLOAT]

    def compute(in_):
        return jnp.sum(in_)


def tile_of(graph: poplar.Graph, tensor: poplar.Tensor) -> list[int]:
    """Tile of every element, in a graph's numbers."""
    (variable,) = tensor.variables()
    return owners(graph.mappings[variable]).tolist()


@pytest.mark.parametrize(
    ("chosen", "tiles", "ipus"),
    [
        ((2, 5), [2, 3, 4], 1),
        ((8, 16), [8, 9, 10, 11, 12, 13, 14, 15], 1),
        ((8, 24), list(range(8, 24)), 2),
        ((3,), [0, 1, 2, 8, 9, 10, 16, 17, 18], 3),
        (([5, 1, 3],), [5, 1, 3], 1),
        (([17, 16, 1, 0],), [17, 16, 1, 0], 2),
    ],
)
def test_tiles_are_chosen_by_range_by_number_and_by_list(chosen, tiles, ipus):
    graph = small_graph(8, num_ipus=3)
    virtual = graph.create_virtual_graph(*chosen)
    target = virtual.get_target()
    assert virtual.get_tiles() == tiles
    assert (target.get_num_tiles(), target.get_num_ipus()) == (len(tiles), ipus)
    assert virtual.get_top_level_graph() is graph and graph.get_top_level_graph() is graph


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ((5, 5), "invalid tiles of a virtual graph"),
        ((0, 25), r"different tiles in 0 … 23"),
        (([1, 1],), "invalid tiles"),
        ((9,), r"1 … 8[\s\S]*got: 9"),
        ((6, 11), r"unequal IPUs[\s\S]*got: \[2, 3\] tiles of IPUs \[0, 1\]"),
        (([0, 8, 1, 9],), "unequal IPUs"),
        (([0], 4), "invalid tile range"),
        ((0, 3.5), "invalid tile range"),
        ((0, True), "invalid tile range"),
        ((0, 1 << 40), "invalid tiles"),
        (([1 << 32],), "invalid tiles"),
        ((np.array([2, (1 << 32) + 3]),), "invalid tiles"),
    ],
)
def test_refuses_invalid_tiles(chosen, message):
    with pytest.raises(GraphError, match=message):
        small_graph(8, num_ipus=3).create_virtual_graph(*chosen)


def test_additions_are_mapped_to_the_parents_tiles():
    graph = small_graph()
    virtual = graph.create_virtual_graph([6, 2, 4])
    v = virtual.add_variable(FLOAT, [3], "v")
    for i in range(3):
        virtual.set_tile_mapping(v[i], i)
    assert (tile_of(graph, v), tile_of(virtual, v)) == ([6, 2, 4], [0, 1, 2])
    assert v.variables()[0] in graph.variables
    assert virtual.get_tile_mapping(v) == [[(0, 1)], [(1, 2)], [(2, 3)]]
    w = virtual.add_variable(FLOAT, [2, 2], "w")
    virtual.set_tile_mapping(w, blocked_mapping([np.array([0, 1, 2]), np.array([0, 2])], np.array([[1], [0]])))
    assert (tile_of(graph, w), tile_of(virtual, w)) == ([2, 2, 6, 6], [1, 1, 0, 0])
    with pytest.raises(MappingError, match=r"0 … 2[\s\S]*got: 3"):
        virtual.set_tile_mapping(v, 3)
    with pytest.raises(GraphError, match=r"0 … 2[\s\S]*got: 3"):
        virtual.set_tile_mapping(virtual.add_vertex(virtual.add_compute_set("c"), SumVertex), 3)


def test_sees_the_parents_variables_that_are_mapped_to_its_tiles():
    graph = small_graph()
    virtual = graph.create_virtual_graph(2, 5)
    inside, outside, across = (graph.add_variable(FLOAT, [2], name) for name in ("inside", "outside", "across"))
    graph.set_tile_mapping(inside, 3)
    graph.set_tile_mapping(outside, 6)
    graph.set_tile_mapping(across, np.array([4, 5]))
    assert [virtual.is_mapped(t) for t in (inside, outside, across)] == [True, False, False]
    assert tile_of(virtual, inside) == [1, 1] and list(virtual.mappings) == [inside.variables()[0]]
    graph.set_tile_mapping(across, 4)
    assert len(virtual.mappings) == 2
    with pytest.raises(MappingError, match="is mapped to no tile"):
        virtual.get_tile_mapping(outside)


def test_a_pipeline_of_two_virtual_graphs_runs_as_one_program():
    graph = small_graph()
    prog = Sequence()
    first = graph.create_virtual_graph(0, 4)
    second = graph.create_virtual_graph(4, 8)
    x = first.add_variable(FLOAT, [4, 3], "x")
    sums = second.add_variable(FLOAT, [4], "sums")
    out = second.add_variable(FLOAT, [4], "out")
    for i in range(4):
        first.set_tile_mapping(x[i], i)
        second.set_tile_mapping(sums[i], i)
        second.set_tile_mapping(out[i], 3 - i)
    first.add_codelets(SumVertex)
    compute_set = first.add_compute_set("sums")
    for i in range(4):
        v = first.add_vertex(compute_set, "SumVertex", {"in": x[i], "out": sums[i]})
        first.set_tile_mapping(v, i)
    prog.add(Execute(compute_set))
    doubled = elementwise(Builder(second, prog, "double"), Op("add", jnp.add, sums.dtype), [sums, sums])
    values = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    (got,) = run_both(graph, prog, {x: values}, [doubled])
    np.testing.assert_array_equal(got, 2 * values.sum(1))
    tiles = [group.tile[group.tile >= 0] for groups in graph.groups.values() for group in groups]
    assert tiles[0].tolist() == [0, 1, 2, 3] and all(tile.min() >= 4 for tile in tiles[1:])
    assert min(tile_of(graph, doubled)) >= 4


def test_libraries_use_the_tiles_of_the_virtual_graph_only():
    graph = small_graph()
    prog = Sequence()
    virtual = graph.create_virtual_graph([7, 5])
    a = virtual.add_variable(FLOAT, [64], "a")
    virtual.set_tile_mapping(a, np.arange(64) // 32)
    total = elementwise(Builder(virtual, prog, "add"), Op("add", jnp.add, a.dtype), [a, a])
    assert set(tile_of(graph, total)) == {7, 5}
    (got,) = run_both(graph, prog, {a: np.arange(64)}, [total])
    np.testing.assert_array_equal(got, 2 * np.arange(64))
    # The virtual graph is a graph of its own machine, too.
    (result_of_virtual_graph,) = run_both(virtual, prog, {a: np.arange(64)}, [total])
    np.testing.assert_array_equal(result_of_virtual_graph, got)


def test_virtual_graphs_nest():
    graph = small_graph()
    inner = graph.create_virtual_graph(2, 8).create_virtual_graph([3, 1])
    v = inner.add_variable(FLOAT, [2], "v")
    inner.set_tile_mapping(v, np.array([0, 1]))
    assert tile_of(graph, v) == [5, 3] and inner.get_top_level_graph() is graph


def test_refuses_vertices_on_tiles_of_the_parent_only():
    graph = small_graph()
    x = placed(graph, FLOAT, [3], "x", 1)
    out = placed(graph, FLOAT, [1], "out", 1)
    compute_set = graph.add_compute_set("sums")
    graph.set_tile_mapping(graph.add_vertex(compute_set, SumVertex, {"in": x, "out": out}), 6)
    virtual = graph.create_virtual_graph(0, 4)
    with pytest.raises(GraphError, match=r"SumVertex in sums are mapped to tiles this virtual graph lacks"):
        _ = virtual.groups[compute_set]


def test_refuses_a_vertex_that_reads_memory_of_another_ipu():
    graph = small_graph(4, num_ipus=2)
    x = placed(graph, FLOAT, [3], "x", 1)
    out = placed(graph, FLOAT, [1], "out", 5)
    virtual = graph.create_virtual_graph(4, 8)
    compute_set = virtual.add_compute_set("sums")
    virtual.set_tile_mapping(virtual.add_vertex(compute_set, SumVertex, {"in": x, "out": out}), 0)
    with pytest.raises(VerifyError, match=r"cross-ipu.*IPU 1 touches .*x.* on IPU 0"):
        compiled(graph, Execute(compute_set), {x: np.ones(3)}, [out])


def test_vertices_on_two_ipus_are_two_groups():
    graph = small_graph(4, num_ipus=2)
    x = graph.add_variable(FLOAT, [8, 3], "x")
    out = graph.add_variable(FLOAT, [8], "out")
    compute_set = graph.add_compute_set("sums")
    for i in range(8):
        graph.set_tile_mapping(x[i], i)
        graph.set_tile_mapping(out[i], i)
        v = graph.add_vertex(compute_set, SumVertex, {"in": x[i], "out": out[i]})
        graph.set_tile_mapping(v, i)
    assert [group.num_vertices for group in graph.groups[compute_set]] == [4, 4]
    (got,) = run_both(graph, Execute(compute_set), {x: np.ones((8, 3))}, [out])
    np.testing.assert_array_equal(got, np.full(8, 3))
