"""`ipujax.onnx.load`: parameters, shapes that fold while tracing, and models as JAX functions."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.sharding import PartitionSpec as P
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from ipujax.onnx import TracedOperandError, registry
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from tests.ipujax.onnx.models import OPSET, graph_of, info, mlp, model_of

SMALL = ipu.IPUModel(tiles_per_ipu=16)
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def plain_mlp(params, x):
    """The model of `mlp` in plain JAX."""
    hidden = jax.nn.relu(x @ params["w1"].T + params["b1"])
    return hidden @ params["w2"].T + params["b2"]


@pytest.fixture
def model():
    return ipujax.onnx.load(mlp())


def test_model_has_parameters_inputs_and_outputs(model):
    assert sorted(model.params) == ["b1", "b2", "w1", "w2"]
    assert [str(each) for each in (*model.inputs, *model.outputs)] == ["x: float32[N,8]", "y: float32[N,4]"]
    assert repr(model) == "<ONNX model mlp: (x: float32[N,8]) → (y: float32[N,4]), 4 parameters>"
    np.testing.assert_allclose(model(model.params, X), plain_mlp(model.params, X), rtol=1e-6)


@pytest.mark.parametrize("source", ["path", "text", "bytes", "proto"])
def test_sources(source, tmp_path):
    proto = mlp()
    path = tmp_path / "mlp.onnx"
    onnx.save(proto, path)
    model = ipujax.onnx.load({"path": path, "text": str(path), "bytes": path.read_bytes(), "proto": proto}[source])
    assert model(model.params, X).shape == (4, 4)
    assert proto == mlp()


def test_model_is_a_function_of_jax(model):
    expected = plain_mlp(model.params, X)
    np.testing.assert_allclose(jax.jit(model)(model.params, X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(model, (None, 0))(model.params, X[:, None])[:, 0], expected, rtol=1e-5)
    loss = jax.grad(lambda params, f: jnp.sum(f(params, X) ** 2))
    for name, gradient in loss(model.params, model).items():
        np.testing.assert_allclose(gradient, loss(model.params, plain_mlp)[name], rtol=1e-5)


def test_layers_have_the_names_of_nodes(model):
    profile = ipu.jit(model, device=SMALL).profile(model.params, X)
    text = profile.summary()
    assert "layer1" in text and "layer2" in text and "Gemm" in text


def test_model_runs_on_replicas_and_in_a_pipeline(model):
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    double = ipu.jit(model, device=device, replicas=2, in_specs=(P(), P("replica")), out_specs=P("replica"))
    np.testing.assert_allclose(double(model.params, X), plain_mlp(model.params, X), rtol=1e-5)

    def loss(params, x):
        with ipu.stage(0):
            y = model(params, x)
        with ipu.stage(1):
            return jnp.mean(y**2)

    step = ipu.jit(ipu.pipeline(jax.value_and_grad(loss), micro_batches=2), device=device)
    value, gradients = step(model.params, X)
    np.testing.assert_allclose(value, jnp.mean(plain_mlp(model.params, X) ** 2), rtol=1e-5)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, model.params)


def test_model_computes_in_the_precision_of_its_arguments(model):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    assert model(half, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def reshaped(scale_from: str = "initializer") -> onnx.ModelProto:
    """Return x[N,C] as [C·2, N/2], by way of shapes and a factor in floating point."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "swap"], ["swapped"]),
        helper.make_node("Cast", ["swapped"], ["floating"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["floating", "scale"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["target"], to=onnx.TensorProto.INT64),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    arrays = {"swap": np.array([1, 0]), "scale": np.array([2, 0.5], np.float32), "unused": np.zeros(3, np.float32)}
    inputs = [info("x", shape=("N", "C"))]
    if scale_from == "input":
        inputs.append(info("scale", shape=(2,)))
        del arrays["scale"]
    return model_of(nodes, inputs, [info("y", shape=None)], arrays)


def test_shapes_fold_while_tracing():
    model = ipujax.onnx.load(reshaped())
    assert sorted(model.params) == ["unused"]  # the scale decides a shape
    jaxpr = jax.make_jaxpr(model)(model.params, X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["reshape"]
    assert jaxpr.out_avals[0].shape == (16, 2)


def test_weights_behind_a_size_that_depends_on_data_stay_parameters():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceMax", ["h"], ["m"], keepdims=0),
        helper.make_node("Range", ["zero", "m", "one"], ["y"]),
    ]
    arrays = {"w": np.eye(8, dtype=np.float32), "zero": np.zeros((), np.float32), "one": np.ones((), np.float32)}
    model = ipujax.onnx.load(model_of(nodes, [info("x", shape=(4, 8))], [info("y", shape=(None,))], arrays))
    assert sorted(model.params) == ["w"]


def test_inputs_that_decide_shapes_are_static_by_name():
    traced = ipujax.onnx.load(reshaped("input"))
    with pytest.raises(TracedOperandError, match=r"node 'Reshape_5' \(Reshape\)") as caught:
        jax.jit(traced)(traced.params, X, np.array([2, 0.5], np.float32))
    assert "static=" in str(caught.value)
    model = ipujax.onnx.load(reshaped("input"), static={"scale": [2, 0.5]})
    assert [each.name for each in model.inputs] == ["x"]
    assert jax.jit(model)(model.params, X).shape == (16, 2)


def test_declared_shapes_can_be_replaced():
    model = ipujax.onnx.load(mlp(), input_shapes={"x": (4, 8)})
    assert model.inputs[0].shape == (4, 8)
    with pytest.raises(ipu.IpuError, match="input 'x' has the wrong shape"):
        model(model.params, X[:2])


def test_named_dimensions_have_one_size():
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    model = ipujax.onnx.load(
        model_of(nodes, [info("a", shape=("N",)), info("b", shape=("N",))], [info("y", shape=None)])
    )
    with pytest.raises(ipu.IpuError, match="input 'b' has the wrong shape"):
        model({}, np.zeros(3, np.float32), np.zeros(1, np.float32))


def nonzero() -> onnx.ModelProto:
    nodes = [helper.make_node("NonZero", ["x"], ["positions"], "where")]
    return model_of(nodes, [info("x", shape=(4,))], [info("positions", np.int64, (1, "n"))])


def test_sizes_that_depend_on_data_need_a_bound():
    x = np.array([0, 1, 0, 2], np.float32)
    unbounded = ipujax.onnx.load(nonzero())
    with pytest.raises(TracedOperandError, match=r"node 'where' \(NonZero\)"):
        jax.jit(unbounded)({}, x)
    bounded = ipujax.onnx.load(nonzero(), max_sizes={"positions": 3})
    assert jax.jit(bounded)({}, x).tolist() == [[1, 3, 0]]
    exact = ipujax.onnx.load(nonzero(), static={"x": x})
    assert jax.jit(exact)({}).tolist() == [[1, 3]]


def test_narrowed_types_are_logged_once(caplog):
    with caplog.at_level(logging.INFO, "ipujax.jit"):
        model = ipujax.onnx.load(nonzero(), max_sizes={"positions": 3})
        model({}, np.zeros(4, np.float32))
    lines = [record.getMessage() for record in caplog.records if "32 bits" in record.getMessage()]
    assert lines == ["int64 of ONNX model graph are computed with 32 bits; jax_enable_x64 computes them exactly"]
    with jax.enable_x64(True):
        assert ipujax.onnx.load(nonzero(), max_sizes={"positions": 3})({}, np.zeros(4, np.float32)).dtype == np.int64


@pytest.fixture
def operators():
    """The table of operators, which is as before after the test."""
    before = dict(registry.OPERATORS)
    yield registry.OPERATORS
    registry.OPERATORS.clear()
    registry.OPERATORS.update(before)


class ScaleVertex(Vertex):
    """Multiplies a vector by a factor."""

    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]
    factor: FLOAT = 1.0

    def compute(x, factor):
        return x * factor

    def cycles(x):
        return 10 + x.size


def custom() -> onnx.ModelProto:
    nodes = [helper.make_node("Scale", ["x"], ["y"], domain="com.example", factor=3.0)]
    return model_of(nodes, [info("x", shape=(8,))], [info("y", shape=(8,))], domains=["com.example"])


def test_registered_operator_is_a_jax_function(operators):
    ipujax.onnx.register("com.example", "Scale")(lambda x, *, factor=1.0: factor * x)
    model = ipujax.onnx.load(custom())
    np.testing.assert_allclose(model({}, X[0]), 3 * X[0])
    assert ("com.example", "Scale") in operators


def test_registered_operator_calls_a_codelet(operators):
    @ipujax.onnx.register("com.example", "Scale")
    def scale(x, *, factor=1.0):
        return ipu.codelet_call(ScaleVertex, x[None], factor=factor)[0]

    model = ipujax.onnx.load(custom())
    step = ipu.jit(model, device=SMALL)
    np.testing.assert_allclose(step({}, X[0]), 3 * X[0])
    assert "ScaleVertex" in step.profile({}, X[0]).summary()


def test_unknown_attributes_are_refused(operators):
    ipujax.onnx.register("com.example", "Scale")(lambda x, *, scale=1.0: scale * x)
    with pytest.raises(ipu.IpuError, match="has an attribute 'factor' that is not implemented"):
        ipujax.onnx.load(custom())({}, X[0])


def test_local_functions_are_inlined():
    body = [helper.make_node("Add", ["a", "a"], ["b"]), helper.make_node("Relu", ["b"], ["c"])]
    twice = helper.make_function("local", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 18)])
    model = model_of(
        [helper.make_node("Twice", ["x"], ["y"], domain="local")],
        [info("x", shape=(8,))],
        [info("y", shape=(8,))],
        domains=["local"],
        opset=18,
    )
    model.functions.append(twice)
    np.testing.assert_allclose(ipujax.onnx.load(model)({}, X[0]), np.maximum(2 * X[0], 0))


