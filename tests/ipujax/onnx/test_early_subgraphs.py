"""Operators of early opsets in branches of If and bodies of Loop; against onnxruntime, before opset 7 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import ipujax.onnx
from tests.ipujax.onnx.models import info, model_of

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
IMAGE = np.random.default_rng(1).normal(size=(1, 2, 4, 4)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.5)
FIRST_COLUMN = POSITIVE[:1, :, :1]
MASK = X > 0
WEIGHTS = np.random.default_rng(2).normal(size=(3, 2)).astype(np.float32)
INPUT_WEIGHTS = np.random.default_rng(3).normal(size=(1, 5, 4)).astype(np.float32)
STATE_WEIGHTS = np.random.default_rng(4).normal(size=(1, 5, 5)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A node of an opset on `x` and constant operands; `expected` where onnxruntime does not have the opset."""

    op_type: str
    opset: int
    x: np.ndarray = field(default_factory=lambda: X)
    operands: Sequence[np.ndarray] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    expected: Sequence[np.ndarray] = ()

    def node(self, x: str, prefix: str) -> onnx.NodeProto:
        """Return the node with results `<prefix>0`, …"""
        inputs = [x, *(f"p{n}" for n in range(len(self.operands)))]
        return helper.make_node(self.op_type, inputs, self.names(prefix), **self.attributes)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the results."""
        return [f"{prefix}{n}" for n in range(self.outputs)]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def rows(op_type: str, opsets: Sequence[int], *operands: np.ndarray, x=X, outputs=1, expected=(), **attributes):
    """Return the cases of an operator in some opsets."""
    return [Case(op_type, opset, x, operands, attributes, outputs, expected) for opset in opsets]


def softmax(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    powers = np.exp(x - x.max(axes, keepdims=True))
    return powers / powers.sum(axes, keepdims=True)


def normalised(x, scale, shift, mean, variance):
    """Return a normalisation over the second axis."""
    scale, shift, mean, variance = (each[:, None] for each in (scale, shift, mean, variance))
    return (x - mean) / np.sqrt(variance + 1e-5) * scale + shift


STATISTICS = (floats(1, 2, 3), floats(0, 1, 0), floats(0, 0, 1), floats(1, 1, 2))
ARITHMETIC: Mapping[str, Callable] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide,
                                      "Pow": np.power}  # fmt: skip
LOGIC: Mapping[str, Callable] = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}

BEFORE_OPSET_7 = [
    *(case for name, f in ARITHMETIC.items() for case in (
        *rows(name, (1, 6), POSITIVE, x=POSITIVE, expected=[f(POSITIVE, POSITIVE)]),
        *rows(name, (1, 6), POSITIVE[0], x=POSITIVE, broadcast=1, expected=[f(POSITIVE, POSITIVE[0])]),
        *rows(name, (1, 6), POSITIVE[0, :, 0], x=POSITIVE, broadcast=1, axis=1, expected=[f(POSITIVE, FIRST_COLUMN)]),
    )),
    *(case for name, f in LOGIC.items() for case in (
        *rows(name, (1, 6), ~MASK, x=MASK, expected=[f(MASK, ~MASK)]),
        *rows(name, (1,), MASK[0, :, 0], x=MASK, broadcast=1, axis=1, expected=[f(MASK, MASK[:1, :, :1])]),
    )),
    *rows("Greater", (1,), X[0, :, 0], broadcast=1, axis=1, expected=[X[:1, :, :1] < X]),
    *rows("PRelu", (1, 6), floats(0.1, 0.2, 0.3), expected=[np.where(X > 0, X, X * floats(0.1, 0.2, 0.3)[:, None])]),
    *rows("Tile", (1,), integers(2), integers(1), expected=[np.tile(X, (1, 2, 1))]),
    *rows("Clip", (1, 6), min=-0.5, max=0.5, expected=[np.clip(X, -0.5, 0.5)]),
    *rows("Pad", (2, 6), pads=[0, 1, 0, 0, 0, 1], expected=[np.pad(X, ((0, 0), (1, 0), (0, 1)))]),
    *rows("Dropout", (1, 6), is_test=1, expected=[X]),
    *rows("BatchNormalization", (1,), *STATISTICS, is_test=1, consumed_inputs=[0, 0, 0, 1, 1],
          expected=[normalised(X, *STATISTICS)]),
    *rows("BatchNormalization", (6,), *STATISTICS, is_test=1, expected=[normalised(X, *STATISTICS)]),
    *rows("Gemm", (1, 6), WEIGHTS, floats(1, 2), x=X[:, :, 0], broadcast=1, expected=[X[:, :, 0] @ WEIGHTS + [1, 2]]),
    *rows("Reshape", (1,), shape=[2, 12], expected=[X.reshape(2, 12)]),
    *rows("Reshape", (5,), integers(2, -1), expected=[X.reshape(2, 12)]),
    *rows("Upsample", (1,), x=IMAGE, height_scale=2.0, width_scale=3.0, expected=[IMAGE.repeat(2, 2).repeat(3, 3)]),
    *rows("Max", (1, 6), X * 0, expected=[np.maximum(X, 0)]),
    *rows("Concat", (1, 4), X, axis=1, expected=[np.concatenate([X, X], 1)]),
    *rows("Softmax", (1, 6), expected=[softmax(X, (1, 2))]),
    *rows("ReduceSum", (1, 6), axes=[1], expected=[X.sum(1, keepdims=True)]),
    *rows("Split", (2,), axis=1, split=[1, 2], outputs=2, expected=[X[:, :1], X[:, 1:]]),
    *rows("Exp", (1,), consumed_inputs=[0], expected=[np.exp(X)]),
]  # fmt: skip

AGAINST_ONNXRUNTIME = [
    *(case for name in ("Softmax", "LogSoftmax") for case in rows(name, (7, 11, 13))),
    *rows("Softmax", (11, 13), axis=0),
    *rows("ReduceSum", (7, 11, 12), axes=[1]),
    *rows("ReduceSum", (13,), integers(1)),
    *rows("ReduceMean", (11, 17), axes=[1], keepdims=0),
    *rows("ReduceL2", (11, 13), axes=[1]),
    *rows("ArgMax", (7, 12, 13), axis=1),
    *rows("Squeeze", (7, 11), x=X[None], axes=[0]),
    *rows("Unsqueeze", (7, 11), axes=[0, 2]),
    *rows("Clip", (7, 10), min=-0.5, max=0.5),
    *rows("Slice", (7, 9), starts=[0, 1], ends=[1, 3], axes=[0, 2]),
    *rows("Dropout", (7, 10, 12)),
    *rows("Upsample", (7,), x=IMAGE, scales=[1.0, 1.0, 2.0, 2.0]),
    *rows("Upsample", (9,), floats(1, 1, 2, 2), x=IMAGE),
    *rows("Resize", (10,), floats(1, 1, 2, 2), x=IMAGE),
    *rows("Pad", (7, 10), pads=[0, 1, 0, 0, 0, 1], mode="reflect"),
    *rows("Split", (7, 12), axis=1, split=[1, 2], outputs=2),
    *rows("TopK", (7, 9), k=2, outputs=2),
    *rows("BatchNormalization", (7, 9, 14), *STATISTICS),
    *rows("Gemm", (7, 9), WEIGHTS, floats(1, 2), x=X[:, :, 0]),
    *rows("Cast", (7, 9), to=onnx.TensorProto.INT32),
    *rows("Scatter", (9,), np.zeros((1, 3, 4), np.int64), np.ones((1, 3, 4), np.float32)),
    *rows("MaxPool", (7, 10), x=IMAGE, kernel_shape=[2, 2]),
    *rows("RNN", (7, 14), INPUT_WEIGHTS, STATE_WEIGHTS, hidden_size=5, outputs=2),
    *rows("Pow", (7, 12), floats(2)),
]  # fmt: skip

CASES = [*BEFORE_OPSET_7, *AGAINST_ONNXRUNTIME]


def untyped(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    return [onnx.ValueInfoProto(name=name) for name in names]


def branches(case: Case, x: str) -> onnx.NodeProto:
    """Return an If at `c` with the node in both branches, after a copy of `x` in one."""
    then = [helper.make_node("Identity", [x], ["copy"]), case.node("copy", "then")]
    graphs = {
        "then_branch": helper.make_graph(then, "then", [], untyped(case.names("then"))),
        "else_branch": helper.make_graph([case.node(x, "else")], "else", [], untyped(case.names("else"))),
    }
    return helper.make_node("If", ["c"], case.names("y"), **graphs)


def in_branches(case: Case) -> Sequence[onnx.NodeProto]:
    return [branches(case, "x")]


def in_body(case: Case) -> Sequence[onnx.NodeProto]:
    return [loop(case, case.node("v", "y"))]


def in_branches_of_body(case: Case) -> Sequence[onnx.NodeProto]:
    return [loop(case, branches(case, "v"))]


def loop(case: Case, node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a Loop of two iterations that carries `v` and stacks the results of a node; no type is declared."""
    nodes = [node, helper.make_node("Identity", ["v"], ["w"]), helper.make_node("Identity", ["before"], ["go"])]
    body = helper.make_graph(nodes, "body", untyped(["i", "before", "v"]), untyped(["go", "w", *case.names("y")]))
    return helper.make_node("Loop", ["two", "", "x"], ["last", *case.names("stacked")], body=body)


