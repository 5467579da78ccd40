"""The verifier: a must-fail program for everything a rule refuses."""

import dataclasses

import numpy as np
import pytest

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    CrossReplicaCopy,
    Function,
    HostStream,
    If,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
    WriteUndef,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, element
from ipujax.runtime.tensor.mapping import Blocked, Flat, even_cuts, on_one_tile
from ipujax.runtime.tensor.tensor import concat
from ipujax.runtime.verify import RULES
from tests.runtime.verify.verifier_helpers import BOOL, F32, I32, UNARY, Builder, along, codelet

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


@must_fail("foreign-tensor", r"Variable\(theirs: float32\[8\]\) belongs to another graph")
def variable_of_another_graph(b):
    other = Builder()
    b.run(b.unary(b.given(8), other.graph.add_variable((8,), F32, "theirs")))


@must_fail("unmapped-variable", r"Variable\(nowhere: float32\[8\]\) is mapped to no tile")
def never_mapped(b):
    nowhere = b.graph.add_variable((8,), F32, "nowhere")
    b.run(b.unary(b.given(8), nowhere))


@must_fail("unmapped-variable", "nowhere")
def streamed_but_never_mapped(b):
    b.program.add(StreamIn(HostStream("s", (8,), F32), b.graph.add_variable((8,), F32, "nowhere")))


@must_fail("mapping", "must have each element once")
def flat_mapping_with_a_hole(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Flat(8, np.array([1]), np.array([0]))


@must_fail("mapping", "must have each element once")
def blocked_mapping_with_an_empty_box(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Blocked((np.array([0, 4, 4, 8]),), np.array([0, 1, 2]))


@must_fail("mapping", "must name tiles of the target")
def mapping_on_a_tile_too_far(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = on_one_tile(8, 4)


@must_fail("type-mismatch", r"(?s)field f0 of test::Any in cs has the wrong dtype.*user.py:7.*float32.*int32")
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
def index_over_a_missing_axis(b):
    b.run(
        b.group(UNARY, [Axis("i", even_cuts(8, 2))], Access(b.given(8), (element(1),)), along(b.variable(8))),
    )


@must_fail("type-mismatch", "no axes named k")
def origin_of_no_axis(b):
    b.run(dataclasses.replace(b.unary(b.given(8), b.variable(8)), origins=("k",)))


@must_fail("type-mismatch", r"(?s)StreamOut.*float32\[9\].*float32\[8\]")
def stream_of_another_shape(b):
    b.program.add(StreamOut(b.given(8), HostStream("out", (9,), F32)))


@must_fail("type-mismatch", "If has the wrong dtype or shape")
def predicate_of_another_dtype(b):
    b.program.add(If(b.given(dtype=I32), Sequence(), Sequence()))


@must_fail("type-mismatch", "Switch has the wrong dtype or shape")
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
    x = b.given(5)
    y = b.variable(8)
    b.run(b.unary(x, y[:5]), b.unary(x[:4], y[4:]))


@must_fail("write-race", "by field f1 of test::Any in cs and field f2")
def two_fields_of_one_group(b):
    x = b.given(8)
    y = b.variable(8)
    b.run(b.group(codelet("in", "out", "out"), [Axis("i", even_cuts(8, 2))], along(x), along(y), along(y)))


@must_fail(
    "read-write-race", r"v: float32\[8\]\)\[1\] is read through field f0 .* written by another vertex through field f1"
)
def reads_its_neighbour_in_place(b):
    y = b.given(8, name="v")
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 8))], along(y, 1, fill=0.0), along(y)))


@must_fail("read-write-race", "is read through field f0")
def one_group_reads_results_of_the_other(b):
    x = b.given(8)
    y = b.given(8, name="y")
    z = b.variable(8)
    b.run(b.unary(x, y), b.unary(y, z))


@must_fail("read-write-race", "is read through field f0")
def two_fields_written_and_one_read(b):
    x = b.given(8)
    y = b.variable(8)
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
    x = b.given(8)
    y = b.variable(8)
    b.program.add(If(b.given(dtype=BOOL, name="p"), Copy(x, y), Copy(x[:4], y[:4])))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))


@must_fail("undefined-read", "by StreamOut")
def written_in_a_loop_that_may_not_run(b):
    x = b.given(8)
    y = b.variable(8)
    p = b.given(dtype=BOOL, name="p")
    b.program.add(RepeatWhile(Sequence(), p, Copy(x, y)))
    b.program.add(StreamOut(y, HostStream("out", (8,), F32)))


