"""Element types of the state of optimisers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.popart.enumerations import DataType
from ipujax.popart.tensor_info import DTYPES


def state_type(kind: DataType, weight_type: np.dtype[Any]) -> np.dtype[Any]:
    """Return the element type of a part of the state.

    Args:
        kind: as a program gives it; UNDEFINED for that of the weight.
        weight_type: element type of the weight.
    """
    return weight_type if kind == DataType.UNDEFINED else DTYPES[DataType(kind).name]