def model_for(case: Case, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    constants = {f"p{n}": operand for n, operand in enumerate(case.operands)} | {"two": np.array(2, np.int64)}
    inputs = [info("x", case.x.dtype, case.x.shape), info("c", bool)]
    outputs = untyped(nodes[-1].output)
    model = model_of(nodes, inputs, outputs, constants, opset=case.opset)
    model.ir_version = 8  # the newest of the onnxruntimes that still have the early opsets
    return model


def expected_results(case: Case) -> Sequence[np.ndarray]:
    if case.expected:
        return case.expected
    model = model_for(case, [case.node("x", "y")])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": case.x, "c": np.array(True)})


def check(case: Case, place: Callable[[Case], Sequence[onnx.NodeProto]]) -> None:
    """Compare the node in a subgraph with its oracle."""
    model = ipujax.onnx.load(model_for(case, place(case)))
    results = model(model.params, case.x, np.array(True))
    results = results if isinstance(results, tuple) else (results,)
    stacks = place is not in_branches
    for result, expected in zip(results[-case.outputs :], expected_results(case), strict=True):
        expected = np.stack([expected, expected]) if stacks else expected
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-5)


def label(case: Case) -> str:
    return f"{case.op_type}-{case.opset}{'-axis' if 'axis' in case.attributes else ''}"


