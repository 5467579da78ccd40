"""How a dimension of a field follows the index space of an operation.

Input: boundaries or lengths of blocks of the index space. Output: those of what they read of the field, and back.
Limits: what a block reads is taken whole from its first to its last element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.layout.grids import Grids


@dataclass(frozen=True, slots=True)
class Span:
    """How one dimension of a field follows the index space: point i reads from (stride · i + offset) / divisor on.

    Args:
        axis: dimension of the index space, None for a dimension that each block has whole.
        extent: elements of the field's dimension.
        stride: distance of what two neighbouring points read.
        reach: elements a point reads, in units of the stride.
        offset: where the first point begins.
        divisor: units to an element of the field.
    """

    axis: int | None
    extent: int
    stride: int = 1
    reach: int = 1
    offset: int = 0
    divisor: int = 1

    @property
    def has_halo(self) -> bool:
        """Whether neighbouring blocks read the same elements."""
        return self.axis is not None and self.reach > self.stride

    def leaves_some(self, grids: Grids) -> np.ndarray:
        """Whether a block does not read all of its part of the field, when that is cut as the index space is."""
        if self.axis is None:
            return np.zeros(grids.blocks.shape[1:], bool)
        last = self.stride * (grids.shape[self.axis] - 1) + self.reach - 1 + self.offset
        ends = self.offset > 0 or last // self.divisor < self.extent - 1
        return ends | ((self.reach < self.stride) & (grids.blocks[self.axis] > 1))

    def lengths(self, block: np.ndarray) -> np.ndarray:
        """Most elements that blocks of some lengths of the index space read."""
        if self.axis is None:
            return np.asarray(self.extent)
        return np.minimum(self.extent, (self.stride * (block[self.axis] - 1) + self.reach - 1) // self.divisor + 1)

    def cuts(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boundaries of the field's dimension where blocks of the index space begin to read, and the block of each."""
        return _clipped(-(-(self.stride * cuts + self.offset) // self.divisor), self.extent)

    def index_cuts(self, cuts: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Boundaries of the index space where its points begin to read in another block, and the block of each."""
        return _clipped(-(-(cuts * self.divisor - self.offset) // self.stride), extent)


def _clipped(bounds: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    inner = np.clip(bounds, 0, extent)
    inner[0], inner[-1] = 0, extent
    kept = np.flatnonzero(np.diff(inner) > 0)
    return np.append(inner[kept], extent) if kept.size else np.zeros(1, np.int64), kept


def spans(shape: Sequence[int], dims: Sequence[int | None]) -> tuple[Span, ...]:
    """The spans of a tensor whose dimensions run along dimensions of the index space, None for one that is whole."""
    return tuple(Span(dim, n) for n, dim in zip(shape, dims, strict=True))
