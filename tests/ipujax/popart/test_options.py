"""Options of sessions: each has an effect, is listed as one without, or is refused by its name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ipujax.popart
from ipujax import popart
from ipujax.popart.options import (
    ALL_OPTIONS,
    FIELDS_WITHOUT_EFFECT,
    MAPPED,
    REFUSED,
    WARNED,
    WITHOUT_EFFECT,
    option_groups,
)
from tests.ipujax.popart.small_models import FEATURES, Perceptron, perceptron

PACKAGE = Path(ipujax.popart.__file__).parent
Change = Callable[[popart.SessionOptions], None]


def session_of(
    options: popart.SessionOptions | None = None, model: Perceptron | None = None, ipus: int = 1
) -> popart.InferenceSession:
    """Return a session that is not prepared."""
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": ipus, "tilesPerIPU": 16})
    chosen = model or perceptron()
    proto = chosen.builder.getModelProto()
    return popart.InferenceSession(proto, popart.DataFlow(1, [chosen.hidden]), device, userOptions=options)


def attributes_read() -> set[str]:
    """Return the names of all attributes that the package reads."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_option_is_in_one_table() -> None:
    tables = (MAPPED, WITHOUT_EFFECT, REFUSED)
    for name in vars(popart.SessionOptions()):
        assert sum(name in table for table in tables) == 1, name
    assert set(vars(popart.SessionOptions())) == set(ALL_OPTIONS) == {name for table in tables for name in table}


def test_every_mapped_option_is_read() -> None:
    assert set(MAPPED) <= attributes_read()


def test_every_field_of_a_mapped_option_is_read_or_listed() -> None:
    listed = {path.rsplit(".", 1)[1] for path in FIELDS_WITHOUT_EFFECT}
    mapped = {type(default()) for default, _ in MAPPED.values()}
    groups = [kind for kind in (*mapped, option_groups.TensorLocation) if issubclass(kind, option_groups.OptionGroup)]
    fields = {name for group in groups for name in vars(group())}
    assert len(groups) == 4
    assert fields - listed <= attributes_read()


def set_tiles(options: popart.SessionOptions) -> None:
    location = popart.TensorLocation(popart.TensorStorage.OffChip, popart.TileSet.IO)
    options.weightTensorLocationSettings = popart.TensorLocationSettings(location)


LISTED: dict[str, tuple[Change, list[str]]] = {
    "reports": (lambda o: o.reportOptions.update(showVarStorage="true"), ["reportOptions"]),
    "engine": (
        lambda o: o.engineOptions.update({"debug.instrument": "true", "opt.useAutoloader": "true"}),
        ["engineOptions['opt.useAutoloader']"],
    ),
    "tile set": (set_tiles, ["weightTensorLocationSettings.location.loadTileSet"]),
    "phases": (
        lambda o: setattr(o.executionPhaseSettings, "stages", 1),
        ["executionPhaseSettings.stages"],
    ),
}


@pytest.mark.parametrize("case", LISTED)
def test_lists_options_without_effect(case: str) -> None:
    change, expected = LISTED[case]
    options = popart.SessionOptions()
    change(options)
    assert session_of(options).optionsWithoutEffect == expected


def test_lists_annotations_without_effect() -> None:
    model = perceptron()
    off_chip = popart.TensorLocation(popart.TensorStorage.OffChip)
    model.builder.outputTensorLocation(model.hidden, off_chip)
    assert session_of(model=model).optionsWithoutEffect == ["builder.outputTensorLocation"]


def shard(name: str) -> Change:
    """Return the change that divides one kind of tensors among replicas."""
    sharded = popart.TensorLocation(popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.On)
    return lambda options: setattr(options, name, popart.TensorLocationSettings(sharded))


def domain(name: str) -> Change:
    """Return the change that would divide one kind of tensors among some replicas only."""
    pairs = popart.CommGroup(popart.CommGroupType.Consecutive, 2)
    return lambda options: setattr(getattr(options, name).location, "shardingDomain", pairs)


def off_chip(name: str) -> Change:
    """Return the change that stores one kind of tensors in streaming memory."""
    return lambda options: setattr(options, name, popart.TensorLocationSettings(popart.TensorStorage.OffChip))


