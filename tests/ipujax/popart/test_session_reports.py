"""Reports of sessions: executions since the last report, saved profiles, dumps also of models that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ipujax as ipu
from ipujax import popart
from ipujax.popart.options.session_options import REPORT_SWITCHES

BATCHES = 2


def step(session: popart.InferenceSession | popart.TrainingSession, x: str) -> None:
    """Run a step."""
    session.run(popart.PyStepIO({x: np.ones((BATCHES, 4, 8), np.float32)}, session.initAnchorArrays()))


def training(engine: Mapping[str, str], stages: int = 1) -> tuple[popart.TrainingSession, str]:
    """Return a prepared session of one or two products, on an IPU each, and its input."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
    y = x
    for stage in range(stages):
        with builder.virtualGraph(stage):
            w = builder.addInitializedInputTensor(np.ones((8, 8), np.float32))
            y = builder.aiOnnx.matmul([y, w])
    with builder.virtualGraph(stages - 1):
        loss = builder.aiGraphcore.l1loss([y], 0.1)
    options = popart.SessionOptions()
    options.engineOptions = dict(engine)
    options.virtualGraphMode = popart.VirtualGraphMode.Manual if stages > 1 else popart.VirtualGraphMode.Off
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(BATCHES, [loss]),
        loss,
        popart.ConstSGD(0.1),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": stages, "tilesPerIPU": 8}),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session, x


def simulation(session: popart.TrainingSession, **settings: bool) -> dict[str, Any]:
    """Return the simulation of the execution report."""
    return dict(json.loads(session.getExecutionReport(**settings))["simulation"])


@pytest.mark.parametrize("stages", [1, 2])  # a call for a step, and one for each batch
def test_execution_reports_cover_all_executions_since_the_last_report(stages: int) -> None:
    session, x = training({"debug.instrument": "true"}, stages)
    assert simulation(session)["cycles"] == 0 and not simulation(session)["steps"]
    step(session, x)
    one = simulation(session)
    assert one["cycles"] == session.getCycleCount() > 0
    step(session, x)
    step(session, x)
    two = simulation(session, resetProfile=False)
    assert two == simulation(session)
    assert two["cycles"] == 2 * one["cycles"]
    assert two["tileCycles"] == {name: 2 * cycles for name, cycles in one["tileCycles"].items()}
    runs = [[row["repeats"] for row in report["steps"] if "repeats" in row] for report in (one, two)]
    assert runs[1] == [2 * n for n in runs[0]]
    assert simulation(session)["cycles"] == 0


def test_summaries_count_executions_and_reset_them() -> None:
    session, x = training({"autoReport.all": "true"})
    step(session, x)
    cycles = session.getCycleCount()
    line = f"Executions since the last report: 1, {cycles:,} cycles"
    assert line in session.getSummaryReport(resetProfile=False)
    assert line in session.getSummaryReport()
    assert "Executions since the last report: 0, 0 cycles" in session.getSummaryReport()


def by_option(directory: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    return {"autoReport.all": "true", "autoReport.directory": str(directory)}


def by_environment(directory: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    patch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(by_option(directory, patch)))
    return {}


@pytest.mark.parametrize("choice", [by_option, by_environment])
def test_profiles_are_saved_in_the_directory(
    choice: Callable[[Path, pytest.MonkeyPatch], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "out" / "profiles"
    session, x = training(choice(directory, monkeypatch))
    saved = ipu.Profile.load(directory / "training.profile")
    assert saved.cycles == session.getReport().cycles
    step(session, x)
    assert simulation(session)["cycles"] == session.getCycleCount()


def test_a_directory_without_reports_is_named(tmp_path: Path) -> None:
    session, _ = training({"autoReport.directory": str(tmp_path)})
    assert session.optionsWithoutEffect == ["engineOptions['autoReport.directory']"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("switch", REPORT_SWITCHES)
def test_each_switch_turns_reports_on(switch: str) -> None:
    options = popart.SessionOptions()
    for text, is_on in (("true", True), ("True", True), ("false", False)):
        options.engineOptions = {switch: text}
        assert options.has_reports is is_on


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(popart.popart_exception, match=r"autoReport\.directory"):
        training({"autoReport.all": "true", "autoReport.directory": str(tmp_path / "file")})


def model_of(case: str) -> tuple[popart.Builder, str]:
    """Return a model that no session can have, and its result."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
    y = builder.aiOnnx.relu([x])
    if case == "operator":
        return builder, builder.customOp("Nothing", 1, "com.acme", [y], {})[0]
    return builder, builder.aiOnnx.matmul([y, y])  # shapes that do not fit


@pytest.mark.parametrize("case", ["operator", "shapes"])
def test_operations_are_dumped_when_the_preparation_fails(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ir.json"
    monkeypatch.setenv("IPUJAX_POPART_IR_DUMP", str(path))
    device = popart.DeviceManager().createIpuModelDevice({"tilesPerIPU": 8})
    with pytest.raises(popart.popart_exception):
        builder, result = model_of(case)
        popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [result]), device)
    operations = json.loads(path.read_text())["maingraph"]
    assert [each["type"] for each in operations] == ["Relu", "Nothing" if case == "operator" else "MatMul"]
