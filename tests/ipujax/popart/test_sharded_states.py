"""Replicated tensor sharding of the optimiser's state: the numbers of whole states, in less memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ipujax import popart
from tests.ipujax.popart.small_models import Array, perceptron, train

REPLICAS = 2
FIRST_MOMENT = "Accl1___"
Optimizers = Callable[[], popart.Optimizer]


def options(sharding: popart.ReplicatedTensorSharding, least: int) -> popart.SessionOptions:
    """Return options of two replicas, whose optimiser state is sharded or not."""
    changed = popart.SessionOptions()
    changed.enableReplicatedGraphs = True
    changed.replicatedGraphCount = REPLICAS
    location = popart.TensorLocation(popart.TensorStorage.OnChip, sharding)
    changed.optimizerStateTensorLocationSettings = popart.TensorLocationSettings(
        location, minElementsForReplicatedTensorSharding=least
    )
    return changed


def adam() -> popart.Optimizer:
    return popart.Adam({"defaultLearningRate": (0.05, False)})


def clipped_sgd() -> popart.Optimizer:
    """Return an optimiser that needs a number of all gradients: their norm."""
    values = {"defaultLearningRate": (0.02, False), "defaultMomentum": (0.9, True)}
    return popart.SGD(values, [popart.ClipNormSettings.clipAllWeights(0.5)])


@pytest.mark.parametrize("optimizer", [adam, clipped_sgd])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_numbers_are_those_of_whole_states(optimizer: Optimizers, is_scaled: bool) -> None:
    results: list[dict[str, Array]] = []
    for sharding in popart.ReplicatedTensorSharding.Off, popart.ReplicatedTensorSharding.On:
        chosen = options(sharding, 6)  # biases stay whole
        chosen.automaticLossScalingSettings.enabled = is_scaled
        model = perceptron()
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": REPLICAS, "tilesPerIPU": 8})
        anchors = {model.loss: popart.AnchorReturnType("ALL")}
        if optimizer is adam:
            anchors[FIRST_MOMENT + "w0"] = popart.AnchorReturnType("ALL")
        trained = train(model, 3, device, chosen, optimizer(), anchors)
        assert not any("optimizerState" in name for name in trained.session.optionsWithoutEffect)
        names = [name for name in trained.session.getAllTensorIds() if name.startswith("Acc")]
        state = {name: np.empty(trained.session.getInfo(name).shape(), np.float32) for name in names}
        trained.session.readWeights(popart.PyWeightsIO(state))
        results.append({**trained.weights, **trained.anchors, **state})
    whole, sharded = results
    for name, value in whole.items():
        np.testing.assert_allclose(sharded[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def wide_session(
    sharding: popart.ReplicatedTensorSharding, least: int, learning_rate: float = 0.05
) -> popart.TrainingSession:
    """Return a prepared session whose state takes most of the memory."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 256]))
    w = builder.addInitializedInputTensor(np.eye(256, dtype=np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, [loss]),
        loss,
        popart.Adam({"defaultLearningRate": (learning_rate, False)}),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": REPLICAS, "tilesPerIPU": 16}),
        userOptions=options(sharding, least),
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session


def test_states_of_large_weights_take_less_memory() -> None:
    sizes = [
        wide_session(sharding, least).getReport().memory.by_role["optimiser state"].sum()
        for sharding, least in (
            (popart.ReplicatedTensorSharding.Off, 8192),
            (popart.ReplicatedTensorSharding.On, 8192),
            (popart.ReplicatedTensorSharding.On, 256 * 256 + 1),
        )
    ]
    whole, sharded, too_small = sizes
    moments, steps = 2 * 4 * 256 * 256, 4
    assert whole == too_small == moments + steps
    assert sharded == moments / REPLICAS + steps


def test_a_state_goes_to_the_host_and_back() -> None:
    session = wide_session(popart.ReplicatedTensorSharding.On, 2, learning_rate=0)  # the gradient does not change
    x = next(iter(session._graph.inputs))
    data = np.random.default_rng(0).normal(size=(REPLICAS, 2, 256)).astype(np.float32)
    step = popart.PyStepIO({x: data}, session.initAnchorArrays())
    session.run(step)
    session.weightsToHost()
    moment = np.empty((256, 256), np.float32)
    session.readWeights(popart.PyWeightsIO({FIRST_MOMENT + "w": moment}))
    assert np.abs(moment).max() > 0
    session.weightsFromHost()
    session.run(step)
    session.weightsToHost()
    second = np.empty((256, 256), np.float32)
    session.readWeights(popart.PyWeightsIO({FIRST_MOMENT + "w": second}))
    # The first moment of a constant gradient: 0.1 of it, then 0.19.
    np.testing.assert_allclose(second, 1.9 * moment, rtol=1e-4, atol=1e-7)
