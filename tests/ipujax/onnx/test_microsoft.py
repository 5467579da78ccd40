"""Operators of `com.microsoft` against onnxruntime's kernels, or NumPy where these have none; and refusals."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.onnx.microsoft_cases import FAMILIES, RNG, Case, f, i, q, s, z

ort = pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def same_numbers_alone_and_among_others() -> None:
    """Begin the random numbers of each test anew, whichever tests ran before it."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def results_of(case: Case) -> list[np.ndarray]:
    """Return the results of a case, traced but for constants."""
    feeds = case.feeds()
    model = ipujax.onnx.load(case.model())
    results = jax.jit(model)(model.params, *(feeds[info.name] for info in model.inputs))
    return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,))]


def check(case: Case, expected: Any) -> None:
    """Compare results with expected ones."""
    for got, right in zip(results_of(case), expected, strict=True):
        assert got.shape == right.shape
        if case.steps:
            assert got.dtype == right.dtype
            assert np.abs(got.astype(int) - right.astype(int)).max() <= case.steps
        else:
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=case.tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree_with_onnxruntime(family: str):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for case in FAMILIES[family]():
        data = case.model().SerializeToString()
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        check(case, session.run(None, case.feeds()))


X = f(2, 3, 4, 4)
FINITE = np.asarray([1, np.inf], np.float32)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("ScaledTanh", [X], {"alpha": 2.0, "beta": 0.5}, domain=""), 2 * np.tanh(0.5 * X)),
        (Case("Affine", [X], {"alpha": 2.0, "beta": 0.5}, domain=""), 2 * X + 0.5),
        (Case("ParametricSoftplus", [X], {"alpha": 2.0, "beta": 0.5}, domain=""), 2 * np.log1p(np.exp(0.5 * X))),
        (
            Case("ImageScaler", [X], {"scale": 2.0, "bias": [0.5, 1.0, 2.0]}, domain=""),
            2 * X + np.asarray([0.5, 1, 2], np.float32)[:, None, None],
        ),
        (Case("IsAllFinite", [FINITE], {}), np.asarray(False)),
        (Case("IsAllFinite", [FINITE], {"isnan_only": 1}), np.asarray(True)),
        (Case("BiasAdd", [X, X[0, 0, 0], X], {}), 2 * X + X[0, 0, 0]),
        (Case("TorchEmbedding", [X, np.asarray([1, 0])], {}), X[::-1]),
    ],
    ids=lambda value: value.op_type if isinstance(value, Case) else "",
)
def test_operators_without_a_kernel(case: Case, expected: np.ndarray):
    check(case, [expected])


def test_channels_last_are_channels_first():
    images, kernels = f(1, 5, 5, 3), f(4, 3, 3, 3)
    (expected,) = results_of(Case("FusedConv", [images.transpose(0, 3, 1, 2), kernels], {"activation": "Relu"}))
    fused = Case("NhwcFusedConv", [images, kernels], {"activation": "Relu"})
    check(fused, [expected.transpose(0, 2, 3, 1)])
    (plain,) = results_of(Case("NhwcConv", [images, kernels], {}))
    np.testing.assert_allclose(np.maximum(plain, 0), expected.transpose(0, 2, 3, 1), rtol=1e-5, atol=1e-5)


def test_bias_softmax_and_gates():
    data, bias = f(2, 3, 4), f(2, 1, 4)
    weights = np.exp(data + bias)
    softmax = Case("BiasSoftmax", [data, bias], {"axis": 2, "is_inner_broadcast": 1})
    check(softmax, [weights / weights.sum(-1, keepdims=True)])
    x, b = f(2, 8), f(8)
    (gate,) = results_of(Case("Gelu", [(x + b)[:, 4:]], {}))
    check(Case("BiasSplitGelu", [x, b], {}), [(x + b)[:, :4] * gate])
    product = Case("FusedMatMulActivation", [f(3, 4), f(4, 5)], {"activation": "Relu"})
    check(product, [np.maximum(product.operands[0] @ product.operands[1], 0)])


def test_means_of_quantised_arrays():
    case = Case("QLinearReduceMean", [q(3, 8), s(0.05), z(9), s(0.05), z(9)], {"axes": [1], "keepdims": 0}, steps=1)
    check(case, [np.round(case.operands[0].astype(np.float32).mean(1)).astype(np.uint8)])


