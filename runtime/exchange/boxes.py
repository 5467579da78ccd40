"""The fast exchange count: boxes of an affine view on boxes of a tile mapping, axis by axis.

Input: a vertex group, one of its accesses and the mapping of its variable. Output: `Traffic`, or None where the general
way of `exchange.count` is needed. Cost grows with the number of blocks of each axis and of vertices, not with elements.

Along the *line* of one sub-dimension of the flat index (`exchange.mixed_radix`) vertices need intervals and tiles own
intervals.
What a vertex receives from a tile is a product of overlaps over all lines, and a sum over all tiles of such products is
a product of sums, because blocks of different lines combine freely (each axis of the group lies on one line).
Limits: one vertex a tile, no gaps in the grid, one box of the mapping a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import numpy as np

from ipujax.runtime.exchange.count import Traffic, copied
from ipujax.runtime.exchange.mixed_radix import Placed, box_of_tile, place
from ipujax.runtime.exchange.shared_bus import Buses, shared_boxes
from ipujax.runtime.graph import Access, VertexGroup, extents
from ipujax.runtime.tensor import Affine, Group, TileMapping


@dataclass(frozen=True, eq=False, slots=True)
class Line:
    """What vertices need and tiles own along one sub-dimension, in rising indices.

    Args:
        start: first index of each vertex' interval, of a shape that broadcasts to the grid of vertices.
        length: number of indices, same shape.
        edges: boundaries of the mapping, int64[blocks + 1].
        owned: values of the sub-dimension each block of the mapping owns, int64[blocks].
        step: values between two indices.
    """

    start: np.ndarray
    length: np.ndarray
    edges: np.ndarray
    owned: np.ndarray
    step: int


@dataclass(frozen=True, eq=False, slots=True)
class Interval:
    """What vertices need along one dimension of a view; both of a shape that broadcasts to the grid of vertices."""

    start: np.ndarray
    length: np.ndarray


def _finer(node: Affine, intervals: Sequence[Interval]) -> tuple[Affine, list[Interval]]:
    """A view with dimensions that join several of the variable's cut into these, where every interval is whole rows."""
    dims, finer = list[Group](), list[Interval]()
    for group, interval in zip(node.dims, intervals, strict=True):
        row = prod(size for size, _ in group[1:])
        if row > 1 and not np.any(interval.start % row) and not np.any(interval.length % row):
            none = np.zeros((1,) * interval.start.ndim, np.int64)
            dims += [(piece,) for piece in group]
            finer.append(Interval(interval.start // row, interval.length // row))
            finer += [Interval(none, none + size) for size, _ in group[1:]]
        else:
            dims.append(group)
            finer.append(interval)
    return replace(node, dims=tuple(dims)), finer


def _lines(intervals: Sequence[Interval], placed: Sequence[Placed], rank: int) -> list[Line] | None:
    """The lines of an access, or None where one axis of the group moves two of them."""
    taken = sum(np.array(interval.start.shape) > 1 for interval in intervals)
    if np.any(taken > 1):
        return None
    scalar = np.zeros((1,) * rank, np.int64)
    lines = []
    for p in placed:
        start, length = scalar, scalar + 1
        if p.axis >= 0:
            start, length = intervals[p.axis].start, intervals[p.axis].length
            if p.reverse:
                start = p.count - start - length
            elif p.count == 1:
                start, length = np.zeros_like(start), np.minimum(length, 1)
        lines.append(Line(start, length, p.edges, np.diff(p.subdim.cuts), p.step))
    return lines


@dataclass(frozen=True, eq=False, slots=True)
class Meets:
    """Which blocks of a line's mapping each vertex' interval meets.

    Args:
        filled: the blocks that hold an index.
        first: number in `filled` of the first block met; any number where none is.
        count: number of blocks met.
        whole: whether the interval is one block, nothing less and nothing more.
    """

    filled: np.ndarray
    first: np.ndarray
    count: np.ndarray
    whole: np.ndarray


def _meets(line: Line) -> Meets:
    filled = np.flatnonzero(np.diff(line.edges))
    starts = line.edges[filled]
    first = np.searchsorted(starts, line.start, side="right") - 1
    last = np.searchsorted(starts, line.start + line.length - 1, side="right") - 1
    count = np.where(line.length > 0, last - first + 1, 0)
    alone = (count == 1) & (line.owned[filled[np.clip(first, 0, None)]] == line.length)
    return Meets(filled, first, count, alone & ((line.step == 1) | (line.length == 1)))


@dataclass(frozen=True, eq=False, slots=True)
class Tally:
    """What intervals meet along a line: the figures that `_fragments` combines.

    Args:
        met: number of blocks met.
        whole: number of those that are the whole interval, nothing less and nothing more.
        indices: number of indices in them.
        step: values between two indices.
    """

    met: np.ndarray
    whole: np.ndarray
    indices: np.ndarray
    step: int


def _fragments(tallies: Sequence[Tally]) -> np.ndarray:
    """Number of fragments, from the tallies of all lines, innermost last.

    An index of a line ends a fragment unless everything further in is whole; then neighbours of one block go on, if
    they are neighbours in memory too.
    """
    whole, broken = np.array(1), np.array(0)
    for tally in reversed(tallies):
        ends = (tally.met if tally.step == 1 else tally.indices) - tally.whole
        broken = ends * whole + tally.indices * broken
        whole = tally.whole * whole
    return whole + broken


def _product(factors: Sequence[np.ndarray]) -> np.ndarray:
    """The product of arrays that broadcast."""
    return reduce(np.multiply, factors, np.array(1))


class _Cover:
    """How many intervals of a line cover each index, and sums of that over ranges."""

    def __init__(self, line: Line) -> None:
        used = line.length.ravel() > 0
        start, stop = line.start.ravel()[used], (line.start + line.length).ravel()[used]
        ends = np.concatenate([start, stop])
        order = np.argsort(ends, kind="stable")
        self.points = ends[order]
        self.depth = np.cumsum(np.where(order < len(start), 1, -1))

    def sum(self, density: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Sums over [low, high) of what is `density` from each of `points` on."""
        if len(self.points) == 0:
            return np.zeros_like(low)
        before = np.concatenate([[0], np.cumsum(np.diff(self.points) * density[:-1])])

        def up_to(x: np.ndarray) -> np.ndarray:
            at = np.searchsorted(self.points, x, side="right") - 1
            return np.where(at < 0, 0, before[at] + (x - self.points[at]) * density[at])

        return up_to(high) - up_to(low)


@dataclass(frozen=True, eq=False, slots=True)
class _Local:
    """What each vertex needs of the box on its own tile.

    Args:
        ranges: per line the interval of indices, (first, end), over the grid of vertices.
        elements: number of elements, over the grid.
        fragments: number of fragments, over the grid.
    """

    ranges: list[tuple[np.ndarray, np.ndarray]]
    elements: np.ndarray
    fragments: np.ndarray


def _local(lines: Sequence[Line], box: np.ndarray) -> _Local:
    """From the box on the tile of each vertex, −1 for none, over the grid of vertices."""
    at = np.unravel_index(np.maximum(box, 0), [len(line.owned) for line in lines])
    ranges, tallies, present = [], [], box >= 0
    for line, block in zip(lines, at, strict=True):
        low = np.maximum(line.start, line.edges[block])
        high = np.maximum(low, np.minimum(line.start + line.length, line.edges[block + 1]))
        shared = high - low
        whole = (shared == line.length) & (shared == line.owned[block]) & ((line.step == 1) | (shared == 1))
        tallies.append(Tally(np.minimum(shared, 1), whole & (shared > 0), shared, line.step))
        present = present & (shared > 0)
        ranges.append((low, high))
    elements = np.where(present, _product([tally.indices for tally in tallies]), 0)
    return _Local(ranges, elements, np.where(present, _fragments(tallies), 0))


def count_boxes(
    group: VertexGroup, access: Access, mapping: TileMapping, num_tiles: int, writes: bool, buses: Buses
) -> Traffic | None:
    """Traffic the exchange of one access axis by axis.

    Args:
        group: the vertices.
        access: one of its accesses, to a view that has elements.
        mapping: of the view's variable.
        num_tiles: tiles of the target.
        writes: the vertices send the elements home instead of receiving them.
        buses: which tiles share an exchange bus.

    Returns:
        The counts, or None where this way does not apply (see the module's limits).
    """
    node, tile = access.tensor.node, group.tile
    if not isinstance(node, Affine) or tile.size == 0 or tile.min() < 0 or np.bincount(tile.ravel()).max() > 1:
        return None
    boxes = box_of_tile(mapping, num_tiles)
    node, intervals = _finer(node, [Interval(extent.start, extent.length) for extent in extents(group, access)])
    placed = None if boxes is None else place(node, mapping)
    lines = None if placed is None else _lines(intervals, placed, len(group.axes))
    if boxes is None or lines is None:
        return None
    local = _local(lines, boxes[tile])
    moved = np.any([np.array(line.start.shape) > 1 for line in lines], axis=0)
    copies = prod(blocks for blocks, moves in zip(group.grid, moved, strict=True) if not moves)
    needed = np.broadcast_to(_product([line.length for line in lines]), tile.shape)
    by_vertex = _by_tile(needed - local.elements, tile, num_tiles)
    here, parts = (_by_tile(part, tile, num_tiles) for part in (local.elements, local.fragments))
    met = [(_meets(line), line) for line in lines]
    tallies = [Tally(meets.count, meets.whole, line.length, line.step) for meets, line in met]
    fragments = _by_tile(_fragments(tallies), tile, num_tiles)
    rearranged = copied(here, parts, fragments)
    if writes:
        received, arriving = (_by_tile(part, mapping.tiles, num_tiles) for part in _arriving(lines, copies))
        none = np.zeros(num_tiles, np.int64)
        return Traffic(received - here, by_vertex, arriving - parts, here, parts, none, *rearranged)
    sent = _by_tile(_wanted(lines), mapping.tiles, num_tiles)
    if copies == 1:
        sent -= _by_tile(_wanted_here_only(lines, local), tile, num_tiles)
    vertex_of_tile = np.full(num_tiles, -1, np.int64)
    vertex_of_tile[tile.ravel()] = np.arange(tile.size)
    starts, lengths = (
        [np.broadcast_to(part, tile.shape).ravel() for part in parts]
        for parts in ([line.start for line in lines], [line.length for line in lines])
    )
    spread = list(zip(starts, lengths, strict=True))
    edges = [line.edges for line in lines]
    shared = shared_boxes(spread, edges, boxes[tile].ravel(), vertex_of_tile, buses.tiles(num_tiles))
    return Traffic(by_vertex, sent, fragments - parts, here, parts, shared, *rearranged)


def _by_tile(values: np.ndarray, tile: np.ndarray, num_tiles: int) -> np.ndarray:
    """Values of vertices or boxes, each on a tile of its own, as values of tiles."""
    out = np.zeros(num_tiles, np.int64)
    out[tile.ravel()] = np.broadcast_to(values, tile.shape).ravel()
    return out


def _over_boxes(per_line: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One vector a line, shaped to broadcast to the grid of boxes of the mapping."""
    return [v.reshape([-1 if a == b else 1 for b in range(len(per_line))]) for a, v in enumerate(per_line)]


def _wanted(lines: Sequence[Line]) -> np.ndarray:
    """Elements of each box of the mapping that some vertex needs."""
    covers = [_Cover(line) for line in lines]
    sums = [c.sum(c.depth > 0, line.edges[:-1], line.edges[1:]) for c, line in zip(covers, lines, strict=True)]
    return _product(_over_boxes(sums)).ravel()


def _wanted_here_only(lines: Sequence[Line], local: _Local) -> np.ndarray:
    """Elements on the tile of each vertex that this vertex needs and no other."""
    covers = [_Cover(line) for line in lines]
    sums = [c.sum(c.depth == 1, low, high) for c, (low, high) in zip(covers, local.ranges, strict=True)]
    return np.where(local.elements > 0, _product(sums), 0)


def _arriving(lines: Sequence[Line], copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements and fragments that vertices write to each box of the mapping."""
    tallies = []
    for line in lines:
        meets, cover, blocks = _meets(line), _Cover(line), len(line.owned)
        used = meets.count > 0
        first, end = meets.first[used], (meets.first + meets.count)[used]
        change = np.bincount(first, minlength=blocks + 1) - np.bincount(end, minlength=blocks + 1)
        met_here = np.zeros(blocks, np.int64)
        met_here[meets.filled] = np.cumsum(change)[: len(meets.filled)]
        whole_here = np.bincount(meets.filled[meets.first[meets.whole]], minlength=blocks)
        tallies.append((met_here, whole_here, cover.sum(cover.depth, line.edges[:-1], line.edges[1:])))
    met, whole, indices = (_over_boxes(column) for column in zip(*tallies, strict=True))
    steps = [line.step for line in lines]
    fragments = _fragments([Tally(*row) for row in zip(met, whole, indices, steps, strict=True)])
    return copies * _product(indices).ravel(), copies * fragments.ravel()
