"""Values, types and programs that are invalid: refused at their line, and the graph is unchanged.

Lines that errors must name are marked `# here`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import codelet_call, poplar
from ipujax.poplar import BOOL, CHAR, FLOAT, HALF, INT, UNSIGNED_INT, Input, Output, Vector, VectorList, Vertex, program
from ipujax.poplar.program import Copy, Execute, Sequence
from ipujax.runtime.errors import ArgumentError, EngineError, GraphError, MappingError, TensorError
from ipujax.runtime.tensor.tensor import concat
from tests.ipujax.poplar.engine_helpers import DEVICE, new_graph, variable
from tests.ipujax.poplar.refusals import refused


class ScaleVertex(Vertex):
    x: Input[Vector[FLOAT]]
    factor: INT
    out: Output[FLOAT]

    def compute(x, factor):
        return jnp.sum(x) * factor


class Setting:
    """A graph with a few variables and a vertex."""

    def __init__(self):
        self.graph = new_graph()
        self.a = variable(self.graph, [2, 3], name="a")
        self.int = variable(self.graph, [2, 3], INT, "int")
        self.seed = variable(self.graph, [2], UNSIGNED_INT, "seed")
        self.compute_set = self.graph.add_compute_set("cs")
        self.vertex = self.graph.add_vertex(self.compute_set, ScaleVertex)


@pytest.fixture
def s():
    return Setting()


# --- values and types -------------------------------------------------------------------------------------------------

VALUES = {
    "a fraction as INT": (INT, 2.5),
    "more than INT holds": (INT, 2**40),
    "a negative UNSIGNED_INT": (UNSIGNED_INT, -1),
    "more than HALF holds": (HALF, 1e9),
    "text": (INT, "a"),
    "nothing": (FLOAT, None),
    "nan as INT": (INT, float("nan")),
    "two as BOOL": (BOOL, 2),
    "rows of different lengths": (FLOAT, [[1], [1, 2]]),
}


@pytest.mark.parametrize("case", VALUES)
def test_refuses_values_out_of_range_of_a_type(s, case):
    dtype, value = VALUES[case]
    with refused(GraphError, r"c[\s\S]*expected: "):
        s.graph.add_constant(dtype, [], value, "c")  # here
    tensor = variable(s.graph, [1], dtype)
    with refused(GraphError, "v"):
        s.graph.set_initial_value(tensor, value)  # here


@pytest.mark.parametrize("value", [1.5, 2**40, "a", float("nan"), None])
def test_refuses_state_out_of_range_of_its_type(s, value):
    with refused(GraphError, r"factor of vertex 0 \(ScaleVertex\)"):
        s.graph.set_initial_value(s.vertex["factor"], value)  # here


def test_accepts_values_that_convert_without_loss(s):
    graph = s.graph
    assert graph.add_constant(HALF, [], 0.1).variables()[0].value == np.float16(0.1)  # rounded, not refused
    assert graph.add_constant(HALF, [], np.inf).variables()[0].value == np.inf
    assert graph.add_constant(INT, [2], 3.0).variables()[0].value.tolist() == [3, 3]
    assert graph.add_constant(BOOL, [2], [0, 1]).variables()[0].value.tolist() == [False, True]
    assert graph.add_constant(FLOAT, [], True).variables()[0].value == 1
    graph.set_initial_value(s.vertex["factor"], np.float32(3))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
def test_refuses_types_of_64_bits(s, dtype):
    with refused(GraphError, rf"wide is of {np.dtype(dtype).name}[\s\S]*expected: .*32"):
        s.graph.add_variable(dtype, [2], "wide")  # here


@pytest.mark.parametrize(
    "mapping", [np.full(6, 0.5), np.array(["a"] * 6), [[(0, 1, 2)]], [[("a", "b")]], [[3]], [[(0, 2.5), (2.5, 6)]]]
)
def test_refuses_mappings_without_tiles(s, mapping):
    with refused(MappingError, r"mapping of Tensor\(float32\[2, 3\] of a\)"):
        s.graph.set_tile_mapping(s.a, mapping)  # here


@pytest.mark.parametrize("tiles", ["abc", 1.5, [0.5], True, [None]])
def test_refuses_virtual_graphs_without_tiles(s, tiles):
    with refused(GraphError, "virtual graph"):
        s.graph.create_virtual_graph(tiles)  # here


@pytest.mark.parametrize("tile", ["a", 1.0, None, 2, -1])
def test_refuses_unmapped_vertices_of_virtual_graphs(s, tile):
    virtual = s.graph.create_virtual_graph(2, 4)
    with refused(GraphError, rf"vertex 0 .* is mapped to tile [\s\S]*expected: a whole number, 0 … 1[\s\S]*{tile}"):
        virtual.set_tile_mapping(s.vertex, tile)  # here


@pytest.mark.parametrize("replicas", [1.0, True, 0, "2"])
def test_refuses_invalid_numbers_of_replicas(replicas):
    with refused(GraphError, "a graph cannot have .* replicas"):
        poplar.Graph(DEVICE, replicas)  # here


def test_refuses_invalid_names(s):
    with refused(GraphError, r"name of a stream[\s\S]*got: 3"):
        s.graph.add_host_to_device_fifo(3, FLOAT, 1)  # here
    with refused(GraphError, r"name of a remote buffer[\s\S]*got: 3"):
        s.graph.add_remote_buffer(3, FLOAT, 1)  # here
    with refused(GraphError, r"name of a compute set[\s\S]*got: 3"):
        s.graph.add_compute_set(3)  # here


def test_refuses_a_host_write_of_a_repeated_element(s):
    with refused(GraphError, r"host write w .*Tensor\(float32\[4, 3\] of a\)[\s\S]*a repeated element"):
        s.graph.create_host_write("w", s.a.broadcast(2, 0))  # here


def test_refuses_empty_views(s):
    with refused(TensorError, "reshape of"):
        s.a.reshape("a")  # here
    with refused(TensorError, r"concat[\s\S]*got: 3"):
        concat([s.a, 3])  # here


# --- codelets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: Input["abc"], "'abc'"),  # here
        (lambda: Vector[3], "3"),  # here
        (lambda: VectorList[Vector[FLOAT]], "Vectors"),  # here
        (lambda: Input[Output[FLOAT]], "Edge"),  # here
    ],
)
def test_refuses_fields_without_a_type(make, got):
    with refused(GraphError, rf"a field must have a type[\s\S]*got: {got}"):
        make()


@pytest.mark.parametrize("name", ["compute", "cycles"])
def test_refuses_codelets_without_functions(name):
    with refused(GraphError, rf"{name} of codelet Odd must be a function[\s\S]*got: 3"):
        type("Odd", (Vertex,), {"__annotations__": {"x": Input[FLOAT], "out": Output[FLOAT]}, name: 3})  # here


@pytest.mark.parametrize("value", [None, "text", object()])
def test_refuses_codelets_that_return_no_number(s, value):
    class Returns(Vertex):
        out: Output[FLOAT]

        def compute():  # here
            return value

    vertex = s.graph.add_vertex(compute_set := s.graph.add_compute_set("odd"), Returns, {"out": s.a[0, 0]})
    s.graph.set_tile_mapping(vertex, 0)
    with pytest.raises(GraphError, match=r"compute of Returns returns a \w+ for field out"):
        poplar.Engine(s.graph, Execute(compute_set))


def test_does_not_add_a_refused_vertex(s):
    compute_set = s.graph.add_compute_set("own")
    for wrong in ({"x": s.a}, {"x": s.a[0], "nothing": s.a[0]}, {"x": s.a[0], "out": s.int[0, 0]}):
        with refused(GraphError, "ScaleVertex"):
            s.graph.add_vertex(compute_set, ScaleVertex, wrong)  # here
    assert s.graph.groups[compute_set] == []
    vertex = s.graph.add_vertex(compute_set, ScaleVertex, {"x": s.a[0], "factor": 2, "out": s.a[1, 0]})
    s.graph.set_tile_mapping(vertex, 1)
    assert repr(vertex) == "vertex 0 (ScaleVertex) of compute set own"
    assert len(s.graph.groups[compute_set]) == 1


@pytest.mark.parametrize("tiles", [-1, "x", 1.5, [0.5], [-1]])
def test_refuses_codelet_calls_on_invalid_tiles(tiles):
    with refused(ArgumentError, r"codelet_call of ScaleVertex: tiles"):
        codelet_call(ScaleVertex, np.ones(3, np.float32), factor=1, tiles=tiles)  # here


@pytest.mark.parametrize("value", ["a", None, 1.5])
def test_refuses_codelet_calls_with_invalid_state(value):
    with refused(ArgumentError, "codelet_call of ScaleVertex: state"):
        codelet_call(ScaleVertex, np.ones(3, np.float32), factor=value)  # here


# --- programs and engines ---------------------------------------------------------------------------------------------


def test_refuses_programs_without_arguments(s):
    for make in (
        lambda: program.Function(3),  # here
        lambda: program.WriteUndef(3),  # here
        lambda: program.ErrorProgram("no", 3),  # here
        lambda: program.Switch(s.int[0, 0]),  # here
        lambda: program.Switch(s.int[0, 0], 3),  # here
        lambda: program.Switch(s.int[0, 0], {1.5: Sequence()}),  # here
        lambda: program.Switch(s.int[0, 0], {"a": Sequence()}),  # here
        lambda: program.Switch(s.int[0, 0], {2**31: Sequence()}),  # here
        lambda: program.Switch(s.seed[0], {-1: Sequence()}),  # here
        lambda: program.Repeat(True, Sequence()),  # here
    ):
        with refused(GraphError, r"\w"):
            make()


def test_refuses_a_compute_set_of_another_graph(s):
    other = new_graph().add_compute_set("other")
    with refused(GraphError, r"compute set other is not of this graph[\s\S]*graph.add_compute_set"):
        poplar.Engine(new_graph(), Sequence(Execute(other)))  # here


def test_refuses_a_non_integer_offset_into_a_remote_buffer(s):
    buffer = s.graph.add_remote_buffer("rows", FLOAT, 3, 5)
    with refused(GraphError, r"offset into remote buffer rows[\s\S]*int32 or uint32[\s\S]*float32"):
        Copy(s.a, buffer, s.a[:, 0])  # here


def test_refuses_to_load_while_a_program_runs():
    graph = new_graph()
    engine = poplar.Engine(graph, Copy(variable(graph, [6]), graph.add_device_to_host_fifo("out", FLOAT, 6)))
    engine.load(DEVICE)
    engine.connect_stream_to_callback("out", lambda _: engine.load(DEVICE))  # here
    with refused(EngineError, "load while a program of the engine runs"):
        engine.run()


@pytest.mark.parametrize(("dtype", "value"), [(CHAR, 300), (INT, 2**40), (HALF, 1e6)])
def test_refuses_host_writes_out_of_range_of_a_type(dtype, value):
    graph = new_graph()
    a = variable(graph, [2], dtype)
    graph.create_host_write("a", a)
    graph.create_host_read("a", a)
    engine = poplar.Engine(graph, Sequence())
    engine.load(DEVICE)
    with refused(GraphError, rf"values of handle a[\s\S]*{dtype}"):
        engine.write_tensor("a", [value, 1])  # here
    np.testing.assert_array_equal(engine.read_tensor("a"), [0, 0])


def test_refuses_ragged_rows_and_a_non_stream_for_prints():
    graph = new_graph()
    graph.create_host_write("a", variable(graph, [3]))
    engine = poplar.Engine(graph, Sequence())
    engine.load(DEVICE)
    with refused(ArgumentError, "handle a cannot be written"):
        engine.write_tensor("a", [[1, 2], [3]])  # here
    with refused(ArgumentError, "set_print_stream"):
        engine.set_print_stream(3)  # here
