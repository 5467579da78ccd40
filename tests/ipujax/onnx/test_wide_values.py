"""64-bit values that 32 bits do not hold: sentinels that saturate, refusals, and exact positions. Oracle: NumPy."""

from __future__ import annotations

import functools
import logging

import jax
import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from ipujax.onnx import OnnxError, registry
from ipujax.onnx.evaluation import saturation
from tests.ipujax.onnx.models import graph_of, info, model_of

LOW = -(2**63)
HIGH = 2**63 - 1
LEAST = -(2**31)  # of int32
REMEDY = "jax_enable_x64"
X = np.array([[5, LEAST, 7], [LEAST, LEAST, 3]])
MASK = np.array([[True, False, True], [False, True, False]])


def one_node(op_type, operands, outputs=("y",), dtype=np.int64, inputs=None, **attributes):
    """Return the model of one node; operands are names of inputs, x and mask, or constants."""
    names = []
    constants = {}
    for n, operand in enumerate(operands):
        is_input = isinstance(operand, str)
        names.append(operand if is_input else f"c{n}")
        if not is_input:
            constants[f"c{n}"] = np.asarray(operand)
    declared = {"x": info("x", dtype, (2, 3)), "mask": info("mask", bool, (2, 3))}
    used = [declared[name] for name in inputs or dict.fromkeys(filter(declared.get, names))]
    nodes = [helper.make_node(op_type, names, list(outputs), "here", **attributes)]
    return model_of(nodes, used, [info(outputs[0], shape=None)], constants)


def results(proto, *inputs, **settings):
    model = ipujax.onnx.load(proto, **settings)
    return np.asarray(model(model.params, *inputs))


@pytest.mark.parametrize(
    ("op_type", "constants", "expected"),
    [
        ("Clip", [np.array(0), np.array(HIGH)], np.maximum(X, 0)),
        ("Clip", [np.array(LOW), np.array(6)], np.minimum(X, 6)),
        ("Max", [np.array([LOW, 0, 2**31 - 1])], np.maximum(X, [LOW, 0, 2**31 - 1])),
        ("Min", [np.array([HIGH, 0, 2**40])], np.minimum(X, [HIGH, 0, 2**40])),
        ("Equal", [np.array([LEAST, LEAST - 1, 7])], X == [LEAST, LEAST - 1, 7]),
        ("Less", [np.array([HIGH, LOW, 7])], X < [HIGH, LOW, 7]),
        ("GreaterOrEqual", [np.array([LEAST, HIGH, LOW])], X >= [LEAST, HIGH, LOW]),
        ("Trilu", [np.array(HIGH)], np.zeros_like(X)),
        ("Trilu", [np.array(LOW)], X),
    ],
)
def test_sentinels_saturate(op_type, constants, expected):
    np.testing.assert_array_equal(results(one_node(op_type, ["x", *constants]), X), expected)


def test_sentinels_of_doubles_saturate():
    x = np.array([[1, -3e38, 2], [0, 5, -1]])
    np.testing.assert_allclose(results(one_node("Clip", ["x", -1e300, 1e300], dtype=np.float64), x), x, rtol=1e-6)


@pytest.mark.parametrize("op_type", ["Less", "GreaterOrEqual", "Equal"])
def test_infinities_and_nan_are_compared(op_type):
    x = np.array([[np.inf, -np.inf, np.nan], [3e38, -3e38, 0]])
    bounds = np.array([1e300, -1e300, -1e300])
    expected = {"Less": np.less, "GreaterOrEqual": np.greater_equal, "Equal": np.equal}[op_type](x, bounds)
    np.testing.assert_array_equal(results(one_node(op_type, ["x", bounds], dtype=np.float64), x), expected)


@pytest.mark.parametrize(
    ("op_type", "constant"),
    [
        ("Add", np.array(2**31)),
        ("Clip", np.array(2**31)),
        ("Concat", np.array([[LOW, 0, 0]])),
        ("Max", np.array([2**31, 0, 0])),
        ("Min", np.array(-(2**31) - 1)),
        ("Mod", np.array(2**32)),
        ("Mul", np.array(2654435761)),
    ],
)
def test_other_constants_are_refused_when_the_model_is_loaded(op_type, constant):
    attributes = {"axis": 0} if op_type == "Concat" else {}
    with pytest.raises(OnnxError, match=r"node 'here' \(\w+\): input 'c1' has the value") as caught:
        ipujax.onnx.load(one_node(op_type, ["x", constant], **attributes))
    assert REMEDY in str(caught.value) and "2147483647" in str(caught.value)


