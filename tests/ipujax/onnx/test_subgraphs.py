"""If, Loop, Scan and SequenceMap: static ones taken apart, others as loops of `jax.lax`; against onnx.reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx.reference
import pytest
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from ipujax.onnx import TracedOperandError
from tests.ipujax.onnx.models import graph_of, info, model_of

X = np.array([1.0, -2.0, 3.0], np.float32)
OPSET = 21  # the newest that onnx.reference of every supported onnx has


def primitives(function, *arguments):
    """Return the names of a function's primitives."""
    return [eqn.primitive.name for eqn in jax.make_jaxpr(function)(*arguments).eqns]


def reference(model, **inputs):
    """Return the outputs by onnx.reference."""
    return onnx.reference.ReferenceEvaluator(model).run(None, inputs)


def branches():
    double = graph_of([helper.make_node("Add", ["x", "x"], ["d"])], [], [info("d", shape=(3,))])
    square = graph_of([helper.make_node("Mul", ["x", "x"], ["s"])], [], [info("s", shape=(3,))])
    node = helper.make_node("If", ["c"], ["y"], then_branch=double, else_branch=square)
    return model_of([node], [info("c", bool, ()), info("x", shape=(3,))], [info("y", shape=(3,))], opset=OPSET)


@pytest.mark.parametrize("condition", [True, False])
def test_traced_if_is_a_branch_of_lax(condition):
    model = ipujax.onnx.load(branches())
    c = np.array(condition)
    assert "cond" in primitives(model, {}, c, X)
    (expected,) = reference(branches(), c=c, x=X)
    np.testing.assert_allclose(jax.jit(model)({}, c, X), expected)
    np.testing.assert_allclose(ipu.jit(model)({}, c, X), expected)
    gradient = jax.grad(lambda x: model({}, c, x).sum())(X)
    np.testing.assert_allclose(gradient, np.full(3, 2.0) if condition else 2 * X)


@pytest.mark.parametrize(("condition", "names"), [(True, ["add"]), (False, ["mul"])])
def test_static_if_leaves_one_branch(condition, names):
    model = ipujax.onnx.load(branches(), static={"c": condition})
    assert primitives(model, {}, X) == names


def test_traced_if_of_branches_that_do_not_fit_needs_a_static_condition():
    first = graph_of([helper.make_node("Identity", ["x"], ["a"])], [], [info("a", shape=(3,))])
    second = graph_of([helper.make_node("MatMul", ["x", "w"], ["b"])], [], [info("b", shape=None)])
    third = graph_of([helper.make_node("ReduceMax", ["x"], ["b"])], [], [info("b", shape=None)])
    for other in (second, third):
        node = helper.make_node("If", ["c"], ["y"], "choice", then_branch=first, else_branch=other)
        weights = {"w": np.ones((4, 3), np.float32)}
        inputs = [info("c", bool, ()), info("x", shape=(3,))]
        proto = model_of([node], inputs, [info("y", shape=None)], weights, opset=OPSET)
        model = ipujax.onnx.load(proto)
        with pytest.raises(TracedOperandError, match=r"node 'choice' \(If\): the condition must be static"):
            jax.jit(model)(model.params, np.array(True), X)
        static = ipujax.onnx.load(proto, static={"c": True})
        np.testing.assert_allclose(static(static.params, X), X)


