"""Control flow whose branches differ in shape, sequences and optionals that a program fills, by `max_sizes=`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.onnx.models import graph_of, info, model_of

X = np.arange(12, dtype=np.float32).reshape(4, 3)
ROW = np.ones((3,), np.float32)


def run(model: onnx.ModelProto, *operands: Any, **settings: Any) -> Any:
    """Return the results of a model, traced."""
    loaded = ipujax.onnx.load(model, **settings)
    return jax.jit(loaded)(loaded.params, *operands)


def branching(then_nodes: Any, else_nodes: Any, outputs: Any, after: Any = ()) -> onnx.ModelProto:
    """Return `If(flag)` with branches whose results are "then" and "else", and nodes after it on its result "y"."""
    branches = {
        f"{name}_branch": graph_of(nodes, [], [onnx.ValueInfoProto(name=name)], name=name)
        for name, nodes in (("then", then_nodes), ("else", else_nodes))
    }
    nodes = [helper.make_node("If", ["flag"], ["y"], "choice", **branches), *after]
    return model_of(nodes, [info("flag", bool), info("x", shape=(4, 3))], outputs)


def rows(result: str, last: int) -> list[onnx.NodeProto]:
    """Return nodes that take the first rows of x."""
    constants = [
        helper.make_node("Constant", [], [f"{result}{name}"], value_ints=[value])
        for name, value in (("start", 0), ("end", last))
    ]
    return [*constants, helper.make_node("Slice", ["x", f"{result}start", f"{result}end"], [result])]


def test_branches_of_different_shapes_are_padded():
    model = branching(rows("then", 2), rows("else", 4), [info("y", shape=(None, 3))])
    for flag, count in ((True, 2), (False, 4)):
        y = np.asarray(run(model, np.asarray(flag), X, max_sizes={"y": 5}))
        assert y.shape == (5, 3)
        np.testing.assert_array_equal(y[:count], X[:count])
        assert not y[count:].any()
    loaded = ipujax.onnx.load(model, max_sizes={"y": 5})
    program = ipu.jit(loaded, device=ipu.IPUModel(tiles_per_ipu=4))
    np.testing.assert_array_equal(program({}, np.asarray(True), X)[:2], X[:2])


def test_the_message_names_the_value_and_the_bound():
    model = branching(rows("then", 2), rows("else", 4), [info("y", shape=(None, 3))])
    with pytest.raises(ipujax.onnx.TracedOperandError, match=r"value 'y' in different forms") as caught:
        run(model, np.asarray(True), X)
    assert "load(max_sizes={'y': n})" in str(caught.value)
    with pytest.raises(ipujax.onnx.OnnxError, match="value 'y' is larger than its bound"):
        run(model, np.asarray(True), X, max_sizes={"y": 3})


def sequence(result: str, count: int) -> list[onnx.NodeProto]:
    """Return nodes that make a sequence of x, some times."""
    return [helper.make_node("SequenceConstruct", ["x"] * count, [result])]


def test_sequences_of_branches():
    after = [
        helper.make_node("SequenceLength", ["y"], ["length"]),
        helper.make_node("SequenceInsert", ["y", "x"], ["longer"]),
        helper.make_node("SequenceErase", ["longer"], ["shorter"]),
        helper.make_node("ConcatFromSequence", ["shorter"], ["all"], axis=0, new_axis=1),
        helper.make_node("SequenceAt", ["longer", "length"], ["last"]),
    ]
    outputs = [info("length", np.int64), info("all", shape=None), info("last", shape=(4, 3))]
    model = branching(sequence("then", 1), sequence("else", 3), outputs, after)
    for flag, count in ((True, 1), (False, 3)):
        length, every, last = run(model, np.asarray(flag), X, max_sizes={"y": 4})
        assert int(length) == count and every.shape == (4, 4, 3)
        np.testing.assert_array_equal(every, np.stack([X * (n < count) for n in range(4)]))
        np.testing.assert_array_equal(last, X)


def test_optionals_of_branches():
    some = [helper.make_node("Optional", ["x"], ["then"])]
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, (4, 3))
    none = [helper.make_node("Optional", [], ["else"], type=kind)]
    after = [
        helper.make_node("OptionalHasElement", ["y"], ["has"]),
        helper.make_node("OptionalGetElement", ["y"], ["value"]),
    ]
    model = branching(some, none, [info("has", bool), info("value", shape=(4, 3))], after)
    for flag in (True, False):
        has, value = run(model, np.asarray(flag), X)
        assert bool(has) is flag
        np.testing.assert_array_equal(value, X * flag)


def growing(condition: str) -> onnx.ModelProto:
    """Return a loop that appends its counter to a sequence while the counter is below a limit."""
    body = graph_of(
        [
            helper.make_node("Cast", ["i"], ["row"], to=TensorProto.FLOAT),
            helper.make_node("SequenceInsert", ["before", "row"], ["after"]),
            helper.make_node("Less", ["i", "limit"], ["go_on"]),
        ],
        [info("i", np.int64), info("go", bool), onnx.ValueInfoProto(name="before")],
        [info("go_on", bool), onnx.ValueInfoProto(name="after")],
        name="body",
    )
    body.input[2].type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    body.output[1].type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"]),
        helper.make_node("Loop", ["", condition, "none"], ["filled"], "loop", body=body),
        helper.make_node("SequenceLength", ["filled"], ["length"]),
        helper.make_node("ConcatFromSequence", ["filled"], ["all"], axis=0, new_axis=1),
    ]
    inputs = [info("limit", np.int64), info("go_first", bool)]
    return model_of(nodes, inputs, [info("length", np.int64), info("all", shape=(None,))])


def test_sequences_that_loops_fill():
    length, every = run(growing("go_first"), np.asarray(2), np.asarray(True), max_sizes={"filled": 6})
    assert int(length) == 4 - 1 and np.asarray(every).tolist() == [0, 1, 2, 0, 0, 0]
    length, _ = run(growing("go_first"), np.asarray(2), np.asarray(False), max_sizes={"filled": 6})
    assert int(length) == 0
    with pytest.raises(ipujax.onnx.OnnxError, match="value 'filled'"):
        run(growing("go_first"), np.asarray(2), np.asarray(True))


def test_traced_positions():
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "z"], ["s"]),
        helper.make_node("SequenceAt", ["s", "n"], ["y"]),
        helper.make_node("SequenceInsert", ["s", "x", "n"], ["t"]),
        helper.make_node("ConcatFromSequence", ["t"], ["all"], axis=0, new_axis=1),
        helper.make_node("SequenceErase", ["s", "n"], ["u"]),
        helper.make_node("SequenceLength", ["u"], ["length"]),
    ]
    inputs = [info("x", shape=(3,)), info("z", shape=(3,)), info("n", np.int64)]
    outputs = [info("y", shape=(3,)), info("all", shape=(3, 3)), info("length", np.int64)]
    y, every, length = run(model_of(nodes, inputs, outputs), ROW, 2 * ROW, np.asarray(-1))
    assert np.asarray(y).tolist() == [2, 2, 2] and int(length) == 1
    np.testing.assert_array_equal(every, np.stack([ROW, ROW, 2 * ROW]))
