"""The fast exchange count: blocks of an affine view on blocks of a tile mapping, axis by axis.

Input: a vertex group, one of its accesses and the mapping of its variable. Output: `Traffic`, or None where only the
general count applies (`exchange.count`). Cost grows with the blocks of each axis and of vertices, not with elements.

Along the *line* of one sub-dimension of the flat index (`exchange.mixed_radix`) vertices need intervals, and intervals
are mapped to tiles.
Elements that a vertex receives from a tile are a product of overlaps over all lines; their sum over all tiles is a
product of sums, because blocks of different lines combine freely (each axis of the group moves one line).
Limits: one vertex a tile, no gaps in the grid, one block of the mapping a tile. Where operands overlap in part, some
fragments that leave a tile once are counted twice (2 % of random cases).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod

import numpy as np

from ipujax.runtime.exchange.count import Traffic, copied_parts
from ipujax.runtime.exchange.mixed_radix import SubDimAccess, block_of_tile, match_subdims
from ipujax.runtime.exchange.shared_bus import Buses, shared_blocks
from ipujax.runtime.graph import Access, VertexGroup, extents
from ipujax.runtime.tensor import Affine, Group, TileMapping


@dataclass(frozen=True, eq=False, slots=True)
class Overlap:
    """Blocks of the mapping of a line that each vertex' interval overlaps.

    Args:
        filled: the blocks that contain an index.
        first: number in `filled` of the first block overlapped; undefined where none is.
        count: number of blocks overlapped.
        is_block: whether the interval equals one block.
    """

    filled: np.ndarray
    first: np.ndarray
    count: np.ndarray
    is_block: np.ndarray


class _Cover:
    """Number of intervals that cover each index, and its sums over ranges."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        used = lengths.ravel() > 0
        start = starts.ravel()[used]
        stop = (starts + lengths).ravel()[used]
        ends = np.concatenate([start, stop])
        order = np.argsort(ends, kind="stable")
        self.points = ends[order]  # where the number of intervals changes, rising
        self.depth = np.cumsum(np.where(order < len(start), 1, -1))  # intervals from each point to the next

    def sums_below(self, density: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Sum, over the indices below each limit, a density that is constant from each of `points` to the next."""
        if len(self.points) == 0:
            return np.zeros_like(limits)
        before = np.concatenate([[0], np.cumsum(np.diff(self.points) * density[:-1])])
        at = np.searchsorted(self.points, limits, side="right") - 1
        return np.where(at < 0, 0, before[at] + (limits - self.points[at]) * density[at])


@dataclass(frozen=True, eq=False)
class Line:
    """Intervals that vertices need and blocks of the mapping along one sub-dimension, in rising indices.

    Args:
        start: first index of each vertex' interval, of a shape that broadcasts to the grid of vertices.
        length: number of indices, same shape.
        edges: boundaries of the mapping, int64[blocks + 1].
        block_size: values of the sub-dimension in each block of the mapping, int64[blocks].
        step: values between two indices.
    """

    start: np.ndarray
    length: np.ndarray
    edges: np.ndarray
    block_size: np.ndarray
    step: int

    @cached_property
    def overlap(self) -> Overlap:
        """Blocks of the mapping that each vertex' interval overlaps."""
        filled = np.flatnonzero(np.diff(self.edges))
        starts = self.edges[filled]
        first = np.searchsorted(starts, self.start, side="right") - 1
        last = np.searchsorted(starts, self.start + self.length - 1, side="right") - 1
        count = np.where(self.length > 0, last - first + 1, 0)
        equals_block = (count == 1) & (self.block_size[filled[np.clip(first, 0, None)]] == self.length)
        return Overlap(filled, first, count, equals_block & ((self.step == 1) | (self.length == 1)))

    @cached_property
    def cover(self) -> _Cover:
        """Number of intervals that cover each index."""
        return _Cover(self.start, self.length)

    @cached_property
    def needed(self) -> np.ndarray:
        """Number of indices in each block of the mapping that some vertex needs."""
        return np.diff(self.cover.sums_below(self.cover.depth > 0, self.edges))


@dataclass(frozen=True, eq=False, slots=True)
class Interval:
    """Indices that vertices need along one dimension of a view; shapes broadcast to the grid of vertices."""

    start: np.ndarray
    length: np.ndarray


def _split_joined_dims(node: Affine, intervals: Sequence[Interval]) -> tuple[Affine, list[Interval]]:
    """Split dimensions that join several of the variable into those, where each interval covers complete rows."""
    dims = list[Group]()
    finer = list[Interval]()
    for group, interval in zip(node.dims, intervals, strict=True):
        row = prod(size for size, _ in group[1:])
        if row > 1 and not np.any(interval.start % row) and not np.any(interval.length % row):
            zero = np.zeros((1,) * interval.start.ndim, np.int64)
            dims += [(piece,) for piece in group]
            finer.append(Interval(interval.start // row, interval.length // row))
            finer += [Interval(zero, zero + size) for size, _ in group[1:]]
        else:
            dims.append(group)
            finer.append(interval)
    return replace(node, dims=tuple(dims)), finer


def _lines_of_access(intervals: Sequence[Interval], accesses: Sequence[SubDimAccess], rank: int) -> list[Line] | None:
    """Build the lines of an access; None where one axis of the group moves two of them."""
    lines_of_axis = sum(np.array(interval.start.shape) > 1 for interval in intervals)
    if np.any(lines_of_axis > 1):
        return None
    scalar = np.zeros((1,) * rank, np.int64)  # sub-dimensions that no dimension moves have one index, 0
    lines = []
    for p in accesses:
        indices = intervals[p.axis] if p.axis >= 0 else Interval(scalar, scalar + 1)
        if p.reverse:
            indices = replace(indices, start=p.count - indices.start - indices.length)
        elif p.count == 1:  # a repeated element is needed once
            indices = Interval(np.zeros_like(indices.start), np.minimum(indices.length, 1))
        lines.append(Line(indices.start, indices.length, p.edges, np.diff(p.subdim.cuts), p.step))
    return lines


@dataclass(frozen=True, eq=False, slots=True)
class Tally:
    """Overlaps of intervals and blocks along a line: the figures that `_count_fragments` combines.

    Args:
        blocks: number of blocks overlapped.
        full_blocks: number of those that equal the interval.
        indices: number of indices in them.
        step: values between two indices.
    """

    blocks: np.ndarray
    full_blocks: np.ndarray
    indices: np.ndarray
    step: int


def _count_fragments(tallies: Sequence[Tally]) -> np.ndarray:
    """Count fragments from the tallies of all lines, innermost last."""
    # An index of a line ends a fragment unless all lines further in are full blocks; then indices of one block continue
    # it, if they are neighbours in memory too.
    full = np.array(1)
    broken = np.array(0)
    for tally in reversed(tallies):
        breaks = (tally.blocks if tally.step == 1 else tally.indices) - tally.full_blocks
        broken = breaks * full + tally.indices * broken
        full = tally.full_blocks * full
    return full + broken


def _runs_at_home(tallies: Sequence[Tally], parts: Sequence[Tally]) -> np.ndarray:
    """Count the runs of an operand on the tiles of `parts`; `tallies` are its overlaps with all tiles."""
    # An index of a line ends a run unless the lines further in overlap one block; then its blocks end them.
    inner = np.array(1)
    runs = np.array(1)
    for tally, part in zip(reversed(tallies), reversed(parts), strict=True):
        runs = np.where(inner == 1, part.blocks, part.indices * runs)
        inner = np.where(inner == 1, tally.blocks, tally.indices * inner)
    return runs


def _product(factors: Sequence[np.ndarray]) -> np.ndarray:
    return reduce(np.multiply, factors, np.array(1))


@dataclass(frozen=True, eq=False, slots=True)
class _Local:
    """Overlap of each vertex' operand with the block of the mapping on its own tile.

    Args:
        ranges: per line the interval of indices, (first, end), over the grid of vertices.
        elements: number of elements, over the grid.
        tallies: the overlap of each line.
    """

    ranges: list[tuple[np.ndarray, np.ndarray]]
    elements: np.ndarray
    tallies: list[Tally]

    def where_any(self, counts: np.ndarray) -> np.ndarray:
        """Counts of the vertices that have an overlap, 0 of the others."""
        return np.where(self.elements > 0, counts, 0)


def _local_part(lines: Sequence[Line], block: np.ndarray) -> _Local:
    """Return the overlap of operands with block `block` of the mapping, that of each vertex' tile, −1 for none."""
    # Tiles without a block count as block 0 here, and are masked by `is_local`.
    index = np.unravel_index(np.maximum(block, 0), [len(line.block_size) for line in lines])
    ranges, tallies = [], []
    is_local = block >= 0
    for line, number in zip(lines, index, strict=True):
        low = np.maximum(line.start, line.edges[number])
        high = np.maximum(low, np.minimum(line.start + line.length, line.edges[number + 1]))
        shared = high - low
        is_full = (shared == line.length) & (shared == line.block_size[number]) & ((line.step == 1) | (shared == 1))
        tallies.append(Tally(np.minimum(shared, 1), is_full & (shared > 0), shared, line.step))
        is_local = is_local & (shared > 0)
        ranges.append((low, high))
    elements = np.where(is_local, _product([tally.indices for tally in tallies]), 0)
    return _Local(ranges, elements, tallies)


def count_blocks(
    group: VertexGroup, access: Access, mapping: TileMapping, num_tiles: int, writes: bool, buses: Buses
) -> Traffic | None:
    """Count the exchange of one access axis by axis, in elements; None outside the limits of the module."""
    node, tile = access.tensor.node, group.tile
    if not isinstance(node, Affine) or tile.size == 0 or tile.min() < 0 or np.bincount(tile.ravel()).max() > 1:
        return None
    blocks = block_of_tile(mapping, num_tiles)
    needed = [Interval(extent.start, extent.length) for extent in extents(group, access)]
    node, intervals = _split_joined_dims(node, needed)
    accesses = None if blocks is None else match_subdims(node, mapping)
    lines = None if accesses is None else _lines_of_access(intervals, accesses, len(group.axes))
    if blocks is None or lines is None:
        return None
    vertex_local = _local_part(lines, blocks[tile])
    moves_line = np.any([np.array(line.start.shape) > 1 for line in lines], axis=0)
    # Vertices along an axis that moves no line need the same elements: each of them receives a copy.
    copies = prod(blocks for blocks, moves in zip(group.grid, moves_line, strict=True) if not moves)
    remote = _by_tile(_product([line.length for line in lines]) - vertex_local.elements, tile, num_tiles)
    local = _by_tile(vertex_local.elements, tile, num_tiles)
    local_fragments = _by_tile(vertex_local.where_any(_count_fragments(vertex_local.tallies)), tile, num_tiles)
    tallies = [Tally(line.overlap.count, line.overlap.is_block, line.length, line.step) for line in lines]
    fragments = _by_tile(_count_fragments(tallies), tile, num_tiles)
    rearranged = copied_parts(local, local_fragments, fragments)
    runs = _runs_at_home(tallies, tallies) - vertex_local.where_any(_runs_at_home(tallies, vertex_local.tallies))
    receives = _by_tile(runs, tile, num_tiles)
    if writes:
        received, arriving = (_by_tile(counts, mapping.tiles, num_tiles) for counts in _arriving_counts(lines, copies))
        zeros = np.zeros(num_tiles, np.int64)
        arriving -= local_fragments
        return Traffic(
            received - local, remote, arriving, arriving, receives, local, local_fragments, zeros, *rearranged
        )
    sent = _by_tile(_needed_by_any(lines), mapping.tiles, num_tiles)
    sends = _by_tile(_needed_fragments(lines), mapping.tiles, num_tiles)
    if copies == 1:  # else another vertex needs them too, and they leave the tile
        local_blocks = _by_tile(_needed_locally_only(lines, vertex_local), tile, num_tiles)
        sent -= local_blocks
        sends -= np.where(local_blocks == local, local_fragments, 0)
    sends = np.where(sent > 0, np.maximum(sends, 1), 0)
    vertex_of_tile = np.full(num_tiles, -1, np.int64)
    vertex_of_tile[tile.ravel()] = np.arange(tile.size)
    intervals_of_line = [
        (np.broadcast_to(line.start, tile.shape).ravel(), np.broadcast_to(line.length, tile.shape).ravel())
        for line in lines
    ]
    edges = [line.edges for line in lines]
    shared = shared_blocks(intervals_of_line, edges, blocks[tile].ravel(), vertex_of_tile, buses.tiles(num_tiles))
    arriving = fragments - local_fragments
    return Traffic(remote, sent, arriving, receives, sends, local, local_fragments, shared, *rearranged)


def _by_tile(values: np.ndarray, tile: np.ndarray, num_tiles: int) -> np.ndarray:
    """Scatter values of vertices or blocks, each on a tile of its own, to int64[num_tiles]."""
    by_tile = np.zeros(num_tiles, np.int64)
    by_tile[tile.ravel()] = np.broadcast_to(values, tile.shape).ravel()
    return by_tile


def _over_blocks(per_line: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Shape one vector a line so that all broadcast to the grid of blocks of the mapping."""
    return [v.reshape([-1 if a == b else 1 for b in range(len(per_line))]) for a, v in enumerate(per_line)]


def _needed_by_any(lines: Sequence[Line]) -> np.ndarray:
    """Count the elements of each block of the mapping that some vertex needs."""
    return _product(_over_blocks([line.needed for line in lines])).ravel()


def _needed_fragments(lines: Sequence[Line]) -> np.ndarray:
    """Count the fragments of each block of the mapping that some vertex needs, those of one start once."""
    tallies = []
    for line in lines:
        overlap = line.overlap
        used = overlap.count > 0
        first = overlap.first[used]
        blocks = len(line.block_size)
        # Intervals start in their first block, each at an index of its own, and continue at the start of the others.
        starts = np.unique(np.broadcast_to(line.start, overlap.count.shape)[used])
        at_edge = np.searchsorted(starts, line.edges[:-1], "right") > np.searchsorted(starts, line.edges[:-1])
        begins = np.bincount(np.searchsorted(line.edges, starts, side="right") - 1, minlength=blocks)[:blocks]
        change = np.bincount(first + 1, minlength=blocks + 1) - np.bincount(
            (overlap.first + overlap.count)[used], minlength=blocks + 1
        )
        continues = np.zeros(blocks, bool)
        continues[overlap.filled] = np.cumsum(change)[: len(overlap.filled)] > 0
        is_full = np.zeros(blocks, np.int64)
        is_full[overlap.filled[overlap.first[overlap.is_block]]] = 1
        tallies.append((begins + (continues & ~at_edge), is_full, line.needed))
    starts_of_line, full_of_line, indices_of_line = (_over_blocks(column) for column in zip(*tallies, strict=True))
    steps = [line.step for line in lines]
    rows = zip(starts_of_line, full_of_line, indices_of_line, steps, strict=True)
    return _count_fragments([Tally(*row) for row in rows]).ravel()


def _needed_locally_only(lines: Sequence[Line], local: _Local) -> np.ndarray:
    """Count the elements on the tile of each vertex that this vertex needs and no other."""
    sums = []
    for line, (low, high) in zip(lines, local.ranges, strict=True):
        alone = line.cover.depth == 1
        sums.append(line.cover.sums_below(alone, high) - line.cover.sums_below(alone, low))
    return np.where(local.elements > 0, _product(sums), 0)


def _arriving_counts(lines: Sequence[Line], copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Count elements and fragments that vertices write to each block of the mapping."""
    tallies = []
    for line in lines:
        overlap = line.overlap
        blocks = len(line.block_size)
        used = overlap.count > 0
        first = overlap.first[used]
        end = (overlap.first + overlap.count)[used]
        # Blocks overlapped are ranges of numbers: count their starts less their ends, and accumulate.
        change = np.bincount(first, minlength=blocks + 1) - np.bincount(end, minlength=blocks + 1)
        overlaps = np.zeros(blocks, np.int64)
        overlaps[overlap.filled] = np.cumsum(change)[: len(overlap.filled)]
        full_blocks = np.bincount(overlap.filled[overlap.first[overlap.is_block]], minlength=blocks)
        indices = np.diff(line.cover.sums_below(line.cover.depth, line.edges))
        tallies.append((overlaps, full_blocks, indices))
    overlaps_of_line, full_of_line, all_indices = (_over_blocks(column) for column in zip(*tallies, strict=True))
    steps = [line.step for line in lines]
    fragments = _count_fragments(
        [Tally(*row) for row in zip(overlaps_of_line, full_of_line, all_indices, steps, strict=True)]
    )
    return copies * _product(all_indices).ravel(), copies * fragments.ravel()
