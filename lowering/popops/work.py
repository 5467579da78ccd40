"""What an operation over an index space is charged on a grid of blocks, for all candidate grids at once.

Input: a codelet, how the dimensions of each of its fields follow the index space, and where operands come from. Output:
cycles: the codelet's formula on the longest blocks, what the busiest tile receives, the sync. An operand the operation
places itself lies where it is read, so that only halos and what several tiles read is received.

The charge of a grid does not depend on how many tiles the target has. Without halos and without operands that lie
elsewhere it is what the cost model charges.
Limits: of an operand that lies elsewhere all is taken to be received, in as few fragments as can be; halos are those of
a typical block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ipujax.lowering.popops.elementwise_cycles import total_elements
from ipujax.lowering.poputil.grids import Grids
from ipujax.runtime.codelet import Codelet
from ipujax.runtime.target import Target
from ipujax.runtime.variable import element_bytes

# A block that many tiles read is placed on one of them up to this size (assumed: 1/40 of a tile), else shared out.
MOST_SHARED_BYTES = 16 * 1024
# Where a field lies: a result where it is computed, an operand this operation places, one that lies somewhere.
Source = Literal["here", "free", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Span:
    """How one dimension of a field follows the index space: point i reads from (stride · i + offset) / divisor on.

    Args:
        axis: dimension of the index space, None for a dimension that each block has whole.
        extent: elements of the field's dimension.
        stride: distance of what two neighbouring points read.
        reach: elements a point reads, in units of the stride.
        offset: where the first point begins.
        divisor: units to an element of the field.
    """

    axis: int | None
    extent: int
    stride: int = 1
    reach: int = 1
    offset: int = 0
    divisor: int = 1

    @property
    def has_halo(self) -> bool:
        """Whether neighbouring blocks read the same elements."""
        return self.axis is not None and self.reach > self.stride

    def leaves_some(self, grids: Grids) -> np.ndarray:
        """Whether a block does not read all of its part of the field, when that is cut as the index space is."""
        if self.axis is None:
            return np.zeros(grids.blocks.shape[1:], bool)
        last = self.stride * (grids.shape[self.axis] - 1) + self.reach - 1 + self.offset
        ends = self.offset > 0 or last // self.divisor < self.extent - 1
        return ends | ((self.reach < self.stride) & (grids.blocks[self.axis] > 1))

    def lengths(self, block: np.ndarray) -> np.ndarray:
        """Most elements that blocks of some lengths of the index space read."""
        if self.axis is None:
            return np.asarray(self.extent)
        return np.minimum(self.extent, (self.stride * (block[self.axis] - 1) + self.reach - 1) // self.divisor + 1)

    def cuts(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boundaries of the field's dimension where blocks of the index space begin to read, and the block of each."""
        return _clipped(-(-(self.stride * cuts + self.offset) // self.divisor), self.extent)

    def index_cuts(self, cuts: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
        """Boundaries of the index space where its points begin to read in another block, and the block of each."""
        return _clipped(-(-(cuts * self.divisor - self.offset) // self.stride), extent)


def _clipped(bounds: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    inner = np.clip(bounds, 0, extent)
    inner[0], inner[-1] = 0, extent
    kept = np.flatnonzero(np.diff(inner) > 0)
    return np.append(inner[kept], extent) if kept.size else np.zeros(1, np.int64), kept


def spans(shape: Sequence[int], dims: Sequence[int | None]) -> tuple[Span, ...]:
    """The spans of a tensor whose dimensions run along dimensions of the index space, None for one that is whole."""
    return tuple(Span(dim, n) for n, dim in zip(shape, dims, strict=True))


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
        """Whether `cycles` is what is charged, whatever the grid."""
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
        """Cycles on each grid, float[candidates]; at least these where halos are read."""
        compute = self.compute_cycles(grids.lengths, target) + self._picked_cycles(grids, target)
        received, fragments, copied = self._moved(grids, target)
        if copied.any():
            compute = np.maximum(compute, self.compute_cycles(self._inner(grids), target) + copied)
        payload = np.ceil(received / target.exchange_bytes_per_cycle)
        payload = np.maximum(payload, fragments * target.exchange_fragment_cycles)
        exchange = np.where(received > 0, target.exchange_startup_cycles + payload, 0)
        return np.broadcast_to(compute + exchange + target.internal_sync_cycles, grids.blocks.shape[1:])

    def compute_cycles(self, lengths: np.ndarray, target: Target) -> np.ndarray:
        """Cycles of one vertex on blocks of some lengths of the index space."""
        shapes = [tuple(span.lengths(lengths) for span in field) for field in self.fields]
        return np.ceil(self.codelet.cycles(shapes, target))

    def _inner(self, grids: Grids) -> np.ndarray:
        """Lengths of a large block that has neighbours on both sides along dimensions with halos, if there are any."""
        lengths = grids.lengths.copy()
        for d in {span.axis for spans in self.fields for span in spans if span.axis is not None and span.has_halo}:
            inner = (grids.blocks[d] > 2) & (grids.shape[d] % grids.blocks[d] > 1)
            lengths[d] = np.where(inner, lengths[d], grids.shape[d] // grids.blocks[d])
        return lengths

    def _picked_cycles(self, grids: Grids, target: Target) -> np.ndarray:
        """Cycles in which a tile copies what it reads out of rows of which it does not read all."""
        picked = np.zeros(grids.blocks.shape[1:])
        for spans, field, source in zip(self.fields, self.codelet.fields, self.sources, strict=True):
            if not field.is_read or source == "elsewhere":
                continue
            size, runs = np.ones((), np.int64), np.ones(grids.blocks.shape[1:], np.int64)
            for span in spans:
                runs = np.where(span.leaves_some(grids), size, runs)
                size = size * span.lengths(grids.lengths)
            copying = np.ceil(size * element_bytes(field.dtype) / target.memcpy_bytes_per_cycle)
            picked = picked + np.where(runs > 1, copying + runs * target.copy_fragment_cycles, 0)
        return picked

    def _moved(self, grids: Grids, target: Target) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes a tile receives, in how many runs, and cycles in which it copies what it has itself between these."""
        received, fragments, copied = (np.zeros(grids.blocks.shape[1:]) for _ in range(3))
        for spans, field, source in zip(self.fields, self.codelet.fields, self.sources, strict=True):
            if not field.is_read:
                continue
            width = element_bytes(field.dtype)
            needed = total_elements([span.lengths(grids.lengths) for span in spans])
            if source == "elsewhere":
                received = received + needed * width
                fragments = fragments + _runs(spans, grids.lengths)
                continue
            axes = [span.axis for span in spans]
            alone = (grids.blocks[[d for d in range(len(grids.shape)) if d not in axes]] == 1).all(0)
            halo, own, pieces = _halo(spans, grids, self._inner(grids))
            spread = needed * width > MOST_SHARED_BYTES
            users, shortest, longest = _shares(spans, grids)
            lacking = np.where(alone, halo, needed - np.where(spread, shortest, 0))
            own = np.where(alone, own, longest)
            copying = np.ceil(own * width / target.memcpy_bytes_per_cycle) + pieces * target.copy_fragment_cycles
            received = received + lacking * width
            fragments = fragments + np.where(alone, 0, np.where(spread, users - 1, 1))
            copied = copied + np.where(np.where(alone, halo > 0, spread), copying, 0)
        return received, fragments, copied


def _shares(spans: Sequence[Span], grids: Grids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Into how many shares blocks that several tiles read are cut, and elements of the smallest and largest share."""
    axes = [span.axis for span in spans]
    users = np.prod(grids.blocks[[d for d in range(len(grids.shape)) if d not in axes]], axis=0, dtype=np.int64)
    parts, rest, size = np.ones_like(users), np.ones_like(users), np.ones_like(users)
    for span in spans:
        length = span.lengths(grids.lengths)
        chosen = (size == 1) & (length > 1)
        fewest = np.array(span.extent) if span.axis is None else span.extent // grids.blocks[span.axis]
        parts = np.where(chosen, np.minimum(users, np.maximum(fewest, 1)), parts)
        rest = np.where(chosen, 1, rest * length)
        size = size * length
    extent = size // np.maximum(rest, 1)
    return parts, extent // parts * rest, -(-extent // parts) * rest


def _runs(spans: Sequence[Span], block: np.ndarray) -> np.ndarray:
    """Runs of contiguous elements of a field that the longest block reads, at least."""
    total, runs = np.ones((), np.int64), np.ones(block.shape[1:], np.int64)
    for span in spans:
        length = span.lengths(block)
        runs = np.where(length < span.extent, total, runs)
        total = total * length
    return runs


def _halo(spans: Sequence[Span], grids: Grids, block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Elements that a block of some lengths reads of its neighbours, and those of its own and in how many runs.

    The block is an inner one where there are three along a dimension, else the first.
    """
    needed, own, runs = np.ones((), np.int64), np.ones((), np.int64), np.ones((), np.int64)
    pieces = np.ones(grids.blocks.shape[1:], np.int64)
    for span in spans:
        whole = part = span.lengths(block)
        if span.has_halo and span.axis is not None:
            blocks = grids.blocks[span.axis]
            part = np.minimum(whole, -(-span.stride * block[span.axis] // span.divisor))
            padding = np.where(blocks == 2, max(0, -span.offset), 0)
            whole, part = np.maximum(whole - padding, 1), np.maximum(part - padding, 1)
            part = np.where(blocks == 1, whole, np.minimum(part, whole))
            pieces = np.where(part < whole, runs, pieces)
        needed, own, runs = needed * whole, own * part, runs * part
    return needed - own, own, pieces