FAST = ("Add", "PRelu", "Gemm", "Softmax", "Clip")


@pytest.mark.parametrize("case", [case for case in CASES if case.op_type in FAST and case.opset < 12], ids=label)
def test_operator_in_branches_of_a_body(case):
    check(case, in_branches_of_body)


@pytest.mark.parametrize("place", [in_branches, in_body, in_branches_of_body])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_operator_in_subgraphs(case, place):
    check(case, place)


def test_results_of_converted_nodes_are_captured():
    """A branch reads the result of a node that several of the newest replace."""
    double = helper.make_graph([helper.make_node("Add", ["s", "s"], ["d"])], "then", [], untyped(["d"]))
    same = helper.make_graph([helper.make_node("Identity", ["s"], ["e"])], "else", [], untyped(["e"]))
    nodes = [helper.make_node("Softmax", ["x"], ["s"]),
             helper.make_node("If", ["c"], ["y"], then_branch=double, else_branch=same)]  # fmt: skip
    model = ipujax.onnx.load(model_for(Case("Softmax", 6), nodes))
    np.testing.assert_allclose(model({}, X, np.array(True)), 2 * softmax(X, (1, 2)), rtol=1e-5)
    np.testing.assert_allclose(model({}, X, np.array(False)), softmax(X, (1, 2)), rtol=1e-5)


def test_rank_of_a_value_that_grows_stays_open():
    """A slope for each channel needs the rank of its operand, and a body that changes it has none."""
    nodes = [
        helper.make_node("Unsqueeze", ["v"], ["w"], axes=[0]),
        helper.make_node("PRelu", ["v", "slope"], ["r"]),
        helper.make_node("ReduceSum", ["r"], ["sum"], keepdims=0),
        helper.make_node("Identity", ["before"], ["go"]),
    ]
    body = helper.make_graph(nodes, "body", untyped(["i", "before", "v"]), untyped(["go", "w", "sum"]))
    node = helper.make_node("Loop", ["two", "", "x"], ["last", "sums"], body=body)
    model = model_of([node], [info("x", shape=(2, 3))], untyped(["last", "sums"]),
                     {"slope": floats(0.5), "two": np.array(2, np.int64)}, opset=7)  # fmt: skip
    loaded = ipujax.onnx.load(model)
    last, sums = loaded(loaded.params, X[:, :, 0])
    assert last.shape == (1, 1, 2, 3)
    x = X[:, :, 0]
    np.testing.assert_allclose(sums, [np.where(x > 0, x, x / 2).sum()] * 2, rtol=1e-5)
