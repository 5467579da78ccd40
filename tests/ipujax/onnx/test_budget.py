"""Sizes that a file asks for: refused before anything is allocated, by one bound that `load` takes."""

from __future__ import annotations

import re
import tracemalloc
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import OnnxError, OnnxModelError
from tests.ipujax.onnx.models import graph_of, info, model_of

HUGE = 10**18
IMAGE = (1, 1, 4, 4)
KERNEL = np.ones((1, 1, 2, 2), np.float32)
# operator → shape of x, further operands, attributes
GROWING: dict[str, tuple[tuple[int, ...], list[Any], dict[str, Any]]] = {
    "Pad": ((2, 3), [np.array([HUGE, 0, 0, 0])], {}),
    "Expand": ((2, 3), [np.array([HUGE, 2, 3])], {}),
    "Tile": ((2, 3), [np.array([HUGE, HUGE])], {}),
    "CenterCropPad": ((2, 3), [np.array([HUGE, 3])], {}),
    "Resize": ((2, 3), [None, None, np.array([HUGE, 3])], {}),
    "Conv": (IMAGE, [KERNEL], {"pads": [HUGE, 0, HUGE, 0]}),
    "ConvTranspose": (IMAGE, [KERNEL], {"output_shape": [HUGE, 4]}),
    "MaxPool ": (IMAGE, [], {"kernel_shape": [3 * 10**8, 2], "pads": [10**8, 0, 10**8, 0], "dilations": [2, 1]}),
    "Conv ": (IMAGE, [KERNEL], {"pads": [2**63 - 1, 0, 2**63 - 1, 0]}),
    "ConvTranspose ": (IMAGE, [KERNEL], {"strides": [2**62, 1]}),
    "MaxPool": (IMAGE, [], {"kernel_shape": [2, 2], "pads": [HUGE, 0, HUGE, 0]}),
    "AveragePool": (IMAGE, [], {"kernel_shape": [2, 2], "pads": [HUGE, 0, HUGE, 0]}),
    "Multinomial": ((2, 3), [], {"sample_size": HUGE}),
    "MaxRoiPool": (IMAGE, [np.ones((1, 5), np.float32)], {"pooled_shape": [2**20, 2**20]}),
    "OneHot": ((2, 3), [np.array(HUGE), np.array([0, 1], np.float32)], {}),
    "DFT": ((1, 4, 1), [np.array(HUGE), np.array(1)], {}),
    "Col2Im": ((1, 1, 4), [np.array([HUGE, 2]), np.array([1, 1])], {}),
    "AffineGrid": ((1, 2, 3), [np.array([1, 1, 2**20, 2**20])], {}),
}
# operator of operands in the file alone → operands, attributes
CONSTANT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "ConstantOfShape": ([np.array([HUGE])], {}),
    "Range": ([np.array(0), np.array(HUGE), np.array(1)], {}),
    "HannWindow": ([np.array(HUGE)], {}),
    "MelWeightMatrix": ([np.array(HUGE), np.array(8), np.array(8), np.float32(0), np.float32(4)], {}),
    "RandomNormal": ([], {"shape": [2**20, 2**20]}),
    "RandomUniform": ([], {"shape": [HUGE]}),
}


def one_node(op_type: str, operands: list[Any], attributes: dict[str, Any], *inputs: Any) -> onnx.ModelProto:
    """Return a model of one node, whose further operands are initialisers."""
    arrays = {f"c{n}": np.asarray(each) for n, each in enumerate(operands) if each is not None}
    names = [f"c{n}" if each is not None else "" for n, each in enumerate(operands)]
    node = helper.make_node(op_type, [*(value.name for value in inputs), *names], ["y"], "grows", **attributes)
    return model_of([node], inputs, [info("y", shape=None)], arrays)


@pytest.mark.parametrize("op_type", GROWING)
def test_results_that_grow_are_refused_when_traced_and_when_called(op_type):
    shape, operands, attributes = GROWING[op_type]
    model = ipujax.onnx.load(one_node(op_type.strip(), operands, attributes, info("x", shape=shape)))
    with pytest.raises(OnnxError):
        jax.eval_shape(model, model.params, jax.ShapeDtypeStruct(shape, np.float32))
    with pytest.raises(OnnxError):
        model(model.params, np.ones(shape, np.float32))


