"""Indices, axes and lengths that are known and that an operand does not have: refused, and the node is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import OnnxError
from tests.ipujax.onnx.models import graph_of, info, model_of

UPDATE = np.zeros((1, 1, 2, 2), np.float32)
INT = np.int64  # most indices
LONG = np.float32(np.arange(6).reshape(2, 3))
# Operator, constants by position behind x [2, 3] or another shape, attributes.
Case = tuple[str, Sequence[int], Mapping[int, Any], Mapping[str, Any]]
CASES: dict[str, Case] = {
    "Gather": ("Gather", (2, 3), {1: INT([99])}, {}),
    "Gather negative": ("Gather", (2, 3), {1: INT([-4])}, {"axis": 1}),
    "Gather axis": ("Gather", (2, 3), {1: INT([0])}, {"axis": 2}),
    "GatherElements": ("GatherElements", (2, 3), {1: INT([[0, 2, 0]])}, {"axis": 0}),
    "GatherElements axis": ("GatherElements", (2, 3), {1: INT([[0, 1, 0]])}, {"axis": -3}),
    "GatherND": ("GatherND", (2, 3), {1: INT([[0, 3]])}, {}),
    "GatherND batch": ("GatherND", (2, 3), {1: INT([[0], [3]])}, {"batch_dims": 1}),
    "GatherND too long": ("GatherND", (2, 3), {1: INT([[0, 0, 0]])}, {}),
    "ScatterElements": ("ScatterElements", (2, 3), {1: INT([[5]]), 2: np.float32([[1]])}, {"axis": 1}),
    "ScatterND": ("ScatterND", (2, 3), {1: INT([[2]]), 2: np.zeros((1, 3), np.float32)}, {}),
    "TensorScatter": (
        "TensorScatter",
        (1, 1, 4, 2),
        {1: UPDATE, 2: INT([3])},
        {"axis": -2},
    ),
    "Compress": ("Compress", (2, 3), {1: np.array([True, False, True])}, {"axis": 0}),
    "Split": ("Split", (4,), {1: INT([2, 1])}, {}),
    "Split uneven": ("Split", (5,), {}, {}),
    "SplitToSequence": ("SplitToSequence", (4,), {1: INT([1, 1])}, {}),
    "SplitToSequence of one size": ("SplitToSequence", (4,), {1: INT(0)}, {}),
    "SplitToSequence of a negative size": ("SplitToSequence", (4,), {1: INT(-1)}, {}),
    "Transpose": ("Transpose", (2, 3), {}, {"perm": [0, 2]}),
    "Transpose twice": ("Transpose", (2, 3), {}, {"perm": [0, 0]}),
    "Concat": ("Concat", (2, 3), {1: LONG}, {"axis": 2}),
    "Squeeze": ("Squeeze", (1, 3), {1: INT([2])}, {}),
    "Unsqueeze": ("Unsqueeze", (2, 3), {1: INT([4])}, {}),
    "Flatten": ("Flatten", (2, 3), {}, {"axis": 3}),
    "Softmax": ("Softmax", (2, 3), {}, {"axis": 2}),
    "Slice axis": ("Slice", (2, 3), {1: INT([0]), 2: INT([1]), 3: INT([5])}, {}),
    "Slice axis twice": ("Slice", (2, 3), {1: INT([0, 0]), 2: INT([1, 1]), 3: INT([1, -1])}, {}),
    "Pad axis": ("Pad", (2, 3), {1: INT([1, 1]), 2: np.float32(0), 3: INT([5])}, {}),
    "ReduceSum": ("ReduceSum", (2, 3), {1: INT([2])}, {}),
    "ArgMax": ("ArgMax", (2, 3), {}, {"axis": 2}),
    "CumSum": ("CumSum", (2, 3), {1: INT(2)}, {}),
    "TopK": ("TopK", (2, 3), {1: INT([4])}, {}),
    "TopK axis": ("TopK", (2, 3), {1: INT([1])}, {"axis": 2}),
    "OneHot axis": ("OneHot", (2, 3), {1: INT(3), 2: np.float32([0, 1])}, {"axis": 3}),
    "LayerNormalization": ("LayerNormalization", (2, 3), {1: np.ones(3, np.float32)}, {"axis": 2}),
    "RMSNormalization": ("RMSNormalization", (2, 3), {1: np.ones(3, np.float32)}, {"axis": 2}),
    "LpNormalization": ("LpNormalization", (2, 3), {}, {"axis": 2}),
    "ReverseSequence": ("ReverseSequence", (4, 2), {1: INT([4, 5])}, {}),
    "DFT": ("DFT", (2, 4, 1), {1: INT(4), 2: INT(5)}, {}),
    "MaxUnpool": ("MaxUnpool", (1, 1, 2), {1: INT([[[0, 9]]])}, {"kernel_shape": [2], "strides": [2]}),
    "MaxRoiPool": ("MaxRoiPool", (1, 1, 4, 4), {1: np.float32([[1, 0, 0, 2, 2]])}, {"pooled_shape": [1, 1]}),
    "RoiAlign": ("RoiAlign", (1, 1, 4, 4), {1: np.float32([[0, 0, 2, 2]]), 2: INT([1])}, {"sampling_ratio": 1}),
    "NegativeLogLikelihoodLoss": ("NegativeLogLikelihoodLoss", (2, 3), {1: INT([0, 3])}, {}),
    "SoftmaxCrossEntropyLoss": ("SoftmaxCrossEntropyLoss", (2, 3), {1: INT([-1, 0])}, {"ignore_index": 1}),
    "RNN": (
        "RNN",
        (2, 1, 1),
        {1: np.ones((1, 1, 1), np.float32), 2: np.ones((1, 1, 1), np.float32), 4: np.int32([3])},
        {"hidden_size": 1},
    ),
    "RNN directions": (
        "RNN",
        (2, 1, 1),
        {1: np.ones((1, 1, 1), np.float32), 2: np.ones((1, 1, 1), np.float32)},
        {"hidden_size": 1, "direction": "bidirectional"},
    ),
    "Gemm of no matrix": ("Gemm", (2, 2, 3), {1: np.ones((3, 2), np.float32)}, {}),
    "Gemm with a larger addend": ("Gemm", (2, 3), {1: np.ones((3, 2), np.float32), 2: np.ones((2, 2, 2))}, {}),
    "Conv": ("Conv", (1, 1, 4), {1: np.ones((2, 1, 3), np.float32), 2: np.ones(1, np.float32)}, {}),
    "BatchNormalization": ("BatchNormalization", (2, 3), dict.fromkeys(range(1, 5), np.ones(1, np.float32)), {}),
    "InstanceNormalization": ("InstanceNormalization", (1, 3, 4), dict.fromkeys((1, 2), np.ones(1, np.float32)), {}),
    "GroupNormalization": (
        "GroupNormalization",
        (1, 3, 4),
        dict.fromkeys((1, 2), np.ones(3, np.float32)),
        {"num_groups": 2},
    ),
    "GatherElements rank": ("GatherElements", (2, 3), {1: INT([0])}, {}),
    "OneHot depth": ("OneHot", (2, 3), {1: INT(-2), 2: np.float32([0, 1])}, {}),
    "Resize without sizes": ("Resize", (2, 3), {}, {}),
    "CenterCropPad": ("CenterCropPad", (2, 3), {1: INT([2])}, {"axes": [2]}),
    "Resize": ("Resize", (2, 3), {2: np.float32([2])}, {"axes": [2]}),
    "QuantizeLinear": ("QuantizeLinear", (2, 3), {1: np.ones(3, np.float32)}, {"axis": 2}),
    "Scatter of opset 9": ("Scatter", (2, 3), {1: INT([[5]]), 2: np.float32([[1]])}, {"axis": 1}),
    "Softmax of opset 11": ("Softmax", (2, 3), {}, {"axis": 3}),
}


def model_of_case(case: Case) -> onnx.ModelProto:
    """Return the model of a case."""
    op_type, shape, constants, attributes = case
    names = ["x", *(f"c{n}" if n in constants else "" for n in range(1, 1 + max(constants, default=0)))]
    outputs = ["y0", "y1"] if op_type in ("Split", "TopK") else ["y0"]
    node = helper.make_node(op_type, names, outputs, "wrong", **attributes)
    # Constants of nodes: initialisers of floating point would be parameters.
    tensors = {f"c{n}": onnx.numpy_helper.from_array(np.asarray(value)) for n, value in constants.items()}
    nodes = [helper.make_node("Constant", [], [name], value=tensor) for name, tensor in tensors.items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    opset = 9 if op_type == "Scatter" else 11 if attributes == {"axis": 3} and op_type == "Softmax" else None
    return model_of([*nodes, node], [info("x", shape=shape)], results, **({} if opset is None else {"opset": opset}))


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    x = np.zeros(CASES[name][1], np.float32)
    with pytest.raises(OnnxError, match=r"node 'wrong'|\(op_type:"):
        model = ipujax.onnx.load(model_of_case(CASES[name]))
        jax.eval_shape(model, model.params, x)


def test_the_error_says_where_and_how_far():
    model = ipujax.onnx.load(model_of_case(CASES["Gather negative"]))
    with pytest.raises(OnnxError) as caught:
        model({}, LONG)
    text = str(caught.value)
    assert "node 'wrong' (Gather)" in text and "axis 1 has length 3" in text and "-4" in text and "-3 to 2" in text


@pytest.mark.parametrize(
    ("op_type", "index", "length"), [("SequenceAt", 2, 2), ("SequenceErase", -3, 2), ("SequenceInsert", 3, 2)]
)
def test_positions_in_sequences(op_type, index, length):
    new = ["x"] if op_type == "SequenceInsert" else []
    nodes = [
        helper.make_node("SequenceConstruct", ["x"] * length, ["s"]),
        helper.make_node(op_type, ["s", *new, "i"], ["t"], "wrong"),
    ]
    nodes += [] if op_type == "SequenceAt" else [helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=0)]
    y = onnx.ValueInfoProto(name="t" if op_type == "SequenceAt" else "y")
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(2, 3))], [y], {"i": INT(index)}))
    with pytest.raises(OnnxError, match=r"node 'wrong'.*position"):
        model({}, LONG)


def test_computed_indices_are_known_too():
    nodes = [helper.make_node("Add", ["i", "i"], ["j"]), helper.make_node("Gather", ["x", "j"], ["y"], "wrong")]
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(2, 3))], [info("y", shape=(1, 3))], {"i": INT([1])}))
    with pytest.raises(OnnxError, match="node 'wrong'"):
        jax.jit(model)({}, LONG)


def test_indices_in_subgraphs_are_known_too():
    inner = [helper.make_node("Gather", ["x", "i"], ["r"], "wrong")]
    body = graph_of(
        [*inner, helper.make_node("Identity", ["go"], ["on"])],
        [info("n", np.int64), info("go", bool)],
        [info("on", bool), info("r", shape=(1, 3))],
        {"i": INT([2])},
    )
    node = helper.make_node("Loop", ["m", ""], ["y"], body=body)
    model = ipujax.onnx.load(model_of([node], [info("x", shape=(2, 3))], [info("y", shape=(2, 1, 3))], {"m": INT(2)}))
    with pytest.raises(OnnxError, match="node 'wrong'"):
        jax.jit(model)({}, LONG)


def test_indices_without_a_bound_are_left_alone():
    nodes = [helper.make_node("OneHot", ["i", "depth", "values"], ["y"])]
    constants = {"i": INT([0, 7, -9]), "depth": INT(3), "values": np.float32([0, 1])}
    y = [info("y", shape=(3, 3)), info("z", shape=(1,))]
    nodes.append(helper.make_node("Slice", ["x", "low", "high"], ["z"]))
    constants |= {"low": INT([-(2**40)]), "high": INT([2**40])}
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(1,))], y, constants))
    hot, part = model(model.params, np.float32([5]))
    np.testing.assert_array_equal(hot, np.float32([[1, 0, 0], [0, 0, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(part, [5])
