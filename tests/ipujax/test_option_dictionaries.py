"""Option dictionaries of Poplar, PopLibs and PopART: unknown names, values out of range, names without effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ipujax.popart as popart
from ipujax import IpuError, poplar, poplin
from ipujax.arguments.poplar_options import GROUPS, read_options
from ipujax.poplar.program import Sequence
from tests.ipujax.poplar.helpers import placed, small_graph

# A misspelt option, its nearest, a value out of range, and an option without effect, of each dictionary.
EXAMPLES = {
    "engine": ("debug.instrumnet", "debug.instrument", ("debug.instrument", "yes"), ("opt.useAutoloader", "true")),
    "convolution": ("parts", "pass", ("availableMemoryProportion", 1.5), ("pass", "INFERENCE_FWD")),
    "matmul": ("partialType", "partialsType", ("partialsType", "double"), ("fullyConnectedPass", "TRAINING_FWD")),
    "LSTM": ("preCalcWeight", "preCalcWeights", ("rnnStepsPerWU", 0), ("recomputationMode", "full")),
    "GCL": ("useSynclessCollective", "useSynclessCollectives", ("maxBytesPerTile", -1), ("topology", "ring")),
    "report": ("showVarsStorage", "showVarStorage", ("showVarStorage", 2), ("showExecutionSteps", True)),
    "device": ("numIPU", "numIPUs", ("numIPUs", 0), ("compileIPUCode", False)),
}
SESSION_OPTIONS = {
    "engine": "engineOptions",
    "convolution": "convolutionOptions",
    "matmul": "matmulOptions",
    "LSTM": "lstmOptions",
    "GCL": "gclOptions",
    "report": "reportOptions",
}


def engine(options: dict[str, Any]) -> object:
    return poplar.Engine(small_graph(), Sequence(), options)


def engine_of_the_environment(options: dict[str, Any]) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPUJAX_ENGINE_OPTIONS", json.dumps(options))
        return engine({})


def product(options: dict[str, Any]) -> object:
    graph = small_graph()
    x = placed(graph, poplar.FLOAT, [4, 4], "x")
    return poplin.mat_mul(graph, x, x, Sequence(), options=options)


def convolution(options: dict[str, Any]) -> object:
    graph = small_graph()
    params = poplin.ConvParams(poplar.FLOAT, 1, [4, 4], [3, 3], 1, 1)
    x = placed(graph, poplar.FLOAT, [1, 1, 4, 4], "x")
    w = placed(graph, poplar.FLOAT, [1, 1, 1, 3, 3], "w")
    return poplin.convolution(graph, x, w, params, prog=Sequence(), options=options)


def device(options: dict[str, Any]) -> object:
    return popart.DeviceManager().createIpuModelDevice(options)


def session(option: str) -> Callable[[dict[str, Any]], object]:
    def make(values: dict[str, Any]) -> object:
        builder = popart.Builder()
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4]))
        y = builder.aiOnnx.relu([x])
        flow = popart.DataFlow(1, {y: popart.AnchorReturnType("ALL")})
        options = popart.SessionOptions()
        setattr(options, option, values)
        model = builder.getModelProto()
        return popart.InferenceSession(model, flow, device({}), userOptions=options)  # type: ignore[arg-type]

    return make


# Where a dictionary goes in, with its group in the table.
DOORS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "Engine": ("engine", engine),
    "environment": ("engine", engine_of_the_environment),
    "mat_mul": ("matmul", product),
    "convolution": ("convolution", convolution),
    "createIpuModelDevice": ("device", device),
    **{option: (group, session(option)) for group, option in SESSION_OPTIONS.items()},
}


@pytest.mark.parametrize("door", DOORS)
def test_unknown_options_and_values_out_of_range_are_refused(door: str) -> None:
    group, use = DOORS[door]
    misspelt, near, (name, value), _ = EXAMPLES[group]
    with pytest.raises(IpuError, match=rf"no {group} option is called '{misspelt}'\n[\s\S]*try: '{near}'"):
        use({misspelt: "true"})
    with pytest.raises(IpuError, match=rf"{group} option {name} must be .*\n[\s\S]*got: {value!r}"):
        use({name: value})
    with pytest.raises(IpuError, match=rf"no {group} option is called 'xyz'"):
        use({"xyz": "1"})


@pytest.mark.parametrize("door", DOORS)
def test_options_without_effect_are_named_in_one_warning(door: str, caplog: pytest.LogCaptureFixture) -> None:
    group, use = DOORS[door]
    name, value = EXAMPLES[group][3]
    with caplog.at_level(logging.WARNING):
        use({name: value})
    lines = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert len(lines) == 1
    assert name in lines[0]


@pytest.mark.parametrize("value", ["yes", 1, 0, None, 1.0, [True], ""])
def test_flags_are_true_or_false(value: Any) -> None:
    with pytest.raises(IpuError, match="must be true or false"):
        read_options("engine", {"debug.instrument": value}, ())


@pytest.mark.parametrize("value", [-1, 1.5, True, "x", None, float("nan"), "1.5"])
def test_counts_are_whole_numbers(value: Any) -> None:
    with pytest.raises(IpuError, match="must be a count"):
        read_options("engine", {"opt.maxCompilationThreads": value}, ())


def test_values_of_python_and_of_text_are_equal() -> None:
    texts = {"debug.instrument": "True", "streams.prefetchDepth": "3"}
    values = {"debug.instrument": True, "streams.prefetchDepth": np.int64(3)}
    assert read_options("engine", texts, texts) == read_options("engine", values, texts) == (values, [])


def test_names_of_options_are_text() -> None:
    assert all(isinstance(name, str) for table in GROUPS.values() for name in table)
