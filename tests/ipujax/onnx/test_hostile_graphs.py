"""Functions, nesting and names of hostile files: typed errors that name the step, nothing that runs for long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import OnnxModelError
from ipujax.onnx.reading import onnx_step
from tests.ipujax.onnx.models import OPSET, graph_of, info, model_of

X = info("x", shape=(3,))
Y = info("y", shape=None)
LOCAL = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]


def call(name: str, operand: str, result: str) -> onnx.NodeProto:
    return helper.make_node(name, [operand], [result], domain="local")


def function(name: str, nodes: Sequence[onnx.NodeProto], opsets=LOCAL) -> onnx.FunctionProto:
    return helper.make_function("local", name, ["a"], ["b"], nodes, opsets)


def with_functions(name: str, functions: Sequence[onnx.FunctionProto], domains=("local",)) -> onnx.ModelProto:
    model = model_of([call(name, "x", "y")], [X], [Y], domains=domains)
    model.functions.extend(functions)
    return model


LEAF = function("f0", [helper.make_node("Neg", ["a"], ["b"])])


def laughs(levels: int) -> list[onnx.FunctionProto]:
    """Return functions each of which calls the one before twice."""
    pairs = ((f"f{n}", f"f{n - 1}") for n in range(1, levels))
    return [LEAF, *(function(name, [call(inner, "a", "c"), call(inner, "c", "b")]) for name, inner in pairs)]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            with_functions("f0", [LEAF], ()),
            "the graph calls function 'local:f0', whose domain 'local' it does not import",
        ),
        (
            with_functions("g", [LEAF, function("g", [call("f0", "a", "b")], LOCAL[:1])]),
            "function 'local:g' calls function 'local:f0', whose domain 'local' it does not import",
        ),
        (with_functions("g", [function("g", [call("g", "a", "b")])]), "a function of the model calls itself"),
        (
            with_functions("g", [function("g", [call("h", "a", "b")]), function("h", [call("g", "a", "b")])]),
            "a function of the model calls itself",
        ),
        (with_functions("f39", laughs(40)), "the functions of the model call one another too often"),
        (with_functions("f0", [LEAF, LEAF]), "a function of the model is defined twice"),
    ],
)
def test_functions_that_cannot_be_inlined_are_refused(model, text):
    with pytest.raises(OnnxModelError, match=text):
        ipujax.onnx.load(model)


def test_functions_that_call_one_another_a_little_are_fine():
    model = ipujax.onnx.load(with_functions("f4", laughs(5)))
    np.testing.assert_array_equal(model(model.params, np.arange(3, dtype=np.float32)), np.arange(3))


def nested(depth: int) -> onnx.ModelProto:
    graph = graph_of([helper.make_node("Relu", ["x"], ["r"])], [], [info("r", shape=None)])
    other = graph_of([helper.make_node("Neg", ["x"], ["r"])], [], [info("r", shape=None)])
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["r"], then_branch=graph, else_branch=other)
        graph = graph_of([node], [], [info("r", shape=None)])
    return model_of(list(graph.node), [X, info("c", bool)], [info("r", shape=None)])


def test_nesting_is_bounded():
    model = ipujax.onnx.load(nested(20))
    np.testing.assert_array_equal(model(model.params, -np.ones(3, np.float32), np.array(True)), np.zeros(3))
    with pytest.raises(OnnxModelError, match="subgraphs are nested too deep"):
        ipujax.onnx.load(nested(31))


@pytest.mark.parametrize("axis", [10**18, 2**63 - 1, -(2**63), 65])
def test_axes_that_no_array_has_do_not_reach_onnx(axis):
    node = helper.make_node("LayerNormalization", ["x", "x"], ["y"], "norm", axis=axis)
    with pytest.raises(OnnxModelError, match=r"node 'norm' \(LayerNormalization\) has an axis"):
        ipujax.onnx.load(model_of([node], [X], [Y]))


def test_numbers_of_axes_that_no_array_has_are_refused():
    node = helper.make_node("GatherND", ["x", "i"], ["y"], "gather", batch_dims=10**18)
    with pytest.raises(OnnxModelError, match=r"node 'gather' \(GatherND\) has an axis"):
        ipujax.onnx.load(model_of([node], [X, info("i", np.int64, (3, 1))], [Y]))


def test_split_has_as_many_parts_as_outputs():
    node = helper.make_node("Split", ["x"], ["y"], "split", num_outputs=10**9)
    with pytest.raises(OnnxModelError, match="another number of outputs than parts"):
        ipujax.onnx.load(model_of([node], [X], [Y]))


def test_initializers_of_one_name_are_refused():
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], [X], [Y], {"w": np.zeros(3, np.float32)})
    model.graph.initializer.extend([model.graph.initializer[0]])
    with pytest.raises(OnnxModelError, match="several initialisers 'w'"):
        ipujax.onnx.load(model)


@pytest.mark.parametrize("name", ["some_operand", "some_graph", "some_node", "some_size"])
def test_names_that_are_not_text_are_refused(name):
    node = helper.make_node("Relu", ["some_operand"], ["y"], "some_node")
    model = model_of([node], [info("some_operand", shape=("some_size",))], [Y], name="some_graph")
    with pytest.raises(OnnxModelError, match="a name of the model is no text"):
        ipujax.onnx.load(model.SerializeToString().replace(name.encode(), b"some_\xff" + name[6:].encode()))


@pytest.mark.parametrize("version", [0, -1, 2**62, 10**6])
def test_opsets_that_onnx_does_not_have_are_refused(version):
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [X], [Y])
    model.opset_import[0].version = version
    with pytest.raises(OnnxModelError):
        ipujax.onnx.load(model)


@pytest.mark.parametrize("error", [RuntimeError("in C++"), KeyError(3), MemoryError(), RecursionError("deep")])
def test_an_error_of_onnx_names_the_step(error):
    with pytest.raises(OnnxModelError, match="onnx cannot do this") as caught, onnx_step("onnx cannot do this"):
        raise error
    assert type(error).__name__ in str(caught.value) and caught.value.__cause__ is error


def test_attributes_of_wrong_types_are_refused():
    node = helper.make_node("If", ["c"], ["y"], then_branch=3, else_branch=b"no graph")
    with pytest.raises(OnnxModelError):
        ipujax.onnx.load(model_of([node], [info("c", bool)], [Y]))
