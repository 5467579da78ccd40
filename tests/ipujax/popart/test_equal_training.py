"""Training with pipelines, shards, accumulation, replicas, recomputation and phases gives the numbers of one IPU."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import popart
from tests.ipujax.popart.small_models import Array, Perceptron, Trained, first_weights, perceptron, samples, train

LIMIT = 1e-5


def two_ipus() -> popart.DeviceInfo:
    """Return a device of two small IPUs."""
    return popart.DeviceManager().createIpuModelDevice({"numIPUs": 2, "tilesPerIPU": 16})


def with_options(**values: object) -> popart.SessionOptions:
    """Return options of a session."""
    options = popart.SessionOptions()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def accumulating(factor: int, **values: object) -> popart.SessionOptions:
    """Return options with gradient accumulation."""
    return with_options(enableGradientAccumulation=True, accumulationFactor=factor, **values)


def distance_error(got: Trained, expected: Trained, before: dict[str, Array]) -> float:
    """Return the relative L1 error of the distance that the parameters moved."""
    error = sum(abs(got.weights[name] - expected.weights[name]).sum() for name in before)
    return float(error / sum(abs(expected.weights[name] - before[name]).sum() for name in before))


def assert_equal(got: Trained, expected: Trained, model: Perceptron) -> None:
    """Check losses and weights."""
    np.testing.assert_allclose(got.losses(model.loss), expected.losses(model.loss), rtol=LIMIT)
    assert distance_error(got, expected, first_weights(model)) < LIMIT


MANUAL = popart.VirtualGraphMode.Manual


def test_sharded_is_one_ipu() -> None:
    one = train(perceptron())
    model = perceptron(stages=True)
    sharded = train(model, device=two_ipus(), options=with_options(virtualGraphMode=MANUAL))
    assert_equal(sharded, one, model)
    assert sharded.session.getReport().cycles > 0


@pytest.mark.parametrize("factor", [1, 4])
def test_pipelined_is_one_ipu(factor: int) -> None:
    one = train(perceptron(), options=accumulating(factor))
    model = perceptron(stages=True)
    options = accumulating(factor, virtualGraphMode=MANUAL, enablePipelining=True)
    assert_equal(train(model, device=two_ipus(), options=options), one, model)


def test_sharded_accumulation_is_one_ipu() -> None:
    one = train(perceptron(), options=accumulating(2))
    model = perceptron(stages=True)
    assert_equal(train(model, device=two_ipus(), options=accumulating(2, virtualGraphMode=MANUAL)), one, model)


def test_automatic_stages_are_one_ipu() -> None:
    one = train(perceptron(), options=accumulating(4))
    model = perceptron()
    mode = popart.VirtualGraphMode.Auto
    options = accumulating(4, virtualGraphMode=mode, enablePipelining=True)
    assert_equal(train(model, device=two_ipus(), options=options), one, model)


@pytest.mark.parametrize(("accumulation", "replicas"), [(4, 1), (1, 2), (2, 2)])
def test_accumulation_and_replicas_are_one_large_batch(accumulation: int, replicas: int) -> None:
    count = accumulation * replicas
    large = train(perceptron(4 * count), samples_per_micro_batch=4 * count)
    model = perceptron()
    options = accumulating(accumulation, enableReplicatedGraphs=True, replicatedGraphCount=replicas)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": replicas, "tilesPerIPU": 16})
    assert_equal(train(model, device=device, options=options), large, model)


@pytest.mark.parametrize("strategy", popart.MeanReductionStrategy)
def test_mean_losses_with_mean_reduction_are_one_large_batch(strategy: popart.MeanReductionStrategy) -> None:
    mean = popart.ReductionType.Mean
    large = train(perceptron(16, reduction=mean), samples_per_micro_batch=16)
    model = perceptron(reduction=mean)
    options = accumulating(
        2,
        enableReplicatedGraphs=True,
        replicatedGraphCount=2,
        accumulationAndReplicationReductionType=mean,
        meanAccumulationAndReplicationReductionStrategy=strategy,
    )
    got = train(model, device=two_ipus(), options=options)
    assert distance_error(got, large, first_weights(model)) < LIMIT
    np.testing.assert_allclose(got.losses(model.loss) / 4, large.losses(model.loss), rtol=LIMIT)


def test_defaults_sum_the_gradients_of_means() -> None:
    mean = popart.ReductionType.Mean
    rate = 0.02
    large_model = perceptron(16, reduction=mean)
    plain = popart.SGD({"defaultLearningRate": (4 * rate, False)})
    large = train(large_model, batches=1, samples_per_micro_batch=16, optimizer=plain)
    options = accumulating(2, enableReplicatedGraphs=True, replicatedGraphCount=2)
    small = popart.SGD({"defaultLearningRate": (rate, False)})
    model = perceptron(reduction=mean)
    got = train(model, batches=1, device=two_ipus(), options=options, optimizer=small)
    assert distance_error(got, large, first_weights(model)) < LIMIT


@pytest.mark.parametrize("mode", popart.RecomputationType)
def test_recomputed_is_kept(mode: popart.RecomputationType) -> None:
    kept = train(perceptron())
    model = perceptron(recompute=mode == popart.RecomputationType.NoRecompute)
    assert_equal(train(model, options=with_options(autoRecomputation=mode)), kept, model)


def phased(factor: int = 1, **values: object) -> popart.SessionOptions:
    """Return options of two execution phases."""
    mode = popart.VirtualGraphMode.ExecutionPhases
    settings = popart.ExecutionPhaseSettings(phases=2)
    return accumulating(factor, virtualGraphMode=mode, executionPhaseSettings=settings, **values)


@pytest.mark.parametrize("io_tiles", [0, 4])
@pytest.mark.parametrize("is_off_chip", [False, True])
def test_phased_is_resident(is_off_chip: bool, io_tiles: int) -> None:
    model = perceptron(phases=True)
    storage = popart.TensorStorage.OffChip if is_off_chip else popart.TensorStorage.OnChip
    location = popart.TensorLocationSettings(storage)
    options = phased(
        numIOTiles=io_tiles,
        optimizerStateTensorLocationSettings=location,
        weightTensorLocationSettings=location,
        activationTensorLocationSettings=location,
    )
    assert_equal(train(model, device=two_ipus(), options=options), train(perceptron()), model)


def test_phased_replicas_with_io_tiles_are_resident() -> None:
    model = perceptron(phases=True)
    replicas: dict[str, object] = {"enableReplicatedGraphs": True, "replicatedGraphCount": 2}
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 4, "tilesPerIPU": 16})
    got = train(model, device=device, options=phased(2, numIOTiles=4, **replicas))
    assert_equal(got, train(perceptron(), device=two_ipus(), options=accumulating(2, **replicas)), model)


@pytest.mark.parametrize(("mean", "io_tiles"), [(False, 0), (True, 0), (True, 4)])
def test_phased_accumulation_is_resident(mean: bool, io_tiles: int) -> None:
    """Micro-batches go through a phase one after another; gradients are summed, or are running means."""
    model = perceptron(phases=True)
    anchors = {model.loss: popart.AnchorReturnType("ALL"), model.hidden: popart.AnchorReturnType("FINAL")}
    got = phased(3, numIOTiles=io_tiles)
    expected = accumulating(3)
    if mean:
        for options in (got, expected):
            options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
            options.meanAccumulationAndReplicationReductionStrategy = popart.MeanReductionStrategy.Running
    resident = train(perceptron(), options=expected, anchors=anchors)
    in_phases = train(model, device=two_ipus(), options=got, anchors=anchors)
    assert_equal(in_phases, resident, model)
    np.testing.assert_allclose(in_phases.anchors[model.hidden], resident.anchors[model.hidden], rtol=LIMIT)


@pytest.mark.parametrize("io_tiles", [0, 4])
def test_phased_inference_is_resident(io_tiles: int) -> None:
    results = []
    for model, options in ((perceptron(phases=True), phased(numIOTiles=io_tiles)), (perceptron(), None)):
        flow = popart.DataFlow(3, {model.hidden: popart.AnchorReturnType("ALL")})
        proto = model.builder.getModelProto()
        session = popart.InferenceSession(proto, flow, two_ipus(), userOptions=options)
        session.prepareDevice()
        results.append(session.initAnchorArrays())
        data, labels = samples(12)
        session.run(popart.PyStepIO({model.data: data, model.labels: labels}, results[-1]))
    np.testing.assert_allclose(results[0][model.hidden], results[1][model.hidden], rtol=LIMIT)


def test_off_chip_is_resident() -> None:
    resident = train(perceptron())
    model = perceptron()
    off_chip = popart.TensorLocationSettings(popart.TensorStorage.OffChip)
    options = with_options(optimizerStateTensorLocationSettings=off_chip, weightTensorLocationSettings=off_chip)
    assert_equal(train(model, options=options), resident, model)


def test_cpu_is_one_ipu() -> None:
    model = perceptron()
    cpu = train(model, device=popart.DeviceManager().createCpuDevice())
    assert_equal(cpu, train(perceptron()), model)


def test_loss_scaling_leaves_the_updates() -> None:
    model = perceptron()
    values = {"defaultLearningRate": (0.02, False), "defaultMomentum": (0.9, True)}
    scaled = train(model, optimizer=popart.SGD({**values, "lossScaling": (64.0, False)}))
    assert_equal(scaled, train(perceptron()), model)


def test_accumulators_are_sums_of_gradients() -> None:
    model = perceptron()
    name = model.weights[0]
    gradient = popart.reservedGradientPrefix() + name
    accumulator = popart.reservedAccumPrefix() + name
    anchors = {key: popart.AnchorReturnType("ALL") for key in (gradient, accumulator)}
    got = train(model, batches=2, options=accumulating(3), anchors=anchors).anchors
    assert got[accumulator].shape == (2, 3, *first_weights(model)[name].shape)
    np.testing.assert_allclose(got[accumulator], got[gradient].cumsum(1), rtol=LIMIT, atol=1e-7)


@pytest.mark.parametrize("ipus", [(1, 0, 1), (3, 2, 2)], ids=["back and forth", "from the last"])
def test_shards_on_any_ipus_are_one_ipu(ipus: tuple[int, ...]) -> None:
    """Values come back to an IPU, and IPUs are without operations."""

    def losses(manual: bool) -> np.ndarray:
        builder = popart.Builder()
        x = builder.addInputTensor("FLOAT", [4])
        w = builder.addInitializedInputTensor(np.linspace(0.1, 1, 4, dtype=np.float32))
        with builder.virtualGraph(ipus[0]):
            y = builder.aiOnnx.mul([x, w])
        with builder.virtualGraph(ipus[1]):
            y = builder.aiOnnx.sin([y])
        with builder.virtualGraph(ipus[2]):
            loss = builder.aiGraphcore.l1loss([builder.aiOnnx.add([x, y])], 1.0)
        mode = popart.VirtualGraphMode.Manual if manual else popart.VirtualGraphMode.Off
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 4, "tilesPerIPU": 4})
        flow = popart.DataFlow(3, [loss])
        options = with_options(virtualGraphMode=mode)
        proto = builder.getModelProto()
        session = popart.TrainingSession(proto, flow, loss, popart.ConstSGD(0.1), device, userOptions=options)
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: np.linspace(0, 2, 12, dtype=np.float32)}, anchors))
        return anchors[loss]

    np.testing.assert_allclose(losses(True), losses(False), rtol=LIMIT)


def test_a_stage_of_the_loss_alone_is_a_stage() -> None:
    """No gradient needs the loss, and no anchor asks for it."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4])
    w = builder.addInitializedInputTensor(np.ones(4, np.float32))
    with builder.pipelineStage(0), builder.virtualGraph(0):
        y = builder.aiOnnx.mul([x, w])
    with builder.pipelineStage(1), builder.virtualGraph(1):
        y = builder.aiOnnx.mul([y, w])
    with builder.pipelineStage(2), builder.virtualGraph(0):
        loss = builder.aiGraphcore.identityloss([y], popart.ReductionType.Sum)
    options = accumulating(4, virtualGraphMode=popart.VirtualGraphMode.Manual, enablePipelining=True)
    flow = popart.DataFlow(1, [w])
    proto = builder.getModelProto()
    session = popart.TrainingSession(proto, flow, loss, popart.ConstSGD(0.5), two_ipus(), userOptions=options)
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.ones((4, 4), np.float32)}, anchors))
    np.testing.assert_allclose(anchors[w][-1], np.full(4, 1 - 0.5 * 4 * 2), rtol=LIMIT)
