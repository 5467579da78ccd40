"""Operators of `ai.onnx.ml`: random models against onnxruntime, doubles in trees, text, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.onnx.ml_cases import BOTH, GENERATORS, Case, Y, one_node

ort = pytest.importorskip("onnxruntime")
SEEDS = 2  # of each operator, in the fast tests
MORE_SEEDS = 20  # 300 models


def results_of(case: Case) -> list[np.ndarray]:
    """Return the results of a case, traced."""
    model = ipujax.onnx.load(case.model)
    results = jax.jit(model)(model.params, *case.feeds.values())
    return [np.asarray(x) for x in (results if isinstance(results, tuple) else (results,))]


def check(name: str, seed: int) -> None:
    """Compare a random model with onnxruntime."""
    case = GENERATORS[name](np.random.default_rng(seed))
    session = ort.InferenceSession(case.model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, expected in zip(results_of(case), session.run(None, dict(case.feeds)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", GENERATORS)
def test_random_models(name: str, seed: int):
    check(name, seed)


@pytest.mark.parametrize("rows", [1, 3])
def test_probit_of_scores(rows: int):
    x = np.random.default_rng(0).uniform(0.05, 0.95, (9, 1)).astype(np.float32)
    case = one_node(
        "LinearRegressor", {"x": x}, Y, coefficients=[1.0, 0.9, 0.8][:rows], targets=rows, post_transform="PROBIT"
    )
    session = ort.InferenceSession(case.model.SerializeToString(), providers=["CPUExecutionProvider"])
    # Near ½ the approximation is a root of a small difference, of which single precision holds 10⁻⁴.
    np.testing.assert_allclose(results_of(case)[0], session.run(None, {"x": x})[0], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", GENERATORS)
def test_many_random_models(name: str):
    for seed in range(SEEDS, SEEDS + MORE_SEEDS):
        check(name, seed)


STUMP: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
}
X = np.asarray([[0.0], [1.0]], np.float32)


def stump(**changes: Any) -> Case:
    """Return a tree of one comparison, x ≤ ½ → 1 or 2, with other attributes; None leaves one out."""
    attributes = {name: value for name, value in {**STUMP, **changes}.items() if value is not None}
    return one_node("TreeEnsembleRegressor", {"x": X}, Y, **attributes)


def test_a_forest_runs_on_tiles():
    model = ipujax.onnx.load(GENERATORS["tree_regressor"](np.random.default_rng(5)).model)
    x = np.random.default_rng(0).standard_normal(model.inputs[0].shape).astype(np.float32)
    device = ipu.IPUModel(tiles_per_ipu=16)
    np.testing.assert_allclose(
        ipu.jit(model, device=device)(model.params, x), jax.jit(model)(model.params, x), rtol=1e-6
    )
    assert not ipu.jit(model, device=device).profile(model.params, x).fallbacks


@pytest.mark.parametrize(
    ("mode", "threshold", "expected"),
    [
        # Doubles between two floats, of which one is 1: what is compared is the double.
        ("BRANCH_LEQ", 1 + 1e-9, [1, 1]),
        ("BRANCH_LEQ", 1 - 1e-9, [1, 2]),
        ("BRANCH_LT", 1 + 1e-9, [1, 1]),
        ("BRANCH_GT", 1 - 1e-9, [2, 1]),
        ("BRANCH_GTE", 1 + 1e-9, [2, 2]),
        ("BRANCH_EQ", 1 + 1e-9, [2, 2]),
        ("BRANCH_NEQ", 1 - 1e-9, [1, 1]),
    ],
)
def test_thresholds_in_double_precision(mode: str, threshold: float, expected: list[float]):
    tensor = onnx.numpy_helper.from_array(np.asarray([threshold, 0, 0]), "values")
    case = stump(nodes_modes=[mode, "LEAF", "LEAF"], nodes_values=None, nodes_values_as_tensor=tensor)
    assert results_of(case)[0].ravel().tolist() == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes_truenodeids": [0, 0, 0]}, "is in a cycle|two parents|number of roots|cycle"),
        ({"nodes_truenodeids": [2, 0, 0]}, "another number of roots"),
        ({"nodes_truenodeids": [9, 0, 0]}, "node 0 of tree 0 has a child that its tree does not have"),
        ({"nodes_nodeids": [0, 1, 1]}, "two nodes of a tree have one number"),
        ({"nodes_featureids": [3, 0, 0]}, "compares a feature that the operand does not have"),
        ({"nodes_modes": ["BRANCH", "LEAF", "LEAF"]}, "nodes_modes is unknown"),
        ({"nodes_values": [0.5]}, "nodes_values needs a value for each node"),
        ({"target_ids": [0, 1]}, "a leaf has a value for a target that there is not"),
        ({"target_nodeids": [1, 5]}, "a value belongs to a leaf that there is not"),
        ({"target_weights": [1.0]}, "differ in length"),
        ({"base_values": [1.0, 2.0]}, "base_values needs a value for each target"),
        ({"n_targets": 1 << 40}, "the table of an ensemble's leaves is too large"),
        ({"n_targets": 0}, "an ensemble needs a target"),
        ({"aggregate_function": "MEDIAN"}, "'aggregate_function' is unknown"),
        ({"post_transform": "TANH"}, "'post_transform' is unknown"),
    ],
)
def test_refused_trees(changes: dict[str, Any], text: str):
    with pytest.raises(ipujax.onnx.OnnxError, match=text):
        results_of(stump(**changes))


def test_refused_numbers_of_classes():
    attributes = {name: value for name, value in STUMP.items() if name.startswith("nodes_")}
    classes = {"class_treeids": [0], "class_nodeids": [1], "class_ids": [1 << 40], "class_weights": [1.0]}
    with pytest.raises(ipujax.onnx.OnnxError, match="the table of an ensemble's leaves is too large"):
        results_of(one_node("TreeEnsembleClassifier", {"x": X}, BOTH, **attributes, **classes))
    count = 100_000
    machine = {"coefficients": [1.0], "rho": [0.0], "vectors_per_class": [0] * count, "classlabels_ints": range(count)}
    with pytest.raises(ipujax.onnx.OnnxError, match="coefficients has another number of values"):
        results_of(one_node("SVMClassifier", {"x": X}, BOTH, **machine))


LINEAR: dict[str, Any] = {"coefficients": [1.0, -1.0, 0.5], "intercepts": [0.0, 0.1, 0.2]}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "labels of neither kind"),
        ({"classlabels_ints": [1, 2]}, "another number of labels than classes"),
        ({"classlabels_ints": [1, 2, 2]}, "two classes have one label"),
        ({"classlabels_ints": [1, 2, 1 << 40]}, "1099511627776, which 32 bits do not hold"),
        ({"classlabels_ints": [1, 2, 3], "classlabels_strings": ["a", "b", "c"]}, "labels of both kinds"),
        ({"classlabels_ints": [1, 2, 3], "coefficients": [1.0]}, "another number of coefficients"),
    ],
)
def test_refused_labels(changes: dict[str, Any], text: str):
    with pytest.raises(ipujax.onnx.OnnxError, match=text):
        results_of(one_node("LinearClassifier", {"x": X}, BOTH, **{**LINEAR, **changes}))


def test_labels_of_text_are_positions():
    outputs = {"label": TensorProto.STRING, "y": TensorProto.FLOAT}
    case = one_node("LinearClassifier", {"x": X}, outputs, **LINEAR, classlabels_strings=["c", "a", "b"])
    label, scores = results_of(case)
    assert label.tolist() == scores.argmax(1).tolist()


def test_text_that_is_known_is_encoded():
    texts = np.asarray(["b", "z", "a"], object)
    case = one_node("LabelEncoder", {"x": texts}, Y, keys_strings=["a", "b"], values_floats=[1.0, 2.0])
    model = ipujax.onnx.load(case.model, static={"x": texts})
    assert np.asarray(model(model.params)).tolist() == [2.0, -0.0, 1.0]


def test_categories_are_positions_of_their_text():
    categories = {"cats_int64s": [5, 7], "cats_strings": ["five", "seven"]}
    numbers = one_node("CategoryMapper", {"x": np.asarray([7, 5, 1])}, {"y": TensorProto.STRING}, **categories)
    assert results_of(numbers)[0].tolist() == [1, 0, 2]  # the last has no text
    texts = np.asarray(["seven", "six"], object)
    case = one_node("CategoryMapper", {"x": texts}, {"y": TensorProto.INT64}, **categories)
    assert np.asarray(ipujax.onnx.load(case.model, static={"x": texts})({})).tolist() == [7, -1]


@pytest.mark.parametrize(
    ("op_type", "attributes", "text"),
    [
        ("Scaler", {"offset": [1.0, 2.0], "scale": [1.0]}, "offset has another number of values than features"),
        ("Normalizer", {"norm": "L3"}, "'norm' is unknown"),
        ("Imputer", {}, "no value for missing ones of float32"),
        ("LabelEncoder", {"keys_floats": [1.0], "values_floats": [1.0, 2.0]}, "another number of keys than values"),
        ("LabelEncoder", {"keys_floats": [1.0]}, "a table needs values of one kind"),
        ("SVMRegressor", {"coefficients": [1.0], "n_supports": 1, "rho": [0.0]}, "support_vectors has another number"),
        ("SVMRegressor", {"coefficients": [1.0] * 3, "n_supports": -2, "rho": [0.0]}, "n_supports -2 is out of range"),
        (
            "SVMRegressor",
            {"coefficients": [1.0], "n_supports": 1, "support_vectors": [1.0], "kernel_params": [1.0]},
            "kernel_params needs gamma, offset and degree",
        ),
        ("Imputer", {"imputed_value_floats": [1.0], "imputed_value_int64s": [1]}, "values of both kinds"),
        ("ZipMap", {}, "labels of neither kind"),
        ("ZipMap", {"classlabels_int64s": [1, 2]}, "another number of labels than classes"),
    ],
)
def test_refused_attributes(op_type: str, attributes: dict[str, Any], text: str):
    with pytest.raises(ipujax.onnx.OnnxError, match=text):
        results_of(one_node(op_type, {"x": X}, Y, **attributes))
