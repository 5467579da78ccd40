"""Files and arguments that are refused: one typed error with a remedy, before anything is traced."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from ipujax.onnx import OnnxError, OnnxModelError, UnsupportedOperatorError, registry
from ipujax.onnx.reading import files
from tests.ipujax.onnx.models import graph_of, info, mlp, model_of

X = info("x", shape=(4,))
Y = info("y", shape=(4,))


def with_external_data(folder: Path, location: str = "weights.bin", **facts: int) -> onnx.ModelProto:
    """Return x + w, whose w is in another file."""
    (folder / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], [X], [Y], {"w": np.zeros(4, np.float32)})
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, location, **facts)
    tensor.ClearField("raw_data")
    return model


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    """Return the path of a model, whose external data stay as they are."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("size", [0, 1, 40, 200])
def test_refuses_files_that_are_cut_off(tmp_path, size):
    path = tmp_path / "cut.onnx"
    path.write_bytes(mlp().SerializeToString()[:size])
    with pytest.raises(OnnxModelError) as caught:
        ipujax.onnx.load(path)
    assert isinstance(caught.value, ipu.IpuError)


def test_every_truncation_is_a_typed_error():
    data = mlp().SerializeToString()
    for size in range(0, len(data), 7):
        with pytest.raises(OnnxError):
            ipujax.onnx.load(data[:size])


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" * 50, b"not a model", b"\x00" * 64])
def test_refuses_bytes_that_are_not_a_model(data):
    with pytest.raises(OnnxModelError):
        ipujax.onnx.load(data)


def test_refuses_a_path_without_a_file(tmp_path):
    with pytest.raises(OnnxModelError, match="cannot be read"):
        ipujax.onnx.load(tmp_path / "none.onnx")


def test_refuses_an_object_that_is_not_a_source():
    with pytest.raises(OnnxModelError, match="model must be a path, bytes or a ModelProto"):
        ipujax.onnx.load(3)


def test_refuses_a_circle():
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], "first"), helper.make_node("Relu", ["a"], ["b"], "second")]
    with pytest.raises(OnnxModelError, match="the graph has a cycle") as caught:
        ipujax.onnx.load(model_of(nodes, [X], [info("b", shape=(4,))]))
    assert "'first'" in str(caught.value) and "'second'" in str(caught.value)


def test_sorts_nodes_that_stand_behind_their_readers():
    # onnxruntime's quantiser writes such files: a branch reads a value that a node below its own computes.
    branches = {
        name: helper.make_graph([helper.make_node(op_type, ["a"], [op_type])], name, [], [info(op_type, shape=(4,))])
        for name, op_type in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        helper.make_node("Exp", ["b"], ["y"]),
        helper.make_node("If", ["is_negative"], ["b"], **branches),
        helper.make_node("Relu", ["x"], ["a"]),
    ]
    model = ipujax.onnx.load(model_of(nodes, [X, info("is_negative", bool, ())], [info("y", shape=(4,))]))
    x = np.arange(-1, 3, dtype=np.float32)
    np.testing.assert_allclose(model({}, x, np.asarray(True)), np.exp(-np.maximum(x, 0)), rtol=1e-6)


def test_refuses_a_missing_initializer():
    with pytest.raises(OnnxModelError, match=r"node 'add' \(Add\) reads 'w', which nothing defines"):
        ipujax.onnx.load(model_of([helper.make_node("Add", ["x", "w"], ["y"], "add")], [X], [Y]))


def test_refuses_a_missing_name_in_a_subgraph():
    branch = graph_of([helper.make_node("Relu", ["w"], ["r"], "inner")], [], [info("r", shape=(4,))])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(OnnxModelError, match="node 'inner'"):
        ipujax.onnx.load(model_of([node], [X, info("c", bool)], [Y]))


def test_refuses_an_output_that_nothing_defines():
    with pytest.raises(OnnxModelError, match="has an output 'z' that nothing defines"):
        ipujax.onnx.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [X], [info("z", shape=(4,))]))


@pytest.mark.parametrize("elements", [4, 4096])
def test_refuses_an_initializer_of_the_wrong_size(elements):
    array = np.zeros(elements, np.float32)
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], [info("x", shape=(elements,))], [Y], {"w": array})
    model.graph.initializer[0].raw_data = array.tobytes()[:-4]
    with pytest.raises(OnnxModelError, match="tensor 'w' cannot be read"):
        ipujax.onnx.load(model)


