"""Option dictionaries of Poplar and PopLibs: unknown names, values out of range, names without effect."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from ipujax import IpuError, poplar, poplin
from ipujax.arguments.poplar_options import GROUPS, read_options
from ipujax.poplar.program import Sequence
from tests.ipujax.option_checks import Use, check_refusals, check_warning
from tests.ipujax.poplar.helpers import placed, small_graph


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


# Where a dictionary goes in, with its group in the table.
DOORS: dict[str, tuple[str, Use]] = {
    "Engine": ("engine", engine),
    "environment": ("engine", engine_of_the_environment),
    "mat_mul": ("matmul", product),
    "convolution": ("convolution", convolution),
}


@pytest.mark.parametrize("door", DOORS)
def test_unknown_options_and_values_out_of_range_are_refused(door: str) -> None:
    check_refusals(*DOORS[door])


@pytest.mark.parametrize("door", DOORS)
def test_options_without_effect_are_named_in_one_warning(door: str, caplog: pytest.LogCaptureFixture) -> None:
    check_warning(*DOORS[door], caplog)


@pytest.mark.parametrize("value", ["yes", 1, 0, None, 1.0, [True], ""])
def test_flags_are_true_or_false(value: Any) -> None:
    with pytest.raises(IpuError, match="must be true or false"):
        read_options("engine", {"debug.instrument": value}, ())


@pytest.mark.parametrize(
    "value",
    [-1, 1.5, True, "x", None, float("nan"), "1.5", np.float32(2.5), np.True_, Decimal("2.5")],
)
def test_counts_are_whole_numbers(value: Any) -> None:
    with pytest.raises(IpuError, match="must be a count"):
        read_options("engine", {"opt.maxCompilationThreads": value}, ())


def test_values_of_python_and_of_text_are_equal() -> None:
    texts = {"debug.instrument": "True", "streams.prefetchDepth": "3"}
    values = {"debug.instrument": True, "streams.prefetchDepth": np.int64(3)}
    assert read_options("engine", texts, texts) == read_options("engine", values, texts) == (values, [])


def test_names_of_options_are_text() -> None:
    assert all(isinstance(name, str) for table in GROUPS.values() for name in table)
