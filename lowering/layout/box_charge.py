"""What an operation over an index space is charged on a grid of blocks, for all candidate grids at once.

Input: a codelet, how the dimensions of each of its fields follow the index space, and where operands come from. Output:
cycles: the codelet's formula on the longest blocks, what the busiest tile receives, the sync. An operand the operation
places itself lies where it is read, so that only halos and what several tiles read is received.

The charge of a grid does not depend on how many tiles the target has. Without halos and without operands that lie
elsewhere it is what the cost model charges.
Limits: of an operand that lies elsewhere all is taken to be received, in as few fragments as can be; halos are those of
a typical block. Where several tiles read a block that is shared out unevenly, or some buses reach from one block to the
next, the charge was up to 4 % less on the grids that were compared. Grids are taken to start at a tile 0, small ones
may start in the middle of a bus (`mapping.first_tile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.grids import Grids
from ipujax.lowering.layout.index_map import Span as Span, spans as spans
from ipujax.lowering.layout.operand_parts import MOST_SHARED_BYTES as MOST_SHARED_BYTES, fewest_runs, part_of, shares_of
from ipujax.runtime.exchange import copy_cycles, exchange_cycles, receive_cycles
from ipujax.runtime.graph import Codelet
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes

# Where a field lies: a result where it is computed, an operand this operation places, one that lies somewhere.
Source = Literal["here", "free", "elsewhere"]


@dataclass(frozen=True, eq=False, slots=True)
class _Arriving:
    """Cycles in which tiles receive one operand.

    Args:
        alone: of a tile that shares its bus with the tile that has the block.
        with_bus: of the last tile.
        repeats: the cut dimensions of the index space along which tiles read a block that the first of them has,
            bool[dimensions, candidates]; none where all tiles receive something.
    """

    alone: np.ndarray
    with_bus: np.ndarray
    repeats: np.ndarray


@dataclass(frozen=True, slots=True)
class Work:
    """What the vertices of an operation do.

    Args:
        codelet: what they run.
        fields: the spans of each of its fields.
        sources: where each of its fields lies.
    """

    codelet: Codelet
    fields: tuple[tuple[Span, ...], ...]
    sources: tuple[Source, ...]

    @property
    def is_exact(self) -> bool:
        """Whether `cycles` is what is charged, whatever the grid.

        Up to rounding, and what tiles of one exchange bus receive together of blocks that several tiles read.
        """
        read = self.codelet.fields
        halos = any(span.has_halo for spans, f in zip(self.fields, read, strict=True) if f.is_read for span in spans)
        return "elsewhere" not in self.sources and not halos

    def with_free(self, numbers: Sequence[int]) -> Work:
        """The same work if some fields, given by number, lie where they are read."""
        here = list(self.sources)
        for number in numbers:
            here[number] = "free"
        return replace(self, sources=tuple(here))

    def cycles(self, grids: Grids, target: Target) -> np.ndarray:
        """Cycles on each grid, float[candidates]; about these where halos are read."""
        inner = self._inner(grids)
        computing = np.maximum(
            self.compute_cycles(grids.lengths, target) + self._copying(grids, grids.lengths, False, target),
            self.compute_cycles(inner, target) + self._copying(grids, inner, True, target),
        )
        exchange = exchange_cycles(self._receiving(grids, inner, target), self._sent_bytes(grids), target)
        return np.broadcast_to(computing + exchange + target.internal_sync_cycles, grids.blocks.shape[1:])

    def placed_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes that the fullest tile holds of the operands that this operation places, int64[candidates]."""
        total = np.zeros(grids.blocks.shape[1:], np.int64)
        for read, width, source in self._read():
            if source == "free":
                needed = total_elements([span.lengths(grids.lengths) for span in read])
                total = total + needed * width // shares_of(read, grids, width).parts
        return total

    def compute_cycles(self, lengths: np.ndarray, target: Target) -> np.ndarray:
        """Cycles of one vertex on blocks of some lengths of the index space."""
        shapes = [tuple(span.lengths(lengths) for span in field) for field in self.fields]
        return np.ceil(self.codelet.cycles(shapes, target))

    def _inner(self, grids: Grids) -> np.ndarray:
        """Lengths of a large block that has neighbours on both sides along dimensions with halos, if there are any."""
        lengths = grids.lengths.copy()
        for d in {span.axis for read in self.fields for span in read if span.axis is not None and span.has_halo}:
            inner = (grids.blocks[d] > 2) & (grids.shape[d] % grids.blocks[d] > 1)
            lengths[d] = np.where(inner, lengths[d], grids.shape[d] // grids.blocks[d])
        return lengths

    def _read(self) -> list[tuple[tuple[Span, ...], int, Source]]:
        """The spans, the bytes of an element and the source of each field that is read."""
        rows = zip(self.fields, self.codelet.fields, self.sources, strict=True)
        return [(spans, element_bytes(field.dtype), source) for spans, field, source in rows if field.is_read]

    def _copying(self, grids: Grids, block: np.ndarray, halos: bool, target: Target) -> np.ndarray:
        """Cycles in which a tile puts what it has itself of its operands in one piece, with what arrives."""
        copied, pieces = (np.zeros(grids.blocks.shape[1:], np.int64) for _ in range(2))
        for read, width, source in self._read():
            if source == "elsewhere":
                continue
            part = part_of(read, grids, block, halos, shares_of(read, grids, width))
            copied = copied + np.where(part.runs > 1, part.own * width, 0)
            pieces = pieces + np.where(part.runs > 1, part.own_runs, 0)
        return copy_cycles(copied, pieces, target)

    def _sent_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes the first tile sends, which has the first of all blocks that several tiles read; halos not counted."""
        first, total = np.array(grids.shape)[:, None] // grids.blocks, np.zeros(grids.blocks.shape[1:], np.int64)
        for read, width, source in self._read():
            shares = shares_of(read, grids, width)
            whole = total_elements([span.lengths(first) for span in read])
            sent = np.where(shares.parts > 1, shares.shortest, np.where(shares.users > 1, whole, 0))
            total = total + np.where(source == "elsewhere", 0, sent * width)
        return total

    def _receiving(self, grids: Grids, inner: np.ndarray, target: Target) -> np.ndarray:
        """Cycles in which a tile receives its operands, one after the other.

        The slowest tile is the last one, or one that shares its bus with the tile that has a whole block: that receives
        the block alone, but has others itself.
        """
        fields = [self._arriving(field, grids, inner, target) for field in self._read()]
        total = sum((field.with_bus for field in fields), np.zeros(grids.blocks.shape[1:], np.int64))
        cut = grids.blocks > 1
        innermost = cut & (np.cumsum(cut[::-1], axis=0)[::-1] == 1)  # the last dimension that is cut
        for field in fields:
            elsewhere = (cut & ~field.repeats) | innermost
            beside = field.alone
            for other in fields:
                reached = ~other.repeats.any(0) | (other.repeats & elsewhere).any(0)
                beside = beside + np.where((other is not field) & reached, other.alone, 0)
            total = np.where(field.with_bus < field.alone, np.maximum(total, beside), total)
        return total

    def _arriving(
        self, field: tuple[tuple[Span, ...], int, Source], grids: Grids, inner: np.ndarray, target: Target
    ) -> _Arriving:
        read, width, source = field
        shares = shares_of(read, grids, width)
        if source == "elsewhere":
            needed = np.broadcast_to(total_elements([span.lengths(grids.lengths) for span in read]), shares.users.shape)
            shared = np.where(shares.by_bus(target), needed, 0)
            cycles = receive_cycles(needed * width, shared * width, fewest_runs(read, grids.lengths), target)
            return _Arriving(cycles, cycles, np.zeros_like(grids.blocks, bool))
        alone = part_of(read, grids, inner, True, shares)
        given = part_of(read, grids, grids.lengths, False, shares)
        lacking = given.needed - np.where(shares.parts == shares.users, shares.shortest, 0)
        received = np.where(shares.users == 1, alone.needed - alone.own, lacking)
        runs = np.where(shares.users == 1, alone.runs - alone.own_runs, given.runs)
        runs = np.where(shares.parts > 1, given.runs - given.own_runs, runs)
        runs = np.where(received > 0, runs, 0)
        common, with_bus = shares.common(given.needed, target)
        beside, last = (receive_cycles(received * width, part * width, runs, target) for part in (common, with_bus))
        axes = [span.axis for span in read]
        rest = np.array([[d not in axes] for d in range(len(grids.shape))], bool).reshape(-1, 1)
        return _Arriving(beside, last, rest & (grids.blocks > 1) & (shares.parts == 1))
