"""Operators on text that is known while a model is traced."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ipujax.onnx
from tests.ipujax.onnx.models import info, model_of

ort = pytest.importorskip("onnxruntime")

WORDS = np.asarray(["Monday", "tuesday", "sun day"], object)


def text(name: str) -> Any:
    """Return the declared type of a vector of text."""
    return helper.make_tensor_value_info(name, TensorProto.STRING, [None])


def test_numbers_of_texts_are_traced_results():
    nodes = [
        helper.make_node("Constant", [], ["end"], value_strings=["!"]),
        helper.make_node("Constant", [], ["monday"], value_strings=["monday!"]),
        helper.make_node("StringNormalizer", ["x"], ["low"], case_change_action="LOWER", stopwords=["TUESDAY"]),
        helper.make_node("StringConcat", ["low", "end"], ["whole"]),
        helper.make_node("StringSplit", ["whole"], ["parts", "counts"]),
        helper.make_node("Equal", ["whole", "monday"], ["is_monday"]),
        helper.make_node("Cast", ["is_monday"], ["flag"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["flag", "z"], ["y"]),
    ]
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])
    results = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("counts", TensorProto.INT64, [2]),
    ]
    model = ipujax.onnx.load(model_of(nodes, [text("x"), z], results), static={"x": WORDS})
    y, counts = jax.jit(model)({}, np.asarray([3.0, 4.0], np.float32))
    assert y.tolist() == [3, 0] and counts.tolist() == [1, 2]


def test_text_is_a_result_of_calls_that_nothing_traces():
    nodes = [helper.make_node("StringSplit", ["x"], ["parts", "counts"], delimiter=" ")]
    model = ipujax.onnx.load(model_of(nodes, [text("x")], [text("parts")]), static={"x": WORDS})
    assert model({}).tolist() == [["Monday", ""], ["tuesday", ""], ["sun", "day"]]


TABLE = np.asarray([["b", "a", "ü"], ["a", "", "b"]], object)
ROWS = np.asarray([1, 0], np.int64)
MOVES: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "columns": ("ArrayFeatureExtractor", [np.asarray([2, 0])], {}),
    "rows by a condition": ("Compress", [np.asarray([False, True])], {"axis": 0}),
    "side by side": ("Concat", [TABLE[:, :1]], {"axis": 1}),
    "equal elements": ("Equal", [TABLE[1:]], {}),
    "repeated": ("Expand", [np.asarray([2, 2, 3])], {}),
    "flat": ("Flatten", [], {"axis": 0}),
    "gathered": ("Gather", [ROWS], {"axis": 1}),  # of rows onnxruntime copies the first element alone
    "elements": ("GatherElements", [ROWS[None]], {}),
    "elements at places": ("GatherND", [ROWS[None]], {}),
    "one element": ("GatherND", [np.asarray([1, 2])], {}),
    "another shape": ("Reshape", [np.asarray([3, 2])], {}),
    "replaced elements": ("ScatterElements", [ROWS[:, None], np.asarray([["x"], ["y"]], object)], {"axis": 1}),
    "replaced rows": ("ScatterND", [ROWS[:1, None], np.asarray([["x", "y", "z"]], object)], {}),
    "part": ("Slice", [np.asarray([1]), np.asarray([3]), np.asarray([1])], {}),
    "parts": ("Split", [np.asarray([1, 2])], {"axis": 1}),
    "tiles": ("Tile", [np.asarray([1, 2])], {}),
    "turned": ("Transpose", [], {}),
    "different": ("Unique", [], {}),
    "one more axis": ("Unsqueeze", [np.asarray([1])], {}),
}


@pytest.mark.parametrize("move", MOVES)
def test_known_text_is_moved_as_by_onnxruntime(move):
    op_type, operands, attributes = MOVES[move]
    domain = "ai.onnx.ml" if op_type == "ArrayFeatureExtractor" else ""
    names = [f"x{n}" for n in range(len(operands))]
    outputs = [f"y{n}" for n in range(2 if op_type == "Split" else 1)]
    node = helper.make_node(op_type, ["x", *names], outputs, domain=domain, **attributes)
    constants = dict(zip(names, operands, strict=True))
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    x = info("x", object, TABLE.shape)
    model = model_of([node], [x], results, constants, opset=19, domains=["ai.onnx.ml"])
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": TABLE})
    got = ipujax.onnx.load(model, static={"x": TABLE})({})
    for value, right in zip(got if len(outputs) > 1 else [got], expected, strict=True):
        assert np.asarray(value).tolist() == right.tolist()


def test_padding_of_text_is_empty_text():
    node = helper.make_node("Pad", ["x", "pads"], ["y"])
    model = model_of([node], [text("x")], [text("y")], {"pads": np.asarray([1, 1])})
    assert ipujax.onnx.load(model, static={"x": WORDS})({}).tolist() == ["", *WORDS, ""]


def test_columns_of_text_are_encoded():
    # As skl2onnx writes encoders of columns: their numbers are a traced result.
    nodes = [
        helper.make_node("ArrayFeatureExtractor", ["x", "first"], ["column"], domain="ai.onnx.ml"),
        helper.make_node("OneHotEncoder", ["column"], ["hot"], domain="ai.onnx.ml", cats_strings=["a", "b"]),
        helper.make_node("Add", ["hot", "z"], ["y"]),
    ]
    inputs = [info("x", object, TABLE.shape), info("z", np.float32, [2, 1, 2])]
    model = model_of(nodes, inputs, [info("y", np.float32, [2, 1, 2])], {"first": ROWS[1:]}, domains=["ai.onnx.ml"])
    z = np.zeros((2, 1, 2), np.float32)
    y = jax.jit(ipujax.onnx.load(model, static={"x": TABLE}))({}, z)
    assert np.asarray(y).tolist() == [[[0, 1]], [[1, 0]]]


def test_columns_of_text_at_traced_positions_are_refused():
    node = helper.make_node("ArrayFeatureExtractor", ["x", "positions"], ["y"], domain="ai.onnx.ml")
    inputs = [info("x", object, TABLE.shape), info("positions", np.int64, [2])]
    model = model_of([node], inputs, [onnx.ValueInfoProto(name="y")], domains=["ai.onnx.ml"])
    with pytest.raises(ipujax.onnx.OnnxError, match="columns of text depend on traced positions"):
        jax.jit(ipujax.onnx.load(model, static={"x": TABLE}))({}, ROWS)


def test_more_texts_than_are_moved_are_refused():
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    model = model_of([node], [text("x")], [text("y")], {"shape": np.asarray([10**9, 3])})
    with pytest.raises(ipujax.onnx.OnnxError, match="too many texts to move"):
        ipujax.onnx.load(model, static={"x": WORDS})({})


def test_unknown_text_is_refused():
    nodes = [helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="SHOUT")]
    model = model_of(nodes, [text("x")], [text("y")])
    with pytest.raises(ipujax.onnx.OnnxError, match="unknown value of the attribute 'case_change_action'"):
        ipujax.onnx.load(model, static={"x": WORDS})({})
