"""Text of tensors for `PrintTensor`: elements in braces, each innermost row on a line of its own.

    v1: {1,1.5,2,2.5}          v3: {
                                {5,4.5},
                                {4,3.5}
                               }

Source: outputs in tutorials 1 and 2 of the Poplar & PopLibs user guide. Numbers have six significant digits, as C++
streams write them (assumed of Poplar, and right for every number the guide shows).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def format_tensor(value: np.ndarray) -> str:
    """Return the text of an array of any shape; a scalar has no braces."""
    if value.ndim == 0:
        return _number(value[()])
    if value.ndim == 1:
        return "{" + ",".join(map(_number, value)) + "}"
    return "{\n" + _rows(value, 1) + "\n}"


def _rows(value: np.ndarray, depth: int) -> str:
    """Return the blocks of an array of two or more dimensions, indented by one blank a level."""
    indent = " " * depth
    if value.ndim == 2:
        return ",\n".join(indent + format_tensor(row) for row in value)
    return ",\n".join(f"{indent}{{\n{_rows(block, depth + 1)}\n{indent}}}" for block in value)


def _number(value: Any) -> str:
    # Kind "V": types that NumPy itself lacks, such as bfloat16.
    return format(float(value), "g") if value.dtype.kind in "fV" else str(int(value))
