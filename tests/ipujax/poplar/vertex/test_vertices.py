"""Single vertices: their results, their groups, large numbers of them, and invalid connections.

The oracle of results is a loop of plain NumPy over the same connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax import poplar
from ipujax.poplar import FLOAT, HALF, INT, InOut, Input, Output, Vector, VectorList, Vertex
from ipujax.poplar.vertex.stacking import mixed_radix, stacked
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import GraphError, VerifyError
from ipujax.runtime.graph.program import ComputeSet, Execute, Program, Sequence
from ipujax.runtime.tensor.tensor import Tensor
from tests.ipujax.poplar.helpers import TILES, compiled, placed, run_both, small_graph, streamed


class SumVertex(Vertex):
    in_: Input[Vector[FLOAT]]
    out: Output[FLOAT]

    def compute(in_):
        return jnp.sum(in_)


class DotVertex(Vertex):
    a: Input[Vector[FLOAT]]
    b: Input[Vector[FLOAT]]
    out: Output[FLOAT]

    def compute(a, b):
        return jnp.sum(a * b)


class ScaleVertex(Vertex):
    data: InOut[Vector[FLOAT]]
    by: Input[FLOAT]

    def compute(data, by):
        return data * by


class PowerVertex(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]
    power: INT
    shift: FLOAT = 0.5

    def compute(x, power, shift):
        return x**power + shift


class ListVertex(Vertex):
    parts: Input[VectorList[FLOAT]]
    sums: Output[Vector[FLOAT]]
    twice: Output[VectorList[FLOAT]]

    def compute(parts):
        return {"sums": jnp.stack([jnp.sum(part) for part in parts]), "twice": [2 * part for part in parts]}


# --- results ----------------------------------------------------------------------------------------------------------


def test_suffix_sums_of_the_guide():
    graph = small_graph()
    v1, v2 = (placed(graph, FLOAT, [4], name) for name in ("v1", "v2"))
    graph.add_codelets(SumVertex)
    compute_set = graph.add_compute_set("computeSet")
    for i in range(4):
        vtx = graph.add_vertex(compute_set, "SumVertex")
        graph.connect(vtx["in"], v1.slice(i, 4))
        graph.connect(vtx["out"], v2[i])
        graph.set_tile_mapping(vtx, i)
        graph.set_cycle_estimate(vtx, 20)
    (got,) = run_both(graph, Execute(compute_set), {v1: [1, 1.5, 2, 2.5]}, [v2])
    np.testing.assert_array_equal(got, [7, 6, 4.5, 2.5])


def test_vertices_of_equal_shapes_are_one_group_whose_regions_are_affine():
    graph = small_graph()
    matrix, vector, out = (placed(graph, FLOAT, shape, "x") for shape in ([6, 5], [5], [6]))
    compute_set = graph.add_compute_set("mul")
    for i in range(6):
        v = graph.add_vertex(compute_set, DotVertex, {"a": matrix[5 - i], "b": vector, "out": out[i]})
        graph.set_tile_mapping(v, i)
    (group,) = graph.groups[compute_set]
    assert group.num_vertices == 6 and group.grid == (6, 1)
    a, b, y = group.accesses
    assert a.tensor.affine is not None and a.tensor.shape == (6, 5)
    assert b.tensor is vector and len(b.dims) == 1
    assert y.tensor.is_whole_variable
    x = np.arange(30.0, dtype=np.float32).reshape(6, 5)
    w = np.ones(5, np.float32)
    (got,) = run_both(graph, Execute(compute_set), {matrix: x, vector: w}, [out])
    np.testing.assert_array_equal(got, (x @ w)[::-1])


@settings(max_examples=6)
@given(st.data())
def test_any_connections_compute_the_results_of_a_loop(data):
    """Rows of several lengths, strides and variables, any views, on any tiles."""
    graph = small_graph()
    matrix = placed(graph, FLOAT, [4, 6], "matrix", 1)
    other = placed(graph, FLOAT, [9], "other", 2)
    out = placed(graph, FLOAT, [24], "out", 3)
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    y = -np.arange(9.0, dtype=np.float32)
    row = st.integers(0, 3)
    start = st.integers(0, 3)
    length = st.integers(1, 3)
    views: dict[str, Callable[..., tuple[Tensor, np.ndarray]]] = {
        "row": lambda i, s, n: (matrix[i, s : s + n], x[i, s : s + n]),
        "column": lambda i, s, n: (matrix[:n, i], x[:n, i]),
        "reversed": lambda i, s, n: (other[s : s + n].reverse(0), y[s : s + n][::-1]),
        "joined": lambda i, s, n: (poplar.concat([matrix[i, :n], other[s : s + 1]]), np.append(x[i, :n], y[s])),
        "repeated": lambda i, s, n: (other[s : s + 1].broadcast(n), np.repeat(y[s], n)),
        "reshaped": lambda i, s, n: (matrix.transpose().flatten()[s : s + n], x.T.flatten()[s : s + n]),
    }
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(sorted(views)), row, start, length), min_size=1, max_size=8))
    places = data.draw(st.permutations(range(24)))
    compute_set = graph.add_compute_set("sums")
    expected = np.zeros(24, np.float32)
    for (kind, i, s, n), place in zip(chosen, places, strict=False):
        tensor, values = views[kind](i, s, n)
        v = graph.add_vertex(compute_set, SumVertex, {"in": tensor, "out": out[place]})
        graph.set_tile_mapping(v, data.draw(st.integers(0, TILES - 1)))
        expected[place] = values.sum()
    (got,) = run_both(graph, Execute(compute_set), {matrix: x, other: y, out: np.zeros(24)}, [out])
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-5, 5)), max_size=5), st.integers(0, 50))
def test_finds_nested_progressions_only(digits, first):
    values = np.array(first)
    for size, stride in digits:
        values = values[..., None] + np.arange(size) * stride
    values = values.reshape(-1).astype(np.int64)
    result = mixed_radix(values)
    if result is None:
        assert sum(size > 1 for size, _ in digits) > 1
        return
    rebuilt = np.array(first)
    for size, stride in result:
        rebuilt = rebuilt[..., None] + np.arange(size) * stride
    np.testing.assert_array_equal(rebuilt.reshape(-1), values)


def test_rows_of_two_loops_stay_affine_and_unordered_rows_are_listed():
    graph = small_graph()
    matrix = placed(graph, FLOAT, [4, 6], "matrix")
    rows = [matrix[i, 2 * j : 2 * j + 2] for j in range(3) for i in range(4)]
    nested = stacked(rows)
    shuffled = stacked([rows[i] for i in (3, 1, 0, 7)])
    assert nested.affine is not None and shuffled.affine is None
    x = np.arange(24).reshape(4, 6)
    expected = np.stack([x[i, 2 * j : 2 * j + 2] for j in range(3) for i in range(4)])
    np.testing.assert_array_equal(nested.flat_indices()[1], expected)
    np.testing.assert_array_equal(shuffled.flat_indices()[1], expected[[3, 1, 0, 7]])


def test_a_field_that_is_read_and_written_is_updated_in_place():
    graph = small_graph()
    data = placed(graph, FLOAT, [6], "data", 4)
    by = placed(graph, FLOAT, [3], "by", 5)
    compute_set = graph.add_compute_set("scale")
    for i in range(3):
        v = graph.add_vertex(compute_set, ScaleVertex, {"data": data[2 * i : 2 * i + 2], "by": by[i]})
        graph.set_tile_mapping(v, i)
    (got,) = run_both(graph, Execute(compute_set), {data: np.arange(6), by: [1, 10, 100]}, [data])
    np.testing.assert_array_equal(got, [0, 1, 20, 30, 400, 500])


def test_state_has_a_value_of_each_vertex_and_a_default_in_the_codelet():
    graph = small_graph()
    x = placed(graph, FLOAT, [2], "x")
    out = placed(graph, FLOAT, [3, 2], "out")
    compute_set = graph.add_compute_set("power")
    for i in range(3):
        v = graph.add_vertex(compute_set, PowerVertex, {"x": x, "out": out[i], "power": i + 1})
        graph.set_tile_mapping(v, i)
    graph.set_initial_value(v["shift"], 2)
    assert len(graph.groups[compute_set]) == 1
    (got,) = run_both(graph, Execute(compute_set), {x: [2, 3]}, [out])
    np.testing.assert_array_equal(got, [[2.5, 3.5], [4.5, 9.5], [10, 29]])


def test_vector_lists_have_vectors_of_their_own_lengths():
    graph = small_graph()
    x, sums, twice = (placed(graph, FLOAT, shape, "t") for shape in ([9], [2, 2], [9]))
    compute_set = graph.add_compute_set("lists")
    first = graph.add_vertex(compute_set, ListVertex, {"parts": [x[0:3], x[3:4]], "sums": sums[0]})
    graph.connect(first["twice"], [twice[0:3], twice[3:4]])
    second = graph.add_vertex(compute_set, ListVertex, {"parts": x[5:9].reshape([2, 2]), "sums": sums[1]})
    graph.connect(second["twice"], twice[5:9].reshape([2, 2]))
    for tile, v in enumerate((first, second)):
        graph.set_tile_mapping(v, tile)
    values = np.arange(9.0, dtype=np.float32)
    got, doubled = run_both(graph, Execute(compute_set), {x: values, twice: np.zeros(9)}, [sums, twice])
    np.testing.assert_array_equal(got, [[3, 3], [11, 15]])
    np.testing.assert_array_equal(doubled, np.where(np.arange(9) == 4, 0, 2 * values))


def test_an_empty_vector_reads_as_an_empty_array():
    graph = small_graph()
    x = placed(graph, FLOAT, [4], "x")
    out = placed(graph, FLOAT, [2], "out")
    compute_set = graph.add_compute_set("sums")
    for i in range(2):
        v = graph.add_vertex(compute_set, SumVertex, {"in": x.slice(2 * i, 4 * i), "out": out[i]})
        graph.set_tile_mapping(v, i)
    (got,) = run_both(graph, Execute(compute_set), {x: np.ones(4)}, [out])
    np.testing.assert_array_equal(got, [0, 2])


def test_vertices_run_once_an_iteration_and_beside_groups_of_the_libraries():
    graph = small_graph()
    x = placed(graph, FLOAT, [2], "x")
    by = placed(graph, FLOAT, [], "by")
    compute_set = graph.add_compute_set("scale")
    v = graph.add_vertex(compute_set, ScaleVertex, {"data": x, "by": by})
    graph.set_tile_mapping(v, 0)
    (got,) = run_both(graph, poplar.program.Repeat(3, Execute(compute_set)), {x: [1, 2], by: 3}, [x])
    np.testing.assert_array_equal(got, [27, 54])


# --- cost -------------------------------------------------------------------------------------------------------------


def vertices_of_lengths(lengths: list[int], tile: int = 0) -> tuple[poplar.Graph, ComputeSet, Tensor, list]:
    graph = small_graph()
    x = placed(graph, FLOAT, [sum(lengths)], "x")
    out = placed(graph, FLOAT, [len(lengths)], "out")
    compute_set = graph.add_compute_set("sums")
    vertices = []
    start = 0
    for i, n in enumerate(lengths):
        vertices.append(graph.add_vertex(compute_set, SumVertex, {"in": x.slice(start, start + n), "out": out[i]}))
        graph.set_tile_mapping(vertices[-1], tile)
        start += n
    return graph, compute_set, x, vertices


def busiest_tile_cycles(graph: poplar.Graph, compute_set: ComputeSet, x: Tensor) -> int:
    """Cycles of the slowest tile in a compute set."""
    step = Execute(compute_set)
    costs = compiled(graph, step, {x: np.zeros(x.shape)}, []).costs
    return int(costs[step].compute_cycles.max())


def test_a_perf_estimate_sets_the_cycles_of_a_vertex():
    graph, compute_set, x, vertices = vertices_of_lengths([2] * 8)
    for cycles, v in zip([100, 90, 80, 70, 60, 50, 40, 30], vertices, strict=True):
        graph.set_perf_estimate(v, cycles)
    target = graph.get_target()
    # Longest first to the least busy of six workers: 100, 90, 80, 70, 60, 50, then 40 to the sixth and 30 to the fifth.
    expected = target.supervisor_overhead_cycles + 6 * 100
    assert busiest_tile_cycles(graph, compute_set, x) == expected
    graph.set_perf_estimate(vertices[6], 75)
    assert busiest_tile_cycles(graph, compute_set, x) == target.supervisor_overhead_cycles + 6 * (60 + 50)


def test_without_an_estimate_a_dot_takes_four_instructions_a_multiply_add():
    def cycles(n: int) -> int:
        graph = small_graph()
        a, b, out = (placed(graph, FLOAT, shape, "x") for shape in ([n], [n], []))
        compute_set = graph.add_compute_set("dot")
        v = graph.add_vertex(compute_set, DotVertex, {"a": a, "b": b, "out": out})
        graph.set_tile_mapping(v, 0)
        step = Execute(compute_set)
        costs = compiled(graph, step, {a: np.zeros(n), b: np.zeros(n)}, []).costs
        return int(costs[step].compute_cycles.max())

    assert cycles(200) - cycles(100) == 6 * 4 * 100


# --- many -------------------------------------------------------------------------------------------------------------


class ScaledSumVertex(Vertex):
    in_: Input[Vector[FLOAT]]
    scale: FLOAT
    out: Output[FLOAT]

    def compute(in_, scale):
        return jnp.sum(in_) * scale


@pytest.mark.parametrize("has_state", [False, True])
def test_a_hundred_thousand_vertices_are_added_compiled_and_run(has_state):
    """Limit of 20 s; a quadratic loop over vertices, or one traced call a vertex, takes far longer."""
    number = 100_000
    start = time.process_time()
    graph = poplar.Graph(poplar.IPUModel().create_device())
    num_tiles = graph.target.num_tiles
    x = graph.add_variable(FLOAT, [number, 2], "x")
    out = graph.add_variable(FLOAT, [number], "out")
    tiles = np.arange(number) * num_tiles // number
    graph.set_tile_mapping(x, np.repeat(tiles, 2))
    graph.set_tile_mapping(out, tiles)
    compute_set = graph.add_compute_set("sums")
    order = np.random.default_rng(0).permutation(number).tolist()
    for i, tile in zip(order, tiles[order].tolist(), strict=True):
        state = {"scale": i % 3} if has_state else {}
        codelet = ScaledSumVertex if has_state else SumVertex
        v = graph.add_vertex(compute_set, codelet, {"in": x[i], "out": out[i], **state})
        graph.set_tile_mapping(v, tile)
    values = np.arange(2.0 * number, dtype=np.float32).reshape(number, 2)
    program, inputs, (stream,) = streamed(Execute(compute_set), {x: values}, [out])
    executable = compile(graph, program)
    got = jax.jit(executable.function)(inputs)[stream]
    np.testing.assert_array_equal(got, values.sum(1) * (np.arange(number) % 3 if has_state else 1))
    assert time.process_time() - start < 20


# --- refusals ---------------------------------------------------------------------------------------------------------


class Other(Vertex):
    half: Input[HALF]
    out: Output[FLOAT]

    def compute(half):
        return half.astype(jnp.float32)


def two_variables() -> tuple[poplar.Graph, ComputeSet, Tensor, Tensor]:
    graph = small_graph()
    graph.add_codelets([SumVertex, DotVertex, PowerVertex])
    return graph, graph.add_compute_set("cs"), placed(graph, FLOAT, [2, 4], "x"), placed(graph, FLOAT, [4], "out")


def test_a_field_left_unconnected_names_vertex_field_and_line():
    graph, compute_set, x, out = two_variables()
    graph.set_tile_mapping(graph.add_vertex(compute_set, SumVertex, {"in": x[0], "out": out[0]}), 0)
    v = graph.add_vertex(compute_set, SumVertex, {"in": x[0]})  # the line to be named
    graph.set_tile_mapping(v, 0)
    message = r"field out of vertex 1 \(SumVertex\) of compute set cs is not connected"
    with pytest.raises(GraphError, match=message) as e:
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])
    assert "the line to be named" in line_of(e.value)


def line_of(error: Exception) -> str:
    """The source line an error names."""
    file, number = str(error.where).split(" ")[0].split(":")
    assert file == "test_vertices.py"
    with open(__file__, encoding="utf-8") as source:
        return source.readlines()[int(number) - 1]


def test_names_an_unmapped_vertex():
    graph, compute_set, x, out = two_variables()
    graph.add_vertex(compute_set, SumVertex, {"in": x[0], "out": out[0]})  # the homeless
    with pytest.raises(GraphError, match=r"vertex 0 \(SumVertex\) of compute set cs has no tile") as e:
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])
    assert "the homeless" in line_of(e.value)


def _connect_twice(graph, vertex, x, out):
    graph.connect(vertex["in"], x[0])
    graph.connect(vertex["in"], x[1])


REFUSED = {
    "connected twice": (_connect_twice, r"field in of vertex 0 \(SumVertex\) of compute set cs is connected twice"),
    "wrong shape": (lambda g, v, x, out: g.connect(v["in"], x), r"expected: one dimension[\s\S]*got: shape \[2, 4\]"),
    "no scalar": (lambda g, v, x, out: g.connect(v["out"], out), r"field out[\s\S]*expected: one element"),
    "no tensor": (lambda g, v, x, out: g.connect(v["in"], 3.0), r"field in[\s\S]*expected: a tensor[\s\S]*got: 3.0"),
    "unknown field": (lambda g, v, x, out: v["ou"], r"SumVertex has no field 'ou'[\s\S]*'in'[\s\S]*try: 'out'"),
    "no such tile": (lambda g, v, x, out: g.set_tile_mapping(v, 8), r"mapped to tile 8[\s\S]*0 … 7"),
    "negative cycles": (lambda g, v, x, out: g.set_perf_estimate(v, -1), r"expected: a whole number, 0 … 4294967295"),
    "unknown codelet": (
        lambda g, v, x, out: g.add_vertex(g.add_compute_set("c"), "SumVertx"),
        r"no codelet 'SumVertx'[\s\S]*DotVertex[\s\S]*try: 'SumVertex'",
    ),
    "value of a connection": (lambda g, v, x, out: g.set_initial_value(v["in"], 1), "is not state"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_connections_are_refused_at_their_line(name):
    act, message = REFUSED[name]
    graph, compute_set, x, out = two_variables()
    vertex = graph.add_vertex(compute_set, "SumVertex")
    with pytest.raises(GraphError, match=message) as e:
        act(graph, vertex, x, out)
    assert str(e.value.where).startswith("test_vertices.py:")


def test_refuses_another_type():
    graph, compute_set, x, _ = two_variables()
    with pytest.raises(GraphError, match=r"field half of[\s\S]*expected: float16[\s\S]*got: float32"):
        graph.add_vertex(compute_set, Other, {"half": x[0, 0]})


def test_state_without_a_value_is_refused_at_the_line_of_the_vertex():
    graph, compute_set, x, _ = two_variables()
    out = placed(graph, FLOAT, [4], "y")
    v = graph.add_vertex(compute_set, PowerVertex, {"x": x[0], "out": out})  # powerless
    graph.set_tile_mapping(v, 0)
    message = r"state power of vertex 0 \(PowerVertex\) of compute set cs has no value"
    with pytest.raises(GraphError, match=message) as e:
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])
    assert "powerless" in line_of(e.value)
    with pytest.raises(GraphError, match="is state, not connected to tensors"):
        graph.connect(v["power"], x[0, 0])


def test_two_vertices_that_write_one_element_are_both_named():
    graph, compute_set, x, out = two_variables()
    for i, place in enumerate((1, 2, 1)):
        v = graph.add_vertex(compute_set, SumVertex, {"in": x[0], "out": out[place]})
        graph.set_tile_mapping(v, i)
    message = (
        r"\[write-race\] .*out: float32\[4\]\)\[1\] is written twice through field out, by vertex 0.* and vertex 2"
    )
    with pytest.raises(VerifyError, match=message):
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])


def test_races_between_vertices_of_different_shapes_are_found():
    graph, compute_set, x, out = two_variables()
    for i in range(2):
        v = graph.add_vertex(compute_set, SumVertex, {"in": x[0, i:], "out": out[0]})
        graph.set_tile_mapping(v, i)
    with pytest.raises(VerifyError, match=r"write-race.*out.*\[0\]"):
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])


def test_refuses_a_vertex_that_reads_elements_of_another_writer():
    def program(read: Callable[[Tensor, int], Tensor]) -> tuple[poplar.Graph, Program, Tensor]:
        graph, compute_set, _, out = two_variables()
        for i in range(2):
            v = graph.add_vertex(compute_set, SumVertex, {"in": read(out, i), "out": out[i]})
            graph.set_tile_mapping(v, i)
        return graph, Sequence(Execute(compute_set)), out

    graph, step, out = program(lambda out, i: out[1 - i : 2 - i])
    with pytest.raises(VerifyError, match="read-write-race"):
        compiled(graph, step, {out: np.zeros(4)}, [])
    graph, step, out = program(lambda out, i: out[2 + i : 3 + i])
    (got,) = run_both(graph, step, {out: np.arange(4)}, [out])
    np.testing.assert_array_equal(got, [2, 3, 2, 3])


def test_refuses_a_write_to_a_constant():
    graph, compute_set, x, _ = two_variables()
    constant = graph.add_constant(FLOAT, [2], [1, 2], "fixed")
    graph.set_tile_mapping(constant, 0)
    v = graph.add_vertex(compute_set, SumVertex, {"in": x[0], "out": constant[0]})
    graph.set_tile_mapping(v, 0)
    with pytest.raises(VerifyError, match=r"read-only-output.*fixed"):
        compiled(graph, Execute(compute_set), {x: np.zeros((2, 4))}, [])


def test_compiles_after_an_invalid_vertex_is_corrected():
    graph, compute_set, x, out = two_variables()
    v = graph.add_vertex(compute_set, SumVertex, {"in": x[0]})
    with pytest.raises(GraphError):
        _ = graph.groups[compute_set]
    graph.set_tile_mapping(v, 2)
    graph.connect(v["out"], out[0])
    (got,) = run_both(graph, Execute(compute_set), {x: np.ones((2, 4)), out: np.zeros(4)}, [out])
    assert got[0] == 4


# --- reads and writes of a vertex -------------------------------------------------------------------------------------


class DoubleVertex(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]

    def compute(x):
        return 2 * x


@pytest.mark.parametrize(("into", "outof"), [(slice(4), slice(4)), (slice(3), slice(3, 6)), (slice(4), slice(2, 6))])
@pytest.mark.parametrize("vertices", [1, 2])
def test_a_vertex_reads_its_written_elements_only_in_place(into, outof, vertices):
    graph = small_graph()
    x = placed(graph, FLOAT, [vertices, 6], "x")
    compute_set = graph.add_compute_set("scale")
    for row in x:
        vertex = graph.add_vertex(compute_set, DoubleVertex, {"x": row[into], "out": row[outof]})
        graph.set_tile_mapping(vertex, 0)
    values = np.arange(6 * vertices).reshape(vertices, 6)
    if into.start != outof.start and into.stop > outof.start:
        with pytest.raises(VerifyError, match=r"x: float32.*\[0, 2\] is read through field x .* by the same vertex"):
            run_both(graph, Execute(compute_set), {x: values}, [x])
        return
    expected = values.copy()
    expected[:, outof] = 2 * values[:, into]
    (result,) = run_both(graph, Execute(compute_set), {x: values}, [x])
    np.testing.assert_array_equal(result, expected)