@pytest.mark.parametrize("op_type", CONSTANT)
def test_constants_that_grow_are_refused(op_type):
    model = ipujax.onnx.load(one_node(op_type, *CONSTANT[op_type]))
    tracemalloc.start()
    with pytest.raises(OnnxError):
        jax.eval_shape(model, model.params)
    with pytest.raises(OnnxError):
        model(model.params)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


@pytest.mark.parametrize("op_type", ["Add", "MatMul", "Where"])
def test_products_of_small_operands_are_refused(op_type):
    n = 2**17
    names = ["a", "b"] if op_type != "Where" else ["c", "a", "b"]
    nodes = [
        helper.make_node("ConstantOfShape", ["column"], ["a"]),
        helper.make_node("ConstantOfShape", ["row"], ["b"]),
        helper.make_node(op_type, names, ["y"], "product"),
    ]
    constants = {"column": np.array([n, 1]), "row": np.array([1, n]), "c": np.array([True])}
    model = ipujax.onnx.load(model_of(nodes, [], [info("y", shape=None)], constants))
    with pytest.raises(OnnxError, match=rf"node 'product' \({op_type}\): result 'y' is too large"):
        model(model.params)


def test_a_product_of_static_operands_is_measured_before_it_is_computed():
    n = 30_000
    arrays = {"a": np.ones((n, 1), np.int64), "b": np.ones((1, n), np.int64)}
    nodes = [helper.make_node("Mul", ["a", "b"], ["c"]), helper.make_node("ReduceSum", ["c"], ["y"], keepdims=0)]
    model = ipujax.onnx.load(model_of(nodes, [], [info("y", np.int64, None)], arrays))
    tracemalloc.start()
    assert jax.eval_shape(model, model.params).shape == ()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < n * n


def test_operators_of_shapes_are_folded_without_an_abstract_result(monkeypatch):
    evaluate = import_module("ipujax.onnx.evaluation.evaluate")
    monkeypatch.setattr(evaluate, "_result_elements", lambda *_: pytest.fail("measured"))
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["g"], axis=0),
        helper.make_node("Mul", ["g", "minus"], ["m"]),
        helper.make_node("Concat", ["m", "minus"], ["t"], axis=0),
        helper.make_node("Abs", ["t"], ["a"]),
        helper.make_node("Reshape", ["x", "a"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "minus": np.array([-1])}
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(6, 1))], [info("y", shape=None)], constants))
    assert model(model.params, np.ones((6, 1), np.float32)).shape == (6, 1)


def doubled(steps: int) -> onnx.ModelProto:
    names = ["x", *(f"v{n}" for n in range(1, steps)), "y"]
    nodes = [helper.make_node("Concat", [names[n]] * 2, [names[n + 1]], axis=0) for n in range(steps)]
    return model_of(nodes, [info("x", shape=(2,))], [info("y", shape=None)])


def test_a_chain_that_doubles_is_refused_where_it_leaves_the_budget():
    model = ipujax.onnx.load(doubled(60))
    with pytest.raises(OnnxError, match=r"node .*: result 'v31' is too large"):
        jax.eval_shape(model, model.params, jax.ShapeDtypeStruct((2,), np.float32))


def test_the_bound_is_an_option():
    x = np.ones(2, np.float32)
    fits = ipujax.onnx.load(doubled(5), max_bytes=256)
    assert fits(fits.params, x).shape == (64,)
    small = ipujax.onnx.load(doubled(5), max_bytes=255)
    with pytest.raises(OnnxError, match="is too large") as caught:
        small(small.params, x)
    assert "max_bytes=n" in str(caught.value)


@pytest.mark.parametrize("option", ["max_bytes", "max_unrolled_nodes"])
@pytest.mark.parametrize("bound", [0, -1, 1.5, "8 GB", None, True])
def test_a_bound_is_a_positive_integer(option, bound):
    with pytest.raises(OnnxError, match=f"{option} must be a bound"):
        ipujax.onnx.load(doubled(1), **{option: bound})


