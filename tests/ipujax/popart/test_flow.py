"""Batches, anchors, data of steps, devices and options, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ipujax as ipu
from ipujax import popart
from ipujax.popart.flow import StepShape
from ipujax.popart.flow.step_io import synthetic_rows

INFO = popart.TensorInfo("FLOAT", [2, 3])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (popart.AnchorReturnType("ALL"), (8, 2, 2, 3)),
        (popart.AnchorReturnType("EveryN", 4), (2, 2, 2, 3)),
        (popart.AnchorReturnType("FINAL"), (2, 3)),
        (popart.AnchorReturnType("Sum"), (2, 3)),
    ],
)
def test_shapes_of_anchors(kind: popart.AnchorReturnType, shape: tuple[int, ...]) -> None:
    assert StepShape(8, 2, 1).anchor_shape(kind, INFO) == shape


def test_anchors_of_replicas() -> None:
    assert StepShape(1, 1, 4).anchor_shape(popart.AnchorReturnType("FINAL"), INFO) == (4, 2, 3)


def test_data_flow() -> None:
    flow = popart.DataFlow(4, ["a", "b"])
    assert flow.anchors() == ["a", "b"]
    assert flow.art("a").id() is popart.AnchorReturnTypeId.All
    with pytest.raises(popart.popart_exception, match="does not divide"):
        popart.DataFlow(4, {"a": popart.AnchorReturnType("EVERYN", 3)})
    with pytest.raises(popart.popart_exception, match="'FINAL', the nearest"):
        popart.AnchorReturnType("FINALE")
    with pytest.raises(popart.popart_exception, match="Must specify return period"):
        popart.AnchorReturnType("EVERYN")
    with pytest.raises(popart.popart_exception, match="must be a number of batches"):
        popart.DataFlow(0, {})


def test_arrays_of_a_step() -> None:
    step = StepShape(4, 2, 1)
    data = np.arange(48, dtype=np.float32)
    stepio = popart.PyStepIO({"x": data}, {})
    assert stepio.read("x", INFO, step).shape == (4, 2, 1, 2, 3)
    with pytest.raises(popart.popart_exception, match="wrong number of elements"):
        stepio.read("x", INFO, StepShape(4, 1, 1))
    with pytest.raises(popart.popart_exception, match="the wrong element type"):
        stepio.read("x", popart.TensorInfo("INT32", [2, 3]), step)
    with pytest.raises(popart.popart_exception, match="not c-contiguous"):
        popart.PyStepIO({"x": data.reshape(8, 6).T}, {})
    with pytest.raises(popart.popart_exception, match="no array of NumPy"):
        popart.PyStepIO({}, {"y": [0.0]})


def test_callbacks_of_a_step() -> None:
    calls: list[tuple[str, bool]] = []
    read: list[str] = []

    def data(name: str, is_prefetch: bool) -> np.ndarray | None:
        calls.append((name, is_prefetch))
        return None if is_prefetch and len(calls) == 2 else np.full((2, 3), len(calls), np.float32)

    results = np.zeros((3, 2, 3), np.float32)
    rows = iter(results)
    stepio = popart.PyStepIOCallback(data, read.append, lambda name: next(rows), lambda name: None)
    values = stepio.read("x", INFO, StepShape(3))
    assert calls == [("x", False), ("x", True), ("x", False), ("x", True)]
    assert read == ["x"] * 3
    stepio.write("y", popart.AnchorReturnType("ALL"), values)
    np.testing.assert_array_equal(results, values.reshape(3, 2, 3))


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (np.zeros((3, 3), np.float32), "wrong number of elements"),
        ([0.0] * 6, "no array of NumPy"),
        (None, "no array of NumPy"),
        (np.broadcast_to(np.zeros(()), (2, 3)), "read-only"),
    ],
)
def test_refuses_arrays_of_callbacks_that_do_not_hold_results(target: Any, match: str) -> None:
    stepio = popart.PyStepIOCallback(lambda name, _: None, lambda name: None, lambda name: target, lambda name: None)
    with pytest.raises(popart.popart_exception, match=match):
        stepio.write("y", popart.AnchorReturnType("ALL"), np.ones((1, 1, 1, 2, 3), np.float32))


@pytest.mark.parametrize("name", ["FLOAT16", "BFLOAT16"])
def test_synthetic_numbers_of_half_precision_are_random(name: str) -> None:
    infos = {"x": popart.TensorInfo(name, [4])}
    rows = synthetic_rows(infos, StepShape(1), popart.SyntheticDataMode.RandomNormal)
    assert len(np.unique(rows["x"].astype(np.float32))) == 4


def test_devices() -> None:
    manager = popart.DeviceManager()
    with manager.createIpuModelDevice({"numIPUs": "2", "tilesPerIPU": 64, "ipuVersion": "ipu21"}) as device:
        assert (device.numIpus, device.tilesPerIPU, device.ipuVersion) == (2, 64, "ipu21")
        assert device.device == ipu.IPUModel(2, "bow", tiles_per_ipu=64, sync_pattern="full")
    assert not device.isAttached
    assert isinstance(manager.createCpuDevice().device, ipu.CPU)
    pattern = popart.SyncPattern.PingPong
    acquired = manager.acquireAvailableDevice(4, pattern=pattern)
    assert isinstance(acquired.device, ipu.IPUModel)
    assert acquired.device.target.sync_pattern == "ping_pong"
    assert [d.id for d in manager.enumerateDevices(numIpus=2)] == [4, 5]
    assert manager.acquireDeviceById(5).numIpus == 2
    with pytest.raises(popart.popart_exception, match="'tilesPerIPU', the nearest"):
        manager.createIpuModelDevice({"tilesPerIpu": 4})
    with pytest.raises(popart.popart_exception, match="no device has this number"):
        manager.acquireDeviceById(7)


def test_options() -> None:
    options = popart.SessionOptions()
    assert options.changed() == []
    options.enableOutlining = False
    options.engineOptions["debug.instrument"] = "true"
    options.autoVirtualGraph = True
    assert options.virtualGraphMode is popart.VirtualGraphMode.Auto
    assert options.without_effect() == ["enableOutlining"]
    options.check()
    with pytest.raises(popart.popart_exception, match="'enablePipelining', the nearest"):
        options.enablePipeline = True
    options.enableFloatingPointChecks = True
    with pytest.raises(popart.popart_exception, match="enableFloatingPointChecks is not supported"):
        options.check()


def test_options_that_contradict_each_other() -> None:
    options = popart.SessionOptions()
    options.accumulationFactor = 4
    with pytest.raises(popart.popart_exception, match="enableGradientAccumulation is false"):
        options.check()
    options.enableGradientAccumulation = True
    options.check()
    assert options.accumulation == 4


def test_prefixes() -> None:
    assert popart.reservedGradientPrefix() == "Gradient___"
    assert popart.reservedAccl1Prefix() + "w" == "Accl1___w"
