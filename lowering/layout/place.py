"""Boxes of an operation's index space on tiles, and the boxes of its operands and results that go with them.

Operations ask `choose` for a placement of their index space. Here is what follows from it: where operands are put,
where results lie, what axes and accesses a vertex group gets; and the other way round, the placement in which an
operand that lies somewhere already need not move.

Source of the least share of a tile: poplibs `poputil/TileMapping.cpp` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout.box_charge import MOST_SHARED_BYTES, Span, spans
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
    """The most even grid over at most `tiles` tiles, with at least 128 bytes a box where there are as many.

    What is in a row of fewer bytes than that is not cut, where something else can be, or where boxes are small anyway:
    it would move in small pieces.

    Args:
        shape: extents of the index space.
        order: the dimensions that may be cut; of two grids as good, the one that cuts the first of them more.
        block_bytes: bytes touched for each point of the index space.
        tiles: number of tiles.
    """
    if 0 in shape:
        return nowhere(shape)
    blocks = max(1, min(tiles, prod(shape) * block_bytes // MIN_BYTES_PER_TILE))
    in_short_rows = tuple(d for d in order if prod(shape[d:]) * block_bytes > MIN_BYTES_PER_TILE)
    in_rows = tuple(d for d in order if prod(shape[d + 1 :]) * block_bytes >= MIN_BYTES_PER_TILE)
    few = min(blocks, -(-prod(shape) * block_bytes // MOST_SHARED_BYTES))
    enough = ((in_rows, blocks), (in_short_rows, few))
    order = next((dims for dims, least in enough if dims and prod(shape[d] for d in dims) >= least), order)
    grids = even_grids(shape, order, blocks)
    keys = [-grids.blocks[d] for d in reversed(order)]
    return grids.placement(int(np.lexsort((*keys, np.prod(grids.lengths, axis=0)))[0]))


def nowhere(shape: Sequence[int]) -> Blocked:
    """The placement of an index space without a point."""
    cuts = [even_cuts(n, 1) for n in shape]
    return blocked_mapping(cuts, np.zeros([len(cut) - 1 for cut in cuts], np.int32))


def follow(
    graph: Graph, tensor: Tensor, spans: Sequence[Span], shape: Sequence[int], order: Sequence[int]
) -> Blocked | None:
    """The placement an operand has, as one of the index space; None if it cuts what must stay whole."""
    mapping = mapping_like(graph, tensor)
    if isinstance(mapping, Flat) and mapping.size:
        mapping = row_boxes(mapping, tensor.shape)
    if not isinstance(mapping, Blocked) or prod(shape) == 0 or not mapping.tile.size:
        return None
    cuts: list[np.ndarray] = [even_cuts(n, 1) for n in shape]
    picks, axes = [], []
    for cut, span in zip(mapping.cuts, spans, strict=True):
        if len(cut) <= 2:
            picks.append(np.zeros(1, np.int64))
            continue
        if span.axis is None or span.axis not in order or span.axis in axes:
            return None
        cuts[span.axis], pick = span.index_cuts(cut, shape[span.axis])
        picks.append(pick)
        axes.append(span.axis)
    boxes = mapping.tile[np.ix_(*picks)].reshape([len(cuts[axis]) - 1 for axis in axes])
    boxes = np.transpose(boxes, np.argsort(axes)) if axes else boxes
    return blocked_mapping(cuts, boxes.reshape([len(cut) - 1 for cut in cuts]))


def row_boxes(mapping: Flat, shape: tuple[int, ...]) -> Blocked | None:
    """The same places as boxes, where the flat intervals are rows of the outermost dimension."""
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    inner, bounds = prod(shape[dim + 1 :]), np.append(mapping.starts, mapping.size)
    if not shape or (bounds % inner).any():
        return None
    cuts = [bounds // inner if d == dim else even_cuts(n, 1) for d, n in enumerate(shape)]
    return blocked_mapping(cuts, mapping.tiles.reshape([len(cut) - 1 for cut in cuts]))


def place_operand(graph: Graph, tensor: Tensor, spans: Sequence[Span], placement: Blocked) -> None:
    """Maps an unmapped operand so that each block of it lies on a tile that reads it.

    Args:
        graph: holds the tensor's variable.
        tensor: the operand; nothing happens when it is mapped.
        spans: how it follows the index space.
        placement: the index space on tiles.

    Raises:
        GraphError: for a variable of a graph that leaves placing variables to its user.
    """
    if graph.is_mapped(tensor):
        return
    cuts, users = _blocks(spans, placement)
    block_bytes = prod(int(np.diff(cut).max(initial=0)) for cut in cuts) * element_bytes(tensor.dtype)
    tile = frozen(users[..., 0], np.int32)
    if users.shape[-1] > 1 and block_bytes > MOST_SHARED_BYTES:
        # The outermost dimension alone, for the first of the tiles, as `box_charge` expects.
        outermost = next((d for d, cut in enumerate(cuts) if np.diff(cut).max() > 1), 0)
        parts = min(users.shape[-1], int(np.diff(cuts[outermost]).min()))
        cuts, tile = share_out(cuts, users[..., :parts], parts, [outermost])
    map_by_plan(graph, tensor, cuts, tile)
    map_linearly(graph, tensor)


def block_mapping(spans: Sequence[Span], placement: Blocked) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Boundaries and tiles of a tensor by a placement: where several blocks read one piece, the first has it."""
    cuts, users = _blocks(spans, placement)
    return cuts, frozen(users[..., 0], np.int32)


