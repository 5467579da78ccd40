"""Models that a builder makes: names, signatures, annotations, subgraphs, and calls that it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from ipujax import popart
from ipujax.popart.building import GRAPHCORE_OPERATIONS, NEWEST_OPSET, OLDEST_OPSET, onnx_operations


def small() -> tuple[popart.Builder, str, str]:
    """Return a builder with an input and a weight."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]))
    return builder, x, builder.addInitializedInputTensor(np.ones((3, 4), np.float32))


def test_names_are_of_popart() -> None:
    builder, x, w = small()
    with builder.nameScope("layer"):
        y = builder.aiOnnx.matmul([x, w])
    assert (x, w, y) == ("input", "init_input", "layer/MatMul:0")
    assert builder.aiOnnx.add([y, y]) == "Add:0"
    assert builder.aiOnnx.add([y, y]) == "Add:0/1"
    assert builder.addInputTensor("INT32", [2], "labels") == "labels"
    assert builder.addInputTensor("INT32", [2]) == "input/1"


def test_shapes_and_types_are_inferred() -> None:
    builder, x, w = small()
    y = builder.aiOnnx.matmul([x, w])
    assert builder.getTensorShape(y) == [2, 4]
    assert builder.getTensorDtypeString(builder.aiOnnx.cast([y], "FLOAT16")) == "float16"


@pytest.mark.parametrize("version", range(OLDEST_OPSET, NEWEST_OPSET + 1))
def test_every_opset_has_its_operators(version: int) -> None:
    operations = onnx_operations(version)
    assert {"add", "conv", "logical_if", "softmax", "lstm"} <= set(operations)
    for operation in operations.values():
        assert list(operation.signature().parameters)[-1] == "debugContext" or operation.method
    builder = getattr(popart.Builder(opsets={"ai.onnx": version}), f"aiOnnxOpset{version}")
    assert builder.version == version


def test_graphcore_operations_of_the_guide() -> None:
    guide = (
        "cacheload cachestore call convflipweights dynamicadd dynamicslice dynamicupdate dynamiczero gelu"
        " groupnormalization init lstm printtensor scale square subsample"
    )
    others = (
        "nllloss l1loss identityloss call reshape slice round swish geluerf detach nop log1p expm1 atan2 fmod ctcloss"
        " scatterreduce groupedgather multiconv reverse replicatedallreduce"
    )
    assert {*guide.split(), *others.split()} <= set(GRAPHCORE_OPERATIONS)


def test_annotations_are_attributes() -> None:
    builder, x, w = small()
    with builder.virtualGraph(1), builder.pipelineStage(2), builder.executionPhase(3):
        y = builder.aiOnnx.matmul([x, w])
        with builder.virtualGraph(0):
            z = builder.aiOnnx.relu([y])
    assert builder.getInt64NodeAttribute("__ipu_number", {y}) == 1
    assert builder.getInt64NodeAttribute("__pipeline_stage", {y}) == 2
    assert builder.getInt64NodeAttribute("__execution_phase", {y}) == 3
    assert builder.getVirtualGraph(z) == 0
    builder.virtualGraph(z, 5)
    assert builder.getVirtualGraph(z) == 5
    assert not builder.hasVirtualGraph()
    builder.recomputeOutputInBackwardPass(y)
    assert builder.getRecomputeOutputInBackwardPass(y)
    builder.setPartialsType(y, "HALF")
    assert builder.getPartialsType(y) == "HALF"
    builder.setAvailableMemoryProportion(y, 0.4)
    assert builder.getFloatNodeAttribute("__available_memory", {y}) == pytest.approx(0.4)


def test_attributes_of_nodes() -> None:
    builder, x, w = small()
    y = builder.aiOnnx.matmul([x, w])
    builder.addNodeAttribute("note", "why", {y})
    builder.addNodeAttribute("sizes", [1, 2], {y})
    assert builder.getStringNodeAttribute("note", {y}) == "why"
    assert builder.getInt64VectorNodeAttribute("sizes", {y}) == [1, 2]
    assert builder.getAllNodeAttributeNames({y}) == ["note", "sizes"]
    builder.removeNodeAttribute("note", {y})
    assert not builder.nodeHasAttribute("note", {y})
    with pytest.raises(popart.popart_exception, match="'sizes', the nearest"):
        builder.getInt64VectorNodeAttribute("size", {y})