def test_folded_values_and_attributes_are_refused_when_traced():
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["b"]),
        helper.make_node("Add", ["x", "b"], ["y"], "sum"),
    ]
    folded = model_of(nodes, [info("x", np.int64, (2, 3))], [info("y", shape=None)], {"a": np.array(2**20)})
    with pytest.raises(OnnxError, match=r"node 'sum' \(Add\): input 'b' has the value 1099511627776"):
        results(folded, X)
    attributes = {"ngram_counts": [0], "ngram_indexes": [0], "pool_int64s": [2**40], "mode": "TF"}
    bounds = {"max_gram_length": 1, "min_gram_length": 1, "max_skip_count": 0}
    counted = one_node("TfIdfVectorizer", ["x"], **attributes, **bounds)
    with pytest.raises(OnnxError, match="attribute 'pool_int64s' has the value 1099511627776"):
        results(counted, X)


def test_results_are_refused():
    proto = model_of([helper.make_node("Identity", ["c"], ["y"])], [], [info("y", shape=None)], {"c": np.array(LOW)})
    with pytest.raises(OnnxError, match="output 'y' has the value -9223372036854775808"):
        results(proto)


def masked(op_type, sentinel, *further, outputs=("y",), **attributes):
    """Return the model of a mask and a reader of it."""
    nodes = [
        helper.make_node("Where", ["mask", "x", "sentinel"], ["w"], "mask"),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node(op_type, ["t", *(f"c{n}" for n in range(len(further)))], list(outputs), "here", **attributes),
    ]
    constants = {"sentinel": np.array(sentinel)} | {f"c{n}": np.array(each) for n, each in enumerate(further)}
    inputs = [info("mask", bool, (2, 3)), info("x", np.int64, (2, 3))]
    return model_of(nodes, inputs, [info(outputs[-1], shape=None)], constants)


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (masked("ReduceMax", LOW, [1], keepdims=0), lambda w: w.max(1)),
        (masked("ReduceMin", HIGH, [1], keepdims=0), lambda w: w.min(1)),
        (masked("Max", LOW, -4), lambda w: np.maximum(w, -4)),
        (masked("Greater", LOW, LEAST), lambda w: w > LEAST),
        (masked("Equal", HIGH, LEAST), lambda w: w == LEAST),
        (masked("ArgMax", LOW, axis=1, keepdims=0), lambda w: w.argmax(1)),
        (masked("ArgMax", HIGH, axis=1, keepdims=0), lambda w: w.argmax(1)),
        (masked("ArgMin", HIGH, axis=1, keepdims=0), lambda w: w.argmin(1)),
        (masked("TopK", LOW, [1], outputs=("v", "y"), axis=1), lambda w: w.argmax(1)[:, None]),
        (masked("TopK", HIGH, [1], outputs=("v", "y"), axis=1, largest=0), lambda w: w.argmin(1)[:, None]),
    ],
)
def test_masks_lose_even_against_the_least_number(proto, expected):
    sentinel = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    x = X if sentinel < 0 else ~X  # ~ turns the order round, and the least number into the greatest
    np.testing.assert_array_equal(results(proto, MASK, x), expected(np.where(MASK, x, sentinel).T))


@pytest.mark.parametrize("op_type", ["ReduceMin", "ReduceSum", "Neg", "Cast", "Identity"])
def test_masks_are_refused_where_their_values_matter(op_type):
    attributes = {"to": onnx.TensorProto.FLOAT} if op_type == "Cast" else {}
    with pytest.raises(OnnxError, match=r"has values of node 'mask' \(Where\) that 32 bits do not hold") as caught:
        results(masked(op_type, LOW, **attributes), MASK, X)
    assert REMEDY in str(caught.value)


def test_saturation_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "ipujax.jit"):
        model = ipujax.onnx.load(one_node("Max", ["x", np.array(LOW)]))
        for _ in range(2):
            model({}, X)
    lines = [record.getMessage() for record in caplog.records if "limits" in record.getMessage()]
    assert lines == ["node 'here' (Max): values beyond 32 bits become their limits; jax_enable_x64 keeps them"]


