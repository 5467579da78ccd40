"""Values at the edges of operators against onnxruntime: ignored classes, thresholds that are met, permuted n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

import ipujax.onnx
from tests.ipujax.onnx.models import info, model_of

INT = np.int64
FLOAT = np.float32
MASKED = FLOAT([[-np.inf, -0.1, -2], [-0.5, -1, -1.5]])  # class 0 of the first sample has probability 0
BOXES = FLOAT([[[0, 0, 1, 1], [0, 2, 1, 3], [0, 4, 1, 5]]])
LINE = np.arange(5, dtype=FLOAT)
COUNTED = {
    "max_gram_length": 2,
    "max_skip_count": 0,
    "min_gram_length": 1,
    "ngram_counts": [0, 2],
    "ngram_indexes": [2, 0, 1],
    "pool_int64s": [7, 5, 5, 7],
    "weights": [2.0, 3.0, 4.0],
}
# Operator, inputs that are no constants, constants behind them, attributes.
CASES: dict[str, tuple[str, Sequence[Any], Sequence[Any], Mapping[str, Any]]] = {
    "an ignored class": ("NegativeLogLikelihoodLoss", [MASKED, INT([-1, 2])], [], {"ignore_index": -1}),
    "an ignored label": ("SoftmaxCrossEntropyLoss", [MASKED, INT([-1, 2])], [], {"ignore_index": -1}),
    "a score at its threshold": (
        "NonMaxSuppression",
        [],
        [BOXES, FLOAT([[[0.9, 0.5, 0.75]]]), INT([3]), FLOAT([0.5]), FLOAT([0.5])],
        {},
    ),
    "an impossible box": ("NonMaxSuppression", [], [BOXES, FLOAT([[[0.9, -np.inf, 0.75]]]), INT([3])], {}),
    "weights of permuted n-grams": ("TfIdfVectorizer", [INT([5, 7, 7, 5, 7])], [], {**COUNTED, "mode": "TFIDF"}),
    "occurrences of permuted n-grams": ("TfIdfVectorizer", [INT([5, 7, 7])], [], {**COUNTED, "mode": "IDF"}),
    "a range up to a multiple": ("Range", [], [FLOAT(0), FLOAT(0.3), FLOAT(0.1)], {}),
    "a backward slice from before the start": ("Slice", [LINE], [INT([-9]), INT([-20]), INT([0]), INT([-1])], {}),
    "a backward slice from behind the end": ("Slice", [LINE], [INT([9]), INT([-20]), INT([0]), INT([-2])], {}),
    "a whole power beyond the integers of float32": ("Pow", [np.int32([3, 5793])], [FLOAT([16, 2])], {}),
    "whole and other powers of integers": ("Pow", [np.int32([5793, 49]), FLOAT([2, 0.5])], [], {}),
    "an element just before a whole position": (
        "Resize",
        [LINE.reshape(1, 1, 1, 5)],
        [FLOAT([]), FLOAT([1, 1, 1, 0.6])],
        {"nearest_mode": "floor"},
    ),
    "a cubic resize to one element": (
        "Resize",
        [LINE.reshape(1, 1, 1, 5)],
        [FLOAT([]), FLOAT([1, 1, 1, 0.2])],
        {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"},
    ),
}
ZEROS = FLOAT([0.0, -0.0, 1, -0.0, 0.0])
PADDED = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
# Operator, input, constants behind it, attributes; of several results.
INDEXED: dict[str, tuple[str, Any, Sequence[Any], Mapping[str, Any], int]] = {
    "the largest of zeros of both signs": ("TopK", ZEROS, [INT([4])], {}, 2),
    "the smallest of zeros of both signs": ("TopK", ZEROS, [INT([4])], {"largest": 0}, 2),
    "a largest element as low as padding": ("MaxPool", np.zeros((1, 1, 4, 4), np.uint8), [], PADDED, 2),
    "windows of −∞": ("MaxPool", np.full((1, 1, 4, 4), -np.inf, FLOAT), [], {**PADDED, "storage_order": 1}, 2),
    "a range of zero": ("DynamicQuantizeLinear", np.zeros(3, FLOAT), [], {}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_values_at_an_edge_are_those_of_onnxruntime(name: str) -> None:
    operator, inputs, constants, attributes = CASES[name]
    arrays = {f"x{n}": x for n, x in enumerate(inputs)}
    known = {f"c{n}": np.asarray(x) for n, x in enumerate(constants)}
    node = helper.make_node(operator, [*arrays, *known], ["y"], **attributes)
    infos = [info(each, x.dtype, x.shape) for each, x in arrays.items()]
    model = model_of([node], infos, [ValueInfoProto(name="y")], known, opset=22)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, arrays)
    loaded = ipujax.onnx.load(model)
    actual = np.asarray(loaded(loaded.params, *inputs))
    assert actual.shape == expected.shape
    tolerance = 0 if actual.dtype.kind in "iu" else 1e-6
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", INDEXED)
def test_indices_and_scales_at_an_edge_are_those_of_onnxruntime(name: str) -> None:
    operator, x, constants, attributes, count = INDEXED[name]
    known = {f"c{n}": np.asarray(x) for n, x in enumerate(constants)}
    results = [f"y{n}" for n in range(count)]
    node = helper.make_node(operator, ["x", *known], results, **attributes)
    infos = [ValueInfoProto(name=each) for each in results]
    model = model_of([node], [info("x", x.dtype, x.shape)], infos, known, opset=22)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    loaded = ipujax.onnx.load(model)
    for actual, expected in zip(loaded(loaded.params, x), session.run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def test_levels_that_meet_a_half_are_those_of_a_division():
    # XLA does not divide by one number, but multiplies by its inverse: by arguments, and by constants.
    scale = FLOAT(0.637)
    x = np.arange(-127, 128, dtype=FLOAT) * scale  # what dequantised weights are
    for operands, outputs in (([], ["y", "scale", "zero"]), ([scale * FLOAT(2), np.uint8(128)], ["y"])):
        names = [f"x{n}" for n in range(len(operands))]
        node = helper.make_node("QuantizeLinear" if names else "DynamicQuantizeLinear", ["x", *names], outputs)
        results = [ValueInfoProto(name=name) for name in outputs]
        constants = dict(zip(names, operands, strict=True))
        model = model_of([node], [info("x", FLOAT, x.shape)], results, constants, opset=22)
        expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
        loaded = ipujax.onnx.load(model)
        for got in (jax.jit(loaded)(loaded.params, x), jax.jit(partial(loaded, loaded.params))(x)):
            for actual, right in zip(jax.tree.leaves(got), expected, strict=True):
                np.testing.assert_array_equal(actual, right)


IMAGE = FLOAT([[[1, 2, 3]]])
ANGLES = FLOAT([[[1, 0.5, 0.1], [0, 1, 0.2]]])
NARROW_KERNEL = {"auto_pad": "SAME_UPPER", "strides": [3]}
LONG_RESULT = {"auto_pad": "SAME_UPPER", "output_shape": [8], "strides": [2]}
# Operator, input, constants behind it, attributes: onnxruntime has other results.
OF_THE_SPECIFICATION: dict[str, tuple[str, np.ndarray, Sequence[Any], Mapping[str, Any]]] = {
    "corners of one element": ("AffineGrid", ANGLES, [INT([1, 1, 1, 1])], {"align_corners": 1}),
    "a list of no axes": ("Squeeze", np.ones((1, 3, 1), FLOAT), [INT([])], {}),
    "a kernel narrower than the stride": ("ConvTranspose", IMAGE, [FLOAT([[[2]]])], NARROW_KERNEL),
    "a result longer than the sum of products": ("ConvTranspose", IMAGE, [FLOAT([[[1, 10, 100]]])], LONG_RESULT),
}


@pytest.mark.parametrize("case", OF_THE_SPECIFICATION)
@pytest.mark.filterwarnings("ignore:divide by zero")  # of the reference
def test_results_are_those_of_the_specification(case: str) -> None:
    operator, x, constants, attributes = OF_THE_SPECIFICATION[case]
    names = [f"x{n}" for n in range(len(constants))]
    node = helper.make_node(operator, ["x", *names], ["y"], **attributes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = model_of([node], [info("x", FLOAT, x.shape)], [y], dict(zip(names, constants, strict=True)), opset=22)
    loaded = ipujax.onnx.load(model)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(loaded(loaded.params, x), expected)


BIG = np.full((1, 2, 3, 3), 40000, np.float16)
SIGNED = BIG * np.float16([-1, 1, 1]) * np.float16([[1], [-1], [1]])
HALVES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "AveragePool": (BIG, {"kernel_shape": [2, 2]}),
    "GlobalLpPool": (BIG / 8, {}),
    "LRN": (BIG, {"size": 1}),
    "LpNormalization": (BIG, {"axis": 1}),
    "LpPool": (BIG, {"kernel_shape": [1, 1]}),
    "Mean": (BIG, {}),
    "MeanVarianceNormalization": (SIGNED, {}),
    "ReduceL2": (BIG[:, :1, :1, :1], {}),
    "ReduceLogSum": (BIG, {}),
}


@pytest.mark.parametrize("operator", HALVES)
def test_halves_do_not_leave_their_range_on_the_way(operator: str) -> None:
    x, attributes = HALVES[operator]
    node = helper.make_node(operator, ["x", "x"] if operator == "Mean" else ["x"], ["y"], **attributes)
    results = []
    for array in (x, x.astype(FLOAT)):
        graph = [node], [info("x", array.dtype, array.shape)], [ValueInfoProto(name="y")]
        model = ipujax.onnx.load(model_of(*graph, opset=22))
        results.append(np.asarray(model(model.params, array)))
    assert results[0].dtype == np.float16
    np.testing.assert_allclose(results[0].astype(FLOAT), results[1], rtol=2e-3)


NARROW = {np.int8: [-1, 64], np.uint8: [100, 200], np.float16: [100, 2048], ml_dtypes.bfloat16: [100, 512]}


@pytest.mark.parametrize("dtype", NARROW)
def test_one_hot_of_narrow_indices_has_every_position(dtype: Any) -> None:
    # onnxruntime has no OneHot of these
    indices = np.asarray(NARROW[dtype], dtype)
    known = {"depth": INT([3000]), "values": INT([0, 1])}
    node = helper.make_node("OneHot", ["x", *known], ["y"])
    graph = [node], [info("x", dtype, [2])], [helper.make_tensor_value_info("y", TensorProto.INT64, [2, 3000])]
    model = ipujax.onnx.load(model_of(*graph, known))
    hot = np.argwhere(np.asarray(model(model.params, indices)))
    assert hot[:, 1].tolist() == [n % 3000 for n in NARROW[dtype]]


HALF = np.float16
BYTES = np.random.default_rng(0).integers(0, 255, (2, 4, 4)).astype(np.uint8)
REGIONS = FLOAT([[1, 1, 1, 1], [2, 2, 1, 1], [0, 0, 3, 3]])  # without extent, turned around, and one of both
BINS = {"output_height": 2, "output_width": 2}
# Operator, inputs, attributes.
HALVES_AND_BINS: dict[str, tuple[str, Sequence[Any], Mapping[str, Any]]] = {
    "means of regions without extent": ("RoiAlign", [np.arange(16, dtype=FLOAT).reshape(1, 1, 4, 4)], BINS),
    "maxima of regions without extent": (
        "RoiAlign",
        [np.arange(16, dtype=FLOAT).reshape(1, 1, 4, 4)],
        {**BINS, "mode": "max"},
    ),
    "indices with fractions": ("OneHot", [FLOAT([1.9, -1.2, 0.5, -0.5])], {}),
    "a channel of a vector": ("BatchNormalization", [FLOAT([1, 2, 3]), *(FLOAT([n]) for n in (2, 1, 0, 4))], {}),
    "the mean loss of many halves": (
        "NegativeLogLikelihoodLoss",
        [np.full((20_000, 2), -8, HALF), np.zeros(20_000, INT)],
        {},
    ),
    "the mean loss of more samples than halves count": (
        "NegativeLogLikelihoodLoss",
        [np.full((70_000, 1), -0.5, HALF), np.zeros(70_000, INT)],
        {},
    ),
    "exponentials of more halves than halves count": ("ReduceLogSumExp", [np.zeros(70_000, HALF)], {}),
    "scales of half precision whose product underflows": (
        "QLinearMatMul",
        [BYTES[0], HALF(0.0011), np.uint8(3), BYTES[1], HALF(0.00013), np.uint8(7), HALF(0.00026), np.uint8(1)],
        {},
    ),
}
KNOWN = {"RoiAlign": [REGIONS, INT([0, 0, 0])], "OneHot": [FLOAT(4), FLOAT([0, 1])]}  # constants behind the inputs


@pytest.mark.parametrize("name", HALVES_AND_BINS)
def test_sums_of_halves_and_empty_bins_are_those_of_onnxruntime(name: str) -> None:
    operator, inputs, attributes = HALVES_AND_BINS[name]
    arrays = {f"x{n}": np.asarray(x) for n, x in enumerate(inputs)}
    known = {f"c{n}": np.asarray(x) for n, x in enumerate(KNOWN.get(operator, ()))}
    node = helper.make_node(operator, [*arrays, *known], ["y"], **attributes)
    infos = [info(each, x.dtype, x.shape) for each, x in arrays.items()]
    model = model_of([node], infos, [ValueInfoProto(name="y")], known, opset=21)
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, arrays)
    loaded = ipujax.onnx.load(model)
    actual = np.asarray(loaded(loaded.params, *arrays.values()))
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-6 if actual.dtype == FLOAT else 0)


@pytest.mark.parametrize(
    ("rule", "operands"), [("linear", "decay"), ("gated", ""), ("delta", "decay beta"), ("gate", "")]
)
def test_linear_attention_refuses_operands_that_its_rule_does_not_read(rule: str, operands: str) -> None:
    x = np.ones((1, 3, 4), FLOAT)
    further = {name: name if name in operands else "" for name in ("past", "decay", "beta")}
    arrays = {"q": x, "k": x, "v": x} | {name: x[..., :2] for name in operands.split()}
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": rule}
    node = helper.make_node("LinearAttention", ["q", "k", "v", *further.values()], ["y", "state"], **heads)
    infos = [info(name, FLOAT, array.shape) for name, array in arrays.items()]
    model = model_of([node], infos, [ValueInfoProto(name="y")])
    with pytest.raises(ipujax.onnx.OnnxError, match=r"update.rule"):
        loaded = ipujax.onnx.load(model)
        loaded(loaded.params, *arrays.values())
