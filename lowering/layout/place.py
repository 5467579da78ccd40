"""Placements: blocks of an operation's index space on tiles, and the mappings of operands and results that follow.

`choose` picks the placement of an operation. From it follow the mappings of unmapped operands and of results, and
the axes and accesses of a vertex group. `unmoved_placement` is the inverse: the placement with which a mapped operand
does not move.

Source of the least share of a tile: poplibs `poputil/TileMapping.cpp` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout.grid_cost import MOST_SHARED_BYTES, Span, spans
from ipujax.lowering.layout.grids import cut_again, even_grids
from ipujax.lowering.layout.mapping import map_by_plan, map_linearly, mapping_like
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Access, Axis, Graph, element
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    Blocked,
    Flat,
    Tensor,
    blocked_mapping,
    element_bytes,
    even_cuts,
    frozen,
)


@remembered
def spread(shape: tuple[int, ...], order: tuple[int, ...], block_bytes: int, tiles: int) -> Blocked:
    """Most even grid of blocks, one a tile, over at most `tiles` tiles, with at least `MIN_BYTES_PER_TILE` a block.

    A row, all points that differ in the inner dimensions alone, of fewer bytes is not cut, because it would move in
    small pieces; but it is if blocks would otherwise be larger than those whose readers share them
    (`MOST_SHARED_BYTES`).

    Args:
        shape: extents of the index space.
        order: dimensions that may be cut; of two equally even grids, the one that cuts the first of them more.
        block_bytes: bytes that one point of the index space reads and writes.
        tiles: number of tiles.
    """
    if 0 in shape:
        return empty_placement(shape)
    blocks = max(1, min(tiles, prod(shape) * block_bytes // MIN_BYTES_PER_TILE))
    between_rows = tuple(d for d in order if prod(shape[d + 1 :]) * block_bytes >= MIN_BYTES_PER_TILE)
    of_long_rows = tuple(d for d in order if prod(shape[d:]) * block_bytes > MIN_BYTES_PER_TILE)
    # Between rows if that gives a block a tile; else inside of long rows too, if that gives blocks of at most
    # `MOST_SHARED_BYTES`; else anywhere.
    blocks_by_size = min(blocks, -(-prod(shape) * block_bytes // MOST_SHARED_BYTES))
    preferences = ((between_rows, blocks), (of_long_rows, blocks_by_size))
    order = next(
        (dims for dims, blocks_needed in preferences if dims and prod(shape[d] for d in dims) >= blocks_needed), order
    )
    grids = even_grids(shape, order, blocks)  # `blocks` and `lengths` of each grid, [dimensions, grids]
    # Even: the smallest longest block; then the most blocks along the first dimensions of `order`.
    keys = [-grids.blocks[d] for d in reversed(order)]
    return grids.placement(int(np.lexsort((*keys, np.prod(grids.lengths, axis=0)))[0]))


def empty_placement(shape: Sequence[int]) -> Blocked:
    """Placement of an empty index space."""
    cuts = [even_cuts(n, 1) for n in shape]
    return blocked_mapping(cuts, np.zeros([len(cut) - 1 for cut in cuts], np.int32))


def unmoved_placement(
    graph: Graph, tensor: Tensor, spans: Sequence[Span], shape: Sequence[int], order: Sequence[int]
) -> Blocked | None:
    """Placement of the index space with which a mapped operand does not move.

    None if the operand is not mapped in blocks, or is cut along a dimension that the index space cannot be cut along.

    Args:
        graph: mappings.
        tensor: the operand.
        spans: its dimensions along the index space.
        shape: extents of the index space.
        order: dimensions that may be cut.
    """
    mapping = mapping_like(graph, tensor)
    if isinstance(mapping, Flat) and mapping.size:  # ranges of elements: blocks where they are of whole rows
        mapping = row_blocks(mapping, tensor.shape)
    if not isinstance(mapping, Blocked) or prod(shape) == 0 or not mapping.tile.size:
        return None
    cuts: list[np.ndarray] = [even_cuts(n, 1) for n in shape]
    block_numbers: list[np.ndarray] = []  # along each dimension of the operand, for each block of the index space
    axes: list[int] = []  # axes of the index space that are cut, in the order of the operand's dimensions
    for cut, span in zip(mapping.cuts, spans, strict=True):
        if len(cut) <= 2:  # one block
            block_numbers.append(np.zeros(1, np.int64))
            continue
        if span.axis is None or span.axis not in order or span.axis in axes:
            return None
        cuts[span.axis], numbers = span.index_cuts(cut, shape[span.axis])
        block_numbers.append(numbers)
        axes.append(span.axis)
    tile = mapping.tile[np.ix_(*block_numbers)].reshape([len(cuts[axis]) - 1 for axis in axes])
    # The axes are in the order of the operand's dimensions; a placement has that of the index space.
    tile = np.transpose(tile, np.argsort(axes)) if axes else tile
    return blocked_mapping(cuts, tile.reshape([len(cut) - 1 for cut in cuts]))


def row_blocks(mapping: Flat, shape: tuple[int, ...]) -> Blocked | None:
    """Blocked form of a flat mapping whose intervals are rows of the outermost dimension; else None."""
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    inner = prod(shape[dim + 1 :])
    bounds = np.append(mapping.starts, mapping.size)
    if not shape or (bounds % inner).any():
        return None
    cuts = [bounds // inner if d == dim else even_cuts(n, 1) for d, n in enumerate(shape)]
    return blocked_mapping(cuts, mapping.tiles.reshape([len(cut) - 1 for cut in cuts]))


def place_operand(graph: Graph, tensor: Tensor, spans: Sequence[Span], placement: Blocked) -> None:
    """Maps an unmapped operand so that each of its blocks is on a tile that reads it.

    Args:
        graph: graph of the operand.
        tensor: operand; a mapped one does not change.
        spans: its dimensions along the index space.
        placement: the index space on tiles.

    Raises:
        GraphError: for a variable of a graph whose user maps variables.
    """
    if graph.is_mapped(tensor):
        return
    cuts, readers = _blocks_and_readers(spans, placement)  # `readers` has those of one block along its last dimension
    block_bytes = prod(int(np.diff(cut).max(initial=0)) for cut in cuts) * element_bytes(tensor.dtype)
    tile = frozen(readers[..., 0], np.int32)
    if readers.shape[-1] > 1 and block_bytes > MOST_SHARED_BYTES:
        # Only the outermost dimension is cut, as `operand_parts.shares_of` expects.
        outermost = next((d for d, cut in enumerate(cuts) if np.diff(cut).max() > 1), 0)
        parts = min(readers.shape[-1], int(np.diff(cuts[outermost]).min()))
        cuts, tile = share_out(cuts, readers[..., :parts], parts, [outermost])
    map_by_plan(graph, tensor, cuts, tile)
    map_linearly(graph, tensor)  # those of several variables


def block_mapping(spans: Sequence[Span], placement: Blocked) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cuts and tiles of a tensor by a placement; a block that several tiles read is on the first of them."""
    cuts, readers = _blocks_and_readers(spans, placement)
    return cuts, frozen(readers[..., 0], np.int32)