@must_fail("undefined-read", "by StreamOut")
def written_in_a_loop_of_no_iterations(b):
    x = b.given(8)
    y = b.variable(8)
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
    first = b.variable(4, name="first")
    second = b.variable(4, name="second")
    out = b.variable(4)
    b.program.add(Copy(b.given(4), concat([first[:2], second[:2]])))
    b.program.add(Copy(second, out))


@must_fail("cross-ipu", r"a vertex on IPU 0 touches .*x: float32\[8\]\)\[0\] on IPU 1 through field f0")
def operand_on_another_ipu(b):
    b.__init__(4, 2)
    x = b.given(8)
    y = b.variable(8)
    b.graph.set_tile_mapping(x.variables()[0], on_one_tile(8, 5))
    b.graph.set_tile_mapping(y.variables()[0], on_one_tile(8, 1))
    b.run(b.unary(x, y))


@must_fail("cross-ipu", r"on IPU 0 touches .*v: float32\[8\]\)\[6\] on IPU 1 through field f1")
def last_elements_of_a_result_on_another_ipu(b):
    b.__init__(4, 2)
    x = b.given(8)
    y = b.variable(8)
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
    x = b.given(4)
    flag = b.given(1, dtype=BOOL, name="flag")
    b.program.add(If(flag.reshape(()), CrossReplicaCopy(x, x, ((0, 1),)), Sequence()))


