"""Rules of PopART where they are not ONNX's or JAX's: element types, scans, old opsets, gradients, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ipujax import popart

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(3)
CPU = popart.DeviceManager().createCpuDevice()
# A function that adds nodes behind inputs of given names, and returns the name of the result.
Build = Callable[..., str]


def inferred(build: Build, *arrays: Array, opset: int = 11, options: Any = None) -> Array:
    """Return the result of a graph of some inputs."""
    builder = popart.Builder(opsets={"ai.onnx": opset, "ai.graphcore": 1})
    names = [builder.addInputTensor(popart.TensorInfo(array)) for array in arrays]
    result = build(builder, *names)
    flow = popart.DataFlow(1, {result: popart.AnchorReturnType("ALL")})
    session = popart.InferenceSession(builder.getModelProto(), flow, CPU, userOptions=options)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO(dict(zip(names, arrays, strict=True)), anchors))
    return anchors[result]


def gradient(build: Build, *arrays: Array, patterns: Any = None) -> Array:
    """Return the gradient of the first input for the sum of the result."""
    builder = popart.Builder()
    names = [builder.addInputTensor(popart.TensorInfo(array)) for array in arrays]
    loss = builder.aiGraphcore.identityloss([build(builder, *names)], reduction=popart.ReductionType.Sum)
    anchor = popart.reservedGradientPrefix() + names[0]
    flow = popart.DataFlow(1, {anchor: popart.AnchorReturnType("ALL")})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), CPU, patterns=patterns)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO(dict(zip(names, arrays, strict=True)), anchors))
    return anchors[anchor]


HALF = RNG.normal(size=(3, 4)).astype(np.float16)
SCALAR = np.float32([3e5])


def test_a_half_tensor_and_a_float_scalar_are_half() -> None:
    result = inferred(lambda b, x, y: b.aiOnnx.div([x, y]), HALF, SCALAR)
    assert result.dtype == np.float16
    np.testing.assert_allclose(result, HALF / SCALAR, atol=1e-5)
    with pytest.raises(
        popart.popart_exception, match=r"incompatible types FLOAT16 and FLOAT \(shapes \[3 4\] and \[4\]"
    ):
        inferred(lambda b, x, y: b.aiOnnx.mul([x, y]), HALF, np.ones(4, np.float32))


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_a_scan_keep_the_axis(axis: int) -> None:
    x = RNG.normal(size=(4, 3)).astype(np.float32)

    def build(builder: popart.Builder, name: str) -> str:
        body = builder.createSubgraphBuilder()
        part = body.addUntypedInputTensor()
        body.addOutputTensor(body.aiOnnx.concat([part, body.aiOnnx.neg([part])], axis))
        axes = {"scan_input_axes": [axis], "scan_output_axes": [axis], "scan_input_directions": [1]}
        return str(builder.aiOnnx.scan([name], 1, body=body, num_scan_inputs=1, **axes)[0])

    backwards = np.flip(x, axis)
    parts = [p for n in range(x.shape[axis]) for p in (backwards.take([n], axis), -backwards.take([n], axis))]
    np.testing.assert_array_equal(inferred(build, x), np.concatenate(parts, axis))


def test_statistics_of_each_element_in_opset_7() -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    scale, bias, mean = (RNG.normal(size=(3, 4)).astype(np.float32) for _ in range(3))
    variance = RNG.random((3, 4), np.float32) + 1

    def build(builder: popart.Builder, *names: str) -> str:
        return str(builder.aiOnnx.batchnormalization(list(names), 1, epsilon=1e-3, spatial=0)[0])

    expected = (x - mean) / np.sqrt(variance + 1e-3) * scale + bias
    np.testing.assert_allclose(inferred(build, x, scale, bias, mean, variance, opset=7), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 10])
def test_images_of_old_opsets_take_the_element_before(opset: int) -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 8)

    def build(builder: popart.Builder, name: str) -> str:
        scales = builder.aiOnnx.constant(np.float32([1, 1, 0.25]))
        resize = builder.aiOnnx.upsample if opset == 9 else builder.aiOnnx.resize
        return str(resize([name, scales]))

    np.testing.assert_array_equal(inferred(build, x, opset=opset), [[[0, 4]]])


def test_reflected_padding_with_a_value() -> None:
    x = np.arange(4, dtype=np.float32)
    padded = inferred(lambda b, n: b.aiOnnx.pad([n], pads=[1, 2], mode="reflect", value=0.0), x, opset=10)
    np.testing.assert_array_equal(padded, np.pad(x, (1, 2), "reflect"))


def test_groups_of_every_nth_channel() -> None:
    x = RNG.normal(size=(2, 4, 3)).astype(np.float32)
    ones = np.ones(4, np.float32)
    zeros = np.zeros(4, np.float32)
    options = popart.SessionOptions()
    options.groupNormStridedChannelGrouping = True
    got = inferred(lambda b, *n: b.aiGraphcore.groupnormalization(list(n), 2)[0], x, ones, zeros, options=options)
    groups = x.reshape(2, 2, 2, 3)  # channel c is in group c mod 2
    normal = (groups - groups.mean((1, 3), keepdims=True)) / np.sqrt(groups.var((1, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, normal.reshape(x.shape), rtol=1e-4, atol=1e-5)


def test_slices_without_an_axis_of_one() -> None:
    x = RNG.normal(size=(3, 2, 4)).astype(np.float32)
    row = RNG.normal(size=(2, 4)).astype(np.float32)
    index = np.uint32([1])
    updated = inferred(lambda b, *n: b.aiGraphcore.dynamicupdate(list(n), [0], [1]), x, index, row)
    np.testing.assert_array_equal(updated, np.stack([x[0], row, x[2]]))
    sliced = inferred(lambda b, *n: b.aiGraphcore.dynamicslice(list(n), [0], [1]), x, index, row)
    np.testing.assert_array_equal(sliced, x[1])


def test_mean_of_many_halves_is_finite() -> None:
    x = np.ones((300, 300), np.float16)
    loss = inferred(lambda b, n: b.aiGraphcore.l1loss([n], 0.5), x)
    assert loss.dtype == np.float16 and loss == 0.5


def test_gradients_at_corners() -> None:
    np.testing.assert_array_equal(gradient(lambda b, x: b.aiOnnx.abs([x]), np.float32([-2, 0, 3])), [-1, 0, 1])
    base = np.float32([0, 0, 2])
    exponent = np.float32([0, 1, 3])
    np.testing.assert_allclose(gradient(lambda b, x, y: b.aiOnnx.pow([x, y]), base, exponent), [0, 1, 12])


def test_a_gradient_whose_pattern_is_off_is_refused() -> None:
    x = np.float32([1, 2])
    with pytest.raises(popart.popart_exception, match="removed by pattern CosGradOp"):
        gradient(lambda b, n: b.aiOnnx.cos([n]), x, patterns=popart.Patterns(["ExpGradOp"]))
    on = popart.Patterns(["ExpGradOp"]).enablePattern("CosGradOp")
    np.testing.assert_allclose(gradient(lambda b, n: b.aiOnnx.cos([n]), x, patterns=on), -np.sin(x), rtol=1e-5)


def test_weights_that_the_loss_does_not_depend_on_do_not_decay(tmp_path: Path) -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    used, other = (builder.addInitializedInputTensor(np.ones(2, np.float32), name) for name in ("used", "other"))
    detached = builder.aiGraphcore.detach([builder.aiOnnx.mul([x, other])])
    total = builder.aiOnnx.add([builder.aiOnnx.mul([x, used]), detached])
    loss = builder.aiGraphcore.identityloss([total], reduction=popart.ReductionType.Sum)
    flow = popart.DataFlow(1, {})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.5, 0.25), CPU)
    session.prepareDevice()
    session.weightsFromHost()
    session.run(popart.PyStepIO({x: np.float32([1, 1])}, {}))
    session.modelToHost(str(tmp_path / "model.onnx"))
    # Elements of float32 are where PopART's programs read them.
    saved = {t.name: list(t.float_data) for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert saved == {"used": [1 - 0.5 * (1 + 0.25)] * 2, "other": [1, 1]}


X = RNG.normal(size=(2, 3)).astype(np.float32)
RECURRENT = np.zeros((1, 2, 2), np.float32)
REFUSED: list[tuple[str, Build, tuple[Array, ...]]] = [
    ("contracting dimensions unequal: lhs 'input' [2 3]", lambda b, *n: b.aiOnnx.matmul(list(n)), (X, X)),
    ("doesn't support scalar tensor input as the lhs", lambda b, *n: b.aiOnnx.matmul(list(n)), (np.float32(1), X)),
    ("Rank of permutation tensor [0 1 2], rank 3 must be", lambda b, n: b.aiOnnx.transpose([n], [0, 1, 2]), (X,)),
    ("invalid dimension '-1'", lambda b, n: b.aiGraphcore.reverse([n], [-1]), (X,)),
    ("Dimension 1 appears multiple times", lambda b, n: b.aiGraphcore.reverse([n], [1, 1]), (X,)),
    ("0 stride at index 1", lambda b, n: b.aiGraphcore.subsample([n], [1, 0]), (X,)),
    ("incompatible input tensor and dropout shape", lambda b, n: b.aiGraphcore.shapeddropout([n], [2, 2]), (X,)),
    ("ratio value 1.5 is not valid", lambda b, n: b.aiGraphcore.shapeddropout([n], [2, 1], 1.5), (X,)),
    ("seed attribute is not supported", lambda b, n: b.aiOnnx.randomnormallike([n], seed=1.0), (X,)),
    ("must be of type Constant", lambda b, *n: b.aiOnnx.tile(list(n)), (X, np.int64([1, 2]))),
    ("one element for each dimension", lambda b, n: b.aiOnnx.tile([n, b.aiOnnx.constant(np.int64([1]))]), (X,)),
    ("Need the value of the ai.onnx.Slice:11 input 'starts'", lambda b, *n: b.aiOnnx.slice(list(n)),
     (X, np.int32([0]), np.int32([1]))),
    ("must have shape [2] to match all but", lambda b, *n: b.aiGraphcore.nllloss(list(n)), (X, np.int32([1]))),
    ("`count_include_pad` is not supported",
     lambda b, n: b.aiOnnx.averagepool([n], [1], count_include_pad=1), (X[None],)),
    ("Dilations of value other than 1", lambda b, n: b.aiOnnx.maxpool([n], 1, [2], dilations=[2])[0], (X[None],)),
    ("only supports `forward' direction",
     lambda b, *n: b.aiOnnx.rnn(list(n), 2, direction="reverse")[0], (X[None], X[None], RECURRENT)),
    ("Padding vector (length 3)", lambda b, n: b.aiOnnx.averagepool([n], [1], pads=[0, 0, 0]), (X[None],)),
    ("Axis 2 is out of acceptable range [-2, 1]", lambda b, n: b.aiOnnx.reducesum([n], axes=[2]), (X,)),
    ("frames [2, 3] and [2] are not aligned", lambda b, *n: b.aiOnnx.add(list(n)), (X, X[:, 0])),
    ("has an invalid number of outputs", lambda b, n: b.aiOnnx.rnn([n, n, n], 3)[0], (X,)),
    ("at least two inputs", lambda b, n: b.aiGraphcore.multiconv([[n]])[0], (X[None],)),
    ("strides vector 2 != number of spatial dimensions 1",
     lambda b, *n: b.aiGraphcore.multiconv([n], strides=[[1, 1]])[0], (X[None], X[None])),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "build", "arrays"), REFUSED, ids=[row[0][:30] for row in REFUSED])
def test_popart_refuses_in_its_words(sentence: str, build: Build, arrays: tuple[Array, ...]) -> None:
    with pytest.raises(popart.popart_exception) as error:
        inferred(build, *arrays)
    # The message alone, without the lines of place and hint below it, as PopART's programs compare it.
    assert sentence in error.value.args[0] and "\n" not in error.value.args[0]
    assert error.value.args[0] in str(error.value)


def test_every_nth_counts_micro_batches() -> None:
    """Two batches of two accumulated micro-batches: the second and the fourth are returned."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    w = builder.addInitializedInputTensor(np.zeros(2, np.float32))
    y = builder.aiOnnx.add([x, w])
    loss = builder.aiGraphcore.l1loss([y], 0.0)
    options = popart.SessionOptions()
    options.enableGradientAccumulation = True
    options.accumulationFactor = 2
    flow = popart.DataFlow(2, {y: popart.AnchorReturnType("EVERYN", 2)})
    session = popart.TrainingSession(
        builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), CPU, userOptions=options
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.arange(8, dtype=np.float32)}, anchors))
    np.testing.assert_array_equal(anchors[y], [[2, 3], [6, 7]])