def _blocks_and_readers(spans: Sequence[Span], placement: Blocked) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cuts of a tensor's blocks, and the tiles that read each, int32[*blocks, readers].

    Args:
        spans: for each dimension of the tensor the axis of the index space that it follows, and what a point reads.
        placement: the index space on tiles.
    """
    if not placement.tile.size:
        cuts = [even_cuts(span.extent, 1) for span in spans]
        return tuple(cuts), np.zeros([*(len(cut) - 1 for cut in cuts), 1], np.int32)
    cuts = []
    # Along each axis of the index space: the number of its block that reads each block of the tensor.
    block_numbers = [np.arange(n) for n in placement.tile.shape]
    for span in spans:
        if span.axis is None:
            cuts.append(even_cuts(span.extent, 1))
            continue
        bounds, block_numbers[span.axis] = span.cuts(placement.cuts[span.axis])
        cuts.append(frozen(bounds, np.int64))
    tile = placement.tile[np.ix_(*block_numbers)]
    followed = [span.axis for span in spans if span.axis is not None]
    # Tiles that differ along other dimensions of the index space read the same block.
    unfollowed = [d for d in range(placement.tile.ndim) if d not in followed]
    num_readers = prod(tile.shape[d] for d in unfollowed)
    tile = np.transpose(tile, [*followed, *unfollowed])
    return tuple(cuts), tile.reshape([*(len(cut) - 1 for cut in cuts), num_readers])


def share_out(
    cuts: Sequence[np.ndarray], readers: np.ndarray, max_parts: int, dims: Sequence[int]
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cuts every block into equal parts, one for each tile that reads the block.

    Args:
        cuts: cuts of each dimension of a tensor.
        readers: tiles that read each block, int32[*blocks, readers].
        max_parts: upper bound of the parts of a block, at most the number of readers; the shortest block may allow
            fewer.
        dims: dimensions that may be cut; outer ones are cut first.

    Returns:
        The finer cuts, and the tile of each part.
    """
    finer_cuts: list[np.ndarray] = []
    blocks: list[np.ndarray] = []
    part_numbers = np.zeros((), np.int64)  # of each part in its block, with a dimension for each of the tensor so far
    parts = 1  # of a block, by the dimensions so far
    for dim, cut in enumerate(cuts):
        count_limit = max(1, min(max_parts // parts, int(np.diff(cut).min()))) if dim in dims else 1
        finer = cut_again(cut, count_limit)
        count = int(finer.number.max()) + 1
        finer_cuts.append(finer.cuts)
        blocks.append(finer.block)  # number of the block that each part is of
        part_numbers = np.add.outer(part_numbers * count, finer.number)
        parts *= count
    # Part p of n goes to reader p · readers / n: the parts are spread evenly over the readers.
    reader = part_numbers * readers.shape[-1] // parts
    return tuple(finer_cuts), frozen(readers[(*np.ix_(*blocks), reader)], np.int32)


def mapped_variable(
    graph: Graph, shape: Sequence[int], dtype: object, name: str, dims: Sequence[int | None], placement: Blocked
) -> Tensor:
    """Adds a result that is mapped to the tiles that compute it; `dims` as for `spans`."""
    return graph.add_variable(shape, dtype, name, blocked_mapping(*block_mapping(spans(shape, dims), placement)))


def placed_axes(placement: Blocked) -> list[Axis]:
    """Axes of a placed index space, d0, d1, …, all of kind `map`."""
    return [Axis(f"d{d}", cut) for d, cut in enumerate(placement.cuts)]


def along(tensor: Tensor, dims: Sequence[int]) -> Access:
    """Access whose dimensions follow the elements of axes `dims`."""
    return Access(tensor, tuple(element(dim) for dim in dims))


def scalar(tensor: Tensor) -> Access:
    """Access of a tensor of shape () that every vertex reads."""
    return Access(tensor, ())


def whole_axis(name: str, extent: int) -> Axis:
    """Axis of one block."""
    return Axis(name, even_cuts(extent, 1))


def tile_grid(placement: Blocked, extra: int) -> np.ndarray:
    """Tiles of a placement, with `extra` more axes of one block behind its own."""
    return placement.tile.reshape((*placement.tile.shape, *(1,) * extra))
