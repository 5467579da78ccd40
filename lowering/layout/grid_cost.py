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
from typing import Literal, NamedTuple

import numpy as np

from ipujax.lowering.layout.grids import Grids, total_elements
from ipujax.lowering.layout.operand_parts import (
    MOST_SHARED_BYTES as MOST_SHARED_BYTES,
    Span as Span,
    fewest_runs,
    part_of_block,
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


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What vertices read or write of a field, for a block of the index space; results are on their tiles.

    Args:
        spans: of each dimension of the field; none for a scalar.
        source: who maps the field.
    """

    spans: tuple[Span, ...]
    source: Source = "here"


class _ReadField(NamedTuple):
    """A field that a vertex reads."""

    spans: tuple[Span, ...]
    element_bytes: int
    source: Source


@dataclass(frozen=True, eq=False, slots=True)
class _Receiving:
    """Cycles in which a tile receives one operand, float[candidates]."""

    beside_owner: np.ndarray  # of a tile on the bus of the tile that has the block
    last_tile: np.ndarray  # of the last tile, far from the tile that has the block
    # Cut dimensions of the index space along which tiles read a block that the first of them has, bool[dimensions,
    # candidates]; none where all tiles receive something
    repeats: np.ndarray


@dataclass(frozen=True, slots=True)
class Work:
    """Vertices of an operation, without a placement."""

    codelet: Codelet
    fields: tuple[FieldUse, ...]  # in the order of the codelet's

    @property
    def is_exact(self) -> bool:
        """True if `cycles` equals the cost model on every grid, up to rounding and to shares of blocks on one bus."""
        has_halos = any(span.has_halo for field in self._read_fields() for span in field.spans)
        has_mapped_fields = any(field.source == "elsewhere" for field in self.fields)
        return not has_mapped_fields and not has_halos

    def with_free(self, numbers: Sequence[int]) -> Work:
        """Work in which some fields, given by number, are mapped to the tiles that read them."""
        fields = list(self.fields)
        for number in numbers:
            fields[number] = replace(fields[number], source="free")
        return replace(self, fields=tuple(fields))

    def cycles(self, grids: Grids, target: Target) -> np.ndarray:
        """Cycles of compute, exchange and sync on each grid of blocks, float[candidates].

        An estimate where blocks read halos, elements of their neighbours: a first block has no halo, an inner one has
        it on both sides, and the slower of them counts.
        """
        inner = self._lengths_of_inner_block(grids)
        computing = np.maximum(
            self._slowest_block_cycles(grids, target)
            + self._copy_cycles(grids, grids.lengths, target, has_neighbours=False),
            self.compute_cycles(inner, target) + self._copy_cycles(grids, inner, target, has_neighbours=True),
        )
        exchange = exchange_cycles(self._receive_cycles(grids, inner, target), self._sent_bytes(grids), target)
        return np.broadcast_to(computing + exchange + sync_cycles(1, target), grids.blocks.shape[1:])

    def placed_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes on the fullest tile of the operands that this operation maps, int64[candidates]."""
        total = np.zeros(grids.blocks.shape[1:], np.int64)
        for field in self._read_fields():
            if field.source == "free":
                needed = total_elements([span.lengths(grids.lengths) for span in field.spans])
                total = total + needed * field.element_bytes // shares_of(field.spans, grids, field.element_bytes).parts
        return total

    def compute_cycles(self, lengths: np.ndarray, target: Target) -> np.ndarray:
        """Cycles of one vertex on blocks of these lengths of the index space."""
        shapes = [tuple(span.lengths(lengths) for span in field.spans) for field in self.fields]
        return np.ceil(self.codelet.cycles(shapes, target))

    def _slowest_block_cycles(self, grids: Grids, target: Target) -> np.ndarray:
        """Cycles of the slowest vertex of each grid: of the longest blocks, or of shorter ones with slow paths.

        Slow paths of repeated operands are left out: a grid does not tell how these are repeated.
        """
        cycles = self.compute_cycles(grids.lengths, target)
        slow_paths = self.codelet.slow_paths
        if slow_paths is None:
            return cycles
        # Blocks of a dimension differ by at most one element: a row may be whole words in one, and not in the next.
        shorter = [
            np.where(np.arange(len(grids.shape))[:, None] == d, grids.shape[d] // grids.blocks, grids.lengths)
            for d in range(len(grids.shape))
        ]
        for lengths in (grids.lengths, *shorter):
            shapes = [tuple(span.lengths(lengths) for span in field.spans) for field in self.fields]
            if of_rows := slow_paths(shapes, [None] * len(self.fields), target):
                slow = sum(path.cycles for path in of_rows)
                cycles = np.maximum(cycles, np.where(slow > 0, self.compute_cycles(lengths, target) + slow, 0))
        return cycles

    def _lengths_of_inner_block(self, grids: Grids) -> np.ndarray:
        """Lengths, int64[dimensions, grids], of the longest block with neighbours on both sides along halos.

        Blocks of a dimension differ by at most one element. If several of three or more are of the longer kind, one of
        these has two neighbours; else only a shorter one may.
        """
        lengths = grids.lengths.copy()
        axes_with_halo = {s.axis for field in self.fields for s in field.spans if s.axis is not None and s.has_halo}
        for d in axes_with_halo:
            # The remainder is the number of longer blocks.
            is_long = (grids.blocks[d] > 2) & (grids.shape[d] % grids.blocks[d] > 1)
            lengths[d] = np.where(is_long, lengths[d], grids.shape[d] // grids.blocks[d])
        return lengths

    def _read_fields(self) -> list[_ReadField]:
        pairs = zip(self.fields, self.codelet.fields, strict=True)
        return [_ReadField(use.spans, element_bytes(field.dtype), use.source) for use, field in pairs if field.is_read]

    def _copy_cycles(self, grids: Grids, block: np.ndarray, target: Target, *, has_neighbours: bool) -> np.ndarray:
        """Cycles of copying a tile's own part of its operands next to the part that arrives, for each grid.

        Args:
            grids: candidate grids.
            block: lengths of the block that the tile computes, int64[dimensions, grids].
            target: the machine.
            has_neighbours: whether the block reads halos.
        """
        # Bytes and pieces that are copied by vectors, and cycles of the others.
        copied, pieces, slow = (np.zeros(grids.blocks.shape[1:], np.int64) for _ in range(3))
        for field in self._read_fields():
            row = row_of([span.extent for span in field.spans])
            is_fast = atom_bytes_of(row * field.element_bytes) == VECTOR_BYTES  # rows are whole vectors
            if field.source == "elsewhere":
                # The whole block arrives. Whole vectors are received in their place; rows that are no whole vectors
                # arrive in a buffer, and are copied from it element by element.
                needed = total_elements([span.lengths(block) for span in field.spans])
                is_scattered = fewest_runs(field.spans, block) > 1
                slow = slow + is_scattered * slow_copy_cycles(row, field.element_bytes, np.zeros_like(needed), needed)
                continue
            shares = shares_of(field.spans, grids, field.element_bytes)
            part = part_of_block(field.spans, grids, block, shares, has_neighbours=has_neighbours)
            is_scattered = part.runs > 1
            copied = copied + is_fast * is_scattered * part.own * field.element_bytes
            pieces = pieces + is_fast * is_scattered * part.own_runs
            slow = slow + is_scattered * slow_copy_cycles(row, field.element_bytes, part.own, part.needed - part.own)
        return copy_cycles(copied, pieces, target, slow)

    def _sent_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes that the first tile sends, for each grid: it has the first of all blocks with several readers.

        Halos are left out. A block in parts is sent by all readers, each its part; else the first one sends all of it.
        """
        # [dimensions, grids]: the first of the blocks of a dimension is one of the shorter ones.
        first_lengths = np.array(grids.shape)[:, None] // grids.blocks
        total = np.zeros(grids.blocks.shape[1:], np.int64)
        for field in self._read_fields():
            if field.source == "elsewhere":
                continue
            shares = shares_of(field.spans, grids, field.element_bytes)
            block = total_elements([span.lengths(first_lengths) for span in field.spans])
            total = total + field.element_bytes * np.select(
                [shares.parts > 1, shares.users > 1], [shares.shortest, block], 0
            )
        return total

    def _receive_cycles(self, grids: Grids, inner: np.ndarray, target: Target) -> np.ndarray:
        """Cycles in which the slowest tile receives its operands, one after the other.

        Two tiles may be the slowest. The last one owns no block of those that several tiles read: it receives all its
        operands, and shares each with the tiles of its bus. A tile on the bus of the owner of one block cannot share
        that one, as the owner receives nothing: it takes longer, but may own its other blocks.

        Args:
            grids: candidate grids.
            inner: lengths of a block with halos on both sides.
            target: the machine.
        """
        fields = [
            _from_elsewhere(field, grids, target)
            if field.source == "elsewhere"
            else _from_readers(field, grids, inner, target)
            for field in self._read_fields()
        ]
        total = sum((field.last_tile for field in fields), np.zeros(grids.blocks.shape[1:], np.int64))
        is_cut = grids.blocks > 1
        # The dimension along which neighbouring tile numbers differ, so tiles of one bus.
        # It is the innermost one that is cut: none from it on but itself.
        is_innermost = is_cut & (np.cumsum(is_cut[::-1], axis=0)[::-1] == 1)
        for field in fields:
            # The owner of a block is the first of its readers: index 0 along the dimensions in which the block repeats.
            # A tile on its bus has index 0 there as well, but any index along other cut dimensions and the innermost
            # one.
            free_dims = (is_cut & ~field.repeats) | is_innermost
            beside_owner = field.beside_owner
            for other in fields:
                # It receives another field's block too, if its own index may be other than that of the block's owner.
                is_receiving = ~other.repeats.any(0) | (other.repeats & free_dims).any(0)
                beside_owner = beside_owner + np.where((other is not field) & is_receiving, other.beside_owner, 0)
            is_slower = field.last_tile < field.beside_owner
            total = np.where(is_slower, np.maximum(total, beside_owner), total)
        return total


def _from_elsewhere(field: _ReadField, grids: Grids, target: Target) -> _Receiving:
    """Cycles of receiving a whole block of an operand that an earlier operation has mapped."""
    spans, width, _ = field
    shares = shares_of(spans, grids, width)
    needed = np.broadcast_to(total_elements([span.lengths(grids.lengths) for span in spans]), shares.users.shape)
    common = np.where(shares.are_by_bus(target), needed, 0)
    cycles = receive_cycles(needed * width, common * width, fewest_runs(spans, grids.lengths), target)
    # No tile has a part of it, so all receive as much.
    return _Receiving(beside_owner=cycles, last_tile=cycles, repeats=np.zeros_like(grids.blocks, bool))


def _from_readers(field: _ReadField, grids: Grids, inner: np.ndarray, target: Target) -> _Receiving:
    """Cycles of receiving the part that a tile does not have of an operand that is mapped to its readers.

        readers of a block   parts of it    a tile receives
        one                  one            the halo of its block
        several              one            the block; its owner nothing
        several              as many        the other parts
        several              fewer          the block: the slowest tile has no part

    Args:
        field: the operand.
        grids: candidate grids.
        inner: lengths of a block that has halos on both sides.
        target: machine whose rates count.
    """
    spans, width, _ = field
    shares = shares_of(spans, grids, width)
    haloed = part_of_block(spans, grids, inner, shares, has_neighbours=True)
    longest = part_of_block(spans, grids, grids.lengths, shares, has_neighbours=False)
    has_one_reader = shares.users == 1
    received = np.select(
        [has_one_reader, shares.parts == shares.users],
        [haloed.needed - haloed.own, longest.needed - shares.shortest],
        longest.needed,
    )
    runs = np.select(
        [received <= 0, has_one_reader, shares.parts > 1],
        [0, haloed.runs - haloed.own_runs, longest.runs - longest.own_runs],
        longest.runs,
    )
    # Elements that all tiles of a bus read arrive once for all of them.
    common = shares.common(longest.needed, target)
    beside_owner = receive_cycles(received * width, common.on_bus_of_owner * width, runs, target)
    last_tile = receive_cycles(received * width, common.on_other_bus * width, runs, target)
    axes = [span.axis for span in spans]
    # Along these dimensions all blocks read the same elements of the field.
    is_unfollowed = np.array([[d not in axes] for d in range(len(grids.shape))], bool).reshape(-1, 1)
    return _Receiving(beside_owner, last_tile, is_unfollowed & (grids.blocks > 1) & (shares.parts == 1))