def test_operations_return_one_name_or_several() -> None:
    builder, x, w = small()
    y = builder.aiOnnx.matmul([x, w], "product")
    assert builder.aiOnnx.dropout([y], 2, 0.3) == ["Dropout:0", "Dropout:1"]
    assert builder.aiOnnx.split([y], 2, axis=1, split=[1, 3]) == ["Split:0", "Split:1"]
    assert isinstance(builder.aiGraphcore.l1loss([y], 0.1), str)
    node = next(n for n in builder.model().graph.node if n.op_type == "MatMul")
    assert node.name == "product"
    assert builder.aiOnnx.gather([y, y], axis=1, debugPrefix="My-Gather") == "Gather:0"


def test_subgraphs_are_attributes() -> None:
    builder, x, _ = small()
    condition = builder.addInputTensor(popart.TensorInfo("BOOL", []))
    branches = []
    for scale in (2.0, 3.0):
        branch = builder.createSubgraphBuilder()
        branch.addInputTensorFromParentGraph(x)
        factor = branch.aiOnnx.constant(np.array(scale, np.float32))
        branch.addOutputTensor(branch.aiOnnx.mul([x, factor]))
        branches.append(branch)
    (result,) = builder.aiOnnx.logical_if([condition], 1, branches[0], branches[1])
    builder.addOutputTensor(result)
    node = builder.model().graph.node[-1]
    assert {a.name for a in node.attribute} == {"then_branch", "else_branch"}
    with pytest.raises(popart.popart_exception, match="takes a tensor of its parent"):
        branches[0].addInputTensorFromParentGraph("nothing")


def subgraph_of(builder, opset, operation, operands):
    """Return a subgraph of one operation on tensors of the graph around it."""
    branch = builder.createSubgraphBuilder()
    for name in operands:
        branch.addInputTensorFromParentGraph(name)
    branch.addOutputTensor(getattr(getattr(branch, f"aiOnnxOpset{opset}"), operation)(operands))
    return branch


@pytest.mark.parametrize("opset", [6, 8, 10])
def test_arithmetic_of_old_opsets_in_a_branch_of_a_loop(opset: int) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [3]))
    condition = builder.addInputTensor(popart.TensorInfo("BOOL", []))
    two = builder.addInitializedInputTensor(np.full(3, 2, np.float32))
    operations = getattr(builder, f"aiOnnxOpset{opset}")
    trip_count = operations.constant(np.array(3, np.int64))
    going = operations.constant(np.array(True))
    body = builder.createSubgraphBuilder()
    body.addInputTensor(popart.TensorInfo("INT64", []))
    before = body.addInputTensor(popart.TensorInfo("BOOL", []))
    state = body.addInputTensor(popart.TensorInfo("FLOAT", [3]))
    for name in (two, condition):
        body.addInputTensorFromParentGraph(name)
    body_operations = getattr(body, f"aiOnnxOpset{opset}")
    product = body_operations.mul([state, two])
    then_branch = subgraph_of(body, opset, "add", [product, two])
    else_branch = subgraph_of(body, opset, "sub", [product, two])
    (after,) = body_operations.logical_if([condition], 1, else_branch, then_branch)
    body.addOutputTensor(before)
    body.addOutputTensor(after)
    (result,) = operations.loop([trip_count, going, x], 1, body)
    flow = popart.DataFlow(1, {result: popart.AnchorReturnType("ALL")})
    device = popart.DeviceManager().createIpuModelDevice({})
    session = popart.InferenceSession(builder.getModelProto(), flow, device)
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.ones(3, np.float32), condition: np.array(True)}, anchors))
    np.testing.assert_array_equal(anchors[result], np.full(3, 22))  # 1 → 4 → 10 → 22


def test_models_are_saved_and_read_again(tmp_path: Path) -> None:
    builder, x, w = small()
    y = builder.aiOnnx.matmul([x, w])
    builder.addOutputTensor(y)
    path = tmp_path / "model.onnx"
    builder.saveModelProto(path)
    repeated = popart.Builder(str(path))
    assert repeated.getOutputTensorIds() == [y]
    assert repeated.aiOnnx.relu([y]) == "Relu:0"
    onnx.checker.check_model(onnx.load_model_from_string(builder.getModelProto()))


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    builder, x, w = small()
    builder.addOutputTensor(builder.aiOnnx.matmul([x, w]))
    builder.saveInitializersExternally([w], tmp_path / "weights.bin")
    assert (tmp_path / "weights.bin").stat().st_size == 3 * 4 * 4


