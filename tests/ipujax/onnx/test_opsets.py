"""Operators in early opsets: onnxruntime and onnx's reference as oracles, NumPy where neither has them any more."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ipujax.onnx
from ipujax.onnx import OnnxModelError
from ipujax.onnx.reading.rewrites import REWRITES
from tests.ipujax.onnx.models import graph_of, info, model_of
from tests.ipujax.onnx.opsets.cases import GENERATORS, draw, opsets_of
from tests.ipujax.onnx.opsets.oracles import outcome

RIGHT = {"equal", "reference", "without oracle"}
# Changes of a schema without a rewrite, by operator and opset, and why there is none.
WITHOUT_REWRITE = {
    ("GlobalLpPool", 2): "p was a float, which the function takes too",
    ("LpPool", 2): "p was a float, which the function takes too",
}


def outcome_of(op_type: str, opset: int, seed: int) -> Any:
    """Return the outcome of a random node; the oracles warn of old forms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(*draw(op_type, opset, seed))


def histories() -> Mapping[str, Sequence[onnx.defs.OpSchema]]:
    """Return the schemas of each standard operator, oldest first."""
    schemas = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            schemas[schema.name].append(schema)
    return {name: sorted(each, key=lambda schema: schema.since_version) for name, each in schemas.items()}


