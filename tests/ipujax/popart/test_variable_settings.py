"""`VariableSettings`: groups as the guide's tables have them, parameters with values for groups, bad settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipujax import popart
from ipujax.popart import CommGroup, CommGroupType, VariableRetrievalMode, VariableSettings
from tests.ipujax.popart.small_models import Array

SIXTEEN = 16
# Settings → the replicas of each group of 16.
GROUPS: list[tuple[VariableSettings, list[list[int]]]] = [
    (VariableSettings(), [list(range(SIXTEEN))]),
    (VariableSettings(CommGroup(CommGroupType.All, 4)), [list(range(SIXTEEN))]),
    (VariableSettings(CommGroup(CommGroupType.Consecutive, 4)), [list(range(4 * g, 4 * g + 4)) for g in range(4)]),
    (VariableSettings(CommGroup(CommGroupType.Orthogonal, 4)), [list(range(g, SIXTEEN, 4)) for g in range(4)]),
    (VariableSettings(CommGroup(CommGroupType.Ungrouped, 0)), [[g] for g in range(SIXTEEN)]),
    (VariableSettings(2, 4), [[8 * (g // 2) + g % 2 + 2 * i for i in range(4)] for g in range(4)]),
    (VariableSettings(stride=4, groupSize=4), [list(range(g, SIXTEEN, 4)) for g in range(4)]),
    (VariableSettings(groupSize=2, stride=1), [[2 * g, 2 * g + 1] for g in range(8)]),
]


@pytest.mark.parametrize(("settings", "groups"), GROUPS, ids=[str(settings) for settings, _ in GROUPS])
def test_groups_are_those_of_the_guide(settings: VariableSettings, groups: list[list[int]]) -> None:
    assert settings.groups(SIXTEEN) == groups
    assert settings.getGroupCount(SIXTEEN) == len(groups) == settings.numReplicasReturningVariable(SIXTEEN)
    assert settings.getRealGroupSize(SIXTEEN) == len(groups[0])
    grouping = settings.getReplicaGrouping(SIXTEEN)
    assert [grouping.getGroupAt(replica) for group in groups for replica in group] == [
        number for number, group in enumerate(groups) for _ in group
    ]
    assert [settings.getGroupRepresentative(number) for number in range(len(groups))] == [g[0] for g in groups]
    shape = settings.shapeOnHost([3, 5], SIXTEEN)
    assert shape == ([len(groups)] if len(groups) > 1 else []) + [3, 5]
    assert settings.shapeOnReplica(shape, SIXTEEN, "w") == [3, 5]


def test_all_replicas_return_a_variable() -> None:
    group = CommGroup(CommGroupType.Consecutive, 2)
    settings = VariableSettings(group, VariableRetrievalMode.AllReplicas)
    assert settings.numReplicasReturningVariable(4) == 4 and settings.getGroupCount(4) == 2
    assert settings.getSharedVariableDomain() == group and settings.isUsingCommGroup()
    assert settings != VariableSettings(group) and settings == VariableSettings(
        retrievalMode_=VariableRetrievalMode.AllReplicas, sharedVariableDomain_=group
    )


BAD: list[tuple[Any, str]] = [
    (lambda: VariableSettings(3), "unknown VariableSettings"),
    (lambda: VariableSettings("All"), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(), CommGroup()), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(), 1, 2), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(CommGroupType.Orthogonal, 0)), "need a size"),
    (lambda: VariableSettings(0, 2), "need a size"),
    (lambda: VariableSettings(VariableRetrievalMode.AllReduceReplicas), "AllReduceReplicas is not supported"),
    (lambda: VariableSettings(CommGroup(CommGroupType.Consecutive, 3)).groups(4), "do not divide the replicas"),
    (lambda: VariableSettings(2, 4).groups(4), "do not divide the replicas"),
    (lambda: VariableSettings(1, 2).shapeOnReplica([3, 5], 4, "w"), "first axis of 'w'"),
    (lambda: VariableSettings(1, 2).shapeOnReplica([], 4, "w"), "first axis of 'w'"),
    (lambda: VariableSettings(1, 2).getSharedVariableDomain(), "have a stride"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_other_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(popart.popart_exception, match=message):
        make()


# --- parameters with values for groups of replicas ---

REPLICAS = 4
SHAPE = (3, 3)
RATE, MOMENTUM, SLOPE = 0.01, 0.9, 0.2  # of the loss 0.1 · y²
PAIRS = CommGroup(CommGroupType.Consecutive, 2)
DATA = np.random.default_rng(0).normal(size=(2, REPLICAS, 2, 3)).astype(np.float32)
FIRST = np.random.default_rng(1).normal(size=(2, *SHAPE)).astype(np.float32)


def model_of(settings: VariableSettings, value: Array = FIRST) -> tuple[popart.Builder, str, str, str]:
    """Return a model of two products, the second with a parameter of groups; its input, result and loss."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]), "x")
    v = builder.addInitializedInputTensor(np.full(SHAPE, 0.5, np.float32), "v")
    w = builder.addInitializedInputTensor(value, settings, "w")
    y = builder.aiOnnx.matmul([builder.aiOnnx.matmul([x, v]), w])
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.mul([y, y])], 0.1, popart.ReductionType.Sum)
    return builder, x, y, loss


def options_of(is_mean: bool = False) -> popart.SessionOptions:
    options = popart.SessionOptions()
    options.enableReplicatedGraphs = True
    options.replicatedGraphCount = REPLICAS
    options.constantWeights = False
    if is_mean:
        options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
    return options