def test_declared_inputs_are_bounded():
    node = helper.make_node("Relu", ["x"], ["y"])
    with pytest.raises(OnnxError, match="input 'x' is too large"):
        ipujax.onnx.load(model_of([node], [info("x", shape=(HUGE,))], [info("y", shape=None)]))
    with pytest.raises(OnnxError, match="input 'x' is too large"):
        ipujax.onnx.load(
            model_of([node], [info("x", shape=("n",))], [info("y", shape=None)]), input_shapes={"x": (HUGE,)}
        )


@pytest.mark.parametrize("dims", [[HUGE], [2**32, 2**32], [-1, -4], [2**40, 0, 2**40, 7]])
def test_declared_initializers_are_bounded(dims):
    model = model_of([helper.make_node("Identity", ["w"], ["y"])], [], [info("y", shape=None)], {"w": np.zeros(4)})
    model.graph.initializer[0].ClearField("dims")
    model.graph.initializer[0].dims.extend(dims)
    with pytest.raises(OnnxError, match=r"tensor 'w'"):
        ipujax.onnx.load(model)


def test_sparse_initializers_are_bounded():
    values = onnx.numpy_helper.from_array(np.ones(1, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(np.array([0])), [HUGE])
    model = model_of([helper.make_node("Identity", ["w"], ["y"])], [], [info("y", shape=None)])
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(OnnxError, match="sparse tensor 'w' is too large"):
        ipujax.onnx.load(model)


def loop_of(step: list[onnx.NodeProto], count: int | None, state: Any) -> onnx.ModelProto:
    """Return a model whose loop carries `s` from x."""
    nodes = [helper.make_node("Identity", ["c"], ["go"]), *step]
    inputs = [info("i", np.int64), info("c", bool), state]
    body = graph_of(nodes, inputs, [info("go", bool), info("s1", shape=None)])
    loop = helper.make_node("Loop", ["n" if count is not None else "", "true", "x"], ["y"], "endless", body=body)
    constants = {"n": np.array(count or 0), "true": np.array(True)}
    return model_of([loop], [info("x", shape=(2,))], [info("y", shape=None)], constants)


@pytest.mark.parametrize("count", [HUGE, 2**63 - 1, 10**6, None])
@pytest.mark.parametrize("operands", [["s", "x"], ["s", "s"]])
def test_loops_whose_values_grow_end(count, operands):
    step = [helper.make_node("Concat", operands, ["s1"], axis=0)]
    model = ipujax.onnx.load(loop_of(step, count, info("s", shape=None)), max_unrolled_nodes=200)
    with pytest.raises(OnnxError, match=r"unrolled|too large"):
        jax.eval_shape(model, model.params, jax.ShapeDtypeStruct((2,), np.float32))


def test_loops_that_stay_loops_are_bounded():
    step = [helper.make_node("Add", ["s", "x"], ["s1"])]
    x = jax.ShapeDtypeStruct((2,), np.float32)
    model = ipujax.onnx.load(loop_of(step, HUGE, info("s", shape=(2,))))
    with pytest.raises(OnnxError, match="too many iterations of Loop"):
        jax.eval_shape(model, model.params, x)
    fine = ipujax.onnx.load(loop_of(step, 10**6, info("s", shape=(2,))))
    assert jax.eval_shape(fine, fine.params, x).shape == (2,)


def test_nested_loops_end():
    inner = [helper.make_node("Add", ["s9", "x"], ["r"])]
    for level in reversed(range(9)):
        body = graph_of(
            [helper.make_node("Identity", [f"c{level}"], [f"go{level}"]), *inner],
            [info(f"i{level}", np.int64), info(f"c{level}", bool), info(f"s{level + 1}", shape=None)],
            [info(f"go{level}", bool), info("r" if level == 8 else f"r{level + 1}", shape=None)],
        )
        inner = [helper.make_node("Loop", ["n", "true", f"s{level}"], [f"r{level}"], body=body)]
    inputs = [info("x", shape=(2,)), info("s0", shape=(2,))]
    constants = {"n": np.array(3), "true": np.array(True)}
    nodes = [*inner, helper.make_node("Identity", ["r0"], ["y"])]
    model = ipujax.onnx.load(model_of(nodes, inputs, [info("y", shape=None)], constants), max_unrolled_nodes=100)
    x = jax.ShapeDtypeStruct((2,), np.float32)
    with pytest.raises(OnnxError, match="an unrolled loop or nested subgraphs have too many nodes"):
        jax.eval_shape(model, model.params, x, x)


def test_split_has_as_many_parts_as_outputs():
    model = one_node("Split", [], {"num_outputs": 10**9}, info("x", shape=(4,)))
    with pytest.raises(OnnxError):
        loaded = ipujax.onnx.load(model)
        jax.eval_shape(loaded, loaded.params, jax.ShapeDtypeStruct((4,), np.float32))


def test_sequences_have_a_bounded_number_of_parts():
    nodes = [helper.make_node("SplitToSequence", ["x"], ["s"]), helper.make_node("SequenceLength", ["s"], ["y"])]
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(2**31 - 1,))], [info("y", np.int64)]))
    with pytest.raises(OnnxError, match="too many parts of a sequence"):
        jax.eval_shape(model, model.params, jax.ShapeDtypeStruct((2**31 - 1,), np.float32))


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_long_ranges_are_computed_by_the_program(kind):
    count = 100_000
    operands = [np.array(3, kind), np.array(3 + 2 * count, kind), np.array(2, kind)]
    model = ipujax.onnx.load(one_node("Range", operands, {}))
    np.testing.assert_array_equal(model(model.params), np.arange(3, 3 + 2 * count, 2, dtype=kind))


