"""Models can be copied and pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ipujax.onnx
from tests.ipujax.copy_checks import WAYS, check_copy, check_errors, check_refused, classes_not_in
from tests.ipujax.onnx.models import mlp

COPIED: dict[str, Callable[[], Any]] = {
    "onnx.Model": lambda: ipujax.onnx.load(mlp()),
    "onnx.ValueInfo": lambda: ipujax.onnx.ValueInfo("x", np.dtype("f4"), (2,)),
}


# Their state is on a device.
REFUSED: dict[str, Callable[[], Any]] = {
    "onnx.Session": lambda: ipujax.onnx.session(mlp()),
    "onnx.RepeatedCalls": lambda: ipujax.onnx.session(mlp()).repeat(2, lambda inputs, outputs: {}),
}


def test_table_has_all_public_classes() -> None:
    assert not classes_not_in([".onnx"], {**COPIED, **REFUSED})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_copies_name_the_remedy(name: str) -> None:
    check_refused(REFUSED[name]())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_equal(name: str, way: str) -> None:
    check_copy(COPIED[name](), way)


@pytest.mark.parametrize("way", WAYS)
def test_errors_keep_their_facts(way: str) -> None:
    check_errors("ipujax.onnx", way)
