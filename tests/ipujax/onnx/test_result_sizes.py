"""Result sizes that depend on data: exact for static operands, padded with zeros up to a bound for traced ones."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import TracedOperandError
from tests.ipujax.onnx.models import info, model_of

BOUND = 9
X = np.array([[3, 0, 1], [0, 3, -2]], np.float32)
BOXES = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 2, 1, 3]]], np.float32)
SCORES = np.array([[[0.6, 0.9, 0.8], [0.1, 0.7, 0.2]]], np.float32)
# operator → operands, dtype of the first result, attributes, axis of the size that depends on data
CASES: dict[str, tuple[list[np.ndarray], Any, dict[str, Any], int]] = {
    "NonZero": ([X], np.int64, {}, 1),
    "Compress": ([X, np.array([True, False, True])], np.float32, {"axis": 1}, 1),
    "Unique": ([X], np.float32, {"sorted": 0}, 0),
    "NonMaxSuppression": (
        [BOXES, SCORES, np.array([2], np.int64), np.array([0.5], np.float32), np.array([0.15], np.float32)],
        np.int64,
        {},
        0,
    ),
}


def model_for(name: str) -> onnx.ModelProto:
    operands, dtype, attributes, _ = CASES[name]
    inputs = [info(f"x{n}", each.dtype, each.shape) for n, each in enumerate(operands)]
    node = helper.make_node(name, [value.name for value in inputs], ["y"], name, **attributes)
    return model_of([node], inputs, [info("y", dtype, None)], opset=24)


def expected(name: str) -> np.ndarray:
    feeds = {f"x{n}": each for n, each in enumerate(CASES[name][0])}
    model = model_for(name).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.parametrize("name", CASES)
def test_static_operands_give_the_exact_size(name):
    static = {f"x{n}": each for n, each in enumerate(CASES[name][0])}
    model = ipujax.onnx.load(model_for(name), static=static)
    np.testing.assert_array_equal(jax.jit(model)(model.params), expected(name))


@pytest.mark.parametrize("name", CASES)
def test_traced_operands_give_a_padded_result(name):
    operands, _, _, axis = CASES[name]
    model = ipujax.onnx.load(model_for(name), max_sizes={"y": BOUND})
    result = np.moveaxis(np.asarray(jax.jit(model)(model.params, *operands)), axis, 0)
    exact = np.moveaxis(expected(name), axis, 0)
    assert len(result) == BOUND
    np.testing.assert_array_equal(result[: len(exact)], exact)
    assert not result[len(exact) :].any()


@pytest.mark.parametrize("name", CASES)
def test_traced_operands_need_a_bound(name):
    model = ipujax.onnx.load(model_for(name))
    with pytest.raises(TracedOperandError, match=rf"node '{name}' \({name}\): the size of .* depends on traced values"):
        jax.jit(model)(model.params, *CASES[name][0])
