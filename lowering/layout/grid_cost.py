"""Cost of an operation over an index space on a grid of blocks, for all candidate grids at once.

Input: a codelet, the map from the index space to each of its fields, and the sources of operands. Output: cycles:
the codelet's formula on the longest blocks, the exchange of the busiest tile, the sync. An operand that the
operation maps itself is on the tiles that read it: only halos and blocks with several readers move. The cost does
not depend on the target's number of tiles; without halos and operands from elsewhere it equals the cost model's.
Limits: an operand from elsewhere counts as received completely, in as few fragments as possible; halos are those
of a typical block. Where shares of a block are uneven, or a bus spans two blocks, the cost was up to 4 % lower on
the grids that were compared. Grids start at tile 0, though small ones may start in a bus (`mapping.first_tile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.grids import Grids
from ipujax.lowering.layout.operand_parts import (
    MOST_SHARED_BYTES as MOST_SHARED_BYTES,
    Span as Span,
    fewest_runs,
    part_of,
    shares_of,
    spans as spans,
)
from ipujax.runtime.exchange import (
    atom_bytes_of,
    copy_cycles,
    exchange_cycles,
    receive_cycles,
    row_of,
    slow_copy_cycles,
    sync_cycles,
)
from ipujax.runtime.graph import Codelet
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import VECTOR_BYTES, element_bytes

# Mapping of a field: on the tile that computes it, chosen by this operation, or chosen by an earlier one.
Source = Literal["here", "free", "elsewhere"]


@dataclass(frozen=True, eq=False, slots=True)
class _Arriving:
    """Cycles of receiving one operand."""

    alone: np.ndarray  # of a tile that shares its bus with the tile that has the block
    with_bus: np.ndarray  # of the last tile
    # Cut dimensions of the index space along which tiles read a block that the first of them has, bool[dimensions,
    # candidates]; none where all tiles receive something
    repeats: np.ndarray


@dataclass(frozen=True, slots=True)
class Work:
    """Vertices of an operation, without a placement."""

    codelet: Codelet
    fields: tuple[tuple[Span, ...], ...]  # of each field of the codelet
    sources: tuple[Source, ...]  # of each field of the codelet

    @property
    def is_exact(self) -> bool:
        """True if `cycles` equals the cost model on every grid, up to rounding and to shares of blocks on one bus."""
        read = self.codelet.fields
        halos = any(span.has_halo for spans, f in zip(self.fields, read, strict=True) if f.is_read for span in spans)
        return "elsewhere" not in self.sources and not halos

    def with_free(self, numbers: Sequence[int]) -> Work:
        """Work in which some fields, given by number, are mapped to the tiles that read them."""
        sources = list(self.sources)
        for number in numbers:
            sources[number] = "free"
        return replace(self, sources=tuple(sources))

    def cycles(self, grids: Grids, target: Target) -> np.ndarray:
        """Cycles on each grid, float[candidates]; an estimate where halos are read."""
        inner = self._inner(grids)
        computing = np.maximum(
            self.compute_cycles(grids.lengths, target) + self._copying(grids, grids.lengths, False, target),
            self.compute_cycles(inner, target) + self._copying(grids, inner, True, target),
        )
        exchange = exchange_cycles(self._receiving(grids, inner, target), self._sent_bytes(grids), target)
        return np.broadcast_to(computing + exchange + sync_cycles(1, target), grids.blocks.shape[1:])

    def placed_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes on the fullest tile of the operands that this operation maps, int64[candidates]."""
        total = np.zeros(grids.blocks.shape[1:], np.int64)
        for read, width, source in self._read_fields():
            if source == "free":
                needed = total_elements([span.lengths(grids.lengths) for span in read])
                total = total + needed * width // shares_of(read, grids, width).parts
        return total

    def compute_cycles(self, lengths: np.ndarray, target: Target) -> np.ndarray:
        """Cycles of one vertex on blocks of these lengths of the index space."""
        shapes = [tuple(span.lengths(lengths) for span in field) for field in self.fields]
        return np.ceil(self.codelet.cycles(shapes, target))

    def _inner(self, grids: Grids) -> np.ndarray:
        """Lengths of a large block with neighbours on both sides along dimensions with halos, if there is one."""
        lengths = grids.lengths.copy()
        for d in {span.axis for read in self.fields for span in read if span.axis is not None and span.has_halo}:
            inner = (grids.blocks[d] > 2) & (grids.shape[d] % grids.blocks[d] > 1)
            lengths[d] = np.where(inner, lengths[d], grids.shape[d] // grids.blocks[d])
        return lengths

    def _read_fields(self) -> list[tuple[tuple[Span, ...], int, Source]]:
        """Spans, bytes of an element and source of each field that is read."""
        rows = zip(self.fields, self.codelet.fields, self.sources, strict=True)
        return [(spans, element_bytes(field.dtype), source) for spans, field, source in rows if field.is_read]

    def _copying(self, grids: Grids, block: np.ndarray, halos: bool, target: Target) -> np.ndarray:
        """Cycles of copying a tile's own part of its operands next to the part that arrives."""
        copied, pieces, slow = (np.zeros(grids.blocks.shape[1:], np.int64) for _ in range(3))
        for read, width, source in self._read_fields():
            row = row_of([span.extent for span in read])
            is_fast = atom_bytes_of(row * width) == VECTOR_BYTES
            if source == "elsewhere":
                needed = total_elements([span.lengths(block) for span in read])
                is_scattered = fewest_runs(read, block) > 1
                slow = slow + is_scattered * slow_copy_cycles(row, width, 0 * needed, needed)
                continue
            part = part_of(read, grids, block, halos, shares_of(read, grids, width))
            is_scattered = part.runs > 1
            copied = copied + is_fast * is_scattered * part.own * width
            pieces = pieces + is_fast * is_scattered * part.own_runs
            slow = slow + is_scattered * slow_copy_cycles(row, width, part.own, part.needed - part.own)
        return copy_cycles(copied, pieces, target, slow)

    def _sent_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes the first tile sends: it has the first of all blocks with several readers; without halos."""
        first_lengths = np.array(grids.shape)[:, None] // grids.blocks
        total = np.zeros(grids.blocks.shape[1:], np.int64)
        for read, width, source in self._read_fields():
            shares = shares_of(read, grids, width)
            block = total_elements([span.lengths(first_lengths) for span in read])
            sent = np.where(shares.parts > 1, shares.shortest, np.where(shares.users > 1, block, 0))
            total = total + np.where(source == "elsewhere", 0, sent * width)
        return total

    def _receiving(self, grids: Grids, inner: np.ndarray, target: Target) -> np.ndarray:
        """Cycles in which the slowest tile receives its operands, one after the other."""
        fields = [self._arriving(field, grids, inner, target) for field in self._read_fields()]
        total = sum((field.with_bus for field in fields), np.zeros(grids.blocks.shape[1:], np.int64))
        cut = grids.blocks > 1
        # The dimension along which neighbouring tile numbers differ.
        innermost = cut & (np.cumsum(cut[::-1], axis=0)[::-1] == 1)
        for field in fields:
            other_dims = (cut & ~field.repeats) | innermost
            beside_owner = field.alone
            for other in fields:
                is_receiving = ~other.repeats.any(0) | (other.repeats & other_dims).any(0)
                beside_owner = beside_owner + np.where((other is not field) & is_receiving, other.alone, 0)
            # The slowest is the last tile, or one on the bus of a block's owner: it receives that block
            # alone, though other blocks are its own.
            total = np.where(field.with_bus < field.alone, np.maximum(total, beside_owner), total)
        return total

    def _arriving(
        self, field: tuple[tuple[Span, ...], int, Source], grids: Grids, inner: np.ndarray, target: Target
    ) -> _Arriving:
        """Cycles in which a tile receives one operand: all of it, or the part that its own tile does not have."""
        read, width, source = field
        shares = shares_of(read, grids, width)
        if source == "elsewhere":
            needed = np.broadcast_to(total_elements([span.lengths(grids.lengths) for span in read]), shares.users.shape)
            shared = np.where(shares.by_bus(target), needed, 0)
            cycles = receive_cycles(needed * width, shared * width, fewest_runs(read, grids.lengths), target)
            return _Arriving(cycles, cycles, np.zeros_like(grids.blocks, bool))
        middle = part_of(read, grids, inner, True, shares)
        outer = part_of(read, grids, grids.lengths, False, shares)
        # With as many parts as readers each reader has one part already.
        missing = outer.needed - np.where(shares.parts == shares.users, shares.shortest, 0)
        received = np.where(shares.users == 1, middle.needed - middle.own, missing)
        runs = np.where(shares.users == 1, middle.runs - middle.own_runs, outer.runs)
        runs = np.where(shares.parts > 1, outer.runs - outer.own_runs, runs)
        runs = np.where(received > 0, runs, 0)
        common, with_bus = shares.common(outer.needed, target)
        beside_owner, last = (
            receive_cycles(received * width, part * width, runs, target) for part in (common, with_bus)
        )
        axes = [span.axis for span in read]
        # Along these dimensions all blocks read the same elements of the field.
        unfollowed = np.array([[d not in axes] for d in range(len(grids.shape))], bool).reshape(-1, 1)
        return _Arriving(beside_owner, last, unfollowed & (grids.blocks > 1) & (shares.parts == 1))
