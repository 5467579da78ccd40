"""Windows of whole IPUs, so that costs are stored for the tiles that take part and not for every tile of a pod.

Input: ranges of tiles, and arrays over all tiles of a system. Output: arrays over the tiles of a `Window`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import TileMapping

TileRange = tuple[int, int]  # first tile, one past the last; (0, 0) for none


def tile_range(tiles: np.ndarray) -> TileRange:
    """Return the range of some tile numbers, those below 0 ignored."""
    return (max(0, int(tiles.min())), int(tiles.max()) + 1) if tiles.size and tiles.max() >= 0 else (0, 0)


@remembered
def mapping_range(mapping: TileMapping) -> TileRange:
    """Return the range of the tiles of a mapping."""
    return tile_range(mapping.tiles)


def compact(values: np.ndarray) -> np.ndarray:
    """Make values read-only, and one number in memory if all are equal."""
    # The ends differ in most arrays of different values, which saves the comparison of all.
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        return np.broadcast_to(values[0], values.shape)
    values.setflags(write=False)
    return values


_MAX_COUNT = 2**53  # of bytes, fragments or cycles of a tile: sums of them are of 64 bits


def is_count_by_tile(values: np.ndarray, tiles: int) -> bool:
    """Return whether values are numbers of bytes, fragments, cycles or vertices of so many tiles, int64[tiles]."""
    if values.shape != (tiles,) or values.dtype != np.int64:
        return False
    distinct = values[:1] if values.strides == (0,) else values
    return bool(distinct.min(initial=0) >= 0 and distinct.max(initial=0) <= _MAX_COUNT)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tiles of some neighbouring IPUs.

    Args:
        first_ipu: number of the first IPU.
        num_ipus: number of IPUs, at least 1.
        tiles_per_ipu: tiles of one IPU.
    """

    first_ipu: int
    num_ipus: int
    tiles_per_ipu: int
    zeros: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "zeros", np.broadcast_to(np.int64(0), (self.tiles,)))

    @staticmethod
    def of(ranges: Iterable[TileRange], target: Target) -> Window:
        """Return the window of all IPUs that have a tile of some ranges."""
        filled = [(low, high) for low, high in ranges if high > low]
        first = min((low for low, _ in filled), default=0) // target.tiles_per_ipu
        last = (max((high for _, high in filled), default=1) - 1) // target.tiles_per_ipu
        return Window(first, last - first + 1, target.tiles_per_ipu)

    @property
    def first_tile(self) -> int:
        """Number of its first tile in the system."""
        return self.first_ipu * self.tiles_per_ipu

    @property
    def tiles(self) -> int:
        """Number of its tiles."""
        return self.num_ipus * self.tiles_per_ipu

    @property
    def tile_numbers(self) -> range:
        """Numbers of its tiles in the system."""
        return range(self.first_tile, self.first_tile + self.tiles)

    def total(self, arrays: Iterable[np.ndarray]) -> np.ndarray:
        """Sum arrays over its tiles, int64[tiles]."""
        total = self.zeros
        for array in arrays:
            if array.any():
                total = total + array
        return total
