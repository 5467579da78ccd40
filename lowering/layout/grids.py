"""Grids of blocks worth trying: numbers of cuts of each dimension of an index space.

The numbers of blocks do not depend on the number of tiles, which only bounds their product. So a grid for few
tiles stays a candidate for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import ragged_rows
from ipujax.runtime.tensor import Blocked, blocked_mapping, even_cuts, frozen

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


# Upper bound of candidate numbers of blocks of a dimension, by the number of dimensions that can be cut: their product
# is the number of grids, 512 to 100,000.
_CANDIDATES = {1: 512, 2: 96, 3: 32, 4: 16, 5: 10}
_FEWEST_CANDIDATES = 6


@dataclass(frozen=True, eq=False, slots=True)
class Grids:
    """Candidate grids of an index space; arrays have one column a candidate."""

    shape: tuple[int, ...]  # extents of the index space
    blocks: np.ndarray  # blocks along each dimension, int64[dimensions, candidates]
    lengths: np.ndarray  # length of the longest block along each dimension, int64[dimensions, candidates]

    def of(self, numbers: np.ndarray) -> Grids:
        """The candidates with these numbers."""
        return Grids(self.shape, self.blocks[:, numbers], self.lengths[:, numbers])

    def placement(self, number: int) -> Blocked:
        """Blocks of one candidate, on tiles from 0 on in row-major order."""
        counts = [int(n) for n in self.blocks[:, number]]
        cuts = tuple(even_cuts(extent, n) for extent, n in zip(self.shape, counts, strict=True))
        counts = [len(cut) - 1 for cut in cuts]
        return blocked_mapping(cuts, np.arange(prod(counts), dtype=np.int32).reshape(counts))


@remembered
def even_grids(shape: tuple[int, ...], order: tuple[int, ...], most_blocks: int) -> Grids:
    """Grids of even blocks worth trying, with cuts along dimensions `order` and at most `most_blocks` blocks.

    Their number is bounded, by fewer numbers of blocks a dimension the more dimensions can be cut.
    """
    cuttable = [d for d in order if shape[d] > 1]
    limit = _CANDIDATES.get(max(1, len(cuttable)), _FEWEST_CANDIDATES)
    options = [np.ones(1, np.int64)] * len(shape)
    budget = limit ** len(cuttable)  # grids; long dimensions get the share that short ones cannot use
    for number, d in enumerate(sorted(cuttable, key=lambda d: shape[d])):
        dims_left = len(cuttable) - number
        options[d] = split_candidates(shape[d], 1, int(budget ** (1 / dims_left) + 1e-9))  # 1e-9: the root is rounded
        budget //= len(options[d])
    blocks = grids(options, most_blocks)  # int64[dimensions, grids]
    return Grids(shape, blocks, -(-np.array(shape, np.int64)[:, None] // blocks))


@remembered
def split_candidates(extent: int, grain: int, limit: int) -> np.ndarray:
    """Numbers of blocks worth trying for one dimension: those that change the longest block, evenly thinned.

    Args:
        extent: elements of the dimension, at least 1.
        grain: cuts are multiples of it.
        limit: upper bound of the candidates, for any number of tiles.

    Returns:
        Rising numbers of blocks from 1, int64[≤ limit].
    """
    grains = -(-extent // grain)
    # The longest block is short, or there are few blocks: one of the two is at most the root of the extent.
    root = isqrt(grains)
    blocks = np.union1d(-(-grains // np.arange(1, root + 1)), np.arange(1, -(-grains // root) + 1))
    if len(blocks) <= limit:
        return blocks
    geometric = np.geomspace(1, grains, limit)  # the same ratio between neighbours
    return np.unique(blocks[np.searchsorted(blocks, geometric)])  # the last of both is `grains`, exactly


def grids(values: Sequence[np.ndarray], max_product: int) -> np.ndarray:
    """Combinations of a value for each dimension with a bounded product, int64[dimensions, combinations].

    `values` has the values of each dimension, positive and rising.
    """
    total = np.ones(1, np.int64)  # product of each combination so far
    chosen = np.zeros((0, 1), np.int64)
    for options in values:
        # Values that fit are the first ones: counting them is faster than a table of all products.
        # For each new combination: the number of the old one that it extends, and that of the value.
        rows, columns = ragged_rows(np.searchsorted(options, max_product // total, side="right"))
        option = options[columns]
        total = total[rows] * option
        chosen = np.concatenate([chosen[:, rows], option[None]])
    return chosen


class FinerCuts(NamedTuple):
    """Cuts of a dimension whose blocks are cut into parts."""

    cuts: np.ndarray  # int64[parts + 1]
    block: np.ndarray  # block that each part is of, int64[parts]
    number: np.ndarray  # of each part within its block, int64[parts]


def cut_again(cuts: np.ndarray, parts: int) -> FinerCuts:
    """Cuts every block of a dimension again, as evenly as possible.

    Args:
        cuts: cuts of the dimension, int64[blocks + 1].
        parts: upper bound of the parts of a block; a block of fewer elements has a part for each.
    """
    starts = cuts[:-1, None]
    lengths = np.diff(cuts)[:, None]
    bounds = np.unique(np.append((starts + np.arange(parts) * lengths // parts).ravel(), cuts[-1]))
    block = np.searchsorted(cuts, bounds[:-1], side="right") - 1
    number = np.arange(len(block)) - np.searchsorted(block, block)  # distance from the first part of its block
    return FinerCuts(frozen(bounds, np.int64), block, number)
