"""Random operators: distributions; each node always draws the same numbers, and others than other nodes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import helper, parser

import ipujax.onnx
from tests.ipujax.onnx.models import info, model_of

SHAPE = (100, 100)


def drawn(
    op_type: str, x: np.ndarray | None = None, name: str = "a", dtype: Any = np.float32, **attributes: Any
) -> Any:
    inputs = [] if x is None else [info("x", x.dtype, x.shape)]
    node = helper.make_node(op_type, [value.name for value in inputs], ["y"], name, **attributes)
    model = ipujax.onnx.load(model_of([node], inputs, [info("y", dtype, None)]))
    return np.asarray(jax.jit(model)(model.params, *([] if x is None else [x])))


@pytest.mark.parametrize(
    ("normals", "uniforms", "operand", "shape"),
    [
        ("RandomNormal", "RandomUniform", None, {"shape": SHAPE}),
        ("RandomNormalLike", "RandomUniformLike", np.zeros(SHAPE, np.float32), {}),
    ],
)
def test_normal_and_uniform_have_their_moments(normals, uniforms, operand, shape):
    normal = drawn(normals, operand, mean=2.0, scale=0.5, seed=1.0, **shape)
    uniform = drawn(uniforms, operand, low=-1.0, high=3.0, seed=1.0, **shape)
    assert normal.shape == uniform.shape == SHAPE
    np.testing.assert_allclose([normal.mean(), normal.std()], [2, 0.5], atol=0.02)
    np.testing.assert_allclose([uniform.mean(), uniform.std()], [1, 4 / np.sqrt(12)], atol=0.05)
    assert uniform.min() >= -1 and uniform.max() < 3


def test_nodes_draw_the_same_numbers_again_and_others_than_other_nodes():
    first, repeated, other = (drawn("RandomUniform", name=name, shape=[64]) for name in "aab")
    np.testing.assert_array_equal(first, repeated)
    assert not np.isin(first, other).any()
    seeds = [drawn("RandomUniform", shape=[64], seed=seed) for seed in (1.0, 2.0)]
    assert not np.isin(*seeds).any()


def test_bernoulli_and_multinomial_follow_their_probabilities():
    ones = drawn("Bernoulli", np.full(SHAPE, 0.3, np.float32))
    assert set(np.unique(ones)) == {0, 1} and abs(ones.mean() - 0.3) < 0.02
    odds = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-9]], np.float32))
    classes = drawn("Multinomial", odds, dtype=np.int32, sample_size=4000)
    shares = np.stack([(classes == each).mean(axis=1) for each in range(3)], axis=1)
    np.testing.assert_allclose(shares, [[0.1, 0.2, 0.7], [0.5, 0.5, 0]], atol=0.03)


def test_dropout_scales_the_elements_that_remain():
    nodes = [helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"], "dropout")]
    constants = {"ratio": np.float32(0.25), "training": np.array(True)}
    constants = {name: np.asarray(value) for name, value in constants.items()}
    outputs = [info("y", shape=SHAPE), info("mask", bool, SHAPE)]
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=SHAPE)], outputs, constants))
    x = np.ones(SHAPE, np.float32)
    y, mask = map(np.asarray, jax.jit(model)(model.params, x))
    np.testing.assert_allclose(y, np.where(mask, 4 / 3, 0), rtol=1e-6)
    assert abs(mask.mean() - 0.75) < 0.02


LOOP = """<ir_version: 8, opset_import: ["" : 17]> g (float x, int64 n, bool go) => (float x_after, float[n, 4] drawn)
{ x_after, drawn = Loop (n, go, x) <body = b (int64 i, bool c, float s) => (bool c_after, float s_after, float[4] r)
{ c_after = Identity (c) s_after = Identity (s) r = RandomUniform <shape = [4]> () }> }"""
SCAN = """<ir_version: 8, opset_import: ["" : 17]> g (float x, float[3] rows) => (float x_after, float[3, 4] drawn)
{ x_after, drawn = Scan <num_scan_inputs = 1, body = b (float s, float row) => (float s_after, float[4] r)
{ s_after = Add (s, row) r = RandomUniform <shape = [4], seed = 3.0> () }> (x, rows) }"""


@pytest.mark.parametrize(
    ("text", "static", "inputs"),
    [
        (LOOP, {"n": np.int64(3), "go": np.bool_(True)}, (np.float32(0),)),
        (SCAN, None, (np.float32(0), np.ones(3, np.float32))),
    ],
    ids=["loop", "scan"],
)
def test_iterations_draw_numbers_of_their_own(text: str, static: Any, inputs: tuple[Any, ...]) -> None:
    model = ipujax.onnx.load(parser.parse_model(text), static=static)
    _, first = model(model.params, *inputs)
    _, second = model(model.params, *inputs)
    assert len(np.unique(first)) == 12
    np.testing.assert_array_equal(first, second)