def test_refuses_fractions_for_whole_numbers() -> None:
    builder, x, w = small()
    calls = (
        ("attribute 'axis'", lambda: builder.aiOnnx.softmax([x], axis=0.7)),
        ("attribute 'perm'", lambda: builder.aiOnnx.transpose([x], [1.9, 0.2])),
        ("virtual graph", lambda: builder.virtualGraph(x, 1.5)),
        ("pipeline stage", lambda: builder.pipelineStage(0.5)),
        ("factor", lambda: builder.setSerializeMatMul({builder.aiOnnx.matmul([x, w])}, "output_channels", 2.5)),
        ("dimension", lambda: popart.TensorInfo("FLOAT", [2.5])),
        ("number of outputs", lambda: builder.aiOnnx.split([x], 2.5)),
        ("recomputation", lambda: builder.recomputeOutputInBackwardPass(builder.aiOnnx.relu([x]), 0.5)),
    )
    for match, call in calls:
        with pytest.raises(popart.popart_exception, match=match):
            call()


def test_attributes_take_truth_values_and_numbers_of_numpy() -> None:
    # As the bindings of PopART do: True is 1, alone and in a list.
    builder, x, _ = small()
    y = builder.aiOnnx.reducesum([x], axes=[False, True], keepdims=np.True_)
    assert builder.getInt64VectorNodeAttribute("axes", {y}) == [0, 1]
    assert builder.getInt64NodeAttribute("keepdims", {y}) == 1
    z = builder.aiOnnx.softmax([x], axis=np.array([1]))
    assert builder.getInt64NodeAttribute("axis", {z}) == 1


def test_an_output_location_is_on_chip_by_default() -> None:
    builder, x, _ = small()
    y = builder.aiOnnx.relu([x])
    builder.outputTensorLocation(y)
    with builder.outputTensorLocation():
        z = builder.aiOnnx.relu([x])
    location = [popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.Off]
    for name in (y, z):
        assert builder.getInt64VectorNodeAttribute("__output_tensor_location", {name}) == location


def test_a_scope_of_an_output_location_by_keyword() -> None:
    builder, x, _ = small()
    with builder.outputTensorLocation(value=popart.TensorLocation(popart.TensorStorage.OffChip)):
        y = builder.aiOnnx.relu([x])
    assert builder.nodeHasAttribute("__output_tensor_location", {y})
    with pytest.raises(popart.popart_exception, match=r"(?s)expected: a TensorLocation.*got: <TensorStorage.OffChip"):
        builder.outputTensorLocation(y, popart.TensorStorage.OffChip)


def test_a_scope_has_one_number() -> None:
    builder, _, _ = small()
    with pytest.raises(popart.popart_exception, match=r"(?s)virtual graph.*got: 0, 1"):
        builder.virtualGraph(0, 1)


def test_scopes_take_whole_numbers_of_numpy() -> None:
    builder, x, _ = small()
    with builder.pipelineStage(np.int64(1)):
        y = builder.aiOnnx.relu([x])
    assert builder.getInt64NodeAttribute("__pipeline_stage", {y}) == 1


def test_refuses_wrong_calls() -> None:
    builder, x, w = small()
    with pytest.raises(popart.popart_exception, match="'softmax', the nearest"):
        builder.aiOnnx.softmx([x])
    with pytest.raises(TypeError, match="'axis', the nearest"):
        builder.aiOnnx.softmax([x], axes=1)
    with pytest.raises(popart.popart_exception, match="MatMul reads a tensor that does not exist: 'y'"):
        builder.aiOnnx.matmul([x, "y"])
    with pytest.raises(popart.popart_exception, match="MatMul has invalid number of inputs"):
        builder.aiOnnx.matmul([x])
    with pytest.raises(popart.popart_exception, match="attribute 'axis' cannot have this value"):
        builder.aiOnnx.softmax([x], axis=[1, 2])
    with pytest.raises(RuntimeError, match="already defined as"):
        _ = builder.aiOnnxOpset11
    with pytest.raises(popart.popart_exception, match=r"no file missing\.onnx"):
        popart.Builder("missing.onnx")
    with pytest.raises(popart.popart_exception, match="no ONNX model"):
        popart.Builder(b"\xff\xff\xff")
    with pytest.raises(popart.popart_exception, match="'FLOAT16', the nearest"):
        popart.TensorInfo("FLOAT17", [1])
    assert builder.aiOnnx.matmul([x, w]) == "MatMul:0"