@must_fail("mapping", "must have each element once")
def flat_mapping_that_goes_back(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Flat(8, np.array([0, 5, 3]), np.array([0, 1, 2]))


@must_fail("mapping", "must have each element once")
def blocked_mapping_with_boxes_that_overlap(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Blocked((np.array([0, 6, 4, 8]),), np.array([0, 1, 2]))


@must_fail("mapping", r"(?s)shape of the variable.*\(8,\).*\(2, 4\)")
def mapping_of_another_shape(b):
    x = b.given(8)
    b.graph.mappings[x.variables()[0]] = Blocked((np.array([0, 2]), np.array([0, 4])), np.array([[0]]))


@must_fail("type-mismatch", "RepeatWhile has the wrong dtype or shape")
def loop_on_a_number(b):
    b.program.add(RepeatWhile(Sequence(), b.given(dtype=I32), Sequence()))


@must_fail("type-mismatch", r"(?s)RemoteOut.*float32\[3, 8\].*float32\[2, 8\]")
def fewer_rows_than_the_buffer_has(b):
    b.program.add(RemoteOut(b.given(2, 8), RemoteBuffer.of("r", F32, 8, 3)))


@must_fail("type-mismatch", r"(?s)RemoteIn.*rows named by int32 or uint32\[rows\], not by float32\[1\]")
def rows_named_by_floats(b):
    b.program.add(RemoteIn(RemoteBuffer.of("r", F32, 8, 3), b.variable(1, 8), b.given(1, name="row")))


@must_fail("type-mismatch", "over 1 axes")
def index_divided_by_nothing(b):
    accesses = Access(b.given(8), (Dim((Term(0),), 0, 0),)), along(b.variable(8))
    b.run(b.group(UNARY, [Axis("i", even_cuts(8, 2))], *accesses))


@must_fail("missing-tile", r"(?s)vertices on tiles the target lacks.*-2 … 3")
def vertex_before_the_first_tile(b):
    b.run(b.unary(b.given(8), b.variable(8), tile=[0, 1, -2, 3]))


@must_fail("read-only-output", "remote buffer r writes to Tensor")
def remote_rows_to_a_broadcast(b):
    b.program.add(RemoteIn(RemoteBuffer.of("r", F32, 8), b.variable(1).broadcast_in_dim((1, 8), (1,))))


@must_fail("read-only-output", "WriteUndef writes to the constant")
def a_constant_left_undefined(b):
    b.program.add(WriteUndef(b.graph.add_constant(np.ones(2, F32), "one", on_one_tile(2, 0))))


@must_fail("read-only-output", "copy between writes to the constant")
def a_constant_of_another_replica(b):
    b.graph.replication_factor = 2
    one = b.graph.add_constant(np.ones(2, F32), "one", on_one_tile(2, 0))
    b.program.add(CrossReplicaCopy(one, one, ((0, 1),), "between"))


@must_fail("read-write-race", "is read through field f0")
def two_groups_on_one_tile_race_all_the_same(b):
    x = b.given(8)
    y = b.given(8, name="y")
    z = b.variable(8)
    b.run(b.unary(x, y, 1, tile=[0]), b.unary(y, z, 1, tile=[0]))


@must_fail("read-write-race", r"\)\[2\] is read through field f0 .*written by the same vertex through field f1")
def vertex_that_reads_some_of_its_results(b):
    x = b.given(6)
    b.run(b.unary(x[:4], x[2:], 1))


@must_fail("read-write-race", "by the same vertex")
def vertex_that_reads_its_results_backwards(b):
    x = b.given(6)
    b.run(b.unary(x[::-1], x, 1))


@must_fail("read-write-race", "by the same vertex")
def vertex_that_reads_another_part_of_the_region_it_updates(b):
    x = b.given(6)
    b.run(b.group(codelet("in", "inout"), [Axis("i", even_cuts(4, 1))], along(x[:4]), along(x[2:])))


@must_fail("undefined-read", r"row: int32\[1\]\)\[0\] .*by RemoteIn")
def rows_never_named(b):
    row = b.variable(1, dtype=I32, name="row")
    b.program.add(RemoteIn(RemoteBuffer.of("r", F32, 8, 3), b.variable(1, 8), row))


@must_fail("undefined-read", "by RemoteOut")
def remote_rows_never_written(b):
    b.program.add(RemoteOut(b.variable(1, 8), RemoteBuffer.of("r", F32, 8)))


@must_fail("undefined-read", "by Switch")
def selector_never_computed(b):
    b.program.add(Switch(b.variable(dtype=I32), (), Sequence()))


@must_fail("undefined-read", "by CrossReplicaCopy")
def sent_to_another_replica_before_it_is_written(b):
    b.graph.replication_factor = 2
    b.program.add(CrossReplicaCopy(b.variable(4), b.variable(4, name="w"), ((0, 1),)))


@must_fail("undefined-read", "by StreamOut")
def written_in_one_replica_only(b):
    b.graph.replication_factor = 2
    x = b.given(4)
    y = b.variable(4)
    b.program.add(CrossReplicaCopy(x, y, ((0, 1),)))
    b.program.add(StreamOut(y, HostStream("out", (4,), F32)))


@must_fail("undefined-read", "by Copy")
def copied_in_a_function_before_it_is_written(b):
    y = b.variable(8)
    b.program.add(Call(Function(Copy(y, b.variable(8, name="w")), "layer")))


@must_fail("cross-ipu", "touches .* on IPU 1")
def operand_in_the_middle_of_a_range_of_tiles(b):
    b.__init__(4, 2)
    x = b.given(12)
    y = b.variable(12)
    b.graph.set_tile_mapping(x.variables()[0], Flat(12, np.array([0, 5, 6]), np.array([0, 4, 1])))
    b.graph.set_tile_mapping(y.variables()[0], on_one_tile(12, 0))
    b.run(b.unary(x, y, 1, tile=[0]))


@must_fail("cross-replica", "names replicas that the graph lacks")
def copy_to_a_missing_replica(b):
    b.graph.replication_factor = 2
    x = b.given(4)
    b.program.add(CrossReplicaCopy(x, x, ((0, 2),)))


@must_fail("cross-replica", "writes twice to replica 1")
def two_sources_of_one_replica(b):
    b.graph.replication_factor = 3
    x = b.given(4)
    b.program.add(CrossReplicaCopy(x, x, ((0, 1), (2, 1))))


@must_fail("divergent-control", "replicas may disagree at this RepeatWhile")
def host_stream_in_a_loop_of_each_replica(b):
    b.graph.replication_factor = 2
    x = b.given(4)
    flag = b.given(dtype=BOOL, name="flag")
    b.program.add(RepeatWhile(Sequence(), flag, StreamOut(x, HostStream("out", (4,), F32))))


@pytest.mark.parametrize("rule, match, build", CASES)
def test_must_fail(rule, match, build):
    builder = Builder()
    build(builder)
    with pytest.raises(VerifyError, match=match) as caught:
        builder.verify()
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"[{rule}] ")


def test_every_rule_has_a_must_fail_program():
    assert {case.values[0] for case in CASES} == set(RULES)


def test_a_rule_names_its_errors_after_itself():
    assert [rule.__name__.replace("_", "-") for rule in RULES.values()] == list(RULES)
