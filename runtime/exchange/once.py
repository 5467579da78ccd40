"""The exchange count of operands that no two tiles share, element by element in the order of memory.

A matrix that is read transposed and spread linearly is millions of runs of one element, which `exchange.count` would
sort. Where each element is needed by one tile only, two arrays say all: which tile holds it, and which needs it.

Input: a vertex group on different tiles, an access that sees nothing twice, and the mapping of its variable. Output:
`Traffic`, or None where this way does not apply, or long runs make the general one faster. A copy is such a read.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ipujax.runtime.exchange.count import Traffic, copied, sums
from ipujax.runtime.exchange.homes import in_tile_order, table
from ipujax.runtime.graph import Access, VertexGroup, element
from ipujax.runtime.tensor import Affine, TileMapping, surely_disjoint

_MOST_ELEMENTS = 1 << 26  # of a variable, assumed: 2 CPU s and 2 GB; a sample of runs serves for more
_SHORT_RUN = 16  # elements; beyond, sorting runs was faster (measured: 4 million elements, 1,472 tiles)


def reads_once(group: VertexGroup, access: Access) -> bool:
    """Whether it is plain that no two vertices read one element: each dimension follows an axis of its own."""
    axes = [dim.terms[0].axis for dim in access.dims if dim.terms]
    if len(set(axes)) < len(access.dims) or access.dims != tuple(map(element, axes)):
        return False
    cut = {number for number, axis in enumerate(group.axes) if axis.blocks > 1}
    return cut <= set(axes) and surely_disjoint([access.tensor.node])


def count_once(group: VertexGroup, access: Access, mapping: TileMapping, num_tiles: int) -> Traffic | None:
    """Traffic what vertices read of elements that each of them has to itself.

    Args:
        group: the vertices.
        access: one for which `reads_once` is true.
        mapping: of its variable.
        num_tiles: tiles of the target.
    """
    node, tile = access.tensor.node, group.tile
    if not isinstance(node, Affine) or node.variable.size > _MOST_ELEMENTS:
        return None
    if np.unique(tile[tile >= 0]).size < np.count_nonzero(tile >= 0):
        return None
    axes = [dim.terms[0].axis for dim in access.dims]
    if any(group.axes[axis].extent != size for axis, size in zip(axes, access.tensor.shape, strict=True)):
        return None
    if _run(node, group, axes) > _SHORT_RUN:
        return None
    need, home = _needs(node, group, axes, num_tiles), _holders(mapping, num_tiles)
    start = np.flatnonzero(np.append(True, (need[1:] != need[:-1]) | (home[1:] != home[:-1])))
    length = np.diff(start, append=len(need))
    need, home = need[start], home[start]
    wanted, here = need >= 0, (need >= 0) & (need == home)
    first = wanted.copy()
    first[_goes_on(need, start, mapping)] = False
    local, local_fragments = sums(home[here], length[here], num_tiles), _by_tile(home[first & here], num_tiles)
    received = sums(need[wanted], length[wanted], num_tiles) - local
    sent = sums(home[wanted], length[wanted], num_tiles) - local
    fragments = _by_tile(need[first], num_tiles) - local_fragments
    copies = copied(local, local_fragments, fragments + local_fragments)
    return Traffic(received, sent, fragments, local, local_fragments, np.zeros(num_tiles, np.int64), *copies)


def _run(node: Affine, group: VertexGroup, axes: list[int]) -> int:
    """Elements of the runs that a view makes in the largest block, if the block is cut where the view's rows are."""
    dims = []
    for axis, subdims in zip(axes, node.dims, strict=True):
        left = int(np.diff(group.axes[axis].cuts).max(initial=0))
        for size, stride in reversed(subdims):
            dims.append((abs(stride), min(size, left)))
            left = -(-left // size)
    run = 1
    for stride, count in sorted(dims):
        if stride != run and count > 1:
            break
        run *= count
    return run


def _number(num_tiles: int) -> type[np.signedinteger]:
    return np.int16 if num_tiles <= np.iinfo(np.int16).max else np.int32


def _needs(node: Affine, group: VertexGroup, axes: list[int], num_tiles: int) -> np.ndarray:
    """The tile that needs each element of the variable, −1 for none, [size]."""
    rest = [number for number in range(len(group.axes)) if number not in axes]
    wanted = group.tile.transpose((*axes, *rest)).reshape([group.axes[axis].blocks for axis in axes])
    wanted = wanted.astype(_number(num_tiles))
    for dim, axis in enumerate(axes):
        wanted = np.repeat(wanted, np.diff(group.axes[axis].cuts), dim)
    need = np.full(node.variable.size, -1, wanted.dtype)
    sizes, strides = [size for size, _ in node.subdims], [stride * need.itemsize for _, stride in node.subdims]
    as_strided(need[node.offset :], sizes, strides)[...] = wanted.reshape(sizes)
    return need


def _holders(mapping: TileMapping, num_tiles: int) -> np.ndarray:
    """The tile that holds each element, [size]."""
    _, lengths, tiles = mapping.runs()
    return np.repeat(tiles.astype(_number(num_tiles)), lengths)


def _goes_on(need: np.ndarray, start: np.ndarray, mapping: TileMapping) -> np.ndarray:
    """The parts that follow another one in the memory of their tile, though not in the variable, for who needs both.

    A part is what one tile holds and one tile needs. Such a part starts a run of the mapping, and the tile that needs
    it also needs the end of the run before it on the same tile, and nothing in between.
    """
    where = table((mapping,))
    order = in_tile_order(where.tile)
    same = where.tile[order[1:]] == where.tile[order[:-1]]
    part = np.searchsorted(start, where.start, side="right") - 1  # at the start of each run of the mapping
    last = np.append(part[1:] - (start[part[1:]] == where.start[1:]), len(start) - 1)  # and at its end
    before, after = last[order[:-1]][same], part[order[1:]][same]
    both = (need[before] == need[after]) & (need[after] >= 0) & (after > before)
    before, after = before[both], after[both]
    if not len(after):
        return after
    position = np.empty(len(need), np.int64)
    position[np.argsort(need, kind="stable")] = np.arange(len(need))
    return after[position[after] == position[before] + 1]


def _by_tile(tiles: np.ndarray, num_tiles: int) -> np.ndarray:
    return np.bincount(tiles, minlength=num_tiles)