def _blocks(spans: Sequence[Span], placement: Blocked) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Boundaries of a tensor's blocks, and in a last dimension the tiles that read each."""
    if not placement.tile.size:
        cuts = [even_cuts(span.extent, 1) for span in spans]
        return tuple(cuts), np.zeros([*(len(cut) - 1 for cut in cuts), 1], np.int32)
    cuts, picks = [], [np.arange(n) for n in placement.tile.shape]
    for span in spans:
        if span.axis is None:
            cuts.append(even_cuts(span.extent, 1))
            continue
        bounds, picks[span.axis] = span.cuts(placement.cuts[span.axis])
        cuts.append(frozen(bounds, np.int64))
    boxes = placement.tile[np.ix_(*picks)]
    used = [span.axis for span in spans if span.axis is not None]
    rest = [d for d in range(placement.tile.ndim) if d not in used]
    users = prod(boxes.shape[d] for d in rest)
    return tuple(cuts), np.transpose(boxes, [*used, *rest]).reshape([*(len(cut) - 1 for cut in cuts), users])


def share_out(
    cuts: Sequence[np.ndarray], users: np.ndarray, wanted: int, dims: Sequence[int]
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cuts every block in equal parts, and gives each to one of the tiles that read the block.

    Args:
        cuts: boundaries of each dimension of a tensor.
        users: the tiles that read each block, one dimension for each of the tensor's and a last one.
        wanted: most parts of a block, at most its users; there are as many as the shortest block allows.
        dims: the dimensions that may be cut; outer ones are first.

    Returns:
        The finer boundaries, and the tile of each part.
    """
    finer, blocks, number, parts = [], [], np.zeros((), np.int64), 1
    for dim, cut in enumerate(cuts):
        most = max(1, min(wanted // parts, int(np.diff(cut).min()))) if dim in dims else 1
        bounds, block, part = cut_again(cut, most)
        count = int(part.max()) + 1
        finer.append(bounds)
        blocks.append(block)
        number = np.add.outer(number * count, part)
        parts *= count
    return tuple(finer), frozen(users[(*np.ix_(*blocks), number * users.shape[-1] // parts)], np.int32)


def mapped_variable(
    graph: Graph, shape: Sequence[int], dtype: object, name: str, dims: Sequence[int | None], placement: Blocked
) -> Tensor:
    """Adds a result that lies where it is computed; arguments as `place_operand`, `dims` for its spans."""
    return graph.add_variable(shape, dtype, name, blocked_mapping(*block_mapping(spans(shape, dims), placement)))


def placed_axes(placement: Blocked, names: Sequence[str] | None = None) -> list[Axis]:
    """The axes of a placed index space, all of kind `map`."""
    names = names or [f"d{d}" for d in range(len(placement.cuts))]
    return [Axis(name, cut) for name, cut in zip(names, placement.cuts, strict=True)]


def along(tensor: Tensor, dims: Sequence[int]) -> Access:
    """The access whose dimensions follow the elements of these axes."""
    return Access(tensor, tuple(element(dim) for dim in dims))


def scalar(tensor: Tensor) -> Access:
    """The access of a tensor of shape (), read by every vertex."""
    return Access(tensor, ())


def whole_axis(name: str, extent: int) -> Axis:
    """An axis of one block."""
    return Axis(name, even_cuts(extent, 1))


def tile_grid(placement: Blocked, extra: int) -> np.ndarray:
    """The tiles of a placement with `extra` more axes of one block behind."""
    return placement.tile.reshape((*placement.tile.shape, *(1,) * extra))
