"""Random models of `ai.onnx.ml`, a generator for each operator; onnxruntime computes the expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Rng = np.random.Generator
DOMAIN = "ai.onnx.ml"
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of one operator, and its operand.

    Args:
        model: of inputs x (and more), outputs y, or label and y.
        feeds: arrays by input.
    """

    model: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]


def one_node(
    op_type: str, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, int], opset: int = 3, **attributes: Any
) -> Case:
    """Return a case of one node."""
    node = helper.make_node(op_type, list(feeds), list(outputs), domain=DOMAIN, **attributes)
    ins = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feeds.items()
    ]
    outs = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, opset)]
    graph = helper.make_graph([node], "case", ins, outs)
    return Case(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds)


Y = {"y": TensorProto.FLOAT}
BOTH = {"label": TensorProto.INT64, "y": TensorProto.FLOAT}


def _x(rng: Rng, features: int) -> np.ndarray:
    return rng.standard_normal((int(rng.integers(1, 12)), features)).astype(np.float32)


def _floats(rng: Rng, *shape: int) -> list[float]:
    return rng.standard_normal(shape).astype(np.float32).ravel().tolist()


def _labels(rng: Rng, classes: int) -> list[int]:
    return rng.permutation(20)[:classes].tolist() if rng.random() < 0.5 else list(range(classes))


