"""The exchange count of operands that no two tiles share, element by element in memory order.

A matrix that is read transposed and mapped linearly is millions of runs of one element, which `exchange.count` would
sort. Where each element is needed by one tile only, two arrays suffice: the tile that it is mapped to, and the tile
that needs it.

Input: a vertex group on different tiles, an access that reads nothing twice, and the mapping of its variable. Output:
`Traffic`, or None where this does not apply, or where long runs make the general count faster. A copy is such a read.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ipujax.runtime.exchange.count import Traffic, copied_parts, sum_by_index
from ipujax.runtime.exchange.homes import home_table, in_tile_order
from ipujax.runtime.graph import Access, VertexGroup, element
from ipujax.runtime.tensor import Affine, TileMapping, surely_disjoint

_MAX_ELEMENTS = 1 << 24  # of a variable, assumed: 0.6 CPU s and 0.5 GB; a sample of runs serves for more
_MAX_RUN_ELEMENTS = 16  # beyond, sorting runs was faster (measured: 4 million elements, 1,472 tiles)


def is_disjoint_read(group: VertexGroup, access: Access) -> bool:
    """Check whether surely no two vertices read one element: each dimension follows an axis of its own."""
    axes = [dim.terms[0].axis for dim in access.dims if dim.terms]
    if len(set(axes)) < len(access.dims) or access.dims != tuple(map(element, axes)):
        return False
    cut = {number for number, axis in enumerate(group.axes) if axis.blocks > 1}
    return cut <= set(axes) and surely_disjoint([access.tensor.node])


def count_disjoint_reads(group: VertexGroup, access: Access, mapping: TileMapping, num_tiles: int) -> Traffic | None:
    """Count the exchange of an access of `is_disjoint_read`; None outside the limits of the module."""
    node = access.tensor.node
    tile = group.tile
    if not isinstance(node, Affine) or node.variable.size > _MAX_ELEMENTS:
        return None
    if np.bincount(tile[tile >= 0]).max(initial=0) > 1:  # a tile with two vertices has two operands
        return None
    axes = [dim.terms[0].axis for dim in access.dims]
    if any(group.axes[axis].extent != size for axis, size in zip(axes, access.tensor.shape, strict=True)):
        return None
    if _longest_run(node, group, axes) > _MAX_RUN_ELEMENTS:
        return None
    need = _reading_tiles(node, group, axes, num_tiles)
    home = _home_tiles(mapping, num_tiles)
    # From here on by parts: successive elements of one home tile and one reading tile.
    start = np.flatnonzero(np.append(True, (need[1:] != need[:-1]) | (home[1:] != home[:-1])))
    length = np.diff(start, append=len(need))
    need = need[start]
    home = home[start]
    needed = need >= 0
    is_local = needed & (need == home)
    # The parts of each reader in order: successive positions are neighbours in its operand.
    order = np.argsort(need, kind="stable")
    first = needed.copy()
    first[_continuing_parts(need, start, order, mapping)] = False
    local = sum_by_index(home[is_local], length[is_local], num_tiles)
    local_fragments = _by_tile(home[first & is_local], num_tiles)
    received = sum_by_index(need[needed], length[needed], num_tiles) - local
    sent = sum_by_index(home[needed], length[needed], num_tiles) - local
    # A part is received by itself if the part before it in the operand is mapped to another tile.
    is_received = np.ones(len(order), bool)
    is_received[1:] = (need[order[1:]] != need[order[:-1]]) | (home[order[1:]] != home[order[:-1]])
    is_received &= (needed & ~is_local)[order]
    receives = _by_tile(need[order[is_received]], num_tiles)
    sends = _by_tile(home[first & ~is_local], num_tiles)
    fragments = _by_tile(need[first], num_tiles)
    copies = copied_parts(local, local_fragments, fragments)
    arriving = fragments - local_fragments
    shared = np.zeros(num_tiles, np.int64)
    return Traffic(received, sent, arriving, receives, sends, local, local_fragments, shared, *copies)


def _longest_run(node: Affine, group: VertexGroup, axes: list[int]) -> int:
    """Return the elements of a view's runs in the largest block, if blocks are cut at the view's rows."""
    dims = []
    for axis, subdims in zip(axes, node.dims, strict=True):
        remaining = int(np.diff(group.axes[axis].cuts).max(initial=0))
        for size, stride in reversed(subdims):
            dims.append((abs(stride), min(size, remaining)))
            remaining = -(-remaining // size)
    run = 1
    for stride, count in sorted(dims):
        if stride != run and count > 1:
            break
        run *= count
    return run


def _tile_dtype(num_tiles: int) -> type[np.signedinteger]:
    return np.int16 if num_tiles <= np.iinfo(np.int16).max else np.int32


def _reading_tiles(node: Affine, group: VertexGroup, axes: list[int], num_tiles: int) -> np.ndarray:
    """Return the tile that reads each element of the variable, −1 for none, [size]."""
    reduced = [number for number in range(len(group.axes)) if number not in axes]
    # Axes that move no dimension have one block each (`is_disjoint_read`), so the reshape only drops them.
    reader = group.tile.transpose((*axes, *reduced)).reshape([group.axes[axis].blocks for axis in axes])
    reader = reader.astype(_tile_dtype(num_tiles))  # small integers: these arrays have an entry for each element
    for dim, axis in enumerate(axes):
        reader = np.repeat(reader, np.diff(group.axes[axis].cuts), dim)
    need = np.full(node.variable.size, -1, reader.dtype)
    sizes = [size for size, _ in node.subdims]
    strides = [stride * need.itemsize for _, stride in node.subdims]
    as_strided(need[node.offset :], sizes, strides)[...] = reader.reshape(sizes)
    return need


def _home_tiles(mapping: TileMapping, num_tiles: int) -> np.ndarray:
    """Return the tile that each element is mapped to, [size]."""
    _, lengths, tiles = mapping.runs()
    return np.repeat(tiles.astype(_tile_dtype(num_tiles)), lengths)


def _continuing_parts(
    reader: np.ndarray, start: np.ndarray, reading_order: np.ndarray, mapping: TileMapping
) -> np.ndarray:
    """Return the parts that continue a fragment: they follow another part in memory and in their reader's operand."""
    # A part is mapped to one tile and read by one tile. A continuing part starts a run of the mapping, and the tile
    # that reads it also reads the end of the run before it on the same tile, and nothing in between.
    homes = home_table((mapping,))
    order = in_tile_order(homes.tile)
    same_tile = homes.tile[order[1:]] == homes.tile[order[:-1]]
    part = np.searchsorted(start, homes.start, side="right") - 1  # at the start of each run of the mapping
    last = np.append(part[1:] - (start[part[1:]] == homes.start[1:]), len(start) - 1)  # and at its end
    part_before = last[order[:-1]][same_tile]
    part_after = part[order[1:]][same_tile]
    continues = (reader[part_before] == reader[part_after]) & (reader[part_after] >= 0) & (part_after > part_before)
    part_before = part_before[continues]
    part_after = part_after[continues]
    if not len(part_after):
        return part_after
    position = np.empty(len(reader), np.int64)
    position[reading_order] = np.arange(len(reader))
    return part_after[position[part_after] == position[part_before] + 1]


def _by_tile(tiles: np.ndarray, num_tiles: int) -> np.ndarray:
    return np.bincount(tiles, minlength=num_tiles)