def loop(*, stops: bool = False, collects: bool = True):
    """Return a loop x ← x / 2 that collects x, and may stop when the sum of its absolute values is small."""
    nodes = [helper.make_node("Mul", ["v", "half"], ["w"], "halve"), helper.make_node("Identity", ["w"], ["row"])]
    if stops:
        nodes += [
            helper.make_node("ReduceL1", ["w"], ["norm"], keepdims=0),
            helper.make_node("Less", ["one", "norm"], ["go"]),
        ]
    else:
        nodes += [helper.make_node("Identity", ["before"], ["go"])]
    outputs = [info("go", bool), info("w", shape=(3,)), *([info("row", shape=(3,))] if collects else [])]
    body = graph_of(nodes, [info("i", np.int64), info("before", bool), info("v", shape=(3,))], outputs)
    results = ["y", "rows"] if collects else ["y"]
    node = helper.make_node("Loop", ["n", "", "x"], results, body=body)
    arrays = {"half": np.float32(0.5), "one": np.float32(1)}
    declared = [info("y", shape=(3,)), *([info("rows", shape=(None, 3))] if collects else [])]
    inputs = [info("n", np.int64), info("x", shape=(3,))]
    return model_of([node], inputs, declared, {k: np.asarray(v) for k, v in arrays.items()}, opset=OPSET)


@pytest.mark.parametrize("trips", [0, 1, 4])
def test_loop_of_known_trip_count_is_a_scan(trips):
    model = ipujax.onnx.load(loop(), static={"n": trips})
    assert primitives(model, model.params, X) == ["scan"]
    y, rows = jax.jit(model)(model.params, X)
    np.testing.assert_allclose(y, X / 2**trips)
    np.testing.assert_allclose(rows, X / 2.0 ** np.arange(1, trips + 1)[:, None])
    gradient = jax.grad(lambda x: model(model.params, x)[0].sum())(X)
    np.testing.assert_allclose(gradient, np.full(3, 0.5**trips))


def test_loop_of_traced_trip_count_is_a_while_loop():
    model = ipujax.onnx.load(loop(collects=False))
    assert "while" in primitives(model, model.params, np.array(3), X)
    np.testing.assert_allclose(jax.jit(model)(model.params, np.array(3), X), X / 8)


@pytest.mark.parametrize("is_static", [True, False])
def test_collected_values_of_an_open_loop_need_a_bound(is_static):
    static = {"n": 9} if is_static else {}
    counts = () if is_static else (np.array(9),)
    with pytest.raises(TracedOperandError, match="the collected values of Loop"):
        unbounded = ipujax.onnx.load(loop(stops=True), static=static)
        unbounded(unbounded.params, *counts, X)
    model = ipujax.onnx.load(loop(stops=True), static=static, max_sizes={"rows": 5})
    y, rows = jax.jit(model)(model.params, *counts, X)
    expected = X / np.array([2, 4, 8])[:, None]  # sums 3, 1.5, 0.75: the third is the last
    np.testing.assert_allclose(y, expected[-1])
    np.testing.assert_allclose(rows, np.pad(expected, ((0, 2), (0, 0))))


def stepping(limit: str):
    """Return `while k < limit: v ← v + x[k], k ← k + 1`, which collects v; `limit` is a value of the graph."""
    nodes = [
        helper.make_node("Gather", ["x", "k"], ["row"], axis=0),
        helper.make_node("Add", ["v", "row"], ["w"]),
        helper.make_node("Add", ["k", "one"], ["next"]),
        helper.make_node("Less", ["next", "end"], ["go"]),
        helper.make_node("Identity", ["end"], ["same"]),
    ]
    inputs = [info("i", np.int64), info("before", bool), info("k", np.int64), info("end", np.int64), info("v")]
    outputs = [info("go", bool), info("next", np.int64), info("same", np.int64), info("w"), info("w")]
    outer = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Squeeze", ["sizes"], ["size"]),
        helper.make_node("Less", ["zero", limit], ["first"]),
        helper.make_node(
            "Loop",
            ["", "first", "zero", limit, "start"],
            ["", "", "y", "rows"],
            "steps",
            body=graph_of(nodes, inputs, outputs),
        ),
    ]
    arrays = {"one": np.array(1), "zero": np.array(0), "start": np.float32(0)}
    declared = [info("x", shape=("n",)), *([info("limit", np.int64)] if limit == "limit" else [])]
    weights = {name: np.asarray(value) for name, value in arrays.items()}
    return model_of(outer, declared, [info("y"), info("rows", shape=("n",))], weights, opset=OPSET)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_while_over_a_counter_below_a_length_is_a_scan(size):
    model = ipujax.onnx.load(stepping("size"))
    assert "while" not in primitives(model, model.params, X[:size])
    y, rows = jax.jit(model)(model.params, X[:size])
    np.testing.assert_allclose(y, X[:size].sum())
    np.testing.assert_allclose(rows, np.cumsum(X[:size]))
    gradient = jax.grad(lambda x: model(model.params, x)[0])(X[:size])
    np.testing.assert_allclose(gradient, np.ones(size))


