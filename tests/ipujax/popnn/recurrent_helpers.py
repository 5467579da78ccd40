"""Values for the tensors of recurrent layers, and comparisons of many results at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def numbers(shape: Any, seed: int) -> np.ndarray:
    """Normally distributed floats, the same whichever tests run."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_all_close(actual: Mapping[str, np.ndarray], expected: Mapping[str, Any], rtol: float, atol: float) -> None:
    """Compares results with expected values, by name."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], np.asarray(value), rtol=rtol, atol=atol, err_msg=name)