LOCATIONS = tuple(name for name in ALL_OPTIONS if name.endswith("TensorLocationSettings"))
WARNINGS: list[tuple[Change, str]] = [
    *((shard(name), f"{name}.location.replicatedTensorSharding") for name in LOCATIONS if "State" not in name),
    *((domain(name), f"{name}.location.shardingDomain") for name in LOCATIONS),
    (lambda o: setattr(o, "enableStochasticRounding", True), "enableStochasticRounding"),
    (lambda o: setattr(o.batchSerializationSettings, "factor", 4), "batchSerializationSettings"),
    (
        lambda o: o.tensorLocationSettingsOverride.update(w1=popart.TensorLocation(popart.TensorStorage.OffChip)),
        "tensorLocationSettingsOverride",
    ),
]


@pytest.mark.parametrize(("change", "name"), WARNINGS, ids=[name for _, name in WARNINGS])
def test_warns_of_options_that_would_change_memory_or_rounding(change: Change, name: str) -> None:
    options = popart.SessionOptions()
    change(options)
    with pytest.warns(UserWarning, match=f"option {name} has no effect"):
        session = session_of(options)
    assert name in session.optionsWithoutEffect
    assert {name for _, name in WARNINGS} == WARNED


def test_deprecated_options_are_those_of_another_name() -> None:
    options = popart.SessionOptions()
    with pytest.warns(DeprecationWarning, match="defaultPrefetchBufferingDepth has been deprecated"):
        options.defaultPrefetchBufferingDepth = 3
    assert options.defaultBufferingDepth == 3


def test_debug_information_is_not_written(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no effect"):
        popart.initializePoplarDebugInfo(str(tmp_path / "debug.cbor"), "cbor")
    popart.closePoplarDebugInfo()


REFUSALS: list[tuple[Change, str]] = [
    (off_chip("activationTensorLocationSettings"), "activationTensorLocationSettings"),
    (off_chip("accumulatorTensorLocationSettings"), "accumulatorTensorLocationSettings"),
    (lambda o: setattr(o.executionPhaseSettings, "phases", 2), "executionPhaseSettings.phases"),
    (lambda o: setattr(o, "enableFloatingPointChecks", True), "enableFloatingPointChecks"),
    (lambda o: setattr(o, "accumulationFactor", 2), "accumulationFactor"),
]


@pytest.mark.parametrize(("change", "name"), REFUSALS, ids=[name for _, name in REFUSALS])
def test_refuses_options_by_name(change: Change, name: str) -> None:
    options = popart.SessionOptions()
    change(options)
    with pytest.raises(popart.popart_exception, match=name):
        session_of(options)


OTHER_KINDS: dict[str, Any] = {
    "autoRecomputation": 7,
    "batchSerializationSettings": 1,
    "cachePath": 3,
    "engineOptions": [("debug.instrument", "true")],
    "enablePipelining": "yes",
    "accumulationFactor": float("nan"),
    "executionPhaseSettings": 3,
    "numIOTiles": 2.5,
    "syntheticDataMode": 9,
    "timeLimitScheduler": "a",
    "virtualGraphMode": "Manual",
    "virtualGraphSplitRatios": "12",
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_refuses_values_of_another_type(name: str) -> None:
    options = popart.SessionOptions()
    setattr(options, name, OTHER_KINDS[name])
    with pytest.raises(popart.popart_exception, match=f"option {name} cannot have this value"):
        options.check()


def test_accepts_values_that_convert(tmp_path: Path) -> None:
    options = popart.SessionOptions()
    converted = {"enableOutlining": 0, "logDir": tmp_path, "numIOTiles": np.int64(4), "outlineThreshold": 3}
    for name, value in {**converted, "autoRecomputation": 1, "virtualGraphSplitRatios": (1.0, 2.0)}.items():
        setattr(options, name, value)
    options.check()


@pytest.mark.parametrize(("ipus", "replicas"), [(1, 2), (3, 2)])
def test_refuses_replicas_that_do_not_divide_the_ipus(ipus: int, replicas: int) -> None:
    options = popart.SessionOptions()
    options.enableReplicatedGraphs = True
    options.replicatedGraphCount = replicas
    with pytest.raises(popart.popart_exception, match="replicatedGraphCount"):
        session_of(options, ipus=ipus)


def test_refuses_phases_beyond_their_number() -> None:
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.ExecutionPhases
    options.executionPhaseSettings.phases = 1
    with pytest.raises(popart.popart_exception, match="execution phase 1 of 1"):
        session_of(options, perceptron(phases=True))


def test_refuses_tracked_tensors_that_are_not_weights() -> None:
    model = perceptron()
    options = popart.SessionOptions()
    options.automaticLossScalingSettings.enabled = True
    options.automaticLossScalingSettings.toTrackTensors = [model.hidden]
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 16})
    proto = model.builder.getModelProto()
    flow = popart.DataFlow(1, {})
    with pytest.raises(popart.popart_exception, match="toTrackTensors"):
        popart.TrainingSession(proto, flow, model.loss, popart.ConstSGD(0.1), device, userOptions=options)


