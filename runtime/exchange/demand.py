"""Demand of tiles: elements that they need of the variables behind a field of a vertex group, or of a copy's source.

Input: a vertex group and an access, or two tensors; the graph with the mappings. Output: `Demand`, flat runs by block,
for the general count. A copy is a read of its source by vertices on the tiles of its destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

import numpy as np

from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange.count import MAX_RUNS, Demand, demand_of_blocks
from ipujax.runtime.exchange.homes import find_homes
from ipujax.runtime.exchange.mixed_radix import view_blocks
from ipujax.runtime.exchange.runs import Runs, block_runs, flat_bases, flat_size, interval_runs
from ipujax.runtime.exchange.sample import list_or_sample
from ipujax.runtime.graph import Access, Axis, Codelet, Graph, VertexGroup, element, extents, tile_gap
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Concat,
    Flat,
    Node,
    Reshaped,
    Tensor,
    TileMapping,
    Variable,
    canonical,
    elements,
    owners,
)

_MAX_ELEMENTS = 1 << 25  # of a copy that are listed where it is no grid, assumed: 20 ns and 30 bytes each


def _no_cycles(shapes: object, target: Target) -> np.ndarray:
    return np.zeros(1, np.int64)


_NONE = Codelet("grid", (), lambda: (), _no_cycles)


def grid_of(axes: tuple[Axis, ...], tile: np.ndarray) -> VertexGroup:
    """Return a group that is only a grid of vertices on tiles, without a codelet."""
    return VertexGroup(_NONE, axes, (), tile)


def mappings_of(tensor: Tensor, graph: Graph) -> tuple[TileMapping, ...]:
    """Return the mappings of a tensor's variables, in order.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    for variable in tensor.variables():
        if variable not in graph.mappings:
            gap = tile_gap(graph, variable)
            raise GraphError(gap.what, where=variable.origin, expected=gap.expected, got=gap.got, hint=gap.hint)
    return tuple(graph.mappings[variable] for variable in tensor.variables())


def access_demand(group: VertexGroup, access: Access, num_tiles: int, max_runs: float = inf) -> Demand:
    """Return the elements that the vertices of a group need through one access.

    Beyond `max_runs` runs about so many are sampled.
    """
    node = access.tensor.node
    variables = access.tensor.variables()
    per_dim = extents(group, access)
    # Vertices along an axis that moves nothing need the same block, which is listed once.
    moving = [number for number in range(len(group.axes)) if any(e.start.shape[number] > 1 for e in per_dim)]
    constant = [number for number in range(len(group.axes)) if number not in moving]
    grid = tuple(n if number in moving else 1 for number, n in enumerate(group.grid))
    start, length = (
        np.stack([np.broadcast_to(part, grid).ravel() for part in parts], axis=1)
        if parts
        else np.zeros((int(np.prod(grid)), 0), np.int64)
        for parts in ([e.start for e in per_dim], [e.length for e in per_dim])
    )
    tile = group.tile.transpose(moving + constant).reshape(len(start), -1)
    used = np.all(length > 0, axis=1) & np.any(tile >= 0, axis=1)
    start, length, tile = start[used], length[used], tile[used]
    bases = flat_bases(variables)
    runs = block_runs(node, np.arange(len(start)), start, length, bases, max_runs)
    return demand_of_blocks(runs, tile, flat_size([v.size for v in variables]), num_tiles)


def copy_grid(source: Tensor, destination: Tensor, graph: Graph) -> tuple[VertexGroup, Access] | None:
    """Return a copy as vertices that read its source, one a block of the destination; None where that is not a grid."""
    mappings = mappings_of(destination, graph)
    if not isinstance(destination.node, Affine):
        return None
    # In terms of sub-dimensions both have the same shape, and each has one stride.
    fine = [size for dim in destination.node.dims for size, _ in dim]
    destination = destination.reshape(fine)
    assert isinstance(destination.node, Affine)
    order = _memory_order(destination.node)
    source = source.reshape(fine).transpose(order)
    destination = destination.transpose(order)
    node = destination.node
    assert isinstance(node, Affine)
    blocks = _mapping_blocks(node, destination.shape, mappings[0])
    if blocks is None:
        return None
    axes = tuple(Axis(f"dim {number}", cut) for number, cut in enumerate(blocks.cuts))
    dims = tuple(element(number) for number in range(len(axes)))
    return grid_of(axes, blocks.tile), Access(source.reshape(blocks.shape), dims)


def _memory_order(node: Affine) -> tuple[int, ...]:
    # By falling stride: a copy may run through dimensions in any order, and this one has the longest runs.
    return tuple(sorted(range(len(node.dims)), key=lambda dim: -max((abs(s) for _, s in node.dims[dim]), default=0)))


