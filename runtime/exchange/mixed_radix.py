"""The flat index in mixed radix: how the dimensions of an affine view lie on the dimensions of a tile mapping.

Input: an affine view of a variable and the variable's mapping. Output: `Placed` sub-dimensions. The flat index of the
variable has one sub-dimension for each dimension of the mapping, unsplit dimensions joined to the one before; one that
several dimensions of the view move is split further. Python integers and boundaries only; no elements.
Limits: None where a dimension of the view moves several sub-dimensions, or a boundary of the mapping falls inside a
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
    """One sub-dimension of the flat index.

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
class Placed:
    """A sub-dimension and what moves it: value = `low` + `step` · index, the index counted backwards where `reverse`.

    Args:
        subdim: the sub-dimension.
        axis: the dimension of the view that moves it; −1 for none.
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
        """The boundaries of the mapping in rising indices, int64[blocks + 1]."""
        return np.clip(-((self.low - self.subdim.cuts) // self.step), 0, self.count)


@remembered
def _mapping_subdims(mapping: TileMapping) -> tuple[SubDim, ...]:
    """The dimensions of a mapping, outermost first, unsplit ones joined to the one before."""
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
def box_of_tile(mapping: TileMapping, num_tiles: int) -> np.ndarray | None:
    """The box of a mapping that each tile holds, −1 for none, int64[num_tiles]; None where a tile holds several."""
    tiles = mapping.tiles
    boxes = np.full(num_tiles, -1, np.int64)
    boxes[tiles] = np.arange(len(tiles))
    return boxes if np.array_equal(boxes[tiles], np.arange(len(tiles))) else None


def _split(subdim: SubDim, outer: int, inner: int, candidates: Iterable[int]) -> tuple[SubDim, SubDim] | None:
    """Cuts a sub-dimension in two between strides `outer` and `inner`, where the mapping's boundaries allow it."""
    for stride in candidates:
        if not (inner < stride <= outer) or stride % subdim.stride or outer % stride:
            continue
        size = stride // subdim.stride
        if subdim.size % size == 0 and not np.any(subdim.cuts % size):
            whole = np.array([0, size], np.int64)
            return SubDim(subdim.size // size, stride, subdim.cuts // size), SubDim(size, subdim.stride, whole)
    return None


def _split_all(subdim: SubDim, strides: Sequence[int], candidates: Sequence[int]) -> list[SubDim] | None:
    """Cuts a sub-dimension so that each of some strides, in falling order, has a part to itself."""
    out: list[SubDim] = []
    for outer, inner in pairwise(strides):
        both = _split(subdim, outer, inner, [*candidates, outer])
        if both is None:
            return None
        out.append(both[0])
        subdim = both[1]
    return [*out, subdim]


def place(node: Affine, mapping: TileMapping) -> tuple[Placed, ...] | None:
    """The sub-dimensions of a mapping, each moved by at most one dimension of a view; None where they cannot be found.

    Args:
        node: a view that has elements.
        mapping: of its variable.

    Returns:
        The sub-dimensions from the outermost to the innermost, then one of size 1 for each dimension that moves none.
    """
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
    low = node.offset + sum(s * (n - 1) for n, s in moving.values() if s < 0)
    placed = [_place_subdim(subdim, low, moving) for subdim in subdims]
    found = [p for p in placed if p is not None]
    if len(found) < len(placed) or sum(p.axis >= 0 for p in found) < len(moving) or any(map(_wraps, found[1:])):
        return None
    point = SubDim(1, 1, np.array([0, 1], np.int64))
    return (*found, *(Placed(point, axis) for axis in range(len(node.dims)) if axis not in moving))


def _place_subdim(subdim: SubDim, low: int, moving: dict[int, tuple[int, int]]) -> Placed | None:
    first = low // subdim.stride % subdim.size
    for axis, (count, stride) in moving.items():
        if subdim.stride <= abs(stride) < subdim.stride * subdim.size:
            step, rest = divmod(abs(stride), subdim.stride)
            if rest or first + step * (count - 1) >= subdim.size:
                return None
            return Placed(subdim, axis, count, first, step, stride < 0)
    return Placed(subdim, low=first)


def _wraps(placed: Placed) -> bool:
    """Whether a strided index meets the first and the last value of a block, which then touches its next row."""
    if placed.step == 1:
        return False
    cuts, edges = placed.subdim.cuts, placed.edges
    first, last = placed.low + placed.step * edges[:-1], placed.low + placed.step * (edges[1:] - 1)
    return bool(np.any((np.diff(edges) > 1) & (first == cuts[:-1]) & (last == cuts[1:] - 1)))


def view_blocks(node: Affine, mapping: TileMapping) -> tuple[tuple[np.ndarray, ...], np.ndarray] | None:
    """The mapping of a view as a grid of boxes over it; None where it is not one.

    Args:
        node: a view that has elements and repeats none.
        mapping: of its variable.

    Returns:
        Per dimension the boundaries, int64[blocks + 1], and the tile of each box, int32[blocks of each dimension].
    """
    placed = place(node, mapping)
    if placed is None:
        return None
    tile = mapping.tiles.reshape([p.subdim.blocks for p in placed])
    cuts: dict[int, np.ndarray] = {}
    for number, p in enumerate(placed):
        filled = np.flatnonzero(np.diff(p.edges))
        edges = np.append(p.edges[filled], p.count)
        tile = tile.take(filled, axis=number)
        if p.reverse:
            tile, edges = np.flip(tile, number), p.count - edges[::-1]
        cuts[p.axis] = edges
    order = [number for number, p in enumerate(placed) if p.axis >= 0]
    order.sort(key=lambda number: placed[number].axis)
    still = [number for number, p in enumerate(placed) if p.axis < 0]
    tile = tile.transpose(order + still).reshape([tile.shape[number] for number in order])
    return tuple(cuts[axis] for axis in range(len(node.dims))), tile
