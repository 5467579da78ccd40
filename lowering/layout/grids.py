"""Grids of blocks worth trying: how often each dimension of an index space may be cut.

Which numbers of blocks are worth trying does not depend on the number of tiles, which only bounds their product. So
what can be done on few tiles stays a candidate on more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor import Blocked, blocked_mapping, even_cuts, frozen

# Most candidate numbers of blocks of one dimension, by the number of dimensions that can be cut: keeps grids small.
_CANDIDATES = {1: 512, 2: 96, 3: 32, 4: 16, 5: 10}
_FEWEST_CANDIDATES = 6


@dataclass(frozen=True, eq=False, slots=True)
class Grids:
    """Candidate grids of an index space; arrays have one column a candidate.

    Args:
        shape: extents of the index space.
        blocks: blocks along each dimension, int64[dimensions, candidates].
        lengths: length of the longest block along each dimension, int64[dimensions, candidates].
    """

    shape: tuple[int, ...]
    blocks: np.ndarray
    lengths: np.ndarray

    def of(self, numbers: np.ndarray) -> Grids:
        """Some of the candidates."""
        return Grids(self.shape, self.blocks[:, numbers], self.lengths[:, numbers])

    def placement(self, number: int) -> Blocked:
        """The boxes of one candidate, on tiles from 0 on in row-major order."""
        counts = [int(n) for n in self.blocks[:, number]]
        cuts = tuple(even_cuts(extent, n) for extent, n in zip(self.shape, counts, strict=True))
        counts = [len(cut) - 1 for cut in cuts]
        return blocked_mapping(cuts, np.arange(prod(counts), dtype=np.int32).reshape(counts))


@remembered
def even_grids(shape: tuple[int, ...], order: tuple[int, ...], most_blocks: int) -> Grids:
    """All grids of even blocks worth trying.

    Args:
        shape: extents of the index space, each at least 1.
        order: the dimensions that may be cut.
        most_blocks: most blocks of a grid, at least 1.
    """
    cuttable = [d for d in order if shape[d] > 1]
    limit = _CANDIDATES.get(max(1, len(cuttable)), _FEWEST_CANDIDATES)
    options = [np.ones(1, np.int64)] * len(shape)
    left = limit ** len(cuttable)  # grids; what short dimensions leave of it, long ones get
    for number, d in enumerate(sorted(cuttable, key=lambda d: shape[d])):
        options[d] = split_candidates(shape[d], 1, int(left ** (1 / (len(cuttable) - number)) + 1e-9))
        left //= len(options[d])
    blocks = grids(options, most_blocks)
    return Grids(shape, blocks, -(-np.array(shape, np.int64)[:, None] // blocks))


@remembered
def split_candidates(extent: int, grain: int, limit: int) -> np.ndarray:
    """Numbers of blocks worth trying for one dimension: those that change the largest block, evenly thinned.

    Args:
        extent: elements of the dimension, at least 1.
        grain: boundaries are multiples of it.
        limit: most candidates; the same for any number of tiles.

    Returns:
        Rising numbers of blocks from 1, int64[≤ limit].
    """
    whole = -(-extent // grain)
    # The longest block is short, or there are few blocks: one of the two is at most the root of the extent.
    root = isqrt(whole)
    blocks = np.union1d(-(-whole // np.arange(1, root + 1)), np.arange(1, -(-whole // root) + 1))
    if len(blocks) <= limit:
        return blocks
    wanted = np.geomspace(1, whole, limit)
    nearest = np.clip(np.searchsorted(blocks, wanted), 0, len(blocks) - 1)
    return np.unique(blocks[nearest])


def grids(values: Sequence[np.ndarray], most: int) -> np.ndarray:
    """All combinations of one value a dimension whose product is at most `most`, int64[dimensions, combinations]."""
    total, chosen = np.ones(1, np.int64), np.zeros((0, 1), np.int64)
    for options in values:
        products = total[:, None] * options[None, :]
        rows, columns = np.nonzero(products <= most)
        total = products[rows, columns]
        chosen = np.concatenate([chosen[:, rows], options[columns][None]])
    return chosen


def cut_again(cuts: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts every block of a dimension again, as evenly as can be.

    Args:
        cuts: boundaries, int64[blocks + 1].
        parts: most parts of a block.

    Returns:
        The finer boundaries, the block of each part, and its number within that.
    """
    starts, lengths = cuts[:-1, None], np.diff(cuts)[:, None]
    bounds = np.unique(np.append((starts + np.arange(parts) * lengths // parts).ravel(), cuts[-1]))
    block = np.searchsorted(cuts, bounds[:-1], side="right") - 1
    return frozen(bounds, np.int64), block, np.arange(len(block)) - np.searchsorted(block, block)