def test_extra_weights_of_a_model_are_refused_unless_ignored() -> None:
    options = popart.SessionOptions()
    options.constantWeights = False

    def model(weights: int) -> tuple[bytes, str]:
        builder = popart.Builder()
        y = builder.addInputTensor("FLOAT", [2])
        for i in range(weights):
            y = builder.aiOnnx.add([y, builder.addInitializedInputTensor(np.ones(2, np.float32), f"w{i}")])
        return builder.getModelProto(), y

    proto, result = model(1)
    flow = popart.DataFlow(1, {result: popart.AnchorReturnType("ALL")})
    session = popart.InferenceSession(proto, flow, CPU, userOptions=options)
    with pytest.raises(popart.popart_exception, match="resetWeights, no tensor 'w1' in tensors"):
        session.resetHostWeights(model(2)[0])
    session.resetHostWeights(model(2)[0], ignoreWeightsInModelWithoutCorrespondingHostWeight=True)


def test_tensors_without_elements_are_returned() -> None:
    result = inferred(lambda b, n: b.aiGraphcore.slice([n], ends=[1], starts=[1], axes=[1]), X)
    assert result.shape == (2, 0)


def test_weights_after_an_update_have_a_name() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    w = builder.addInitializedInputTensor(np.zeros(2, np.float32))
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.add([x, w])], 1.0, popart.ReductionType.Sum)
    flow = popart.DataFlow(3, [popart.reservedUpdatedVarPrefix() + w])
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.5), CPU)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    step = popart.PyStepIO({x: np.full((3, 2), 9, np.float32)}, anchors)
    with pytest.raises(popart.popart_exception, match="Must call weightsFromHost before run"):
        session.run(step)
    session.weightsFromHost()
    session.run(step)
    np.testing.assert_array_equal(anchors[popart.reservedUpdatedVarPrefix() + w], [[-0.5] * 2, [-1] * 2, [-1.5] * 2])


