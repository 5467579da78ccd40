"""Slow paths: slower forms of code that vertices take for some shapes, and rows by which operands are repeated.

A codelet names its slow paths from the shapes of its blocks and from the `Repetition` of each field. A vector
instruction handles whole vectors from an aligned address: rows whose length is no multiple of a vector begin at other
addresses, so that code for them is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class SlowReason:
    """What is slow, and why; as text "C++ because the row length 197 is no multiple of 4".

    Args:
        what: form of code, or of copies.
        row: elements of a row.
        vector: elements of a vector.
    """

    what: str
    row: int
    vector: int

    def __str__(self) -> str:
        return f"{self.what} because the row length {self.row} is no multiple of {self.vector}"


@dataclass(frozen=True, slots=True, eq=False)
class SlowPath:
    """A slower form of code.

    Args:
        reason: what is slow, and why.
        cycles: tile cycles of a vertex beyond `Codelet.cycles`, int64, broadcastable to the grid of vertices.
    """

    reason: SlowReason
    cycles: np.ndarray


@dataclass(frozen=True, slots=True)
class Repetition:
    """How an operand is repeated along the innermost axes of a vertex group.

    Args:
        repeats: "elements" where each element stands for a row, as one mean a row; "rows" where a row is repeated, as
            one bias a column.
        row: elements of a row.
        axes: axes of the group that a row of repeated elements spans; empty where the view repeats them.
    """

    repeats: Literal["elements", "rows"]
    row: int
    axes: tuple[int, ...] = ()