@pytest.mark.parametrize("op_type", ["Mish", "Gelu", "LayerNormalization", "Softmax", "ReduceL2", "Celu", "Shrink"])
def test_function_bodies_give_the_same(op_type, operators):
    scale = {"LayerNormalization": {"scale": np.linspace(1, 2, 8, dtype=np.float32)}}.get(op_type, {})
    nodes = [helper.make_node(op_type, ["x", *scale], ["y"])]
    direct = ipujax.onnx.load(model_of(nodes, [info("x", shape=(4, 8))], [info("y", shape=None)], scale))
    expected = direct(direct.params, X)
    del operators["", op_type]
    np.testing.assert_allclose(jax.jit(direct)(direct.params, X), expected, rtol=1e-5, atol=1e-6)


def test_types_that_a_file_leaves_out_are_filled_in():
    bare = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [onnx.ValueInfoProto(name="x")],
        [onnx.ValueInfoProto(name="y")],
        {"w": np.eye(8, dtype=np.float32)},
        opset=9,
    )
    model = ipujax.onnx.load(bare)
    assert str(model.inputs[0]) == "x: float32[?]"
    np.testing.assert_allclose(model(model.params, X), X)
    assert ipujax.onnx.load(bare, input_shapes={"x": (4, 8)}).inputs[0].shape == (4, 8)