def _pick(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def linear_regressor(rng: Rng) -> Case:
    """Return a linear model of several targets."""
    features, targets = (int(n) for n in rng.integers(1, 6, 2))
    given = {} if rng.random() < 0.2 else {"intercepts": _floats(rng, targets)}
    return one_node(
        "LinearRegressor",
        {"x": _x(rng, features)},
        Y,
        coefficients=_floats(rng, targets, features),
        targets=targets,
        post_transform=_pick(rng, TRANSFORMS),
        **given,
    )


def linear_classifier(rng: Rng) -> Case:
    """Return a linear classifier: of one row of coefficients for two classes, or one for each class."""
    features, rows = (int(n) for n in rng.integers(1, 6, 2))
    return one_node(
        "LinearClassifier",
        {"x": _x(rng, features)},
        BOTH,
        coefficients=_floats(rng, rows, features),
        intercepts=_floats(rng, rows),
        classlabels_ints=_labels(rng, max(rows, 2)),
        multi_class=int(rng.integers(2)),
        post_transform=_pick(rng, TRANSFORMS),
    )


def normalizer(rng: Rng) -> Case:
    """Return a norm of rows."""
    x = _x(rng, int(rng.integers(1, 7)))
    x[0] *= _pick(rng, (0, 1))
    return one_node("Normalizer", {"x": x}, Y, norm=_pick(rng, ("MAX", "L1", "L2")))


def scaler(rng: Rng) -> Case:
    """Return a scaler of floats or integers."""
    features = int(rng.integers(1, 6))
    x = _x(rng, features) if rng.random() < 0.6 else rng.integers(-9, 9, (4, features))
    size = _pick(rng, (1, features))
    offset, scale = (_floats(rng, size) for _ in range(2))
    return one_node("Scaler", {"x": x}, Y, offset=offset, scale=scale)


def imputer(rng: Rng) -> Case:
    """Return an imputer of NaN, of a marker, of integers."""
    features = int(rng.integers(1, 6))
    size = _pick(rng, (1, features))
    if rng.random() < 0.3:
        x = rng.integers(-2, 3, (5, features))
        values = rng.integers(10, 20, size).tolist()
        return one_node(
            "Imputer", {"x": x}, {"y": TensorProto.INT64}, imputed_value_int64s=values, replaced_value_int64=-1
        )
    x = _x(rng, features)
    marker = _pick(rng, (float("nan"), 7.0))
    x[rng.random(x.shape) < 0.3] = marker
    return one_node("Imputer", {"x": x}, Y, imputed_value_floats=_floats(rng, size), replaced_value_float=marker)


def binarizer(rng: Rng) -> Case:
    """Return a threshold."""
    return one_node("Binarizer", {"x": _x(rng, 4)}, Y, threshold=float(rng.standard_normal()))


def feature_vectorizer(rng: Rng) -> Case:
    """Return the features of two operands side by side."""
    sizes = [int(n) for n in rng.integers(1, 5, 2)]
    feeds = {name: rng.standard_normal((3, size)).astype(np.float32) for name, size in zip("xz", sizes, strict=True)}
    return one_node("FeatureVectorizer", feeds, Y, inputdimensions=sizes)


def array_feature_extractor(rng: Rng) -> Case:
    """Return columns of an array or elements of a vector."""
    features = int(rng.integers(1, 6))
    x = _x(rng, features) if rng.random() < 0.7 else rng.standard_normal(features).astype(np.float32)
    return one_node("ArrayFeatureExtractor", {"x": x, "z": rng.integers(0, features, int(rng.integers(1, 5)))}, Y)


def label_encoder(rng: Rng) -> Case:
    """Return a table between numbers."""
    size = int(rng.integers(1, 7))
    keys = rng.permutation(12)[:size]
    is_float = rng.random() < 0.5
    floats = rng.standard_normal(size).astype(np.float32)
    values: dict[str, Any] = (
        {"values_floats": floats.tolist(), "default_float": -5.0}
        if is_float
        else {"values_int64s": rng.integers(0, 99, size).tolist(), "default_int64": -7}
    )
    kind = {"y": TensorProto.FLOAT if is_float else TensorProto.INT64}
    if rng.random() < 0.4:
        names = keys.astype(np.float32)
        names[0] = np.nan if rng.random() < 0.5 else names[0]
        x = np.append(rng.integers(0, 12, 6), np.nan).astype(np.float32).reshape(1, 7)
        return one_node("LabelEncoder", {"x": x}, kind, 4, keys_floats=names.tolist(), **values)
    return one_node("LabelEncoder", {"x": rng.integers(0, 12, (3, 4))}, kind, keys_int64s=keys.tolist(), **values)


def one_hot_encoder(rng: Rng) -> Case:
    """Return flags of categories."""
    categories = rng.permutation(8)[: int(rng.integers(1, 8))].tolist()
    x = rng.integers(0, 8, (4, 1))
    x = x if rng.random() < 0.5 else x.astype(np.float32)
    return one_node("OneHotEncoder", {"x": x}, Y, cats_int64s=categories, zeros=1)


def _kernel(rng: Rng) -> dict[str, Any]:
    kind = _pick(rng, ("LINEAR", "POLY", "RBF", "SIGMOID"))
    return {"kernel_type": kind, "kernel_params": [float(rng.uniform(0.1, 0.6)), float(rng.uniform(0, 1)), 3.0]}


def svm_regressor(rng: Rng) -> Case:
    """Return a support vector regression, a one-class machine among them."""
    features, vectors = int(rng.integers(1, 5)), int(rng.integers(1, 8))
    return one_node(
        "SVMRegressor",
        {"x": _x(rng, features)},
        Y,
        coefficients=_floats(rng, vectors),
        support_vectors=_floats(rng, vectors, features),
        n_supports=vectors,
        rho=_floats(rng, 1),
        one_class=int(rng.random() < 0.3),
        **_kernel(rng),
    )


def svm_classifier(rng: Rng) -> Case:
    """Return a support vector classifier, with probabilities or decisions."""
    features, classes = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    counts = rng.integers(1, 5, classes).tolist()
    pairs = classes * (classes - 1) // 2
    given: dict[str, Any] = {}
    if rng.random() < 0.6:
        given = {"prob_a": (-np.abs(_floats(rng, pairs))).tolist(), "prob_b": _floats(rng, pairs)}
    return one_node(
        "SVMClassifier",
        {"x": _x(rng, features)},
        BOTH,
        coefficients=_floats(rng, classes - 1, sum(counts)),
        support_vectors=_floats(rng, sum(counts), features),
        vectors_per_class=counts,
        rho=_floats(rng, pairs),
        classlabels_ints=_labels(rng, classes),
        **_kernel(rng),
        **given,
    )


def forest(rng: Rng, features: int, modes: tuple[str, ...]) -> tuple[dict[str, list[Any]], list[tuple[int, int]]]:
    """Return the attributes of a forest's nodes, in a random order, and its leaves by tree and number."""
    columns: dict[str, list[Any]] = {
        f"nodes_{name}": []
        for name in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    }
    rows: list[tuple[Any, ...]] = []
    leaves = []
    for tree in range(int(rng.integers(1, 6))):
        pending = [0]
        used = 1
        while pending:
            node = pending.pop()
            if used < 24 and rng.random() < (0.9 if node == 0 else 0.6):
                threshold = float(np.float32(np.round(rng.standard_normal(), 1)))
                rows.append((tree, node, int(rng.integers(features)), threshold, _pick(rng, modes), used, used + 1))
                pending += [used, used + 1]
                used += 2
            else:
                rows.append((tree, node, 0, 0.0, "LEAF", 0, 0))
                leaves.append((tree, node))
    for row in rows:
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    columns["nodes_missing_value_tracks_true"] = rng.integers(0, 2, len(rows)).tolist()
    return columns, leaves


def _batch(rng: Rng, features: int) -> np.ndarray:
    x = np.round(rng.standard_normal((int(rng.integers(1, 12)), features)), 1).astype(np.float32)
    if rng.random() < 0.3:
        x[rng.random(x.shape) < 0.2] = np.nan
    return x


def _modes(rng: Rng) -> tuple[str, ...]:
    return (_pick(rng, MODES),) if rng.random() < 0.6 else MODES


def tree_regressor(rng: Rng) -> Case:
    """Return a forest of several targets."""
    features, targets = (int(n) for n in rng.integers(1, 5, 2))
    nodes, leaves = forest(rng, features, _modes(rng))
    ids = [int(rng.integers(targets)) for _ in leaves] if rng.random() < 0.3 else None
    entries = [(*leaf, t) for n, leaf in enumerate(leaves) for t in (range(targets) if ids is None else [ids[n]])]
    trees, numbers, targets_of = (list(column) for column in zip(*entries, strict=True))
    base = {} if rng.random() < 0.5 else {"base_values": _floats(rng, targets)}
    return one_node(
        "TreeEnsembleRegressor",
        {"x": _batch(rng, features)},
        Y,
        n_targets=targets,
        aggregate_function=_pick(rng, ("SUM", "AVERAGE", "MIN", "MAX")),
        post_transform=_pick(rng, TRANSFORMS) if targets > 1 else "NONE",
        target_treeids=trees,
        target_nodeids=numbers,
        target_ids=targets_of,
        target_weights=_floats(rng, len(entries)),
        **nodes,
        **base,
    )


def tree_classifier(rng: Rng) -> Case:
    """Return a forest with weights for each class, or for the second of two alone."""
    features, classes = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    nodes, leaves = forest(rng, features, _modes(rng))
    is_single = classes == 2 and rng.random() < 0.6
    column = int(rng.integers(2))
    is_partial = classes > 2 and rng.random() < 0.3
    every = [column] if is_single else list(range(classes))
    entries = [(*leaf, c) for leaf in leaves for c in ([_pick(rng, every)] if is_partial else every)]
    trees, numbers, ids = (list(each) for each in zip(*entries, strict=True))
    weights = np.asarray(_floats(rng, len(entries)))
    weights = np.abs(weights) if rng.random() < 0.5 else weights
    sizes = (0,) if is_single and column else (0, 1) if is_single else (0, classes)
    base_size = _pick(rng, sizes)
    base = {"base_values": _floats(rng, base_size)} if base_size else {}
    return one_node(
        "TreeEnsembleClassifier",
        {"x": _batch(rng, features)},
        BOTH,
        classlabels_int64s=_labels(rng, classes) if classes > 2 or is_single else [0, 1],
        class_treeids=trees,
        class_nodeids=numbers,
        class_ids=ids,
        class_weights=weights.tolist(),
        post_transform=_pick(rng, TRANSFORMS),
        **nodes,
        **base,
    )


def tree_ensemble(rng: Rng) -> Case:
    """Return a forest in the form of ai.onnx.ml 5, sets of members among its comparisons."""
    features, targets = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    nodes, leaves = forest(rng, features, _modes(rng))
    identities = list(zip(nodes["nodes_treeids"], nodes["nodes_nodeids"], strict=True))
    is_leaf = [mode == "LEAF" for mode in nodes["nodes_modes"]]
    alone = {tree for tree, number in leaves if number == 0}  # trees of one leaf have another form
    branches = {key: n for n, key in enumerate(k for k, leaf in zip(identities, is_leaf, strict=True) if not leaf)}
    if alone or not branches:
        return tree_ensemble(rng)
    places = {key: n for n, key in enumerate(leaves)}
    rows = [dict(zip(nodes, row, strict=True)) for row in zip(*nodes.values(), strict=True)]
    rows = [row for row in rows if row["nodes_modes"] != "LEAF"]
    ways: dict[str, list[int]] = {}
    for way in ("true", "false"):
        children = [(row["nodes_treeids"], row[f"nodes_{way}nodeids"]) for row in rows]
        ways[f"nodes_{way}leafs"] = [int(child in places) for child in children]
        ways[f"nodes_{way}nodeids"] = [places.get(child, branches.get(child)) for child in children]
    codes = np.asarray([MODES.index(row["nodes_modes"]) for row in rows], np.uint8)
    members: dict[str, Any] = {}
    if rng.random() < 0.3:
        codes[rng.random(len(codes)) < 0.5] = 6
        sets = [
            np.append(rng.integers(-2, 3, int(rng.integers(1, 4))).astype(np.float32), np.nan)
            for _ in range(int((codes == 6).sum()))
        ]
        if sets:
            members = {"membership_values": _tensor(np.concatenate(sets), "membership_values")}
    x = _batch(rng, features)
    return one_node(
        "TreeEnsemble",
        {"x": np.round(x) if members else x},
        Y,
        opset=5,
        n_targets=targets,
        aggregate_function=int(rng.integers(1, 4)),
        post_transform=0,
        tree_roots=[branches[key] for key in branches if key[1] == 0],
        nodes_modes=onnx.numpy_helper.from_array(codes, "nodes_modes"),
        nodes_featureids=[row["nodes_featureids"] for row in rows],
        nodes_splits=_tensor(np.asarray([row["nodes_values"] for row in rows]), "nodes_splits"),
        nodes_missing_value_tracks_true=[row["nodes_missing_value_tracks_true"] for row in rows],
        leaf_targetids=[int(rng.integers(targets)) for _ in leaves],
        leaf_weights=_tensor(rng.standard_normal(len(leaves)), "leaf_weights"),
        **ways,
        **members,
    )


def _tensor(values: np.ndarray, name: str) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(values.astype(np.float32), name)


GENERATORS: Mapping[str, Callable[[Rng], Case]] = {
    each.__name__: each
    for each in (
        *(array_feature_extractor, binarizer, feature_vectorizer, imputer, label_encoder, linear_classifier),
        *(linear_regressor, normalizer, one_hot_encoder, scaler, svm_classifier, svm_regressor, tree_classifier),
        *(tree_ensemble, tree_regressor),
    )
}