def test_long_ranges_beyond_32_bits_are_refused():
    operands = [np.array(2**40), np.array(2**40 + 10**6), np.array(1)]
    model = ipujax.onnx.load(one_node("Range", operands, {}))
    with pytest.raises(OnnxError, match="cannot be evaluated") as caught:
        model(model.params)
    assert "jax_enable_x64" in str(caught.value)


@pytest.mark.parametrize("op_type", ["Trilu", "OneHot"])
def test_tables_that_are_not_constants_give_the_same_numbers(op_type, monkeypatch):
    x = np.arange(9).reshape(3, 3) % 4
    operands, attributes = ([np.array(1)], {}) if op_type == "Trilu" else ([np.array(4), np.array([5, 7])], {})
    proto = one_node(op_type, operands, attributes, info("x", np.int32, (3, 3)))
    model = ipujax.onnx.load(proto)
    small = np.asarray(model(model.params, x.astype(np.int32)))
    monkeypatch.setattr("ipujax.onnx.operators.operand_types.numpy_for", lambda _: jnp)
    monkeypatch.setattr("ipujax.onnx.operators.constant_arrays.numpy_for", lambda _: jnp)
    np.testing.assert_array_equal(model(model.params, x.astype(np.int32)), small)


def gradients(count: int) -> onnx.ModelProto:
    domain = "ai.onnx.preview.training"
    nodes = [helper.make_node("Mul", ["x", "x"], ["v0"])]
    for n in range(count):
        nodes.append(helper.make_node("Gradient", ["x"], [f"d{n}"], domain=domain, xs=["x"], y=f"v{n}"))
        nodes.append(helper.make_node("Mul", [f"d{n}", f"v{n}"], [f"v{n + 1}"]))
    nodes.append(helper.make_node("Neg", [f"v{count}"], ["y"]))
    return model_of(nodes, [info("x", shape=())], [info("y", shape=None)], domains=[domain])


def test_gradients_of_gradients_are_bounded():
    assert ipujax.onnx.load(gradients(2)).inputs
    with pytest.raises(OnnxModelError, match="differentiate one another too often"):
        ipujax.onnx.load(gradients(40))


def test_the_error_has_size_budget_and_remedy():
    model = ipujax.onnx.load(one_node("Expand", [np.array([2**20, 2**20])], {}, info("x", shape=(1,))))
    with pytest.raises(OnnxError) as caught:
        model(model.params, np.ones(1, np.float32))
    text = str(caught.value)
    assert re.search(r"float32\[1048576, 1048576\]", text) and "8,589,934,592 bytes" in text and "max_bytes" in text