def test_inference_needs_something_to_compute() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    y = builder.aiOnnx.relu([x])
    proto = builder.getModelProto()
    with pytest.raises(popart.popart_exception, match="must specify an anchor tensor"):
        popart.InferenceSession(proto, popart.DataFlow(1, {}), CPU)
    with pytest.raises(popart.popart_exception, match="nothing to compute"):
        popart.InferenceSession(proto, popart.DataFlow(1, [x]), CPU)
    options = popart.SessionOptions()
    options.enableGradientAccumulation = True
    options.accumulationFactor = 2
    with pytest.raises(popart.popart_exception, match="Gradient Accumulation only available when training"):
        popart.InferenceSession(proto, popart.DataFlow(1, [y]), CPU, userOptions=options)


def test_recomputation_is_automatic_or_manual() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [1])
    y = builder.aiOnnx.relu([x])
    loss = builder.aiOnnx.relu([y])
    builder.recomputeOutputInBackwardPass(y)
    options = popart.SessionOptions()
    options.autoRecomputation = popart.RecomputationType.Standard
    flow = popart.DataFlow(1, [loss])
    with pytest.raises(popart.popart_exception, match="mixture of auto and manual recomputation"):
        popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), CPU, userOptions=options)


def test_weights_survive_an_abort() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2])
    w = builder.addInitializedInputTensor(np.ones(2, np.float32))
    builder.aiGraphcore.abort([builder.aiOnnx.cast([x], "INT32")])
    loss = builder.aiGraphcore.identityloss([builder.aiOnnx.mul([x, w])], popart.ReductionType.Sum)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 16})
    flow = popart.DataFlow(1, {loss: popart.AnchorReturnType("All")})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.5), device)
    session.prepareDevice()
    session.weightsFromHost()
    weights = np.zeros(2, np.float32)

    def weights_after(row: list[float]) -> list[float]:
        session.run(popart.PyStepIO({x: np.array(row, np.float32)}, session.initAnchorArrays()))
        session.weightsToHost()
        session.readWeights(popart.PyWeightsIO({w: weights}))
        return [float(value) for value in weights]

    assert weights_after([0.5, 0.25]) == [0.75, 0.875]
    with pytest.raises(popart.poplar_runtime_error, match="aborted"):
        weights_after([0.5, 1.5])
    assert weights_after([0.5, 0.25]) == [0.5, 0.75]