def test_refuses_unknown_fields_of_groups() -> None:
    with pytest.raises(popart.popart_exception, match="'phases', the nearest"):
        popart.SessionOptions().executionPhaseSettings.phase = 2  # type: ignore[attr-defined]
    with pytest.raises(popart.popart_exception, match="unknown setting of a TensorLocation"):
        popart.TensorLocation(popart.TensorStorage.OffChip, 3)


def test_refuses_annotations_that_would_change_numbers() -> None:
    model = perceptron()
    sharded = popart.TensorLocation(popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.On)
    with pytest.raises(popart.popart_exception, match="outputTensorLocation"):
        model.builder.outputTensorLocation(model.hidden, sharded)
    with pytest.raises(popart.popart_exception, match="outputTensorLocation needs a TensorLocation"):
        model.builder.outputTensorLocation(model.hidden, popart.TensorStorage.OffChip)
    with pytest.raises(popart.popart_exception, match="commGroup"):
        model.builder.commGroup(popart.CommGroupType.Consecutive, 2)
    with pytest.raises(popart.popart_exception, match="InputSettings"):
        popart.InputSettings(popart.ReplicatedStreamMode.Broadcast)


def products(*partials: str | None) -> Perceptron:
    """Return a model of two products, annotated in their order where there is a value."""
    model = perceptron()
    names = [node.output[0] for node in model.builder.model().graph.node if node.op_type == "MatMul"]
    for name, value in zip(names, partials, strict=True):
        if value is not None:
            model.builder.setPartialsType(name, value)
            model.builder.setAvailableMemoryProportion(name, 0.25)
    return model


def test_annotations_of_all_products_are_those_of_the_program() -> None:
    session = session_of(model=products("HALF", "HALF"))
    assert not session.optionsWithoutEffect
    session.prepareDevice()
    executable = session.getReport().executable
    assert executable.options.partials == "float16"
    assert executable.target.available_memory_proportion == 0.25
    assert executable.target.tiles_per_ipu == 16


@pytest.mark.parametrize("second", ["FLOAT", None])
def test_annotations_of_some_products_are_listed(second: str | None) -> None:
    listed = session_of(model=products("HALF", second)).optionsWithoutEffect
    assert "builder.setPartialsType" in listed
    assert ("builder.setAvailableMemoryProportion" in listed) == (second is None)


def test_attributes_without_effect_are_listed() -> None:
    builder = popart.Builder(opsets={"ai.onnx": 10, "ai.graphcore": 1})
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1, 4, 6, 6]))
    w = builder.addInitializedInputTensor(np.ones((4, 4, 3, 3), np.float32))
    (y,) = builder.aiGraphcore.multiconv([[x, w]], partialsTypes=["half"], planType="serial")
    y = builder.aiGraphcore.printtensor(builder.aiGraphcore.printtensor(y), digits=3)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 16})
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    assert session.optionsWithoutEffect == ["MultiConv.partialsTypes", "MultiConv.planType", "PrintTensor.digits"]


def test_programs_are_cached_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later session of an equal model reads its program from `cachePath`."""
    monkeypatch.setenv("IPUJAX_LOG_CONFIG", '{"cache": "INFO"}')
    options = popart.SessionOptions()
    options.enableEngineCaching = True
    options.cachePath = str(tmp_path / "session_cache")
    results = []
    for _ in range(2):
        model = perceptron()
        session = session_of(options, model)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        feeds = {model.data: np.ones((4, FEATURES), np.float32), model.labels: np.zeros(4, np.int32)}
        session.weightsFromHost()
        session.run(popart.PyStepIO(feeds, anchors))
        results.append(anchors[model.hidden].copy())
    assert capsys.readouterr().err.count("is in the cache") == 1
    np.testing.assert_array_equal(results[0], results[1])