def test_one_token_of_decoders():
    operands = [f(2, 1, 8), f(2, 1, 8), f(2, 1, 8), None, None, f(2, 2, 3, 4), f(2, 2, 3, 4)]
    three = (True, True, True)
    expected = results_of(
        Case("MultiHeadAttention", [*operands[:3], None, None, None, *operands[5:]], {"num_heads": 2}, three)
    )
    check(Case("DecoderMaskedMultiHeadAttention", operands, {"num_heads": 2}, three), expected)


def test_attention_runs_on_tiles():
    case = Case("MultiHeadAttention", [f(2, 4, 8), f(2, 5, 8), f(2, 5, 8)], {"num_heads": 2})
    session = ipujax.onnx.session(case.model(), device=ipu.IPUModel(tiles_per_ipu=16))
    np.testing.assert_allclose(session(*case.operands), results_of(case)[0], rtol=1e-5, atol=1e-6)
    assert not session.profile(*case.operands).fallbacks


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case("FusedGemm", [f(3, 4), f(4, 5)], {"activation": "Sine"}), "'activation' is unknown"),
        (Case("MultiHeadAttention", [f(2, 4, 8)], {"num_heads": 2}), "the node has no keys"),
        (Case("MultiHeadAttention", [f(2, 4, 7)] * 3, {"num_heads": 2}), "heads do not divide the hidden size"),
        (Case("Attention", [f(2, 4, 8), f(8, 24), f(24), i([1, 2, 3])], {"num_heads": 2}), "a mask of lengths"),
        (
            Case("MatMulNBits", [f(3, 64), q(5, 1, 16), f(5, 2)], {"K": 64, "N": 5, "block_size": 32}),
            "packed weights have another size",
        ),
        (
            Case("GroupQueryAttention", [f(2, 5, 64), None, None, None, None, i([4, 4]), i(5)], {
                "num_heads": 4, "kv_num_heads": 2}),
            "the size of the cache of keys depends on traced values",
        ),
        (Case("Attention", [f(2, 4, 8), f(8, 24), f(1)], {"num_heads": 2}), "the bias needs a value for each position"),
        (Case("BiasGelu", [f(2, 3), f(1)], {}), "the bias needs a value for each position on axis 1"),
        (Case("SkipLayerNormalization", [f(2, 4, 8), f(2, 4, 8), f(1)], {}), "gamma needs a value for each position"),
        (Case("BiasSoftmax", [f(2, 3), f(1, 3)], {"axis": 5, "is_inner_broadcast": 1}), "axis 5 is outside"),
        (
            Case("MatMulNBits", [f(3, 4), q(5, 1, 16), f(5)], {"K": 32, "N": 5, "block_size": 32}),
            "the rows of the operand have another length",
        ),
        (Case("QLinearConcat", [s(1.0), z(0), q(2, 2)], {"axis": 0}), "each array needs a scale and a zero point"),
        (Case("QOrderedGelu", [f(2, 2)], {}), "com.microsoft:QOrderedGelu, 1 node: node"),
    ],
)  # fmt: skip
def test_refusals(case: Case, text: str):
    with pytest.raises(ipujax.onnx.OnnxError, match=text):
        results_of(case)


def test_norm_of_onnxruntime_in_a_function():
    # An operator that ONNX lacks, in a function of the model, beside nodes that import no other domain.
    node = helper.make_node("SimplifiedLayerNormalization", ["a", "b"], ["c"], epsilon=1e-6)
    opsets = [helper.make_opsetid("", 17)]
    function = helper.make_function("local", "Norm", ["a", "b"], ["c"], [node], opsets)
    call = helper.make_node("Norm", ["x", "scale"], ["y"], domain="local")
    values = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [2, 8]), ("scale", [8]))]
    graph = helper.make_graph([call], "graph", values, [helper.make_tensor_value_info("y", 1, [2, 8])])
    opsets = [*opsets, helper.make_opsetid("local", 1)]
    model = ipujax.onnx.load(helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8))
    x, scale = RNG.standard_normal((2, 8)).astype(np.float32), f(8)
    expected = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(model({}, x, scale), expected, rtol=1e-5)