def test_tables_name_operators():
    names = {op_type for domain, op_type in registry.OPERATORS if not domain}
    assert {*saturation.SATURATING, *saturation.READERS} <= names


def test_with_64_bits_all_is_exact():
    with jax.enable_x64(True):
        y = results(one_node("Mul", ["x", np.array(2654435761)]), X)
        w = results(masked("Identity", LOW), MASK, X + 2**40)
    np.testing.assert_array_equal(y, X * 2654435761)
    np.testing.assert_array_equal(w, np.where(MASK, X + 2**40, LOW).T)


def masked_chain(second, *nodes):
    """Return a model of `a = Where(mask, x, low)`, then nodes of `a` and of the constants."""
    constants = {"low": np.array(LOW), "second": np.array(second), "five": np.array(5), "axes": np.array([1])}
    all_nodes = [helper.make_node("Where", ["mask", "x", "low"], ["a"], "first"), *nodes]
    inputs = [info("x", np.int64, (2, 3)), info("mask", bool, (2, 3))]
    return model_of(all_nodes, inputs, [info("y", shape=None)], constants)


def test_different_sentinels_of_one_side_are_not_ordered():
    other = helper.make_node("Where", ["mask", "x", "second"], ["b"], "other")
    joined = helper.make_node("Concat", ["a", "b"], ["c"], "join", axis=1)
    best = helper.make_node("ArgMax", ["c"], ["y"], "best", axis=1)
    with pytest.raises(OnnxError, match=REMEDY):
        results(masked_chain(-3_000_000_000, other, joined, best), X, MASK)
    masked = np.where(MASK, X, LOW)
    got = results(masked_chain(LOW, other, joined, best), X, MASK)
    np.testing.assert_array_equal(got[:, 0], np.concatenate([masked, masked], 1).argmax(1))


def test_rows_that_are_masked_altogether_are_compared_exactly():
    most = helper.make_node("ReduceMax", ["a", "axes"], ["m"], "most")
    mask = np.array([[True, False, True], [False, False, False]])
    expected = np.where(mask, X, LOW).max(1, keepdims=True)
    for op_type, name, bound in (("Equal", "low", LOW), ("Less", "low", LOW), ("Less", "five", 5)):
        compared = helper.make_node(op_type, ["m", name], ["y"], "compared")
        got = results(masked_chain(-3_000_000_000, most, compared), X, mask)
        np.testing.assert_array_equal(got, {"Equal": np.equal, "Less": np.less}[op_type](expected, bound))
    compared = helper.make_node("Less", ["m", "second"], ["y"], "compared")
    with pytest.raises(OnnxError, match=REMEDY):  # two values below 32 bits
        results(masked_chain(-3_000_000_000, most, compared), X, mask)
    added = helper.make_node("Add", ["m", "five"], ["y"], "added")
    sums = np.where(MASK, X, LEAST).max(1, keepdims=True) + 5
    np.testing.assert_array_equal(results(masked_chain(0, most, added), X, MASK), sums)


def test_strides_of_64_bits_take_one_element():
    for start, step in ((1, HIGH), (0, HIGH), (2, -HIGH), (1, 2**40)):
        proto = one_node(
            "Slice", ["x", np.array([start]), np.array([3 if step > 0 else LOW]), np.array([1]), np.array([step])]
        )
        np.testing.assert_array_equal(results(proto, X), X[:, start : start + 1])


@pytest.mark.parametrize("call", ["model", "jit", "partial", "params"])
def test_arguments_are_refused(call):
    model = ipujax.onnx.load(one_node("Add", ["x", np.array(1)]))
    functions = {
        "model": model,
        "jit": ipu.jit(model, device=ipu.IPUModel(tiles_per_ipu=4)),
        "partial": lambda _, x: ipu.jit(functools.partial(model, {}), device=ipu.CPU())(x),
        "params": lambda params, x: model.__check_arguments__({"w": np.array(1e300)}),
    }
    place = r"params\['w'\]" if call == "params" else "input 'x'"
    with pytest.raises(OnnxError, match=f"{place} has the value") as caught:
        functions[call]({}, np.where(MASK, X, 2**31))
    assert REMEDY in str(caught.value)
    if call != "params":
        np.testing.assert_array_equal(functions[call]({}, X), X + 1)


