"""Elements and contiguous runs of an operand that a block needs, has on its own tile, and shares with tiles of its bus.

Affine maps lead from the index space of an operation to the dimensions of a field, and back. A block reads everything
from its first to its last element, also with a stride.

Input: spans of a field that the operation maps to its readers, and candidate grids, all at once.
Source: the rules of `ipujax.runtime.exchange.blocks` for runs, of `exchange.shared_bus` for buses, of
`place.place_operand` for mappings.
Limits: one typical block a grid; the tiles of a grid are numbered in row-major order, as by `Grids.placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ipujax.lowering.layout.grids import Grids, total_elements
from ipujax.runtime.target import Target


@dataclass(frozen=True, slots=True)
class Span:
    """Map from the index space to one dimension of a field: point i reads from (stride · i + offset) / divisor on."""

    axis: int | None  # dimension of the index space, None for a dimension that every block reads completely
    extent: int  # elements of the field's dimension
    stride: int = 1  # distance between the first elements of two neighbouring points, in units of 1 / divisor
    reach: int = 1  # elements a point reads, in units of the stride
    offset: int = 0  # position of the first point
    divisor: int = 1  # units to an element of the field

    @property
    def has_halo(self) -> bool:
        """True if neighbouring blocks read the same elements."""
        return self.axis is not None and self.reach > self.stride

    def skips_elements(self, grids: Grids) -> np.ndarray:
        """True if the blocks of a grid together leave out elements of the field's dimension: bool[candidates]."""
        if self.axis is None:
            return np.zeros(grids.blocks.shape[1:], bool)
        last = self.stride * (grids.shape[self.axis] - 1) + self.reach - 1 + self.offset
        # Elements before the first or after the last point; between points where the stride skips some.
        misses_ends = self.offset > 0 or last // self.divisor < self.extent - 1
        return misses_ends | ((self.reach < self.stride) & (grids.blocks[self.axis] > 1))

    def lengths(self, block: np.ndarray) -> np.ndarray:
        """Upper bound of the elements that blocks of some lengths of the index space read."""
        if self.axis is None:
            return np.asarray(self.extent)
        return np.minimum(self.extent, (self.stride * (block[self.axis] - 1) + self.reach - 1) // self.divisor + 1)

    def cuts(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts of the field's dimension where blocks of the index space begin to read, and the block of each part."""
        return _clipped_cuts(-(-(self.stride * cuts + self.offset) // self.divisor), self.extent)

    def index_cuts(self, cuts: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Cuts of the index space where its points begin to read in another block, and the block of each part."""
        return _clipped_cuts(-(-(cuts * self.divisor - self.offset) // self.stride), extent)


def _clipped_cuts(bounds: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts from 0 to `extent` at bounds that may be outside, and the block of each part between two cuts."""
    clipped = np.clip(bounds, 0, extent)
    # The first and the last block also have what no block reads before and after them.
    clipped[0] = 0
    clipped[-1] = extent
    # Blocks that read nothing of the dimension disappear.
    blocks = np.flatnonzero(np.diff(clipped) > 0)
    return np.append(clipped[blocks], extent) if blocks.size else np.zeros(1, np.int64), blocks


def spans(shape: Sequence[int], dims: Sequence[int | None]) -> tuple[Span, ...]:
    """Spans of a tensor whose dimensions run along dimensions of the index space; None for one that is not cut."""
    return tuple(Span(dim, n) for n, dim in zip(shape, dims, strict=True))


# A block with several readers is mapped to one of them up to this size (assumed: 1/40 of a tile), else shared out.
MOST_SHARED_BYTES = 16 * 1024


class Common(NamedTuple):
    """Elements of a block that all tiles of a bus receive, int64[candidates]."""

    on_bus_of_owner: np.ndarray
    on_other_bus: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Shares:
    """Division of blocks of a field among the tiles that read them, as `place.place_operand` does it.

    Arrays are int64[candidates], for the longest block of each grid.
    """

    users: np.ndarray  # tiles that read a block
    parts: np.ndarray  # shares of a block, 1 where one tile has it all
    dim: np.ndarray  # dimension that is cut into shares, −1 for none
    shortest: np.ndarray  # elements of the smallest share
    longest: np.ndarray  # elements of the largest share
    in_row: np.ndarray  # consecutive tiles, from a multiple of this number on, that read one block

    def are_by_bus(self, target: Target) -> np.ndarray:
        """True if all tiles of an exchange bus read one block."""
        return self.in_row % target.tiles_per_exchange_bus == 0

    def common(self, needed: np.ndarray, target: Target) -> Common:
        """Elements that all tiles of an exchange bus receive of a block with `needed` elements; 0 unless all read it.

        They arrive once for all of these tiles. Results are for the bus of the block's owner, and for any other.
        Readers of a block are consecutive tiles, and so fill whole buses; share k of a block is on its k-th reader.
        """
        tiles_per_bus = target.tiles_per_exchange_bus
        # Elements that tiles of the bus have already: nobody receives those from another bus.
        present = np.select(
            [
                # One tile has the block: on a bus of its own if there are more readers than that bus has tiles.
                (self.parts == 1) & (self.users > tiles_per_bus),
                self.parts == 1,
                # Each reader has a part.
                self.parts == self.users,
            ],
            [0, needed, self.shortest + (tiles_per_bus - 1) * self.longest],
            # Only the first readers have a share: the buses of the last ones have none. The bus in between decides,
            # whose first tiles have one; 0 where the shares end with a bus.
            self.parts % tiles_per_bus * self.longest,
        )
        shared = np.where(self.are_by_bus(target), np.maximum(needed - present, 0), 0)
        return Common(np.where(self.parts > 1, shared, 0), shared)


def shares_of(spans: Sequence[Span], grids: Grids, element_bytes: int) -> Shares:
    """Shares of the longest blocks of a field among their readers, for each grid of the index space.

    A block of more than `MOST_SHARED_BYTES` is cut along its outermost dimension that can be cut, others are not.
    `spans` map the index space to each dimension of the field.
    """
    axes = [span.axis for span in spans]
    # Blocks that differ along these dimensions alone read the same elements.
    unfollowed = [d for d in range(len(grids.shape)) if d not in axes]
    users = np.prod(grids.blocks[unfollowed], axis=0, dtype=np.int64)
    lengths = [span.lengths(grids.lengths) for span in spans]
    size = np.broadcast_to(total_elements(lengths), users.shape)
    parts = np.ones_like(users)
    dim = np.full_like(users, -1)  # dimension that is cut, −1 for none
    length_along_dim = np.ones_like(users)
    for number, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        is_cut = (dim < 0) & (length > 1) & (users > 1) & (size * element_bytes > MOST_SHARED_BYTES)
        # The shortest block has to have an element for each part.
        fewest = np.array(span.extent) if span.axis is None else span.extent // grids.blocks[span.axis]
        parts = np.where(is_cut, np.minimum(users, np.maximum(fewest, 1)), parts)
        length_along_dim = np.where(is_cut, length, length_along_dim)
        dim = np.where(is_cut, number, dim)
    elements_of_slice = size // length_along_dim  # at one index of the dimension that is cut
    shortest = length_along_dim // parts * elements_of_slice
    longest = -(-length_along_dim // parts) * elements_of_slice
    return Shares(users, parts, dim, shortest, longest, _consecutive_readers(grids, unfollowed))


def _consecutive_readers(grids: Grids, unfollowed: Sequence[int]) -> np.ndarray:
    """Number of consecutive tiles that read one block of a field, for each grid.

    They are those along the innermost dimensions, as long as these are `unfollowed`: no dimension of the field.
    Tiles are numbered in row-major order, so innermost dimensions vary first; dimensions of one block do not count.
    """
    tiles = np.ones(grids.blocks.shape[1:], np.int64)
    reads_one_block = np.ones(grids.blocks.shape[1:], bool)
    for d in reversed(range(len(grids.shape))):
        reads_one_block = reads_one_block & ((grids.blocks[d] == 1) | (d in unfollowed))
        tiles = np.where(reads_one_block, tiles * grids.blocks[d], tiles)
    return tiles


def fewest_runs(spans: Sequence[Span], block: np.ndarray) -> np.ndarray:
    """Lower bound of the contiguous runs of a field that the longest block reads."""
    total = np.ones((), np.int64)
    runs = np.ones(block.shape[1:], np.int64)
    for span in spans:
        length = span.lengths(block)
        # From outer to inner: the innermost dimension that is read in part ends the runs.
        runs = np.where(length < span.extent, total, runs)
        total = total * length
    return runs


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Elements of a field that a block reads, and those of them on its own tile; arrays are int64[candidates]."""

    needed: np.ndarray  # elements read
    own: np.ndarray  # elements of these on the tile
    runs: np.ndarray  # pieces that are contiguous in the field's memory and in the block
    own_runs: np.ndarray  # pieces of these on the tile


def part_of_block(
    spans: Sequence[Span], grids: Grids, block: np.ndarray, shares: Shares, *, has_neighbours: bool
) -> Part:
    """Elements and runs that a block reads of a field that is mapped to its readers.

    Args:
        spans: map from the index space to each dimension of the field.
        grids: candidate grids.
        block: lengths of a block of each grid along the dimensions of the index space, int64[dimensions, candidates].
        shares: division of the field's blocks among their readers.
        has_neighbours: whether the block reads a halo that another tile has. A block has the first elements that it
            reads, so that its halo is behind them.
    """
    ones = np.ones(grids.blocks.shape[1:], np.int64)
    needed = own_elements = runs = own_runs = ones
    # From inner to outer dimensions: the contiguous runs that they span. As long as a tile owns all that it reads of
    # each inner dimension, and skips nothing, its part is one run, and a run ends only where the owner changes; from
    # the first dimension on of which it owns less, each index of an outer dimension begins a run.
    is_contiguous = ones.astype(bool)
    for dim, span in reversed(list(enumerate(spans))):
        length = own_length = span.lengths(block)
        if has_neighbours and span.has_halo and span.axis is not None:
            blocks = grids.blocks[span.axis]
            # Elements up to those at which the next block begins to read.
            own_length = np.minimum(length, -(-span.stride * block[span.axis] // span.divisor))
            # Of two blocks the first one stands for both: the halo before it is padding, which is neither read nor
            # owned, and the halo behind it belongs to the second.
            padding = np.where(blocks == 2, max(0, -span.offset), 0)
            length = np.maximum(length - padding, 1)
            own_length = np.maximum(own_length - padding, 1)
            own_length = np.where(blocks == 1, length, np.minimum(own_length, length))
        # Tiles that have a part of this dimension's range: each begins a run of its own.
        owners = -(-length // own_length)
        is_shared = shares.dim == dim
        # Cut into shares along this dimension: the tile has one of them.
        own_length = np.where(is_shared, -(-length // shares.parts), own_length)
        owners = np.where(is_shared, shares.parts, owners)
        runs = np.where(is_contiguous, owners, runs * length)
        own_runs = np.where(is_contiguous, 1, own_runs * own_length)
        is_contiguous = is_contiguous & (own_length == length) & ~span.skips_elements(grids)
        needed = needed * length
        own_elements = own_elements * own_length
    return Part(needed, own_elements, runs, own_runs)