def test_while_below_a_traced_limit_names_the_value_that_needs_a_bound():
    model = ipujax.onnx.load(stepping("limit"))
    with pytest.raises(TracedOperandError, match=r"node 'steps'.*collected values of Loop") as caught:
        jax.jit(model)(model.params, X, np.array(2))
    assert "load(max_sizes={'rows': n})" in str(caught.value)
    bounded = ipujax.onnx.load(stepping("limit"), max_sizes={"rows": 3})
    y, rows = jax.jit(bounded)(bounded.params, X, np.array(2))
    np.testing.assert_allclose(y, X[:2].sum())
    np.testing.assert_allclose(rows, [1, -1, 0])


def test_while_that_counts_too_far_is_not_counted():
    model = ipujax.onnx.load(stepping("limit"), static={"limit": np.array(2**31 - 1)})
    with pytest.raises(TracedOperandError, match="collected values of Loop"):
        jax.jit(model)(model.params, X)


def growing():
    """Return a loop that appends i·x to a sequence, and the sequence as one tensor."""
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Mul", ["f", "x"], ["e"]),
        helper.make_node("SequenceInsert", ["s", "e"], ["t"]),
        helper.make_node("Identity", ["before"], ["go"]),
    ]
    sequence = [helper.make_tensor_sequence_value_info(name, 1, None) for name in "st"]
    body = graph_of(nodes, [info("i", np.int64), info("before", bool), sequence[0]], [info("go", bool), sequence[1]])
    outer = [
        helper.make_node("SequenceEmpty", [], ["empty"], dtype=1),
        helper.make_node("Loop", ["n", "", "empty"], ["all"], body=body),
        helper.make_node("ConcatFromSequence", ["all"], ["y"], axis=0, new_axis=1),
    ]
    return model_of(outer, [info("n", np.int64), info("x", shape=(3,))], [info("y", shape=(None, 3))], opset=OPSET)


def test_loop_of_a_growing_sequence_is_unrolled():
    model = ipujax.onnx.load(growing(), static={"n": 3})
    np.testing.assert_allclose(jax.jit(model)({}, X), np.arange(3)[:, None] * X)
    assert "scan" not in primitives(model, {}, X)
    with pytest.raises(ipu.IpuError, match=r"node 'Loop_\d'"):
        ipujax.onnx.load(growing())({}, np.array(3), X)


def widening():
    """Return a loop whose body takes the first i + 1 elements: a shape that its counter decides."""
    nodes = [
        helper.make_node("Add", ["i", "one"], ["end"]),
        helper.make_node("Reshape", ["end", "shape"], ["ends"]),
        helper.make_node("Slice", ["x", "start", "ends"], ["part"]),
        helper.make_node("ReduceSum", ["part"], ["sum"], keepdims=0),
        helper.make_node("Add", ["v", "sum"], ["w"]),
        helper.make_node("Identity", ["before"], ["go"]),
    ]
    inputs = [info("i", np.int64), info("before", bool), info("v")]
    body = graph_of(nodes, inputs, [info("go", bool), info("w")])
    arrays = {"one": np.array(1), "shape": np.array([1]), "start": np.array([0]), "n": np.array(3)}
    node = helper.make_node("Loop", ["n", "", "zero"], ["y"], body=body)
    return model_of([node], [info("x", shape=(3,)), info("zero")], [info("y")], arrays, opset=OPSET)


