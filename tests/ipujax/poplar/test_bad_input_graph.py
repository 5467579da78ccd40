"""Invalid graphs and programs: each is refused at once, with its defect and its line.

Lines that errors must name are marked `# here`. Valid graphs are tested elsewhere.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar import FLOAT, HALF, INT, Input, Output, Vector, VectorList, Vertex, program
from ipujax.poplar.program import Copy, Execute, If, PrintTensor, Repeat, RepeatWhileTrue, Sequence, Switch
from ipujax.runtime.errors import ArgumentError, GraphError, MappingError, TargetError, VerifyError
from tests.ipujax.poplar.helpers import placed, small_graph
from tests.ipujax.poplar.refusals import refused


class SumVertex(Vertex):
    in_: Input[Vector[FLOAT]]
    out: Output[FLOAT]

    def compute(in_):
        return jnp.sum(in_)


class RowsVertex(Vertex):
    rows: Input[VectorList[FLOAT]]
    out: Output[Vector[FLOAT]]
    copy: Output[Vector[FLOAT]]

    def compute(rows):
        return rows[0], rows[0]


class Setting:
    """A graph with some variables on tile 0, and a compute set."""

    def __init__(self):
        self.graph = small_graph()
        self.a = placed(self.graph, FLOAT, [4], "a")
        self.b = placed(self.graph, FLOAT, [4], "b")
        self.matrix = placed(self.graph, FLOAT, [4, 2], "matrix")
        self.half = placed(self.graph, HALF, [4], "half")
        self.flag = placed(self.graph, poplar.BOOL, [], "flag")
        self.compute_set = self.graph.add_compute_set("cs")
        self.graph.add_codelets([SumVertex, RowsVertex])


@pytest.fixture
def s():
    return Setting()


# --- variables on no tile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [0, 3])
def test_refuses_a_copy_to_an_unmapped_variable(s, mapped):
    lost = s.graph.add_variable(FLOAT, [4], "lost")  # here
    s.graph.set_tile_mapping(lost[:mapped], 0)
    with refused(
        VerifyError, r"\[unmapped-variable\] Variable\(lost: float32\[4\]\)[\s\S]*try: graph.set_tile_mapping"
    ):
        poplar.Engine(s.graph, Copy(s.a, lost))


def test_refuses_an_unmapped_constant(s):
    lost = s.graph.add_constant(FLOAT, [4], 1, "lost")
    copy = Copy(lost, s.a)  # here
    with refused(VerifyError, r"\[unmapped-variable\] Variable\(lost: float32\[4\]\)"):
        poplar.Engine(s.graph, copy)


def test_refuses_a_vertex_of_an_unmapped_variable(s):
    lost = s.graph.add_variable(FLOAT, [4], "lost")
    vertex = s.graph.add_vertex(s.compute_set, "SumVertex", {"in": lost, "out": s.b[0]})  # here
    s.graph.set_tile_mapping(vertex, 0)
    with refused(VerifyError, r"\[unmapped-variable\] Variable\(lost: float32\[4\]\)"):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_a_stream_or_print_of_an_unmapped_variable(s):
    lost = s.graph.add_variable(FLOAT, [4], "lost")  # here
    stream = s.graph.add_host_to_device_fifo("in", FLOAT, 4)
    for step in (Copy(stream, lost), PrintTensor("title", lost)):
        with refused(VerifyError, r"\[unmapped-variable\] Variable\(lost: float32\[4\]\)"):
            poplar.Engine(s.graph, step)


def test_refuses_an_unmapped_operand_of_a_library(s):
    lost = s.graph.add_variable(FLOAT, [4], "lost")
    with refused(
        GraphError,
        r"operand Variable\(lost: float32\[4\]\) is mapped to no tile \(added at test_bad_input_graph.py:\d+",
    ):
        popops.add(s.graph, s.a, lost, Sequence(), "add")  # here


def test_refuses_an_unmapped_vertex(s):
    s.graph.add_vertex(s.compute_set, SumVertex, {"in": s.a, "out": s.b[0]})  # here
    with refused(GraphError, r"vertex 0 \(SumVertex\) of compute set cs has no tile"):
        poplar.Engine(s.graph, Execute(s.compute_set))


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_refuses_a_write_race_of_two_vertices(s, first):
    """Of one shape, or of different shapes and so of different vertex groups."""
    for i in range(2):
        connections = {"in": s.a[i * first :], "out": s.b[1]}
        vertex = s.graph.add_vertex(s.compute_set, SumVertex, connections)  # here
        s.graph.set_tile_mapping(vertex, i)
    message = (
        r"\[write-race\] Variable\(b: float32\[4\]\)\[1\] is written twice[\s\S]*field out[\s\S]*SumVertex[\s\S]*cs"
    )
    with refused(VerifyError, message):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_a_write_race_of_two_fields(s):
    connections = {"rows": [s.a[:2]], "out": s.b[:2], "copy": s.b[1:3]}
    vertex = s.graph.add_vertex(s.compute_set, RowsVertex, connections)  # here
    s.graph.set_tile_mapping(vertex, 0)
    with refused(
        VerifyError, r"\[write-race\] Variable\(b: .*\)\[1\] is written twice, by field out .* and field copy"
    ):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_a_field_that_writes_an_element_twice(s):
    connections = {"rows": [s.a[:2]], "out": s.b[:1].broadcast(2), "copy": s.b[1:3]}
    vertex = s.graph.add_vertex(s.compute_set, RowsVertex, connections)  # here
    s.graph.set_tile_mapping(vertex, 0)
    with refused(VerifyError, r"\[write-race\] Variable\(b: .*\)\[0\] is written twice through field out"):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_a_read_write_race_of_two_vertices(s):
    for i in range(2):
        vertex = s.graph.add_vertex(s.compute_set, SumVertex, {"in": s.b[1 - i : 2 - i], "out": s.b[i]})  # here
        s.graph.set_tile_mapping(vertex, i)
    with refused(VerifyError, r"\[read-write-race\] Variable\(b: .*\)\[\d\] is read through field in .* field out"):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_a_write_to_a_constant(s):
    fixed = s.graph.add_constant(FLOAT, [4], 1, "fixed")
    s.graph.set_tile_mapping(fixed, 0)
    with refused(VerifyError, r"\[read-only-output\] copy .* writes to the constant Variable\(fixed: float32\[4\]\)"):
        poplar.Engine(s.graph, Copy(s.a, fixed))  # here
    with refused(GraphError, r"host write handle would write to Tensor\(float32\[4\] of fixed\)[\s\S]*got: a constant"):
        s.graph.create_host_write("handle", fixed)  # here
    assert "handle" not in s.graph.host_writes


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("connected", "missing"), [(["in"], "out"), (["out"], "in"), ([], "in, out")])
def test_refuses_an_unconnected_field(s, connected, missing):
    tensors = {"in": s.a, "out": s.b[0]}
    vertex = s.graph.add_vertex(s.compute_set, SumVertex, {name: tensors[name] for name in connected})  # here
    s.graph.set_tile_mapping(vertex, 0)
    with refused(GraphError, rf"field {missing} of vertex 0 \(SumVertex\) of compute set cs is not connected"):
        poplar.Engine(s.graph, Execute(s.compute_set))


def test_refuses_to_connect_a_field_twice(s):
    vertex = s.graph.add_vertex(s.compute_set, SumVertex, {"in": s.a})
    with refused(GraphError, r"field in of vertex 0 \(SumVertex\) of compute set cs is connected twice"):
        s.graph.connect(vertex["in"], s.b)  # here


UNFIT = {
    "another type": ("SumVertex", "in", lambda s: s.half, "expected: float32[\\s\\S]*got: float16"),
    "a matrix": ("SumVertex", "in", lambda s: s.matrix, r"expected: one dimension[\s\S]*got: shape \[4, 2\]"),
    "an element for a vector": ("SumVertex", "in", lambda s: s.a[0], r"expected: one dimension[\s\S]*got: shape \[\]"),
    "a vector for an element": ("SumVertex", "out", lambda s: s.a, r"expected: one element[\s\S]*got: shape \[4\]"),
    "a list": ("SumVertex", "in", lambda s: [1, 2], r"expected: a tensor[\s\S]*got: \[1, 2\]"),
    "an array": ("SumVertex", "in", lambda s: np.zeros(2), r"expected: a tensor[\s\S]*got: \[0. 0.\]"),
    "a vector for a list": ("RowsVertex", "rows", lambda s: s.a, "expected: vectors, or one tensor of two dimensions"),
    "no vectors": ("RowsVertex", "rows", lambda s: [], r"expected: vectors[\s\S]*got: \[\]"),
    "vectors of another type": (
        "RowsVertex",
        "rows",
        lambda s: [s.a, s.half],
        "expected: float32[\\s\\S]*got: float16",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_refuses_a_connection_of_another_type_or_shape(s, name):
    codelet, field, connection, message = UNFIT[name]
    vertex = s.graph.add_vertex(s.compute_set, codelet)
    named = rf"field {field} of vertex 0 \({codelet}\) of compute set cs does not match its connection"
    with refused(GraphError, rf"{named}[\s\S]*{message}"):
        s.graph.connect(vertex[field], connection(s))  # here


def test_refuses_a_non_field(s):
    vertex = s.graph.add_vertex(s.compute_set, SumVertex)
    with refused(GraphError, r"vertex 0 .* must be a field[\s\S]*try: vertex\[\"in\"\] or vertex\[\"out\"\]"):
        s.graph.connect(vertex, s.a)  # here
    with refused(GraphError, "'in' must be a field of a vertex"):
        s.graph.connect("in", s.a)  # here
    with refused(GraphError, r"SumVertex has no field 'inn'[\s\S]*try: 'in'"):
        s.graph.connect(vertex["inn"], s.a)  # here


def test_refuses_a_vertex_of_another_graph(s):
    other = Setting()
    theirs = s.graph.add_vertex(s.compute_set, SumVertex)
    ours = other.graph.add_vertex(other.compute_set, SumVertex)
    assert ours.number == theirs.number
    for act in (
        lambda: other.graph.connect(theirs["in"], other.a),  # here
        lambda: other.graph.set_tile_mapping(theirs, 0),  # here
        lambda: other.graph.set_perf_estimate(theirs, 1),  # here
    ):
        with refused(GraphError, r"vertex 0 \(SumVertex\) of compute set cs belongs to another graph"):
            act()


@pytest.mark.parametrize("tile", [8, -1, 1.5, None, True])
def test_refuses_an_invalid_tile_of_a_vertex(s, tile):
    vertex = s.graph.add_vertex(s.compute_set, SumVertex)
    with refused(GraphError, r"vertex 0 \(SumVertex\) of compute set cs is mapped to tile [\s\S]*0 … 7"):
        s.graph.set_tile_mapping(vertex, tile)  # here


@pytest.mark.parametrize("tiles", [8, -1, 1.5, None, [0, 1, 2, 3], "0"])
def test_refuses_invalid_tiles_of_a_tensor(s, tiles):
    with refused(MappingError, r"Tensor\(float32\[4\] of a\)"):
        s.graph.set_tile_mapping(s.a, tiles)  # here


@pytest.mark.parametrize("cycles", [-1, 2.5, "20", True, 2**32, 2**70])
def test_refuses_invalid_cycles(s, cycles):
    vertex = s.graph.add_vertex(s.compute_set, SumVertex)
    with refused(GraphError, r"cycles of vertex 0 \(SumVertex\) of compute set cs[\s\S]*0 … 4294967295"):
        s.graph.set_perf_estimate(vertex, cycles)  # here


def test_refuses_an_unknown_codelet(s):
    with refused(GraphError, r"no codelet 'SumVertx'[\s\S]*try: 'SumVertex'"):
        s.graph.add_vertex(s.compute_set, "SumVertx")  # here


# --- variables, handles and graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[-1], [2.5], "four", 4])
def test_refuses_a_non_shape(s, shape):
    with refused(GraphError, "precious (must have a type|has a negative size)"):
        s.graph.add_variable(FLOAT, shape, "precious")  # here


@pytest.mark.parametrize("size", [-3, 2.5, None])
def test_refuses_an_invalid_stream_size(s, size):
    with refused(GraphError, "in (must have a type|has a negative size)"):
        s.graph.add_host_to_device_fifo("in", FLOAT, size)  # here


def test_refuses_a_handle_without_a_tensor(s):
    for act in (
        lambda: s.graph.create_host_read("handle", "a"),  # here
        lambda: s.graph.create_host_write(s.a, "handle"),  # here
    ):
        with refused(GraphError, r"a handle needs a name and a tensor[\s\S]*\"name\", tensor"):
            act()


def test_refuses_a_graph_without_a_target():
    with refused(TargetError, r"IPUModel\(.*\) must be a target[\s\S]*try: create_device\(\).get_target\(\)"):
        poplar.Graph(poplar.IPUModel())  # here
    with refused(TargetError, "'mk2' must be a target"):
        poplar.Graph("mk2")  # here


# --- programs ---------------------------------------------------------------------------------------------------------

WRONG_PROGRAMS = {
    "sizes of a copy": (
        lambda s: Copy(s.a, s.b[:3]),  # here
        r"different sizes[\s\S]*float32\[4\] of Variable\(a: [\s\S]*float32\[3\] of Variable\(b: ",
    ),
    "types of a copy": (
        lambda s: Copy(s.a, s.half),  # here
        r"different sizes or types[\s\S]*float32\[4\] of Variable\(a: [\s\S]*float16\[4\] of Variable\(half: ",
    ),
    "copy of an array": (
        lambda s: Copy(np.zeros(4, np.float32), s.a),  # here
        r"a copy needs a tensor on one side[\s\S]*got: ndarray to Tensor",
    ),
    "a tensor in a sequence": (
        lambda s: Sequence().add(s.a),  # here
        r"Tensor\(float32\[4\] of a\) is not a program",
    ),
    "a compute set in a sequence": (
        lambda s: Sequence(s.compute_set),  # here
        r"compute set cs is not a program[\s\S]*try: Execute\(compute_set\)",
    ),
    "a list in a sequence": (
        lambda s: Sequence([Copy(s.a, s.b)]),  # here
        r"a list is not a program[\s\S]*try: Sequence\(\*programs\)",
    ),
    "a compute set that is repeated": (
        lambda s: Repeat(3, s.compute_set),  # here
        r"compute set cs is not a program[\s\S]*try: Execute\(compute_set\)",
    ),
    "the name of a compute set": (
        lambda s: Execute("cs"),  # here
        r"'cs' is not a compute set[\s\S]*graph.add_compute_set",
    ),
    "a count below zero": (
        lambda s: Repeat(-1, Sequence()),  # here
        r"count of a Repeat[\s\S]*0 … 4294967295[\s\S]*got: -1",
    ),
    "a count beyond 32 bits": (
        lambda s: Repeat(10**12, Sequence()),  # here
        r"count of a Repeat[\s\S]*0 … 4294967295[\s\S]*got: 1000000000000",
    ),
    "a count that is a flag": (
        lambda s: Repeat(True, Sequence()),  # here
        r"count of a Repeat[\s\S]*got: True",
    ),
    "half a turn": (
        lambda s: Repeat(2.5, Sequence()),  # here
        r"count of a Repeat[\s\S]*got: 2.5",
    ),
    "count and body exchanged": (
        lambda s: Repeat(Sequence(), 3),  # here
        r"count of a Repeat[\s\S]*got: a Sequence",
    ),
    "a branch that is not a program": (
        lambda s: If(s.flag, s.a),  # here
        r"Tensor\(float32\[4\] of a\) is not a program",
    ),
    "a predicate that is no flag": (
        lambda s: If(s.a[0], Sequence()),  # here
        r"a predicate must be one element[\s\S]*one bool[\s\S]*got: float32\[\] of Variable\(a: ",
    ),
    "a predicate of Python": (
        lambda s: RepeatWhileTrue(Sequence(), True, Sequence()),  # here
        r"a predicate must be one element[\s\S]*one bool[\s\S]*got: True",
    ),
    "several predicates": (
        lambda s: program.AbortOn(placed(s.graph, poplar.BOOL, [2], "flags"), "m"),  # here
        r"a predicate must be one element[\s\S]*got: bool\[2\] of Variable\(flags: ",
    ),
    "a control that is no number": (
        lambda s: Switch(s.a[0], [(0, Sequence())]),  # here
        r"a control must be one element[\s\S]*one int32[\s\S]*got: float32\[\] of Variable\(a: ",
    ),
    "a call of no function": (
        lambda s: program.Call(Sequence()),  # here
        r"a Sequence is not a function[\s\S]*graph.add_function",
    ),
    "a print of no tensor": (
        lambda s: PrintTensor("title", 3),  # here
        r"PrintTensor\('title'\) must have a tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_refuses_an_invalid_program_at_construction(s, name):
    make, message = WRONG_PROGRAMS[name]
    with refused(GraphError, message):
        make(s)


def test_refuses_a_sequence_inside_itself(s):
    sequence = Sequence(Copy(s.a, s.b))
    with refused(GraphError, r"added to itself[\s\S]*try: Repeat"):
        sequence.add(sequence)  # here
    assert len(sequence.children()) == 1


def test_refuses_an_engine_without_graph_or_program(s):
    for arguments, message in (
        ((s.graph, None), r"engine must have programs[\s\S]*got: NoneType"),
        ((Sequence(), s.graph), r"engine must have a graph[\s\S]*got: Sequence"),
        ((s.graph, Sequence(), "debug.instrument"), r"options must be a mapping[\s\S]*'debug.instrument'"),
    ):
        with refused(ArgumentError, message):
            poplar.Engine(*arguments)  # here
    with refused(GraphError, r"compute set cs is not a program"):
        poplar.Engine(s.graph, [Sequence(), s.compute_set])  # here


def test_refuses_a_tensor_of_another_graph(s):
    other = Setting()
    with refused(VerifyError, r"\[foreign-tensor\] Variable\(a: float32\[4\]\) belongs to another graph"):
        poplar.Engine(s.graph, Copy(other.a, s.b))  # here


def test_accepts_an_integer_control(s):
    number = placed(s.graph, INT, [], "number")
    poplar.Engine(s.graph, Switch(number, [(0, Copy(s.a, s.b))]))