def test_refuses_unknown_operators_all_at_once():
    nodes = [
        helper.make_node("Reluu", ["x"], ["a"], "one", domain="com.example"),
        helper.make_node("Reluu", ["a"], ["b"], "two", domain="com.example"),
        helper.make_node("Gemmm", ["b"], ["y"], "three", domain="com.other"),
    ]
    with pytest.raises(UnsupportedOperatorError) as caught:
        ipujax.onnx.load(model_of(nodes, [X], [Y], domains=["com.example", "com.other"]))
    text = str(caught.value)
    assert "com.example:Reluu, 2 nodes: one, two" in text and "com.other:Gemmm, 1 node: three" in text
    assert "ipujax.onnx.register" in text


@pytest.mark.parametrize(("domain", "op_type", "near"), [("", "Reluu", "Relu"), ("ai.onnx.ml", "Scalar", "Scaler")])
def test_refuses_an_unknown_operator_of_onnx(domain, op_type, near):
    node = helper.make_node(op_type, ["x"], ["y"], "one", domain=domain)
    with pytest.raises(UnsupportedOperatorError) as caught:
        ipujax.onnx.load(model_of([node], [X], [Y], domains=[domain] if domain else []))
    text = str(caught.value)
    assert f"{domain or 'ai.onnx'}:{op_type}, 1 node: one ('{near}'" in text
    assert f"@ipujax.onnx.register({domain!r}, {op_type!r})" in text


def test_runs_an_operator_that_onnx_lacks_and_a_user_registers(monkeypatch):
    monkeypatch.setitem(registry.OPERATORS, ("", "Double"), None)  # the table is restored
    ipujax.onnx.register("", "Double")(lambda x: 2 * x)
    model = ipujax.onnx.load(model_of([helper.make_node("Double", ["x"], ["y"])], [X], [Y]))
    np.testing.assert_array_equal(model({}, np.ones(4, np.float32)), np.full(4, 2, np.float32))


def test_refuses_a_domain_that_is_not_imported():
    node = helper.make_node("Double", ["x"], ["y"], "one", domain="com.example")
    with pytest.raises(OnnxModelError, match=r"node 'one'.* of domain 'com.example', of which the model imports no"):
        ipujax.onnx.load(model_of([node], [X], [Y]))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (helper.make_node("Softmax", ["x"], ["y"], "one", axes=[0]), "axes"),
        (helper.make_node("Cast", ["x"], ["y"], "one"), "node 'one'.* no attribute 'to'|Required attribute 'to'"),
        (helper.make_node("Where", ["x"], ["y"], "one"), "node 'one'.* too few inputs|has input size 1"),
        (helper.make_node("FusedGemm", ["x"], ["y"], "one", domain="com.microsoft"), "node 'one'.* too few inputs"),
        (
            helper.make_node("QLinearReduceMean", ["x"] * 5, ["y"], "one", domain="com.microsoft"),
            "node 'one'.* no attribute 'axes'",
        ),
    ],
)
def test_refuses_absent_attributes_and_inputs(node, text):
    with pytest.raises(OnnxError, match=text):
        ipujax.onnx.load(model_of([node], [X], [Y], domains=["com.microsoft"]))({}, np.ones(4, np.float32))


def test_refuses_a_newer_opset():
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [X], [Y])
    model.opset_import[0].version = 1000
    with pytest.raises(OnnxModelError):
        ipujax.onnx.load(model)


