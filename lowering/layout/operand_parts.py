"""What a block of an operation needs of an operand, what of it lies on its own tile, and what the tiles of a bus share.

Input: the spans of a field that the operation places where it is read, and candidate grids. Output: elements and
contiguous runs, for all grids at once.

Source: the rules of `ipujax.runtime.exchange.boxes` for runs, of `exchange.shared_bus` for buses, of
`place.place_operand` for places.
Limits: one typical block a grid; the tiles of a grid are numbered in row-major order, as `Grids.placement` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.grids import Grids
from ipujax.lowering.layout.index_map import Span
from ipujax.runtime.target import Target

# A block that many tiles read is placed on one of them up to this size (assumed: 1/40 of a tile), else shared out.
MOST_SHARED_BYTES = 16 * 1024


@dataclass(frozen=True, eq=False, slots=True)
class Shares:
    """How blocks of a field that several tiles read are shared out among these, as `place.place_operand` does it.

    Args:
        users: tiles that read a block.
        parts: shares of a block, 1 where one tile has it all.
        dim: the dimension that is cut in shares, −1 for none.
        shortest: elements of the smallest share.
        longest: elements of the largest share.
        in_row: tiles with numbers in a row, from a multiple of this on, that read the same block.
    """

    users: np.ndarray
    parts: np.ndarray
    dim: np.ndarray
    shortest: np.ndarray
    longest: np.ndarray
    in_row: np.ndarray

    def by_bus(self, target: Target) -> np.ndarray:
        """Whether all tiles of an exchange bus read the same block."""
        return self.in_row % target.tiles_per_exchange_bus == 0

    def common(self, needed: np.ndarray, target: Target) -> tuple[np.ndarray, np.ndarray]:
        """Elements of a block that all tiles of a bus receive: beside the tile that has all of it, and elsewhere."""
        width = target.tiles_per_exchange_bus
        held = np.where(self.parts < self.users, self.parts % width * self.longest, 0)
        held = np.where(self.parts == self.users, self.shortest + (width - 1) * self.longest, held)
        held = np.where(self.parts > 1, held, np.where(self.users > width, 0, needed))
        shared = np.where(self.by_bus(target), np.maximum(needed - held, 0), 0)
        return np.where(self.parts > 1, shared, 0), shared


def shares_of(spans: Sequence[Span], grids: Grids, width: int) -> Shares:
    """The shares of the longest blocks of a field.

    Args:
        spans: how the field follows the index space.
        grids: candidate grids of that.
        width: bytes of an element.
    """
    axes = [span.axis for span in spans]
    rest = [d for d in range(len(grids.shape)) if d not in axes]
    users = np.prod(grids.blocks[rest], axis=0, dtype=np.int64)
    in_row, alike = np.ones_like(users), np.ones_like(users, bool)
    for d in reversed(range(len(grids.shape))):
        alike = alike & ((grids.blocks[d] == 1) | (d in rest))
        in_row = np.where(alike, in_row * grids.blocks[d], in_row)
    lengths = [span.lengths(grids.lengths) for span in spans]
    size = np.broadcast_to(total_elements(lengths), users.shape)
    parts, dim, extent = np.ones_like(users), np.full_like(users, -1), np.ones_like(users)
    for number, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        chosen = (dim < 0) & (length > 1) & (users > 1) & (size * width > MOST_SHARED_BYTES)
        fewest = np.array(span.extent) if span.axis is None else span.extent // grids.blocks[span.axis]
        parts = np.where(chosen, np.minimum(users, np.maximum(fewest, 1)), parts)
        extent = np.where(chosen, length, extent)
        dim = np.where(chosen, number, dim)
    inner = size // extent
    return Shares(users, parts, dim, extent // parts * inner, -(-extent // parts) * inner, in_row)


def fewest_runs(spans: Sequence[Span], block: np.ndarray) -> np.ndarray:
    """Runs of contiguous elements of a field that the longest block reads, at least."""
    total, runs = np.ones((), np.int64), np.ones(block.shape[1:], np.int64)
    for span in spans:
        length = span.lengths(block)
        runs = np.where(length < span.extent, total, runs)
        total = total * length
    return runs


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """What a block reads of a field, and what of that lies on its own tile.

    Args:
        needed: elements read.
        own: elements of these on the tile.
        runs: pieces that are contiguous where they lie and where they are read.
        own_runs: those of them on the tile.
    """

    needed: np.ndarray
    own: np.ndarray
    runs: np.ndarray
    own_runs: np.ndarray


def part_of(spans: Sequence[Span], grids: Grids, block: np.ndarray, halos: bool, shares: Shares) -> Part:
    """What a block of some lengths reads of a field that lies where it is read.

    A block has what it reads first, so that halos are behind it. An element ends a run unless all that is further in is
    a whole block.

    Args:
        spans: how the field follows the index space.
        grids: candidate grids of that.
        block: lengths of the block on each grid, int64[dimensions, candidates].
        halos: whether it has neighbours: an inner block where there are three along a dimension, else the first.
        shares: how blocks that several tiles read are shared out.
    """
    one = np.ones(grids.blocks.shape[1:], np.int64)
    needed, own, whole, broken, own_broken = one, one, one, 0 * one, 0 * one
    for number, span in reversed(list(enumerate(spans))):
        length = part = span.lengths(block)
        if halos and span.has_halo and span.axis is not None:
            blocks = grids.blocks[span.axis]
            part = np.minimum(length, -(-span.stride * block[span.axis] // span.divisor))
            padding = np.where(blocks == 2, max(0, -span.offset), 0)
            length, part = np.maximum(length - padding, 1), np.maximum(part - padding, 1)
            part = np.where(blocks == 1, length, np.minimum(part, length))
        met = -(-length // part)
        shared = shares.dim == number
        part, met = np.where(shared, -(-length // shares.parts), part), np.where(shared, shares.parts, met)
        all_of_one = (part == length) & ~span.leaves_some(grids)
        broken = (met - all_of_one) * whole + length * broken
        own_broken = (1 - all_of_one) * whole + part * own_broken
        needed, own, whole = needed * length, own * part, whole * all_of_one
    return Part(needed, own, whole + broken, whole + own_broken)
