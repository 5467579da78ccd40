"""Models can be copied and pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ipujax.onnx
from tests.ipujax.copy_checks import WAYS, check_copy, check_errors, classes_not_in
from tests.ipujax.onnx.models import mlp

COPIED: dict[str, Callable[[], Any]] = {
    "onnx.Model": lambda: ipujax.onnx.load(mlp()),
    "onnx.ValueInfo": lambda: ipujax.onnx.ValueInfo("x", np.dtype("f4"), (2,)),
}


def test_table_has_all_public_classes() -> None:
    assert not classes_not_in([".onnx"], COPIED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_equal(name: str, way: str) -> None:
    check_copy(COPIED[name](), way)


@pytest.mark.parametrize("way", WAYS)
def test_errors_keep_their_facts(way: str) -> None:
    check_errors("ipujax.onnx", way)
