"""Counts over a grid of candidates: a number, or an int64 array of one for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Count = Any  # an int, or an int64 array over any grid: the arithmetic is the same


def ceil_div(number: Count, divisor: Count) -> Count:
    """Quotients rounded up."""
    return -(-number // divisor)


def total_elements(lengths: Sequence[Count]) -> Count:
    """Elements of a block from the lengths of its dimensions."""
    total: Count = np.int64(1)
    for length in lengths:
        total = total * length
    return total