def test_functions_of_an_older_opset_whose_nodes_mean_the_same_in_the_models():
    """onnx can convert no function that gets the result of another, whose type it does not know."""
    older = [helper.make_opsetid("", OPSET - 1)]
    nodes = {"double": helper.make_node("Add", ["a", "a"], ["b"]), "negate": helper.make_node("Neg", ["a"], ["b"])}
    calls = [
        helper.make_node("double", ["x"], ["h"], domain="own"),
        helper.make_node("negate", ["h"], ["y"], domain="own"),
    ]
    model = model_of(calls, [info("x", shape=(3,))], [info("y", shape=(3,))], domains=["own"])
    for name, node in nodes.items():
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], [node], older))
    loaded = ipujax.onnx.load(model)
    np.testing.assert_array_equal(loaded({}, np.arange(3, dtype=np.float32)), [0, -2, -4])


def reference(name: str, outer_name: str) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, ref_attr_name=outer_name, type=onnx.AttributeProto.FLOAT)


@pytest.mark.parametrize(("given", "factor"), [({}, 0.25), ({"slope": 0.5}, 0.5)])
@pytest.mark.parametrize("is_reference", [False, True])
def test_functions_have_defaults_of_their_own(given: dict[str, float], factor: float, is_reference: bool) -> None:
    """The inner call has a slope, none, or one that refers to an attribute that the outer call may leave out."""
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
    inner = helper.make_node("LeakyRelu", ["a"], ["b"])
    inner.attribute.append(reference("alpha", "slope"))
    slope = helper.make_attribute("slope", 0.25)
    leaky = helper.make_function("local", "Leaky", ["a"], ["b"], [inner], opsets, [], [slope])
    call = helper.make_node("Leaky", ["a"], ["b"], domain="local", **({} if is_reference else given))
    call.attribute.extend([reference("slope", "outer_slope")] * is_reference)
    outer = helper.make_function("local", "Outer", ["a"], ["b"], [call], opsets, ["outer_slope"])
    of_outer = {"outer_slope": given["slope"]} if is_reference and given else {}
    outer_call = helper.make_node("Outer", ["x"], ["y"], domain="local", **of_outer)
    graph = graph_of([outer_call], [info("x", shape=(4,))], [info("y", shape=(4,))])
    model = helper.make_model(graph, opset_imports=opsets, functions=[leaky, outer], ir_version=10)
    loaded = ipujax.onnx.load(model)
    np.testing.assert_array_equal(loaded({}, np.float32([-4, -2, 0, 2])), np.float32([-4 * factor, -2 * factor, 0, 2]))


