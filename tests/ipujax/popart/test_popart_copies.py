"""Options, optimisers and descriptions can be copied and pickled; builders and sessions refuse it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from ipujax import popart
from tests.ipujax.copy_checks import WAYS, check_copy, check_errors, check_refused, classes_not_in


@cache
def onnx_model() -> onnx.ModelProto:
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    body = onnx.helper.make_graph(nodes, "relu", values[:1], values[1:])
    return onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


def _session_options() -> Any:
    options = popart.SessionOptions()
    options.enableGradientAccumulation = True
    options.accumulationFactor = 4
    options.replicatedGraphCount = 2
    return options


COPIED: dict[str, Callable[[], Any]] = {
    "popart.AccumulateOuterFragmentSettings": popart.AccumulateOuterFragmentSettings,
    "popart.Adam": lambda: popart.Adam({"defaultLearningRate": (0.1, False)}),
    "popart.Adaptive": lambda: popart.Adaptive({"defaultLearningRate": (0.1, False)}),
    "popart.AnchorReturnType": lambda: popart.AnchorReturnType("All"),
    "popart.AutodiffSettings": popart.AutodiffSettings,
    "popart.AutomaticLossScalingSettings": popart.AutomaticLossScalingSettings,
    "popart.BatchSerializationSettings": popart.BatchSerializationSettings,
    "popart.ClipNormSettings": lambda: popart.ClipNormSettings(["w"], 1.0),
    "popart.CommGroup": popart.CommGroup,
    "popart.ConstSGD": lambda: popart.ConstSGD(0.1),
    "popart.DataFlow": lambda: popart.DataFlow(1, {"x": popart.AnchorReturnType("All")}),
    "popart.DebugContext": lambda: popart.DebugContext("a"),
    "popart.DeviceInfo": lambda: popart.DeviceManager().createIpuModelDevice({"numIPUs": 1}),
    "popart.DeviceManager": popart.DeviceManager,
    "popart.ExecutionPhaseSettings": popart.ExecutionPhaseSettings,
    "popart.ExperimentalSettings": popart.ExperimentalSettings,
    "popart.GraphTransformer": lambda: popart.GraphTransformer(onnx_model().SerializeToString()),
    "popart.IdentityLoss": lambda: popart.IdentityLoss("a", "b"),
    "popart.InputSettings": popart.InputSettings,
    "popart.InputShapeInfo": popart.InputShapeInfo,
    "popart.L1Loss": lambda: popart.L1Loss("a", "b", 0.1),
    "popart.Logger": popart.Logger,
    "popart.NllLoss": lambda: popart.NllLoss("a", "b", "c"),
    "popart.OpDefinition": lambda: next(iter(popart.getSupportedOperationsDefinition(False).values())),
    "popart.OperatorIdentifier": lambda: next(iter(popart.getSupportedOperationsDefinition(False))),
    "popart.OptimizerValue": lambda: popart.OptimizerValue(0.1),
    "popart.OptimizerValueMap": lambda: popart.OptimizerValueMap(popart.OptimizerValue(0.1)),
    "popart.Patterns": popart.Patterns,
    "popart.PyStepIO": lambda: popart.PyStepIO({"x": np.ones(2)}, {}),
    "popart.PyWeightsIO": lambda: popart.PyWeightsIO({"w": np.ones(2)}),
    "popart.ReplicatedCollectivesSettings": popart.ReplicatedCollectivesSettings,
    "popart.SGD": lambda: popart.SGD({"defaultLearningRate": (0.1, True)}),
    "popart.SessionOptions": _session_options,
    "popart.TensorInfo": lambda: popart.TensorInfo("FLOAT", [2]),
    "popart.TensorLocation": popart.TensorLocation,
    "popart.TensorLocationSettings": popart.TensorLocationSettings,
    "popart.VariableSettings": lambda: popart.VariableSettings(popart.CommGroup(popart.CommGroupType.Consecutive, 2)),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "popart.Builder": popart.Builder,
    "popart.InferenceSession": lambda: popart.InferenceSession(
        onnx_model().SerializeToString(),
        popart.DataFlow(1, {"y": popart.AnchorReturnType("All")}),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": 1}),
    ),
}
# Classes without values of their own: bases, and what only a session, a builder or files make.
WITHOUT_VALUES = {
    *("popart.AiGraphcoreOpset1", "popart.IStepIO", "popart.NumericsReport", "popart.Optimizer"),
    *("popart.PyStepIOCallback", "popart.TrainingSession"),
}


def test_table_has_all_public_classes() -> None:
    assert not classes_not_in([".popart"], {*COPIED, *REFUSED, *WITHOUT_VALUES})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_equal(name: str, way: str) -> None:
    check_copy(COPIED[name](), way)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_copies_name_the_remedy(name: str) -> None:
    check_refused(REFUSED[name]())


@pytest.mark.parametrize("way", WAYS)
def test_errors_keep_their_facts(way: str) -> None:
    check_errors("ipujax.popart", way)
