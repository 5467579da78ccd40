"""The flat index in mixed radix: sub-dimensions of a tile mapping, each with the dimension of a view that indexes it.

Input: an affine view of a variable and the variable's mapping. Output: a `SubDimAccess` for each sub-dimension. The
flat index has one sub-dimension for each dimension of the mapping, unsplit dimensions joined to the one before; one
that several dimensions of the view index is split further. Python integers and boundaries only; no elements.
Limits: None where a dimension of the view indexes several sub-dimensions, or a boundary of the mapping is inside a
split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor import Affine, Blocked, TileMapping


@dataclass(frozen=True, eq=False, slots=True)
class SubDim:
    """Sub-dimension of the flat index.

    Args:
        size: number of its values.
        stride: flat elements between two values.
        cuts: boundaries of the mapping along it, int64[blocks + 1].
    """

    size: int
    stride: int
    cuts: np.ndarray

    @property
    def blocks(self) -> int:
        return len(self.cuts) - 1


@dataclass(frozen=True, eq=False, slots=True)
class SubDimAccess:
    """Sub-dimension and the dimension that indexes it: value = `low` + `step` · index, backwards where `reverse`.

    Args:
        subdim: the sub-dimension.
        axis: the dimension of the view; −1 for none.
        count: number of indices.
        low: lowest value.
        step: distance of values, at least 1.
        reverse: whether the dimension counts down.
    """

    subdim: SubDim
    axis: int = -1
    count: int = 1
    low: int = 0
    step: int = 1
    reverse: bool = False

    @property
    def edges(self) -> np.ndarray:
        """Boundaries of the mapping in rising indices, int64[blocks + 1]."""
        return np.clip(-((self.low - self.subdim.cuts) // self.step), 0, self.count)


@remembered
def _mapping_subdims(mapping: TileMapping) -> tuple[SubDim, ...]:
    """Return the dimensions of a mapping, outermost first, unsplit ones joined to the one before."""
    if not isinstance(mapping, Blocked):
        return (SubDim(mapping.size, 1, np.append(mapping.starts, mapping.size)),)
    subdims: list[SubDim] = []
    stride = prod(mapping.shape)
    for size, cuts in zip(mapping.shape, mapping.cuts, strict=True):
        stride //= size
        if subdims and len(cuts) == 2:
            last = subdims.pop()
            subdims.append(SubDim(last.size * size, stride, last.cuts * size))
        elif size > 1:
            subdims.append(SubDim(size, stride, cuts))
    return tuple(subdims) or (SubDim(1, 1, np.array([0, 1], np.int64)),)


@remembered
def block_of_tile(mapping: TileMapping, num_tiles: int) -> np.ndarray | None:
    """Return the block of a mapping on each tile, −1 for none, int64[num_tiles]; None where a tile has several."""
    tiles = mapping.tiles
    blocks = np.full(num_tiles, -1, np.int64)
    blocks[tiles] = np.arange(len(tiles))
    return blocks if np.array_equal(blocks[tiles], np.arange(len(tiles))) else None


def _split_dimension(subdim: SubDim, outer: int, inner: int, candidates: Iterable[int]) -> tuple[SubDim, SubDim] | None:
    """Split a sub-dimension between strides `outer` and `inner`, at a candidate where no boundary is inside."""
    for stride in candidates:
        if not (inner < stride <= outer) or stride % subdim.stride or outer % stride:
            continue
        size = stride // subdim.stride
        # A boundary inside the inner part would be a different cut for each outer value.
        if subdim.size % size == 0 and not np.any(subdim.cuts % size):
            unsplit = np.array([0, size], np.int64)
            return SubDim(subdim.size // size, stride, subdim.cuts // size), SubDim(size, subdim.stride, unsplit)
    return None


def _split_all(subdim: SubDim, strides: Sequence[int], candidates: Sequence[int]) -> list[SubDim] | None:
    """Split a sub-dimension so that each of some strides, in falling order, has a part to itself."""
    parts: list[SubDim] = []
    for outer, inner in pairwise(strides):
        halves = _split_dimension(subdim, outer, inner, [*candidates, outer])
        if halves is None:
            return None
        parts.append(halves[0])
        subdim = halves[1]
    return [*parts, subdim]


def match_subdims(node: Affine, mapping: TileMapping) -> tuple[SubDimAccess, ...] | None:
    """Match each sub-dimension of a mapping with at most one dimension of a view; None where that fails."""
    # The view has elements. The result is outermost first, then one of size 1 for each dimension that moves none.
    if any(len(group) > 1 for group in node.dims):
        return None
    moving = {axis: group[0] for axis, group in enumerate(node.dims) if group and group[0][1]}
    shape = node.variable.shape
    rows = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    subdims: list[SubDim] = []
    for subdim in _mapping_subdims(mapping):
        reach = subdim.stride * subdim.size
        strides = sorted((abs(s) for _, s in moving.values() if subdim.stride <= abs(s) < reach), reverse=True)
        parts = _split_all(subdim, strides, rows)
        if parts is None:
            return None
        subdims += parts
    # Dimensions of negative stride reach their lowest element at their last index.
    low = node.offset + sum(s * (n - 1) for n, s in moving.values() if s < 0)
    accesses = [_match_subdim(subdim, low, moving) for subdim in subdims]
    matched = [p for p in accesses if p is not None]
    # The outermost sub-dimension has no row that a strided index could run into.
    if (
        len(matched) < len(accesses)
        or sum(p.axis >= 0 for p in matched) < len(moving)
        or any(map(_touches_next_row, matched[1:]))
    ):
        return None
    point = SubDim(1, 1, np.array([0, 1], np.int64))
    return (*matched, *(SubDimAccess(point, axis) for axis in range(len(node.dims)) if axis not in moving))


def _match_subdim(subdim: SubDim, low: int, moving: dict[int, tuple[int, int]]) -> SubDimAccess | None:
    """Match a sub-dimension with the dimension that moves it, of those by axis; None where its steps do not fit."""
    first = low // subdim.stride % subdim.size
    for axis, (count, stride) in moving.items():
        if subdim.stride <= abs(stride) < subdim.stride * subdim.size:
            step, remainder = divmod(abs(stride), subdim.stride)
            if remainder or first + step * (count - 1) >= subdim.size:
                return None
            return SubDimAccess(subdim, axis, count, first, step, stride < 0)
    return SubDimAccess(subdim, low=first)


def _touches_next_row(access: SubDimAccess) -> bool:
    """Check whether a strided index has the first and the last value of some block of the mapping.

    Then the end of a row and the start of the next are neighbours on their tile: one fragment, where counts have two.
    """
    if access.step == 1:
        return False
    cuts = access.subdim.cuts
    edges = access.edges
    first = access.low + access.step * edges[:-1]
    last = access.low + access.step * (edges[1:] - 1)
    return bool(np.any((np.diff(edges) > 1) & (first == cuts[:-1]) & (last == cuts[1:] - 1)))


def view_blocks(node: Affine, mapping: TileMapping) -> tuple[tuple[np.ndarray, ...], np.ndarray] | None:
    """Return the mapping of a view as a grid of blocks: cuts by dimension, tile by block; None where it is not one."""
    # The view repeats no element. Cuts are int64[blocks + 1], tiles int32[blocks of each dimension].
    accesses = match_subdims(node, mapping)
    if accesses is None:
        return None
    tile = mapping.tiles.reshape([p.subdim.blocks for p in accesses])
    cuts: dict[int, np.ndarray] = {}
    for number, p in enumerate(accesses):
        filled = np.flatnonzero(np.diff(p.edges))  # blocks of the mapping outside the view have no index
        edges = np.append(p.edges[filled], p.count)
        tile = tile.take(filled, axis=number)
        if p.reverse:
            tile = np.flip(tile, number)
            edges = p.count - edges[::-1]
        cuts[p.axis] = edges
    order = [number for number, p in enumerate(accesses) if p.axis >= 0]
    order.sort(key=lambda number: accesses[number].axis)
    constant = [number for number, p in enumerate(accesses) if p.axis < 0]
    tile = tile.transpose(order + constant).reshape([tile.shape[number] for number in order])
    return tuple(cuts[axis] for axis in range(len(node.dims))), tile
