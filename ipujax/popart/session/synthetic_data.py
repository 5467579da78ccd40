"""Inputs that a session makes itself, in place of data from the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ipujax.popart.enumerations import SyntheticDataMode
from ipujax.popart.flow import StepShape
from ipujax.popart.tensor_info import TensorInfo


def synthetic_rows(
    inputs: Mapping[str, TensorInfo], step: StepShape, mode: SyntheticDataMode
) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of a step; whole numbers are zeros.

    Args:
        inputs: element types and shapes of a micro-batch.
        step: micro-batches of the step.
        mode: zeros, or normal or uniform numbers.
    """
    rng = np.random.default_rng(0)
    rows: dict[str, np.ndarray[Any, Any]] = {}
    for name, info in inputs.items():
        shape = (*step.dims, *info.dims)
        if mode == SyntheticDataMode.Zeros or not np.issubdtype(info.dtype, np.floating):
            rows[name] = np.zeros(shape, info.dtype)
        else:
            is_normal = mode == SyntheticDataMode.RandomNormal
            rows[name] = (rng.standard_normal(shape) if is_normal else rng.random(shape)).astype(info.dtype)
    return rows
