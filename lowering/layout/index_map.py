"""Affine maps from the index space of an operation to the dimensions of a field.

Input: cuts or lengths of blocks of the index space. Output: those of the elements they read of the field, and back.
Limits: a block reads everything from its first to its last element, also with a stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.layout.grids import Grids


@dataclass(frozen=True, slots=True)
class Span:
    """Map from the index space to one dimension of a field: point i reads from (stride · i + offset) / divisor on."""

    axis: int | None  # dimension of the index space, None for a dimension that every block reads completely
    extent: int  # elements of the field's dimension
    stride: int = 1  # distance between the first elements of two neighbouring points, in units of 1 / divisor
    reach: int = 1  # elements a point reads, in units of the stride
    offset: int = 0  # position of the first point
    divisor: int = 1  # units to an element of the field

    @property
    def has_halo(self) -> bool:
        """True if neighbouring blocks read the same elements."""
        return self.axis is not None and self.reach > self.stride

    def leaves_some(self, grids: Grids) -> np.ndarray:
        """True if a block reads less than its part of the field, cut as the index space is: bool[candidates]."""
        if self.axis is None:
            return np.zeros(grids.blocks.shape[1:], bool)
        last = self.stride * (grids.shape[self.axis] - 1) + self.reach - 1 + self.offset
        # Elements before the first or after the last point; between points where the stride skips some.
        misses_ends = self.offset > 0 or last // self.divisor < self.extent - 1
        return misses_ends | ((self.reach < self.stride) & (grids.blocks[self.axis] > 1))

    def lengths(self, block: np.ndarray) -> np.ndarray:
        """Upper bound of the elements that blocks of some lengths of the index space read."""
        if self.axis is None:
            return np.asarray(self.extent)
        return np.minimum(self.extent, (self.stride * (block[self.axis] - 1) + self.reach - 1) // self.divisor + 1)

    def cuts(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts of the field's dimension where blocks of the index space begin to read, and the block of each part."""
        return _clipped(-(-(self.stride * cuts + self.offset) // self.divisor), self.extent)

    def index_cuts(self, cuts: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Cuts of the index space where its points begin to read in another block, and the block of each part."""
        return _clipped(-(-(cuts * self.divisor - self.offset) // self.stride), extent)


def _clipped(bounds: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    inner = np.clip(bounds, 0, extent)
    inner[0] = 0
    inner[-1] = extent
    # Blocks that read nothing of the dimension disappear.
    blocks = np.flatnonzero(np.diff(inner) > 0)
    return np.append(inner[blocks], extent) if blocks.size else np.zeros(1, np.int64), blocks


def spans(shape: Sequence[int], dims: Sequence[int | None]) -> tuple[Span, ...]:
    """Spans of a tensor whose dimensions run along dimensions of the index space; None for one that is not cut."""
    return tuple(Span(dim, n) for n, dim in zip(shape, dims, strict=True))
