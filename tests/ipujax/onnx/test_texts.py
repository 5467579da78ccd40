"""Operators on text that is known while a model is traced."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper

import ipujax.onnx
from tests.ipujax.onnx.models import model_of

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


def test_unknown_text_is_refused():
    nodes = [helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="SHOUT")]
    model = model_of(nodes, [text("x")], [text("y")])
    with pytest.raises(ipujax.onnx.OnnxError, match="unknown value of the attribute 'case_change_action'"):
        ipujax.onnx.load(model, static={"x": WORDS})({})