def test_numbers_of_python_are_refused():
    model = ipujax.onnx.load(one_node("Add", ["x", np.array(1)]))
    for number in (2**31, 2**70):
        with pytest.raises(OnnxError, match="input 'x' has"):
            model({}, [[number, 0, 0], [0, 0, 0]])
    with pytest.raises(OnnxError, match=r"static\['x'\] has values that int64 does not hold"):
        ipujax.onnx.load(one_node("Add", ["x", np.array(1)]), static={"x": [[2**70, 0, 0], [0, 0, 0]]})


def test_params_with_huge_doubles_are_constants():
    proto = one_node("Clip", ["x", np.array(-1.0), np.array(1e300)], dtype=np.float64)
    model = ipujax.onnx.load(proto)
    assert sorted(model.params) == ["c1"]
    np.testing.assert_array_equal(model(model.params, X.astype(float)), np.maximum(X, -1))


def test_positions_and_trip_counts_are_exact():
    sliced = one_node("Slice", ["x", np.array([1]), np.array([HIGH]), np.array([1])])
    np.testing.assert_array_equal(results(sliced, X), X[:, 1:])
    body = graph_of(
        [
            helper.make_node("Add", ["v", "one"], ["w"]),
            helper.make_node("ReduceMax", ["w"], ["largest"], keepdims=0),
            helper.make_node("Less", ["largest", "bound"], ["go"]),
        ],
        [info("i", np.int64), info("c", bool), info("v", np.int64, (2, 3))],
        [info("go", bool), info("w", np.int64, (2, 3))],
        {"one": np.array(1), "bound": np.array(20)},
    )
    for trips in (HIGH, 2**32, 2**32 + 1):
        looped = one_node("Loop", [np.array(trips), np.array(True), "x"], body=body)
        np.testing.assert_array_equal(results(looped, X), X + 13)


def test_values_that_loops_and_branches_carry_are_refused():
    branch = graph_of([helper.make_node("Identity", ["s"], ["z"])], [], [info("z", np.int64)], {"s": np.array(LOW)})
    other = graph_of([helper.make_node("Identity", ["s"], ["z"])], [], [info("z", np.int64)], {"s": np.array(1)})
    nodes = [helper.make_node("If", ["flag"], ["y"], "branches", then_branch=branch, else_branch=other)]
    proto = model_of(nodes, [info("flag", bool)], [info("y", np.int64)])
    with pytest.raises(OnnxError, match=r"node 'branches' \(If\): a value of a subgraph has the value") as caught:
        results(proto, np.array(True))
    assert REMEDY in str(caught.value)
    assert results(proto, static={"flag": False}) == 1


def test_means_of_integers_are_exact():
    x = np.array([[2**31 - 1, 2**31 - 2, -5], [LEAST, 16777217, -(2**31) + 1]])
    expected = [int(np.trunc(int(row.sum()) / 3)) for row in x]
    proto = one_node("ReduceMean", ["x", np.array([1])], keepdims=0)
    np.testing.assert_array_equal(results(proto, x), expected)


@pytest.mark.parametrize(("dtype", "to"), [(np.float64, onnx.TensorProto.INT64), (np.int64, onnx.TensorProto.DOUBLE)])
def test_bits_of_64_bit_elements_are_refused(dtype, to):
    with pytest.raises(
        OnnxError, match=r"node 'here' \(BitCast\): elements of \w+ are computed with 32 bits"
    ) as caught:
        results(one_node("BitCast", ["x"], dtype=dtype, to=to), X.astype(dtype))
    assert REMEDY in str(caught.value)
    with jax.enable_x64(True):
        bits = results(one_node("BitCast", ["x"], dtype=dtype, to=to), X.astype(dtype))
    np.testing.assert_array_equal(bits.view(dtype), X)


def test_masked_scores_have_a_softmax():
    scores = np.array([[1.0, 2, 3], [4, 5, 6]])
    nodes = [
        helper.make_node("Where", ["mask", "x", "low"], ["w"]),
        helper.make_node("Softmax", ["w"], ["y"], axis=1),
    ]
    inputs = [info("mask", bool, (2, 3)), info("x", np.float64, (2, 3))]
    proto = model_of(nodes, inputs, [info("y", shape=None)], {"low": np.array(np.finfo(np.float64).min)})
    weights = np.where(MASK, np.exp(scores), 0)
    np.testing.assert_allclose(results(proto, MASK, scores), weights / weights.sum(1, keepdims=True), rtol=1e-6)