class _ViewBlocks(NamedTuple):
    """The mapping of a view as a grid of blocks.

    Args:
        shape: of the view, or of the flat view.
        cuts: boundaries of the blocks along each dimension.
        tile: of each block.
    """

    shape: tuple[int, ...]
    cuts: tuple[np.ndarray, ...]
    tile: np.ndarray


def _mapping_blocks(node: Affine, shape: tuple[int, ...], mapping: TileMapping) -> _ViewBlocks | None:
    """Return the mapping of a view of some shape as blocks, of the flat view if need be; None if neither is a grid."""
    if node.is_whole and isinstance(mapping, Blocked):
        return _ViewBlocks(mapping.shape, mapping.cuts, mapping.tile)
    if node.is_whole and isinstance(mapping, Flat):
        return _ViewBlocks((mapping.size,), (np.append(mapping.starts, mapping.size),), mapping.tiles)
    flat = node.reshape((prod(shape),))
    for view in (node, flat):
        blocks = None if view is None else view_blocks(view, mapping)
        if view is not None and blocks is not None:
            return _ViewBlocks(view.shape, *blocks)
    return None


def copy_demand(source: Tensor, destination: Tensor, mappings: Sequence[TileMapping], num_tiles: int) -> Demand:
    """Return the elements that each tile needs of a copy's source; `mappings` are of the destination's variables."""
    variables = source.variables()
    size = flat_size([v.size for v in variables])
    if source.size > _MAX_ELEMENTS:
        sample = _sampled_copy_runs(source, destination, mappings)
        present = np.bincount(sample.block, minlength=num_tiles) > 0
        return demand_of_blocks([sample], np.where(present, np.arange(num_tiles), -1)[:, None], size, num_tiles)
    length, tile = _owner_runs(destination.node, dict(zip(destination.variables(), mappings, strict=True)))
    tile = tile[length > 0]
    length = length[length > 0]
    new = np.diff(tile, prepend=-1) != 0  # neighbouring runs of one tile become one interval
    first = (np.cumsum(length) - length)[new]
    tile = tile[new]
    length = np.diff(np.append(first, destination.size))
    runs = interval_runs(source.node, tile, first, length, flat_bases(variables))
    present = np.bincount(tile, minlength=num_tiles) > 0
    needs = np.where(present, np.arange(num_tiles), -1)[:, None]
    return demand_of_blocks(runs, needs, size, num_tiles)


def _sampled_copy_runs(source: Tensor, destination: Tensor, mappings: Sequence[TileMapping]) -> Runs:
    """Sample single elements of a copy's source, evenly in row-major order, by the tile that needs them."""
    _, position, weight = list_or_sample(np.array([0]), np.array([source.size]), MAX_RUNS)
    destination_homes = find_homes(tuple(mappings))

    def tile_and_element(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tile = destination_homes.tile_of(destination_homes.run_of(_flat_element(destination, at)))
        return tile, _flat_element(source, at)

    (tile, element), (tile_before, element_before) = map(tile_and_element, (position, np.maximum(position - 1, 0)))
    before = np.where((tile_before == tile) & (position > 0), element_before, -1)
    order = np.lexsort((element, tile))
    weights = np.ones(len(order)) if weight is None else weight
    return Runs(tile[order], element[order], np.ones_like(order), weights[order], before[order])


def _flat_element(tensor: Tensor, position: np.ndarray) -> np.ndarray:
    """Return the flat elements at some positions of a tensor's row-major order."""
    element = np.zeros_like(position)
    bases = flat_bases(tensor.variables())
    for runs in interval_runs(tensor.node, np.arange(len(position)), position, np.ones_like(position), bases):
        element[runs.block] = runs.start
    return element


def _owner_runs(node: Node, mappings: Mapping[Variable, TileMapping]) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths and tiles of runs of a view's row-major order, int64[n]; of elements if memory order differs."""
    size = prod(node.shape)
    if isinstance(node, Reshaped):
        return _owner_runs(node.source, mappings)
    if isinstance(node, Concat) and prod(node.shape[: node.axis]) == 1:
        lengths, tiles = zip(*(_owner_runs(part, mappings) for part in node.parts), strict=True)
        return np.concatenate(lengths), np.concatenate(tiles)
    if isinstance(node, Affine) and canonical(node.subdims) in ((), ((size, 1),)):
        starts, _, tiles = mappings[node.variable].runs()
        low = np.searchsorted(starts, node.offset, "right") - 1
        high = np.searchsorted(starts, node.offset + size)
        limits = np.append(starts[low:high], node.offset + size)
        return np.diff(np.maximum(limits, node.offset)), tiles[low:high].astype(np.int64)
    which, index = (part.ravel() for part in elements(node, tuple(mappings)))
    tile = np.zeros(size, np.int64)
    for number, mapping in enumerate(mappings.values()):
        inside = which == number
        tile[inside] = owners(mapping)[index[inside]]
    return np.ones(size, np.int64), tile
