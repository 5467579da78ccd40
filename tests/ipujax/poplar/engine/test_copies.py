"""Vertices connected to memory of other IPUs: the engine copies their operands and results, as Poplar does."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import poplar
from ipujax.poplar.engine.copies import with_ipu_copies
from ipujax.poplar.program import Copy, Execute, Repeat, Sequence
from ipujax.runtime.graph import Copy as RuntimeCopy, distinct
from tests.ipujax.poplar.helpers import run_both, small_graph

FLOAT = poplar.FLOAT
VALUES = np.arange(24, dtype=np.float32).reshape(8, 3)


class AddRows(poplar.Vertex):
    a: poplar.Input[poplar.Vector[FLOAT]]
    b: poplar.Input[poplar.Vector[FLOAT]]
    out: poplar.Output[poplar.Vector[FLOAT]]

    def compute(a, b):
        return a + b


class Doubled(poplar.Vertex):
    x: poplar.InOut[poplar.Vector[FLOAT]]

    def compute(x):
        return 2 * x


class Counted(poplar.Vertex):
    x: poplar.Input[poplar.Vector[FLOAT]]
    n: poplar.Input[poplar.Vector[poplar.INT]]
    out: poplar.Output[poplar.Vector[FLOAT]]

    def compute(x, n):
        return x + n


def rows_graph(num_ipus: int = 2, shift: int = 0):
    """A graph with x, a row a tile, and out, a row a tile, moved on by some tiles."""
    graph = small_graph(8 // num_ipus, num_ipus)
    graph.add_codelets(AddRows)
    graph.add_codelets(Doubled)
    graph.add_codelets(Counted)
    x, out = (graph.add_variable(FLOAT, [8, 3], name) for name in ("x", "out"))
    for row in range(8):
        graph.set_tile_mapping(x[row], row)
        graph.set_tile_mapping(out[row], (row + shift) % 8)
    graph.create_host_write("x", x)
    graph.create_host_read("out", out)
    graph.create_host_read("x", x)
    return graph, x, out


def neighbours_sum(graph, x, out):
    compute_set = graph.add_compute_set("sums")
    for row in range(8):
        fields = {"a": x[row], "b": x[(row + 1) % 8], "out": out[row]}
        graph.set_tile_mapping(graph.add_vertex(compute_set, "AddRows", fields), row)
    return Execute(compute_set)


def run(graph, program, read="out"):
    """The value of a handle after a run, and the engine."""
    engine = poplar.Engine(graph, program)
    engine.load(
        poplar.IPUModel(num_ipus=graph.target.num_ipus, tiles_per_ipu=8 // graph.target.num_ipus).create_device()
    )
    engine.write_tensor("x", VALUES)
    engine.run(0)
    return engine.read_tensor(read), engine


@pytest.mark.parametrize("num_ipus", [2, 4])
@pytest.mark.parametrize("shift", [0, 3])
def test_operands_and_results_cross_ipus(num_ipus, shift):
    graph, x, out = rows_graph(num_ipus, shift)
    got, engine = run(graph, Sequence(neighbours_sum(graph, x, out)))
    np.testing.assert_array_equal(got, VALUES + np.roll(VALUES, -1, 0))
    copies = [node for node in distinct(engine._compiled.programs[0]) if isinstance(node, RuntimeCopy)]
    assert [copy.name for copy in copies] == ["sums/operands", "sums/results"][: 1 + (shift > 0)]
    assert engine.profile.phase_cycles["global_exchange"] > 0


def test_only_rows_with_elements_of_other_ipus_are_copied():
    graph, x, out = rows_graph(2)
    _, engine = run(graph, Sequence(neighbours_sum(graph, x, out)))
    (copy,) = [node for node in distinct(engine._compiled.programs[0]) if isinstance(node, RuntimeCopy)]
    assert copy.source.size == 2 * 3  # row 4 for tile 3, row 0 for tile 7


def test_the_tile_interpreter_agrees():
    graph, x, out = rows_graph(4, 1)
    local, (program,) = with_ipu_copies(graph, [Sequence(neighbours_sum(graph, x, out))])
    (got,) = run_both(local, program, {x: VALUES}, [out])  # which also verifies that no vertex touches another IPU
    np.testing.assert_array_equal(got, VALUES + np.roll(VALUES, -1, 0))


def test_read_and_written_operands_in_a_loop():
    graph, x, _ = rows_graph(2)
    compute_set = graph.add_compute_set("doubled")
    for row in range(8):  # each on the other IPU
        graph.set_tile_mapping(graph.add_vertex(compute_set, "Doubled", {"x": x[row]}), (row + 4) % 8)
    got, _ = run(graph, Repeat(3, Execute(compute_set)), "x")
    np.testing.assert_array_equal(got, 8 * VALUES)


def test_an_operand_that_vertices_share_and_two_types():
    graph, x, out = rows_graph(2)
    counts = graph.add_constant(poplar.INT, [3], [1, 2, 3], "counts")
    graph.set_tile_mapping(counts, 0)
    compute_set = graph.add_compute_set("counted")
    for row in range(8):
        fields = {"x": x[row], "n": counts, "out": out[row]}
        graph.set_tile_mapping(graph.add_vertex(compute_set, "Counted", fields), (row + 4) % 8)
    got, _ = run(graph, Sequence(Execute(compute_set)))
    np.testing.assert_array_equal(got, VALUES + np.array([1, 2, 3]))


def test_a_function_that_is_called_twice():
    graph, x, out = rows_graph(2)
    function = graph.add_function(Sequence(neighbours_sum(graph, x, out), Copy(out, x)))
    got, _ = run(graph, Sequence(poplar.program.Call(function), poplar.program.Call(function)))
    once = VALUES + np.roll(VALUES, -1, 0)
    np.testing.assert_array_equal(got, once + np.roll(once, -1, 0))


def test_one_ipu_has_no_copies():
    graph, x, out = rows_graph(1, 3)
    _, engine = run(graph, Sequence(neighbours_sum(graph, x, out)))
    assert engine.profile.phase_cycles["global_exchange"] == 0
    assert not [node for node in distinct(engine._compiled.programs[0]) if isinstance(node, RuntimeCopy)]
