"""Option dictionaries of sessions and devices: unknown names, values out of range, names without effect."""

from __future__ import annotations

from typing import Any

import pytest

import ipujax.popart as popart
from tests.ipujax.option_checks import Use, check_refusals, check_warning

SESSION_OPTIONS = {
    "engine": "engineOptions",
    "convolution": "convolutionOptions",
    "matmul": "matmulOptions",
    "LSTM": "lstmOptions",
    "GCL": "gclOptions",
    "report": "reportOptions",
}


def device(options: dict[str, Any]) -> object:
    return popart.DeviceManager().createIpuModelDevice(options)


def session(option: str) -> Use:
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
DOORS: dict[str, tuple[str, Use]] = {
    "createIpuModelDevice": ("device", device),
    **{option: (group, session(option)) for group, option in SESSION_OPTIONS.items()},
}


@pytest.mark.parametrize("door", DOORS)
def test_unknown_options_and_values_out_of_range_are_refused(door: str) -> None:
    check_refusals(*DOORS[door])


@pytest.mark.parametrize("door", DOORS)
def test_options_without_effect_are_named_in_one_warning(door: str, caplog: pytest.LogCaptureFixture) -> None:
    check_warning(*DOORS[door], caplog)
