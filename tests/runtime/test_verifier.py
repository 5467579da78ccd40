"""The verifier: a must-fail program for every rule, programs that pass, and agreement with the tile interpreter."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipujax.runtime.codelet import Codelet, Field
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import Graph
from ipujax.runtime.interpreter import interpret
from ipujax.runtime.mapping import Blocked, Flat, even_cuts, linear, on_one_tile
from ipujax.runtime.presets import preset
from ipujax.runtime.program import (
    Call,
    Copy,
    CrossReplicaCopy,
    Execute,
    Function,
    HostStream,
    If,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
    WriteUndef,
)
from ipujax.runtime.tensor import concat
from ipujax.runtime.tile_memory import InterpreterError
from ipujax.runtime.variable import Origin
from ipujax.runtime.verifier import RULES, verify
from ipujax.runtime.vertices import Access, Axis, Dim, Term, VertexGroup, block, element

F32, I32, BOOL = np.dtype(np.float32), np.dtype(np.int32), np.dtype(bool)
HERE = Origin("user.py:7 (step)")


def sum_to_shapes(*arrays, shapes):
    """Any function of the operands in the shapes that are asked for."""
    total = sum(array.sum() for array in arrays)
    results = tuple(np.ones(shape, np.float32) * total for shape in shapes)
    return results if len(results) != 1 else results[0]


def codelet(*directions, dtype=F32):
    fields = tuple(Field(f"f{number}", direction, dtype) for number, direction in enumerate(directions))
    return Codelet("test::Any", fields, sum_to_shapes, lambda shapes, target: np.ones(1), takes=("shapes",))


UNARY = codelet("in", "out")


class Builder:
    """A graph with helpers; everything it makes is sound until a test spoils it."""

    def __init__(self, tiles=4, num_ipus=1):
        self.graph = Graph(preset("mk2").replace(tiles_per_ipu=tiles, num_ipus=num_ipus))
        self.program = Sequence()

    def variable(self, *shape, dtype=F32, name="v"):
        size = int(np.prod(shape))
        mapping = linear(size, np.dtype(dtype).itemsize, self.graph.target.num_tiles)
        return self.graph.add_variable(shape, dtype, name, mapping)

    def given(self, *shape, dtype=F32, name="x"):
        """A variable that the host fills."""
        tensor = self.variable(*shape, dtype=dtype, name=name)
        self.program.add(StreamIn(HostStream(name, shape, dtype), tensor))
        return tensor

    def group(self, code, axes, *accesses, tile=None):
        counts = [axis.blocks for axis in axes]
        tiles = self.graph.target.tiles_per_ipu
        tile = np.arange(int(np.prod(counts)), dtype=np.int32).reshape(counts) % tiles if tile is None else tile
        return VertexGroup(code, tuple(axes), tuple(accesses), np.asarray(tile, np.int32), (), HERE)

    def compute_set(self, *groups, checked=True):
        compute_set = self.graph.add_compute_set("cs")
        for each in groups:
            if checked:
                self.graph.add_vertices(compute_set, each)
            else:
                self.graph.groups[compute_set].append(each)
        return Execute(compute_set)

    def unary(self, source, target, blocks=4, code=UNARY, **kwargs):
        """One group over a one-dimensional tensor."""
        axis = Axis("i", even_cuts(source.shape[0], blocks))
        return self.group(code, [axis], along(source), along(target), **kwargs)

    def run(self, *groups, **kwargs):
        self.program.add(self.compute_set(*groups, **kwargs))

    def verify(self):
        verify(self.graph, self.program)


def along(tensor, offset=0, coeff=1, fill=None):
    """An access of a one-dimensional tensor by axis 0."""
    return Access(tensor, (element(0, coeff, offset),), fill)


# --- programs that must fail, by rule ---------------------------------------------------------------------------------

CASES = []


def must_fail(rule, match=""):
    def register(build):
        CASES.append(pytest.param(rule, match, build, id=f"{rule}-{build.__name__}"))
        return build

    return register


@must_fail("unknown-compute-set", "compute set cs is not of this graph")
def of_another_graph(b):
    b.program.add(Builder().compute_set())


@must_fail("unmapped-variable", r"Variable\(nowhere: float32\[8\]\) lies on no tile")
def never_mapped(b):
    nowhere = b.graph.add_variable((8,), F32, "nowhere")
    b.run(b.unary(b.given(8), nowhere))


@must_fail("unmapped-variable", "nowhere")
def streamed_but_never_mapped(b):
    b.program.add(StreamIn(HostStream("s", (8,), F32), b.graph.add_variable((8,), F32, "nowhere")))


@must_fail("mapping", "leaves elements out or holds them twice")
def flat_mapping_with_a_hole(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Flat(8, np.array([1]), np.array([0]))


@must_fail("mapping", "leaves elements out or holds them twice")
def blocked_mapping_with_an_empty_box(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Blocked((np.array([0, 4, 4, 8]),), np.array([0, 1, 2]))


@must_fail("mapping", "names a tile the target lacks")
def mapping_on_a_tile_too_far(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = on_one_tile(8, 4)


@must_fail("type-mismatch", r"(?s)field f0 of test::Any in cs has another dtype.*user.py:7.*float32.*int32")
def operand_of_another_dtype(b):
    b.run(b.unary(b.given(8, dtype=I32), b.variable(8)), checked=False)


@must_fail("type-mismatch", r"(?s)field f1 .*another rank.*2 indices.*1")
def result_of_another_rank(b):
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], along(b.given(8)), along(b.variable(8, 1))), checked=False)


@must_fail("type-mismatch", "2 fields, 1 connected")
def unconnected_field(b):
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], along(b.given(8))), checked=False)


@must_fail("type-mismatch", r"a grid of \[4\] blocks, tiles for \[3\]")
def tiles_of_another_grid(b):
    b.run(b.unary(b.given(8), b.variable(8), tile=[0, 1, 2]), checked=False)


@must_fail("type-mismatch", "cuts of axis i do not rise")
def falling_cuts(b):
    b.run(b.group(UNARY, [Axis("i", np.array([0, 5, 3, 8]))], along(b.given(8)), along(b.variable(8))))


@must_fail("type-mismatch", "over 1 axes")
def index_over_an_axis_that_is_not_there(b):
    b.run(
        b.group(UNARY, [Axis("i", even_cuts(8, 2))], Access(b.given(8), (element(1),)), along(b.variable(8))),
    )


@must_fail("type-mismatch", "no axes named k")
def origin_of_no_axis(b):
    b.run(dataclasses.replace(b.unary(b.given(8), b.variable(8)), origins=("k",)))


@must_fail("type-mismatch", r"(?s)StreamOut.*float32\[9\].*float32\[8\]")
def stream_of_another_shape(b):
    b.program.add(StreamOut(b.given(8), HostStream("out", (9,), F32)))


@must_fail("type-mismatch", "If has another dtype or shape")
def predicate_of_another_dtype(b):
    b.program.add(If(b.given(dtype=I32), Sequence(), Sequence()))


@must_fail("type-mismatch", "Switch has another dtype or shape")
def selector_of_two(b):
    b.program.add(Switch(b.given(2, dtype=I32), (), Sequence()))


@must_fail("missing-tile", "vertices on tiles the target lacks")
def vertex_on_a_tile_too_far(b):
    b.run(b.unary(b.given(8), b.variable(8), tile=[0, 1, 2, 4]))


@must_fail("read-only-output", "writes to the constant")
def copy_to_a_constant(b):
    b.program.add(Copy(b.given(2), b.graph.add_constant(np.ones(2, F32), "one", on_one_tile(2, 0))))


@must_fail("read-only-output", "field f1 .* writes to Tensor")
def output_through_a_broadcast(b):
    b.run(b.unary(b.given(8), b.variable().broadcast_in_dim((8,), ())))


@must_fail("read-only-output", "stream s writes to Tensor")
def stream_to_overlapping_pieces(b):
    x = b.variable(8)
    b.program.add(StreamIn(HostStream("s", (10,), F32), concat([x[:5], x[3:]])))


@must_fail("out-of-tensor", r"(?s)field f0 .* reaches out of .*inside of it, or a fill.*\(1 … 8\)")
def operand_beyond_the_end(b):
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], along(b.given(8), 1), along(b.variable(8))))


@must_fail("out-of-tensor", "field f1")
def result_before_the_start_even_with_fill(b):
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], along(b.given(8)), along(b.variable(8), -1, fill=0.0)))


@must_fail("out-of-tensor", r"\(0 … 7\) / 2")
def index_between_elements(b):
    accesses = Access(b.given(8), (Dim((Term(0),), 0, 2),)), along(b.variable(8))
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], *accesses))


@must_fail("write-race", "(?s)several vertices write one element.*no index along k")
def split_axis_missing_in_the_output(b):
    axes = [Axis("i", even_cuts(8, 2)), Axis("k", even_cuts(6, 3), "reduce")]
    b.run(b.group(UNARY, axes, Access(b.given(8, 6), (element(0), element(1))), along(b.variable(8))))


@must_fail("write-race", "(?s)index of another form.*Term")
def strided_output(b):
    b.run(b.group(UNARY, [Axis("i", even_cuts(4, 2))], along(b.given(4)), along(b.variable(8), 0, 2)))


@must_fail("write-race", "index of another form")
def output_of_two_terms(b):
    axes = [Axis("i", even_cuts(4, 2)), Axis("j", even_cuts(3, 1))]
    out = Access(b.variable(8), (Dim((Term(0), Term(1))),))
    b.run(b.group(UNARY, axes, Access(b.given(4, 3), (element(0), element(1))), out))


@must_fail("write-race", r"v: float32\[8\]\)\[4\] is written twice, by field f1 .* in cs")
def two_groups_that_meet(b):
    x, y = b.given(5), b.variable(8)
    b.run(b.unary(x, y[:5]), b.unary(x[:4], y[4:]))


@must_fail("write-race", "by field f1 of test::Any in cs and field f2")
def two_fields_of_one_group(b):
    x, y = b.given(8), b.variable(8)
    b.run(b.group(codelet("in", "out", "out"), [Axis("i", even_cuts(8, 2))], along(x), along(y), along(y)))


@must_fail(
    "read-write-race", r"v: float32\[8\]\)\[2\] is read through field f0 .* written by another vertex through field f1"
)
def reads_its_neighbour_in_place(b):
    y = b.given(8, name="v")
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 4))], along(y, 1, fill=0.0), along(y)))


@must_fail("read-write-race", "is read through field f0")
def one_group_reads_what_the_other_writes(b):
    x, y, z = b.given(8), b.given(8, name="y"), b.variable(8)
    b.run(b.unary(x, y), b.unary(y, z))


@must_fail("read-write-race", "is read through field f0")
def two_fields_written_and_one_read(b):
    x, y = b.given(8), b.variable(8)
    b.program.add(StreamIn(HostStream("s", (8,), F32), y))
    axes = [Axis("i", even_cuts(4, 2))]
    b.run(b.group(codelet("in", "out", "out"), axes, along(y[:4]), along(y[:4]), along(y[4:])), b.unary(y[4:], x[4:]))


@must_fail("undefined-read", r"(?s)v: float32\[8\]\)\[0\] is read before anything writes it, by field f0.*user.py:7")
def operand_never_written(b):
    b.run(b.unary(b.variable(8), b.variable(8)))


@must_fail("undefined-read", r"v: float32\[8\]\)\[5\] .*by Copy")
def one_element_never_written(b):
    y = b.variable(8)
    b.program.add(StreamIn(HostStream("s", (5,), F32), y[:5]))
    b.program.add(StreamIn(HostStream("t", (2,), F32), y[6:]))
    b.program.add(Copy(y, b.variable(8)))


@must_fail("undefined-read", "by StreamOut")
def written_in_one_branch_only(b):
    x, y = b.given(8), b.variable(8)
    b.program.add(If(b.given(dtype=BOOL, name="p"), Copy(x, y), Copy(x[:4], y[:4])))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))


@must_fail("undefined-read", "by StreamOut")
def written_in_a_loop_that_may_not_run(b):
    x, y, p = b.given(8), b.variable(8), b.given(dtype=BOOL, name="p")
    b.program.add(RepeatWhile(Sequence(), p, Copy(x, y)))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))


@must_fail("undefined-read", "by StreamOut")
def written_in_a_loop_of_no_iterations(b):
    x, y = b.given(8), b.variable(8)
    b.program.add(Repeat(0, Copy(x, y)))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))


@must_fail("undefined-read", "by RepeatWhile")
def predicate_never_computed(b):
    b.program.add(RepeatWhile(Sequence(), b.variable(dtype=BOOL), Sequence()))


@must_fail("undefined-read", "by field f0")
def updated_in_place_before_it_is_filled(b):
    buffer = b.variable(8)
    code = codelet("inout")
    b.program.add(Repeat(3, b.compute_set(b.group(code, [Axis("i", even_cuts(8, 2))], along(buffer)))))


@must_fail("undefined-read", r"second: float32\[4\]\)\[2\] is read")
def halves_of_two_variables_are_not_all_of_them(b):
    first, second, out = b.variable(4, name="first"), b.variable(4, name="second"), b.variable(4)
    b.program.add(Copy(b.given(4), concat([first[:2], second[:2]])))
    b.program.add(Copy(second, out))


@must_fail("cross-ipu", r"a vertex on IPU 0 touches .*x: float32\[8\]\)\[0\] on IPU 1 through field f0")
def operand_on_another_ipu(b):
    b.__init__(4, 2)
    x, y = b.given(8), b.variable(8)
    b.graph.set_tile_mapping(x.variables()[0], on_one_tile(8, 5))
    b.graph.set_tile_mapping(y.variables()[0], on_one_tile(8, 1))
    b.run(b.unary(x, y))


@must_fail("cross-ipu", r"on IPU 0 touches .*v: float32\[8\]\)\[6\] on IPU 1 through field f1")
def last_elements_of_a_result_on_another_ipu(b):
    b.__init__(4, 2)
    x, y = b.given(8), b.variable(8)
    b.graph.set_tile_mapping(x.variables()[0], on_one_tile(8, 1))
    b.graph.set_tile_mapping(y.variables()[0], Flat(8, np.array([0, 2, 6]), np.array([3, 1, 4])))
    b.run(b.unary(x, y, 2))


@must_fail("cross-replica", "the graph is not replicated")
def copy_between_replicas_of_one(b):
    x = b.given(4)
    b.program.add(CrossReplicaCopy(x, x, ((0, 0),)))


@must_fail("divergent-control", "replicas may disagree at this If")
def copy_between_replicas_under_a_flag_of_each(b):
    b.graph.replication_factor = 2
    x, flag = b.given(4), b.given(1, dtype=BOOL, name="flag")
    b.program.add(If(flag.reshape(()), CrossReplicaCopy(x, x, ((0, 1),)), Sequence()))


@pytest.mark.parametrize("rule, match, build", CASES)
def test_must_fail(rule, match, build):
    builder = Builder()
    build(builder)
    with pytest.raises(VerifyError, match=match) as caught:
        builder.verify()
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"[{rule}] ")


def test_every_rule_has_a_must_fail_program():
    assert {case.values[0] for case in CASES} == {rule.name for rule in RULES}


def test_a_rule_names_its_errors_after_itself():
    assert [rule.check.__name__.replace("_", "-") for rule in RULES] == [rule.name for rule in RULES]


# --- programs that must pass ------------------------------------------------------------------------------------------


def test_matmul_with_partials_passes():
    b = Builder()
    x, y, partials, out = b.given(6, 8), b.given(8, 4, name="y"), b.variable(2, 6, 4), b.variable(6, 4)
    axes = [Axis("m", even_cuts(6, 2)), Axis("n", even_cuts(4, 1)), Axis("k", even_cuts(8, 2), "reduce")]
    dims = (element(0), element(2)), (element(2), element(1)), (block(2), element(0), element(1))
    accesses = [Access(t, d) for t, d in zip((x, y, partials), dims, strict=True)]
    b.run(b.group(codelet("in", "in", "out"), axes, *accesses))
    axes = [Axis("p", even_cuts(2, 1), "reduce"), axes[0], axes[1]]
    dims = (element(0), element(1), element(2)), (element(1), element(2))
    b.run(b.group(UNARY, axes, Access(partials, dims[0]), Access(out, dims[1])))
    b.program.add(StreamOut(out, HostStream("out", (6, 4), F32)))
    b.verify()


def test_halo_with_fill_and_reversed_output_pass():
    b = Builder()
    x, y = b.given(8), b.variable(8)
    axes = [Axis("i", even_cuts(8, 3)), Axis("w", np.array([0, 3]), "reduce")]
    b.run(b.group(UNARY, axes, Access(x, (Dim((Term(0), Term(1)), -1),), 0.0), along(y, 7, -1)))
    b.verify()


def test_an_index_that_leaves_the_tensor_only_where_no_vertex_is_passes():
    b = Builder()
    x, y = b.given(6), b.variable(6)
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 4))], along(x), along(y), tile=[0, 1, 2, -1]))
    b.verify()


def test_one_vertex_along_an_axis_that_outputs_lack_passes():
    b = Builder()
    axes = [Axis("i", even_cuts(8, 2)), Axis("k", even_cuts(6, 2))]
    access = Access(b.given(8, 6), (element(0), element(1)))
    b.run(b.group(UNARY, axes, access, along(b.variable(8)), tile=[[0, -1], [-1, 1]]))
    b.verify()


def test_groups_that_write_parts_of_one_variable_pass():
    b = Builder()
    x, y, out = b.given(4, 3), b.given(4, 5, name="y"), b.variable(4, 8)
    axes = [[Axis("i", even_cuts(4, 2)), Axis("j", even_cuts(n, 2))] for n in (3, 5)]
    both = (element(0), element(1))
    parts = zip(axes, (x, y), (out[:, :3], out[:, 3:]), strict=True)
    b.run(*(b.group(UNARY, a, Access(s, both), Access(d, both)) for a, s, d in parts))
    b.program.add(StreamOut(out, HostStream("out", (4, 8), F32)))
    b.verify()


def test_in_place_passes():
    b = Builder()
    x, y = b.given(8), b.given(8, name="y")
    b.run(b.unary(x, x), b.group(codelet("inout", "in"), [Axis("i", even_cuts(8, 4))], along(y), along(y)))
    b.run(b.group(UNARY, [Axis("i", even_cuts(4, 2))], along(x[4:]), along(x[:4])))
    b.verify()


def test_interleaved_halves_of_two_groups_pass():
    b = Builder()
    x, y = b.given(8), b.variable(8)
    axis = Axis("i", even_cuts(8, 4))
    even, odd = [0, -1, 2, -1], [-1, 1, -1, 3]
    b.run(*(b.group(UNARY, [axis], along(x), along(y), tile=tile) for tile in (even, odd)))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))
    b.verify()


def test_piecewise_definitions_pass():
    b = Builder()
    x, y, z = b.given(8), b.variable(8), b.variable(8)
    b.program.add(If(b.given(dtype=BOOL, name="p"), Copy(x[:4], y[:4]), Call(Function(Copy(x[4:], y[:4])))))
    b.program.add(Repeat(2, Sequence(Copy(x[4:], y[4:]), Copy(y, z))))
    first, second = Copy(x, z), Sequence(Copy(x[:2], z[:2]), Copy(x[2:], z[2:]))
    b.program.add(Switch(b.given(dtype=I32, name="s"), (first, second), first))
    b.program.add(RepeatWhile(b.compute_set(), b.given(dtype=BOOL, name="q"), Copy(z, y)))
    for tensor in (y, z):
        b.program.add(StreamOut(tensor, HostStream("out", (8,), F32)))
    b.verify()


def test_a_buffer_left_undefined_on_purpose_passes():
    b = Builder()
    buffer = b.variable(8)
    b.program.add(WriteUndef(buffer))
    b.program.add(Repeat(3, b.compute_set(b.group(codelet("inout"), [Axis("i", even_cuts(8, 2))], along(buffer)))))
    b.verify()


def test_each_vertex_on_its_own_ipu_passes():
    b = Builder(4, 2)
    x, y = b.given(64), b.variable(64)
    tiles = np.arange(8)
    for tensor in (x, y):
        b.graph.set_tile_mapping(tensor.variables()[0], Flat(64, tiles * 8, tiles))
    b.run(b.unary(x, y, 8, tile=tiles[::-1] ^ 3))
    b.graph.set_tile_mapping(y.variables()[0], on_one_tile(64, 6))
    b.program.add(Copy(x, y))
    with pytest.raises(VerifyError, match="cross-ipu"):
        b.verify()
    b = Builder(4, 2)
    x, y = b.given(64), b.variable(64)
    for tensor in (x, y):
        b.graph.set_tile_mapping(tensor.variables()[0], Flat(64, tiles * 8, tiles))
    b.run(b.unary(x, y, 8, tile=[3, 2, 1, 0, 7, 6, 5, 4]))
    b.program.add(Copy(x[:8], y[56:]))
    b.verify()


# --- against the tile interpreter -------------------------------------------------------------------------------------

SIZE = 12


@st.composite
def accesses(draw, axis, tensors):
    """A slice of a tensor as long as the axis, forwards or backwards, whole or strided, or one all vertices share."""
    n, tensor = axis.extent, draw(st.sampled_from(tensors))
    coeff = draw(st.sampled_from([1, 1, 1, -1]))
    step = draw(st.sampled_from([1, 1, 2])) if 2 * n <= SIZE else 1
    start = draw(st.integers(0, SIZE - n * step))
    if draw(st.integers(0, 5)) == 0:
        return Access(tensor[start : start + n], (Dim((), draw(st.integers(0, n - 1))),))
    view = tensor[start : start + n * step : step]
    return Access(view, (element(0, coeff, 0 if coeff == 1 else n - 1),))


@st.composite
def programs(draw):
    """Two compute sets of two groups each on two variables, of which one may be half undefined."""
    b = Builder()
    x, y = b.given(SIZE), b.variable(SIZE)
    defined = draw(st.sampled_from([0, 7, SIZE]))
    b.program.add(StreamIn(HostStream("half", (defined,), F32), y[:defined]))
    for _ in range(2):
        groups = []
        for _ in range(draw(st.integers(1, 2))):
            axis = Axis("i", even_cuts(draw(st.integers(1, 6)), draw(st.integers(1, 4))))
            directions = draw(st.sampled_from([("in", "out"), ("inout",), ("in", "out", "out"), ("inout", "in")]))
            tile = [draw(st.sampled_from([-1, 0, 1, 2, 3])) for _ in range(axis.blocks)]
            connected = [draw(accesses(axis, (x, y))) for _ in directions]
            groups.append(b.group(codelet(*directions), [axis], *connected, tile=tile))
        b.run(*groups)
    b.program.add(StreamOut(x, HostStream("x", (SIZE,), F32)))
    return b


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 3))
def test_agrees_with_the_interpreter(b, seed):
    streams = [node.stream for node in b.program.children() if isinstance(node, StreamIn)]
    inputs = {stream: np.ones(stream.shape, F32) for stream in streams}
    caught = {}
    for name, run in (
        ("verifier", b.verify),
        ("interpreter", lambda: interpret(b.graph, b.program, inputs, seed=seed)),
    ):
        try:
            run()
            caught[name] = None
        except (VerifyError, InterpreterError) as error:
            caught[name] = error.rule
    assert (caught["verifier"] is None) == (caught["interpreter"] is None), caught