def device() -> popart.DeviceInfo:
    return popart.DeviceManager().createIpuModelDevice({"numIPUs": REPLICAS, "tilesPerIPU": 4})


def training_session(
    settings: VariableSettings, options: popart.SessionOptions, optimizer: popart.Optimizer | None = None
) -> popart.TrainingSession:
    builder, _, y, loss = model_of(settings)
    sgd = popart.SGD({"defaultLearningRate": (RATE, False), "defaultMomentum": (MOMENTUM, True)})
    flow = popart.DataFlow(len(DATA), [y])
    return popart.TrainingSession(builder.getModelProto(), flow, loss, optimizer or sgd, device(), userOptions=options)


def trained_by_numpy(groups: list[list[int]], is_mean: bool) -> tuple[Array, Array]:
    """Return both parameters after training, the second by group."""
    v, w = np.full(SHAPE, 0.5), FIRST.astype(np.float64)
    moment_v, moment_w = np.zeros_like(v), np.zeros_like(w)
    for batch in DATA:
        slope_v, slope_w = np.zeros_like(v), np.zeros_like(w)
        for group, replicas in enumerate(groups):
            for x in batch[replicas]:
                slope_y = SLOPE * (x @ v @ w[group])
                slope_w[group] += (x @ v).T @ slope_y / (len(replicas) if is_mean else 1)
                slope_v += x.T @ (slope_y @ w[group].T) / (REPLICAS if is_mean else 1)
        moment_v, moment_w = MOMENTUM * moment_v + slope_v, MOMENTUM * moment_w + slope_w
        v, w = v - RATE * moment_v, w - RATE * moment_w
    return v, w


@pytest.mark.parametrize(
    ("settings", "groups", "is_mean"),
    [
        (VariableSettings(PAIRS), [[0, 1], [2, 3]], False),
        (VariableSettings(CommGroup(CommGroupType.Orthogonal, 2), VariableRetrievalMode.AllReplicas), [[0, 2], [1, 3]],
         True),
    ],
    ids=["pairs", "orthogonal"],
)  # fmt: skip
def test_groups_train_values_of_their_own(
    settings: VariableSettings, groups: list[list[int]], is_mean: bool, tmp_path: Path
) -> None:
    session = training_session(settings, options_of(is_mean))
    session.prepareDevice()
    session.weightsFromHost()
    assert session.getInfo("w").shape() == list(SHAPE)
    session.run(popart.PyStepIO({"x": DATA}, session.initAnchorArrays()))
    session.weightsToHost()
    v, w = trained_by_numpy(groups, is_mean)
    rows = settings.numReplicasReturningVariable(REPLICAS)
    read = {"v": np.empty(SHAPE, np.float32), "w": np.empty((rows, *SHAPE), np.float32)}
    session.readWeights(popart.PyWeightsIO(read))
    np.testing.assert_allclose(read["v"], v, rtol=1e-5)
    group_of = {replica: number for number, group in enumerate(groups) for replica in group}
    numbers = [group_of[replica] for replica in range(REPLICAS)] if rows == REPLICAS else [0, 1]
    np.testing.assert_allclose(read["w"], w[numbers], rtol=1e-5)
    # A saved model has a row for each group, and goes into another session.
    session.modelToHost(tmp_path / "model.onnx")
    builder, x, y, _ = model_of(settings)
    flow = popart.DataFlow(1, [y])
    other = popart.InferenceSession(builder.getModelProto(), flow, device(), userOptions=options_of())
    other.prepareDevice()
    other.resetHostWeights(str(tmp_path / "model.onnx"), ignoreWeightsInModelWithoutCorrespondingHostWeight=True)
    other.weightsFromHost()
    results = other.initAnchorArrays()
    other.run(popart.PyStepIO({x: DATA[0]}, results))
    expected = [batch @ v @ w[group_of[replica]] for replica, batch in enumerate(DATA[0])]
    np.testing.assert_allclose(results[y], expected, rtol=1e-4, atol=1e-6)


def loss_scaling(options: popart.SessionOptions) -> None:
    options.automaticLossScalingSettings.enabled = True


def sharding(options: popart.SessionOptions) -> None:
    location = popart.TensorLocation(popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.On)
    options.optimizerStateTensorLocationSettings = popart.TensorLocationSettings(location)


@pytest.mark.parametrize(
    ("change", "name"), [(loss_scaling, "automaticLossScaling"), (sharding, "replicatedTensorSharding")]
)
def test_numbers_of_all_replicas_do_not_go_with_groups(change: Any, name: str) -> None:
    options = options_of()
    change(options)
    with pytest.raises(popart.popart_exception, match=name):
        training_session(VariableSettings(PAIRS), options)


def test_clipping_does_not_go_with_groups() -> None:
    clipped = popart.SGD({}, [popart.ClipNormSettings.clipAllWeights(1.0)])
    with pytest.raises(popart.popart_exception, match="clip_norm_settings"):
        training_session(VariableSettings(PAIRS), options_of(), clipped)


def test_arrays_need_a_row_for_each_group() -> None:
    three = VariableSettings(CommGroup(CommGroupType.Ungrouped, 0))
    with pytest.raises(popart.popart_exception, match="first axis of 'w' must be that of the groups"):
        training_session(three, options_of())


def test_builders_go_on_with_settings_of_a_model() -> None:
    builder, *_ = model_of(VariableSettings(PAIRS))
    texts = [{each.key: each.value for each in b.model().metadata_props} for b in
             (builder, popart.Builder(builder.getModelProto()))]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 1
    with pytest.raises(popart.popart_exception, match="a parameter needs a name"):
        builder.addInitializedInputTensor(FIRST, 3)  # type: ignore[arg-type]