def is_changed(old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> bool:
    """Return whether a node of the old schema has another form or meaning, or none, in the new one."""
    gone = set(old.attributes) - set(new.attributes)
    kept = set(old.attributes) & set(new.attributes)
    defaults = [
        schema.attributes[name].default_value.SerializeToString() for name in sorted(kept) for schema in (old, new)
    ]
    types = [schema.attributes[name].type for name in sorted(kept) for schema in (old, new)]
    required = [name for name, each in new.attributes.items() if each.required and name in kept]
    newly_required = any(not old.attributes[name].required for name in required)
    is_form_kept = defaults[::2] == defaults[1::2] and types[::2] == types[1::2] and not newly_required
    return bool(gone) or not is_form_kept or new.min_input > old.min_input or new.deprecated


def test_every_change_of_a_schema_has_a_rewrite():
    missing = set()
    for name, schemas in histories().items():
        rows = [opset for opset, _ in REWRITES.get(name, ())]
        for old, new in itertools.pairwise(schemas):
            if is_changed(old, new) and max(rows, default=0) < new.since_version:
                missing.add((name, new.since_version))
    assert missing == set(WITHOUT_REWRITE), missing ^ set(WITHOUT_REWRITE)


@pytest.mark.parametrize("op_type", sorted(set(REWRITES) & set(GENERATORS)))
def test_operator_before_its_last_change(op_type):
    opset = max(REWRITES[op_type], key=lambda row: row[0])[0] - 1
    result = outcome_of(op_type, opset, 0)
    assert result.kind in RIGHT, result


@pytest.mark.parametrize("op_type", sorted(GENERATORS))
def test_operator_in_every_version(op_type):
    opsets = opsets_of(op_type)
    versions = {schema.since_version for schema in histories()[op_type]}
    chosen = sorted({*versions & set(opsets), *(version - 1 for version in versions), opsets[-1]} & set(opsets))
    results = {(opset, seed): outcome_of(op_type, opset, seed) for opset in chosen for seed in range(2)}
    assert all(result.kind in RIGHT for result in results.values()), results


def test_every_rewritten_operator_is_drawn():
    assert set(REWRITES) <= set(GENERATORS)


X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
# Nodes that neither oracle runs: operator, opset, attributes, further operands, right result of X.
BY_NUMPY: dict[str, tuple[str, int, dict[str, Any], list[Any], Any]] = {
    "cast": ("Cast", 5, {"to": "INT32"}, [], X.astype(np.int32)),
    "clip": ("Clip", 1, {"max": 0.5, "consumed_inputs": [0]}, [], np.minimum(X, 0.5)),
    "lp": ("GlobalLpPool", 1, {"p": 1.0}, [], np.abs(X).sum(2, keepdims=True)),
    "pad": ("Pad", 1, {"paddings": [0, 0, 1, 0, 0, 0]}, [], np.pad(X, [(0, 0), (0, 0), (1, 0)])),
    "pow": ("Pow", 1, {"broadcast": 1, "axis": 1}, [np.float32([1, 2, 3])], X ** np.float32([[1], [2], [3]])),
    "prelu": ("PRelu", 1, {}, [np.float32([2, 3, 4])], np.where(X < 0, X * np.float32([[2], [3], [4]]), X)),
    "reshape": ("Reshape", 1, {"shape": [0, -1]}, [], X.reshape(2, 12)),
    "split": ("Split", 1, {"split": [4]}, [], X),
    "sum": ("Sum", 1, {"consumed_inputs": [0, 0]}, [X], 2 * X),
    "tile": ("Tile", 1, {}, [np.float32([2]), np.float32([1])], np.tile(X, (1, 2, 1))),
}


@pytest.mark.parametrize("name", BY_NUMPY)
def test_nodes_that_only_numpy_computes(name):
    op_type, opset, attributes, operands, right = BY_NUMPY[name]
    axis = {"axis": 2} if op_type == "Split" else {}
    names = [f"c{n}" for n in range(len(operands))]
    node = helper.make_node(op_type, ["x", *names], ["y"], **attributes, **axis)
    y = [info("y", right.dtype, right.shape)]
    model = model_of([node], [info("x", shape=X.shape)], y, dict(zip(names, operands, strict=True)), opset=opset)
    loaded = ipujax.onnx.load(model)
    np.testing.assert_allclose(jax.jit(loaded)(loaded.params, X), right, rtol=1e-5)


def test_selu_of_opset_1_has_its_own_constants():
    model = model_of(
        [helper.make_node("Selu", ["x"], ["y"])], [info("x", shape=(3,))], [info("y", shape=(3,))], opset=5
    )
    loaded = ipujax.onnx.load(model)
    x = np.float32([-1, 0, 2])
    right = np.where(x > 0, 1.0507 * x, 1.0507 * 1.6732 * (np.exp(x) - 1))
    np.testing.assert_allclose(loaded({}, x), right, rtol=1e-6)


def test_upsample_of_opset_1_names_both_axes():
    node = helper.make_node("Upsample", ["x"], ["y"], height_scale=2.0, width_scale=1.0, mode="nearest")
    shapes = [(1, 1, 2, 2), (1, 1, 4, 2)]
    model = model_of([node], [info("x", shape=shapes[0])], [info("y", shape=shapes[1])], opset=1)
    x = np.arange(4, dtype=np.float32).reshape(shapes[0])
    np.testing.assert_array_equal(ipujax.onnx.load(model)({}, x), np.repeat(x, 2, axis=2))


def test_operator_in_a_subgraph_has_the_opset_of_the_model():
    branch = graph_of([helper.make_node("Hardmax", ["x"], ["h"])], [], [info("h", shape=X.shape)])
    other = graph_of([helper.make_node("Neg", ["x"], ["n"])], [], [info("n", shape=X.shape)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    inputs = [info("c", bool), info("x", shape=X.shape)]
    model = ipujax.onnx.load(model_of([node], inputs, [info("y", shape=X.shape)], opset=11))
    assert np.asarray(jax.jit(model)({}, np.asarray(True), X)).sum() == 2


def test_operator_in_a_function_has_the_opset_of_the_model():
    body = [helper.make_node("Hardmax", ["a"], ["b"])]
    function = helper.make_function("local", "Winner", ["a"], ["b"], body, [helper.make_opsetid("", 11)])
    node = helper.make_node("Winner", ["x"], ["y"], domain="local")
    model = model_of([node], [info("x", shape=X.shape)], [info("y", shape=X.shape)], opset=11, domains=["local"])
    model.functions.append(function)
    assert np.asarray(ipujax.onnx.load(model)({}, X)).sum() == 2


@pytest.mark.parametrize(("of_function", "of_model", "ones"), [(11, 18, 2), (18, 11, 6)])
def test_operator_in_a_function_has_the_opset_of_the_function(of_function: int, of_model: int, ones: int) -> None:
    """Hardmax beside one of the model's own opset; before opset 13 it is over all dimensions from 1 on."""
    inside = [helper.make_node("Hardmax", ["a"], ["m"]), helper.make_node("ReduceMax", ["m"], ["b"], keepdims=0)]
    if of_function < 13:
        inside[1].attribute.append(helper.make_attribute("axes", [-1]))
    else:
        axes = numpy_helper.from_array(np.array([-1]), "axes")
        inside = [helper.make_node("Constant", [], ["i"], value=axes), *inside]
        inside[-1].input.append("i")
    opsets = [helper.make_opsetid("", of_function)]
    function = helper.make_function("local", "Winner", ["a"], ["b"], inside, opsets)
    nodes = [helper.make_node("Winner", ["x"], ["y"], domain="local"), helper.make_node("Hardmax", ["x"], ["z"])]
    outputs = [onnx.ValueInfoProto(name="y"), info("z", shape=X.shape)]
    model = model_of(nodes, [info("x", shape=X.shape)], outputs, opset=of_model, domains=["local"])
    model.functions.append(function)
    y, z = ipujax.onnx.load(model)({}, X)
    assert y.shape == X.shape[:-1]
    assert (np.asarray(y).sum(), np.asarray(z).sum()) == (ones, 8 - ones)


def test_a_function_that_is_newer_than_onnx_is_refused() -> None:
    newest = onnx.defs.onnx_opset_version()
    body = [helper.make_node("Relu", ["a"], ["b"])]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", newest + 1)])
    node = helper.make_node("F", ["x"], ["y"], domain="local")
    model = model_of([node], [info("x", shape=(3,))], [info("y", shape=(3,))], domains=["local"])
    model.functions.append(function)
    with pytest.raises(OnnxModelError, match="function local:F is newer than onnx"):
        ipujax.onnx.load(model)


@pytest.mark.parametrize("op_type", ["Hardmax", "LogSoftmax", "Softmax"])
@pytest.mark.parametrize("shape", [(1, 0, 2), (2, 3, 0), (0, 2)])
def test_early_forms_of_arrays_without_elements(op_type: str, shape: tuple[int, ...]) -> None:
    node = helper.make_node(op_type, ["x"], ["y"], axis=1)
    model = model_of([node], [info("x", shape=shape)], [info("y", shape=shape)], opset=11)
    assert ipujax.onnx.load(model)({}, np.zeros(shape, np.float32)).shape == shape


def test_statistics_of_a_batch_are_refused():
    operands = ["x", "s", "b", "m", "v"]
    node = helper.make_node("BatchNormalization", operands, ["y", "a", "c", "d", "e"], "norm")
    inputs = [info("x", shape=X.shape), *(info(name, shape=(3,)) for name in operands[1:])]
    model = model_of([node], inputs, [info("y", shape=X.shape)], opset=9)
    with pytest.raises(OnnxModelError, match=r"node 'norm' \(BatchNormalization\) gives the statistics of a batch"):
        ipujax.onnx.load(model)


def scan_of_batch(lengths: Sequence[int] | None, direction: int) -> tuple[onnx.ModelProto, tuple[np.ndarray, ...]]:
    """Return a Scan of opset 8 with a batch of 3 and 5 times, and its inputs."""
    inside = [info("a", shape=(2,)), info("e", shape=(2,))]
    body = graph_of(
        [helper.make_node("Add", ["a", "e"], ["s"]), helper.make_node("Mul", ["s", "e"], ["o"])],
        inside,
        [info("s", shape=(2,)), info("o", shape=(2,))],
    )
    names = ["" if lengths is None else "n", "start", "x"]
    node = helper.make_node("Scan", names, ["last", "rows"], body=body, num_scan_inputs=1, directions=[direction])
    inputs = [info("start", shape=(3, 2)), info("x", shape=(3, 5, 2))]
    outputs = [info("last", shape=(3, 2)), info("rows", shape=(3, 5, 2))]
    constants = {} if lengths is None else {"n": np.asarray(lengths, np.int64)}
    rng = np.random.default_rng(1)
    arrays = tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2), (3, 5, 2)))
    return model_of([node], inputs, outputs, constants, opset=8), arrays


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("lengths", [None, [5, 1, 3]])
def test_scan_of_opset_8_runs_each_sequence_to_its_length(lengths, direction):
    model, (start, x) = scan_of_batch(lengths, direction)
    last, rows = (np.array(start), np.zeros_like(x))
    for n, length in enumerate(lengths or [5] * 3):
        order = x[n, :length][::-1] if direction else x[n, :length]
        sums = start[n] + np.cumsum(order, axis=0)
        last[n] = sums[-1]
        rows[n, :length] = sums * order
    loaded = ipujax.onnx.load(model)
    for actual, right in zip(jax.jit(loaded)({}, start, x), (last, rows), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)
