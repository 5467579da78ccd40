"""Changes of a model before a session reads it, and the lists of operators that models may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ipujax import popart


def result_of(proto: bytes, name: str, data: dict[str, Any]) -> Any:
    """Return an anchor of one micro-batch."""
    device = popart.DeviceManager().createCpuDevice()
    session = popart.InferenceSession(proto, popart.DataFlow(1, [name]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO(data, anchors))
    return anchors[name]


def test_floats_become_halves_everywhere() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [3])
    w = builder.addInitializedInputTensor(np.float32([1, 2, 3]))
    c = builder.aiOnnx.constant(np.float32([0.5, 0.25, 0.125]))
    y = builder.aiOnnx.add([builder.aiOnnx.mul([x, w]), c])
    builder.addOutputTensor(y)
    transformer = popart.GraphTransformer(builder.getModelProto())
    transformer.convertFloatsToHalfs()
    result = result_of(transformer.getModelProto(), y, {x: np.float16([1, 1, 2])})
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, np.float16([1.5, 2.25, 6.125]))


CONVERSIONS = [
    ("convertDoublesToFloats", np.float64([0.5, 2]), np.float32),
    ("convertDoublesToHalfs", np.float64([0.5, 2]), np.float16),
    ("convertUINT8ToINT32", np.uint8([3, 255]), np.int32),
    ("convertUINT16ToINT32", np.uint16([3, 65535]), np.int32),
    ("convertINT8ToINT32", np.int8([3, -128]), np.int32),
    ("convertINT16ToINT32", np.int16([3, -7]), np.int32),
    ("convertINT64ToINT32", np.int64([3, -7]), np.int32),
]


@pytest.mark.parametrize(("method", "array", "dtype"), CONVERSIONS, ids=[row[0] for row in CONVERSIONS])
def test_constants_of_another_element_type(method: str, array: Any, dtype: type) -> None:
    builder = popart.Builder()
    builder.addOutputTensor(builder.aiOnnx.constant(array))
    transformer = popart.GraphTransformer(builder.getModelProto())
    getattr(transformer, method)()
    (node,) = onnx.load_model_from_string(transformer.getModelProto()).graph.node
    converted = onnx.numpy_helper.to_array(node.attribute[0].t)
    assert converted.dtype == dtype
    np.testing.assert_array_equal(converted, array)


def test_whole_numbers_out_of_range() -> None:
    builder = popart.Builder()
    w = builder.addInitializedInputTensor(np.int64([2**40, -(2**40), 5]))
    builder.addOutputTensor(builder.aiOnnx.identity([w]))
    transformer = popart.GraphTransformer(builder.getModelProto())
    with pytest.raises(popart.popart_exception, match="clip=True"):
        transformer.convertINT64ToINT32()
    transformer.convertINT64ToINT32(clip=True)
    result = result_of(transformer.getModelProto(), "Identity:0", {})
    np.testing.assert_array_equal(result, [2**31 - 1, -(2**31), 5])


def test_parameters_become_constants() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2, 3])
    shape = builder.addInitializedInputTensor(np.int64([1, 6]), "shape")
    w = builder.addInitializedInputTensor(np.ones((1, 6), np.float32), "w")
    y = builder.aiOnnx.add([builder.aiOnnx.reshape([x, shape]), w])
    builder.addOutputTensor(y)
    transformer = popart.GraphTransformer(builder.getModelProto())
    with pytest.raises(popart.popart_exception, match="TensorId unknown not in the model"):
        transformer.convertInitializersToConstants([shape, "unknown"])
    twice = popart.GraphTransformer(transformer.getModelProto())
    twice.convertInitializersToConstants([w, w])
    assert [node.op_type for node in onnx.load_from_string(twice.getModelProto()).graph.node].count("Constant") == 1
    transformer.convertAllFixedPointInitializersToConstants()
    proto = transformer.getModelProto()
    changed = popart.Builder(proto)
    assert set(changed.getInputTensorIds()) == {x, w}
    result = result_of(proto, y, {x: np.arange(6, dtype=np.float32)})
    np.testing.assert_array_equal(result, [[1, 2, 3, 4, 5, 6]])


def test_batch_normalisations_get_the_outputs_of_training() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2, 3, 2, 2])
    weights = [builder.addInitializedInputTensor(np.ones(3, np.float32)) for _ in range(4)]
    unused = builder.addInputTensor("FLOAT", [1])
    (y,) = builder.aiOnnx.batchnormalization([x, *weights], 1)
    builder.addOutputTensor(y)
    transformer = popart.GraphTransformer(builder.getModelProto())
    transformer.prepareNodesForTraining()
    transformer.removeUnusedInputs()
    graph = onnx.load_model_from_string(transformer.getModelProto()).graph
    assert len(graph.node[0].output) == len(set(graph.node[0].output)) == 5
    assert unused not in {value.name for value in graph.input}


def test_values_of_parameters_in_a_file(tmp_path: Path) -> None:
    builder = popart.Builder()
    w = builder.addInitializedInputTensor(np.float32([1, 2]))
    y = builder.aiOnnx.identity([w])
    builder.addOutputTensor(y)
    transformer = popart.GraphTransformer(builder.getModelProto())
    transformer.saveInitializersExternally([w], tmp_path / "values")
    np.testing.assert_array_equal(np.fromfile(tmp_path / "values", np.float32), [1, 2])
    with pytest.raises(popart.popart_exception, match="already has an external data_location"):
        transformer.saveInitializersExternally([w], tmp_path / "values")
    with pytest.raises(popart.popart_exception, match="is not an initializer"):
        builder.saveInitializersExternally([y], tmp_path / "other")


def test_lists_of_operators() -> None:
    public = popart.getSupportedOperations(False)
    assert {("ai.onnx", "Conv", 11), ("ai.graphcore", "Gelu", 1)} <= {(o.domain, o.type, o.version) for o in public}
    assert set(public) < set(popart.getSupportedOperations(True))
    assert [o.type for o in popart.getUnsupportedOperations(10)] == []
    definitions = popart.getSupportedOperationsDefinition(False)
    relu = definitions[popart.OperatorIdentifier("ai.onnx", "Relu", 6)]
    assert [each.name for each in relu.inputs] == ["X"]
    assert popart.DataType.FLOAT16 in relu.inputs[0].supportedTensors
    assert set(definitions[popart.OperatorIdentifier("ai.onnx", "LeakyRelu", 6)].attributes) == {"alpha"}


@pytest.mark.parametrize("change", ["domain", "dims", "external"])
def test_errors_of_onnx_are_poparts(change, tmp_path):
    tensor = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    value = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4])
    node = onnx.helper.make_node("Neg", ["w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [value], [tensor]))
    path = tmp_path / "model.onnx"
    row = model.graph.initializer[0]
    if change == "domain":
        model.graph.node[0].domain = "nowhere"
    elif change == "dims":
        row.dims.append(7)
    else:
        row.ClearField("raw_data")
        row.data_location = onnx.TensorProto.EXTERNAL
        row.external_data.add(key="location", value="../none")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(popart.popart_exception):
        popart.GraphTransformer(str(path)).convertFloatsToHalfs()
        popart.InferenceSession(
            str(path), popart.DataFlow(1, ["y"]), popart.DeviceManager().createIpuModelDevice({})
        ).prepareDevice()