def test_reads_external_data_beside_the_model(tmp_path):
    model = ipujax.onnx.load(saved(with_external_data(tmp_path), tmp_path))
    np.testing.assert_array_equal(model.params["w"], np.arange(4, dtype=np.float32))
    half = ipujax.onnx.load(saved(with_external_data(tmp_path, offset=0, length=16), tmp_path))
    np.testing.assert_array_equal(half.params["w"], model.params["w"])


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "a/../../weights.bin", "", "a\\b"])
def test_refuses_external_data_outside_the_folder(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(OnnxModelError, match="refused"):
        ipujax.onnx.load(saved(with_external_data(tmp_path, location), folder))


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_refuses_external_data_through_a_link(tmp_path, linked):
    folder = tmp_path / "model"
    folder.mkdir()
    model = with_external_data(tmp_path, "link" if linked == "file" else "link/weights.bin")
    (folder / "link").symlink_to(tmp_path / "weights.bin" if linked == "file" else tmp_path)
    with pytest.raises(OnnxModelError, match="is a link"):
        ipujax.onnx.load(saved(model, folder))


def test_refuses_external_data_without_a_folder(tmp_path):
    with pytest.raises(OnnxModelError, match="need the model's folder"):
        ipujax.onnx.load(with_external_data(tmp_path).SerializeToString())


@pytest.mark.parametrize("facts", [{"offset": 8}, {"length": 32}, {"offset": 400}])
def test_refuses_external_data_of_the_wrong_size(tmp_path, facts):
    with pytest.raises(OnnxModelError, match=r"external data of 'w'|tensor 'w' cannot be read"):
        ipujax.onnx.load(saved(with_external_data(tmp_path, **facts), tmp_path))


def test_refuses_missing_external_data(tmp_path):
    with pytest.raises(OnnxModelError, match="are missing"):
        ipujax.onnx.load(saved(with_external_data(tmp_path, "other.bin"), tmp_path))


def test_refuses_two_gibibytes_in_one_file(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(files._MAX_PROTOBUF_BYTES + 1)  # sparse: takes no space
    with pytest.raises(OnnxModelError, match="too large") as caught:
        ipujax.onnx.load(path)
    assert "save_as_external_data" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.zeros((2, 9), np.float32),), "input 'x' has the wrong shape"),
        ((np.zeros(8, np.float32),), "input 'x' has the wrong shape"),
        ((np.zeros((2, 8), np.int32),), "input 'x' has the wrong dtype"),
        ((None,), "input 'x' must be an array"),
        ((), "the wrong number of inputs"),
    ],
)
def test_refuses_other_arguments(arguments, text):
    model = ipujax.onnx.load(mlp())
    with pytest.raises(OnnxError, match=re.escape(text)):
        model(model.params, *arguments)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w3": np.zeros(1)}, "params names 'w3'"),
        ({"w1": np.zeros((8, 16), np.float32)}, "params['w1'] has the wrong shape"),
    ],
)
def test_refuses_other_parameters(change, text):
    model = ipujax.onnx.load(mlp())
    with pytest.raises(OnnxError, match=re.escape(text)):
        model({**model.params, **change}, np.zeros((2, 8), np.float32))
    with pytest.raises(OnnxError, match="params has no 'b1'"):
        model({"w1": model.params["w1"]}, np.zeros((2, 8), np.float32))
    with pytest.raises(OnnxError, match="the first argument of a model must be its parameters"):
        model(np.zeros((2, 8), np.float32))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"input_shapes": {"z": (1,)}}, "input_shapes names 'z'"),
        ({"input_shapes": {"x": (1,)}}, "input_shapes['x'] does not match this input"),
        ({"input_shapes": {"x": "3,8"}}, "input_shapes['x'] is no shape"),
        ({"input_shapes": {"x": (1.5, 8)}}, "input_shapes['x'] is no shape"),
        ({"input_shapes": [(3, 8)]}, "input_shapes must name what each value is for"),
        ({"static": ["x"]}, "static must name what each value is for"),
        ({"static": {"x": object()}}, "static['x'] is no array of numbers"),
        ({"max_sizes": ["y"]}, "max_sizes must name what each value is for"),
        ({"static": {"z": 1}}, "static names 'z'"),
        ({"static": {"x": np.zeros(3)}}, "input 'x' has the wrong shape"),
        ({"max_sizes": {"z": 1}}, "max_sizes names 'z'"),
        ({"max_sizes": {"y": -1}}, "max_sizes['y'] must be a size"),
    ],
)
def test_load_refuses_other_names(keywords, text):
    with pytest.raises(OnnxError, match=re.escape(text)):
        ipujax.onnx.load(mlp(), **keywords)


def test_nodes_that_do_not_fit_are_named():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    model = ipujax.onnx.load(
        model_of(nodes, [info("x", shape=None)], [info("y", shape=None)], {"w": np.eye(3, dtype="f")})
    )
    with pytest.raises(OnnxError, match=r"node 'product' \(MatMul\) cannot be evaluated") as caught:
        model(model.params, np.zeros((2, 5), np.float32))
    assert "float32[2, 5], float32[3, 3]" in str(caught.value)


def test_integers_of_fewer_bits_are_computed_as_those_of_the_file():
    nodes = [onnx.helper.make_node("Mul", ["x", "x"], ["y"])]
    model = ipujax.onnx.load(model_of(nodes, [info("x", np.int32, (2,))], [info("y", np.int32, (2,))]))
    np.testing.assert_array_equal(model(model.params, np.int8([100, -50])), [10_000, 2_500])
    narrow = ipujax.onnx.load(model_of(nodes, [info("x", np.int8, (2,))], [info("y", np.int8, (2,))]))
    with pytest.raises(ipujax.onnx.OnnxError, match="input 'x' has the wrong dtype"):
        narrow(narrow.params, np.int32([100, -50]))


def test_parameters_are_floats():
    model = ipujax.onnx.load(mlp())
    whole = {name: np.ones(x.shape, int) for name, x in model.params.items()}
    with pytest.raises(ipujax.onnx.OnnxError, match=r"params\['w1'\] has the wrong dtype"):
        model(whole, np.zeros((2, 8), np.float32))
