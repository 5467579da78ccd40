"""Checks of a place that takes an option dictionary: of Poplar, of PopLibs, of a front end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from ipujax import IpuError

Use = Callable[[dict[str, Any]], object]  # passes a dictionary to such a place
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


def check_refusals(group: str, use: Use) -> None:
    """Pass a misspelt option, a value out of range and an unknown option, which are refused."""
    misspelt, near, (name, value), _ = EXAMPLES[group]
    with pytest.raises(IpuError, match=rf"no {group} option is called '{misspelt}'\n[\s\S]*try: '{near}'"):
        use({misspelt: "true"})
    with pytest.raises(IpuError, match=rf"{group} option {name} must be .*\n[\s\S]*got: {value!r}"):
        use({name: value})
    with pytest.raises(IpuError, match=rf"no {group} option is called 'xyz'"):
        use({"xyz": "1"})


def check_warning(group: str, use: Use, caplog: pytest.LogCaptureFixture) -> None:
    """Pass an option without effect, which one warning names."""
    name, value = EXAMPLES[group][3]
    with caplog.at_level(logging.WARNING):
        use({name: value})
    lines = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert len(lines) == 1
    assert name in lines[0]