def test_loop_whose_body_needs_its_counter_is_unrolled():
    model = ipujax.onnx.load(widening())
    np.testing.assert_allclose(jax.jit(model)({}, X, np.float32(0)), np.cumsum(X).sum())


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scan_is_a_scan_of_lax(direction, axis):
    nodes = [helper.make_node("Add", ["sum", "x"], ["next"]), helper.make_node("Identity", ["next"], ["row"])]
    body = graph_of(
        nodes, [info("sum", shape=(3,)), info("x", shape=(3,))], [info("next", shape=(3,)), info("row", shape=(3,))]
    )
    node = helper.make_node(
        "Scan",
        ["start", "xs"],
        ["last", "rows"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[direction],
        scan_output_axes=[axis],
        scan_output_directions=[direction],
    )
    xs = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = np.cumsum(xs[::-1] if direction else xs, 0)
    expected_rows = rows[::-1] if direction else rows
    shape = (4, 3) if axis == 0 else (3, 4)
    outputs = [info("last", shape=(3,)), info("rows", shape=shape)]
    model = ipujax.onnx.load(
        model_of([node], [info("start", shape=(3,)), info("xs", shape=shape)], outputs, opset=OPSET)
    )
    last, collected = jax.jit(model)({}, np.zeros(3, np.float32), xs if axis == 0 else xs.T)
    np.testing.assert_allclose(last, xs.sum(0))
    np.testing.assert_allclose(collected, expected_rows if axis == 0 else expected_rows.T)
    assert "scan" in primitives(model, {}, np.zeros(3, np.float32), xs if axis == 0 else xs.T)


def test_sequence_map_applies_a_subgraph():
    body = graph_of(
        [helper.make_node("Add", ["e", "t"], ["r"])], [info("e", shape=None), info("t")], [info("r", shape=None)]
    )
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
        helper.make_node("SequenceMap", ["s", "t"], ["m"], body=body),
        helper.make_node("ConcatFromSequence", ["m"], ["y"], axis=0),
    ]
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(3,)), info("t")], [info("y", shape=None)], opset=OPSET))
    np.testing.assert_allclose(jax.jit(model)({}, X, np.float32(1)), X + 1)


def test_optional_inputs_are_none_or_values():
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(1, (3,)))
    optional = helper.make_value_info("o", kind)
    value = graph_of([helper.make_node("OptionalGetElement", ["o"], ["v"])], [], [info("v", shape=(3,))])
    zero = graph_of([helper.make_node("Identity", ["x"], ["z"])], [], [info("z", shape=(3,))])
    nodes = [
        helper.make_node("OptionalHasElement", ["o"], ["has"]),
        helper.make_node("If", ["has"], ["y"], then_branch=value, else_branch=zero),
    ]
    model = ipujax.onnx.load(model_of(nodes, [optional, info("x", shape=(3,))], [info("y", shape=(3,))], opset=OPSET))
    np.testing.assert_allclose(jax.jit(model)({}, None, X), X)
    np.testing.assert_allclose(jax.jit(model)({}, 2 * X, X), 2 * jnp.asarray(X))


def test_a_loop_without_an_end_is_refused():
    body = graph_of(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["a", "a"], ["b"])],
        [info("i", np.int64, ()), info("go", bool, ()), info("a", shape=(3,))],
        [info("go_on", bool, ()), info("b", shape=(3,))],
    )
    node = helper.make_node("Loop", ["", "", "x"], ["y"], "forever", body=body)
    model = ipujax.onnx.load(model_of([node], [info("x", shape=(3,))], [info("y", shape=(3,))], opset=OPSET))
    with pytest.raises(ipujax.onnx.OnnxError, match=r"forever.*never ends"):
        model(model.params, X)
