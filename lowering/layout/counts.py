"""Integer arithmetic on one number or on an int64 array with an entry for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Count = Any  # an int, or an int64 array over any grid: the arithmetic is the same


def ceil_div(number: Count, divisor: Count) -> Count:
    """Quotient rounded up."""
    return -(-number // divisor)


def total_elements(lengths: Sequence[Count]) -> Count:
    """Number of elements of a block with these lengths."""
    total: Count = np.int64(1)
    for length in lengths:
        total = total * length
    return total
