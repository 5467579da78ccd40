"""Where a planned operation computes: boxes of its index space on tiles.

Operations whose blocks may be cut along some dimensions only (a slice along others, a scan, a sort, a window) ask
here for a `Blocked` placement of their index space: the placement of an operand if that is spread well enough and
cuts nothing that must stay whole, else an even grid of as many tiles as are worth using.

Source of the least share of a tile: poplibs `poputil/TileMapping.cpp` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from ipujax.lowering.poputil.mapping import map_by_plan, mapping_like
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import MIN_BYTES_PER_TILE, Blocked, Flat, even_cuts, frozen
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.vertices import Access, Axis, element

# An operand's own placement is kept if its largest block is at most this many times that of an even grid (assumed).
_KEEP_IF_WITHIN = 2

# A tensor, and for each of its dimensions the number of the index space's dimension it runs along, or None.
Candidate = tuple[Tensor, Sequence[int | None]]


def place(
    graph: Graph,
    shape: Sequence[int],
    order: Sequence[int],
    block_bytes: int,
    candidates: Sequence[Candidate] = (),
    most: tuple[tuple[int, int], ...] = (),
) -> Blocked:
    """Cuts an index space in boxes and puts each on a tile.

    Args:
        graph: gives the target, and the mappings of the candidates.
        shape: extents of the index space.
        order: the dimensions that may be cut, those to cut first in front.
        block_bytes: bytes touched for each point of the index space.
        candidates: operands whose own placement would save an exchange, best first.
        most: see `spread`; an operand's own placement is not bound by it.

    Returns:
        A placement of `shape`; dimensions not in `order` are whole.
    """
    shape = tuple(shape)
    planned = spread(shape, tuple(order), block_bytes, graph.target.tiles_per_ipu, most)
    for tensor, dims in candidates:
        followed = follow(graph, tensor, dims, shape, order)
        if followed is not None and _largest(followed) <= _KEEP_IF_WITHIN * _largest(planned):
            return followed
    return planned


@lru_cache(maxsize=4096)
def spread(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    block_bytes: int,
    tiles: int,
    most: tuple[tuple[int, int], ...] = (),
) -> Blocked:
    """An even grid over at most `tiles` tiles, with at least 128 bytes a box where there are as many.

    Args:
        shape: extents of the index space.
        order: the dimensions that may be cut; of two grids as good, the one that cuts the first of them more.
        block_bytes: bytes touched for each point of the index space.
        tiles: number of tiles.
        most: `(dimension, most blocks)` for dimensions that are not to be cut in more.
    """
    budget = max(1, min(tiles, prod(shape) * block_bytes // MIN_BYTES_PER_TILE))
    limits = dict(most)
    blocks = dict(
        zip(order, _block_sizes([(shape[d], limits.get(d, shape[d])) for d in order], budget)[1], strict=True)
    )
    counts = [-(-n // blocks[d]) if d in blocks and n else 1 for d, n in enumerate(shape)]
    cuts = tuple(even_cuts(n, count) for n, count in zip(shape, counts, strict=True))
    boxes = [len(cut) - 1 for cut in cuts]
    return Blocked(cuts, frozen(np.arange(prod(boxes)).reshape(boxes), np.int32))


def _block_sizes(extents: Sequence[tuple[int, int]], budget: int) -> tuple[int, list[int]]:
    """Volume and sizes of the blocks of a grid of at most `budget` of them, of least volume among a few tried.

    Args:
        extents: `(elements, most blocks)` of each dimension, those to cut first in front.
        budget: most blocks.
    """
    if not extents:
        return 1, []
    (extent, most), *rest = extents
    least = max(1, -(-extent // max(1, min(extent, most, budget))))
    best: tuple[int, list[int]] | None = None
    for size in sorted({min(max(1, extent), n) for n in (least, least + 1, 2 * least, 3 * least)}):
        volume, sizes = _block_sizes(rest, budget // max(1, -(-extent // size)))
        if best is None or size * volume < best[0]:
            best = size * volume, [size, *sizes]
    assert best is not None
    return best


def _largest(placement: Blocked) -> int:
    return prod(int(np.diff(cut).max(initial=0)) for cut in placement.cuts)


def follow(
    graph: Graph, tensor: Tensor, dims: Sequence[int | None], shape: tuple[int, ...], order: Sequence[int]
) -> Blocked | None:
    """The placement an operand has, as one of the index space; None if it cuts what must stay whole."""
    mapping = mapping_like(graph, tensor)
    if isinstance(mapping, Flat) and tensor.ndim == 1 and mapping.size:
        mapping = Blocked((frozen(np.append(mapping.starts, mapping.size), np.int64),), mapping.tiles)
    if not isinstance(mapping, Blocked):
        return None
    cuts: list[np.ndarray] = [even_cuts(n, 1) for n in shape]
    for cut, dim in zip(mapping.cuts, dims, strict=True):
        if len(cut) <= 2:
            continue
        if dim is None or dim not in order or int(cut[-1]) != shape[dim]:
            return None
        cuts[dim] = cut
    kept = [(d, dim) for d, dim in enumerate(dims) if len(mapping.cuts[d]) > 2 and dim is not None]
    boxes = mapping.tile.reshape([mapping.tile.shape[d] for d, _ in kept]) if mapping.tile.size else None
    if boxes is None or prod(shape) == 0:
        return None
    boxes = np.transpose(boxes, np.argsort([dim for _, dim in kept])) if kept else boxes
    return Blocked(tuple(cuts), frozen(boxes.reshape([len(cut) - 1 for cut in cuts]), np.int32))


def map_like_blocks(graph: Graph, tensor: Tensor, dims: Sequence[int | None], placement: Blocked) -> None:
    """Maps an unmapped operand so that each block of it lies on the tile that uses it.

    Args:
        graph: holds the tensor's variable.
        tensor: the operand.
        dims: the dimension of the placed index space each of its dimensions runs along, None for one that is not cut.
        placement: the index space on tiles.
    """
    if not graph.is_mapped(tensor):
        map_by_plan(graph, tensor, *projected(tensor.shape, dims, placement))


def projected(
    shape: Sequence[int], dims: Sequence[int | None], placement: Blocked
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cuts and tiles of a tensor by a placement: where several blocks use one piece, the first of them has it."""
    cuts = tuple(even_cuts(n, 1) if dim is None else placement.cuts[dim] for n, dim in zip(shape, dims, strict=True))
    used = [dim for dim in dims if dim is not None]
    firsts = tuple(slice(None) if d in used else 0 for d in range(placement.tile.ndim))
    boxes = placement.tile[firsts] if placement.tile.size else np.zeros([0] * len(used), np.int32)
    boxes = np.transpose(boxes, np.argsort(np.argsort(used))) if used else boxes
    counts = [len(cut) - 1 for cut in cuts]
    return cuts, frozen(boxes.reshape(counts) if boxes.size and prod(counts) else np.zeros(counts), np.int32)


def mapped_variable(
    graph: Graph, shape: Sequence[int], dtype: object, name: str, dims: Sequence[int | None], placement: Blocked
) -> Tensor:
    """Adds a result that lies where it is computed; arguments as `map_like_blocks`."""
    return graph.add_variable(shape, dtype, name, Blocked(*projected(shape, dims, placement)))


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