def test_calls_between_overloads_have_the_defaults_of_what_they_call() -> None:
    """F:a calls G:a, and G:b calls F:b: neither name is the outer one."""
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]

    def leaky(name: str, overload: str, default: float) -> onnx.FunctionProto:
        node = helper.make_node("LeakyRelu", ["a"], ["b"])
        node.attribute.append(reference("alpha", "slope"))
        slope = helper.make_attribute("slope", default)
        return helper.make_function("local", name, ["a"], ["b"], [node], opsets, [], [slope], overload=overload)

    def calling(name: str, overload: str, inner: str) -> onnx.FunctionProto:
        node = helper.make_node(inner, ["a"], ["b"], domain="local", overload=overload)
        return helper.make_function("local", name, ["a"], ["b"], [node], opsets, overload=overload)

    functions = [calling("F", "a", "G"), leaky("F", "b", 0.25), leaky("G", "a", 0.5), calling("G", "b", "F")]
    nodes = [
        helper.make_node("F", ["x"], ["t"], domain="local", overload="a"),
        helper.make_node("G", ["t"], ["y"], domain="local", overload="b"),
    ]
    graph = graph_of(nodes, [info("x", shape=(2,))], [info("y", shape=(2,))])
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    np.testing.assert_array_equal(ipujax.onnx.load(model)({}, np.float32([-8, 2])), np.float32([-1, 2]))


def test_functions_that_import_different_versions_of_a_domain() -> None:
    bodies = {"F": 2, "G": 3}
    functions = []
    for name, version in bodies.items():
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", version)]
        body = [helper.make_node("Neg", ["a"], ["b"])]
        functions.append(helper.make_function("local", name, ["a"], ["b"], body, opsets))
    nodes = [
        helper.make_node("F", ["x"], ["t"], domain="local"),
        helper.make_node("G", ["t"], ["y"], domain="local"),
    ]
    graph = graph_of(nodes, [info("x", shape=(2,))], [info("y", shape=(2,))])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    np.testing.assert_array_equal(ipujax.onnx.load(model)({}, np.float32([-8, 2])), np.float32([-8, 2]))
