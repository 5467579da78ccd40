"""The candidate plans of one kind of vertex, costed as arrays.

Each candidate has a lower bound that is cheap: exchange, reduction, and its multiply-adds at the peak rate. The full
formula is computed for those of least bound first, then only for those whose bound is below the best found, so that the
choice is the same as if all were costed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ipujax.lowering.layout import split_candidates
from ipujax.lowering.layout.grids import grids
from ipujax.lowering.poplin.cycles import Count, ceil_div, copy_cycles, product
from ipujax.lowering.poplin.partials import partials_cost
from ipujax.lowering.poplin.spec import BATCH, FIELD, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, Memory, arithmetic
from ipujax.lowering.poplin.vertex_kinds import (
    VertexKind,
    block_cycles,
    gathered_bytes,
    grains,
    input_lengths,
    output_lengths,
    weight_lengths,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, element_bytes

# Most candidate splits of one dimension, by the number of dimensions that can be split: keeps the grid small. Up to
# three all are tried, as PopLibs does: thinned to 48 the plans of large products took up to 7 % more cycles.
_CANDIDATES = {1: 512, 2: 512, 3: 512, 4: 32, 5: 14, 6: 10, 7: 8}
_FEWEST_CANDIDATES = 4
_FIRST_COSTED = 128


def _runs(memory: Memory, lengths: Sequence[Count]) -> np.ndarray:
    """Runs of what is kept in an order that blocks of some lengths read, if it lies in one place."""
    left, runs, is_whole = list(lengths), np.ones((), np.int64), np.ones((), bool)
    for axis, size in reversed(memory):
        fits, length, left[axis] = left[axis] % size == 0, np.minimum(left[axis], size), ceil_div(left[axis], size)
        runs = np.where(is_whole, runs, runs * length)
        is_whole = is_whole & fits
    return runs


def output_order(kind: VertexKind, rank: int) -> list[int]:
    """The axes of results, in the order in which tiles are numbered.

    Output channels are innermost, rows when operands are swapped, so that neighbouring tiles share activations.
    """
    outputs = [BATCH, *range(FIELD, FIELD + rank)]
    return [OUT_CHANNELS, *outputs] if kind.is_swapped else [*outputs, OUT_CHANNELS]


@dataclass(frozen=True, eq=False)
class Candidates:
    """All candidate plans of one kind of vertex; arrays have one entry a candidate.

    Args:
        spec: what is computed.
        kind: the vertices that compute it.
        target: the machine.
        grains: what boundaries of blocks are multiples of.
        splits: blocks of each dimension, int64[dimensions, candidates].
        block: lengths of the largest block.
        lhs_stays: whether the activations lie where they are used, all of them.
        rhs_stays: the same of the weights.
    """

    spec: ConvSpec
    kind: VertexKind
    target: Target
    grains: Dims[int]
    splits: np.ndarray
    block: Dims[np.ndarray]
    lhs_stays: bool = False
    rhs_stays: bool = False

    @staticmethod
    def of(kind: VertexKind, spec: ConvSpec, target: Target, in_groups: bool = False) -> Candidates:
        """Makes the candidates of one kind of vertex that use at most one IPU's tiles."""
        grain = grains(kind, spec, target, in_groups)
        pairs = list(zip(spec.extents, grain, strict=True))
        splittable = sum(extent > g for extent, g in pairs)
        limit = _CANDIDATES.get(max(1, splittable), _FEWEST_CANDIDATES)
        splits = grids([split_candidates(extent, g, limit) for extent, g in pairs], target.tiles_per_ipu)
        lengths = [ceil_div(-(-extent // g), split) * g for (extent, g), split in zip(pairs, splits, strict=True)]
        clipped = [np.minimum(length, extent) for length, (extent, _) in zip(lengths, pairs, strict=True)]
        return Candidates(spec, kind, target, grain, splits, Dims.of(clipped))

    @cached_property
    def slots(self) -> np.ndarray:
        """Partial results of each output element."""
        return np.asarray(
            product(list(self.splits[[IN_CHANNELS, *range(FIELD + len(self.spec.in_field), len(self.splits))]]))
        )

    @cached_property
    def exchange_cycles(self) -> np.ndarray:
        """Cycles to receive the operands: in full, but for what tiles hold of operands that the plan places."""
        width = self.target.tiles_per_exchange_bus
        pairs = zip(self._received_bytes, self._shared_on_bus, strict=True)
        received = sum(np.where(shared, ceil_div(own, width), own) for own, shared in pairs)
        cycles = np.asarray(ceil_div(received, self.target.exchange_bytes_per_cycle)).astype(np.int64)
        return np.where(cycles > 0, self.target.exchange_startup_cycles + cycles, 0)

    @cached_property
    def _shared_on_bus(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether the tiles of a bus read the same inputs, or the same weights.

        Neighbouring tiles differ in the innermost axis that is split, if that is split evenly among those of a bus.
        """
        width, left = self.target.tiles_per_exchange_bus, np.ones(self.splits.shape[1], bool)
        inputs, weights = np.zeros_like(left), np.zeros_like(left)
        for axis in reversed(output_order(self.kind, len(self.spec.in_field))):
            evenly = left & (self.splits[axis] > 1) & (self.splits[axis] % width == 0)
            (inputs if axis == OUT_CHANNELS else weights)[evenly] = True
            left &= self.splits[axis] == 1
        return inputs, weights

    @cached_property
    def gathering_cycles(self) -> np.ndarray:
        """Cycles to copy operands that are partly received and partly here to one place."""
        total = np.zeros(self.splits.shape[1], np.int64)
        for block, received in zip((self._input_bytes, self._weight_bytes), self._received_bytes, strict=True):
            copying = self.target.copy_startup_cycles + copy_cycles(self.target, block)
            total += np.where((received > 0) & (received < block), copying, 0)
        return total

    @cached_property
    def _received_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of inputs and of weights that the tile of the largest block receives."""
        spec, rank = self.spec, len(self.spec.in_field)
        field, kernel = self.splits[FIELD : FIELD + rank], self.splits[FIELD + rank :]
        inputs = self._input_bytes * (not self.lhs_stays)
        if spec.lhs_is_free and not self.lhs_stays:
            # Along a field dimension an input is cut as often as outputs or the kernel are, and shared by the others.
            lengths = [ceil_div(n, np.maximum(f, k)) for n, f, k in zip(spec.in_field, field, kernel, strict=True)]
            block = self.block
            held = block.batch * block.groups * block.in_channels * product(lengths) * element_bytes(spec.lhs_dtype)
            inputs = self._received(inputs, held, self.splits[OUT_CHANNELS] * product(list(np.minimum(field, kernel))))
        weights = self._weight_bytes * (not self.rhs_stays)
        if spec.rhs_is_free and not self.rhs_stays:
            weights = self._received(weights, weights, self.splits[BATCH] * product(list(field)))
        return inputs, weights

    def _received(self, block_bytes: np.ndarray, held_bytes: np.ndarray, users: Count) -> np.ndarray:
        """Bytes of a block that come from other tiles when the operand is spread evenly over those that use it.

        A block of which each user would hold less than is worth a tile lies on some of them, and the others hold none.

        Args:
            block_bytes: what a vertex reads.
            held_bytes: the part of it that lies on its users, and not on neighbours that read it too.
            users: tiles that read the same.
        """
        is_worth = held_bytes // MIN_BYTES_PER_TILE >= users
        own = np.where(is_worth | (product(list(self.splits)) == 1), held_bytes // users, 0)
        return np.maximum(block_bytes - own, 0)

    @cached_property
    def reduction_cycles(self) -> np.ndarray:
        """Exchange, compute and sync cycles of combining partial results, int64[3, candidates]."""
        extents, spec = self.spec.extents, self.spec
        outputs = prod((extents.batch, extents.groups, extents.out_channels, *extents.field))
        tiles = np.asarray(product(list(self.splits)))
        cost = partials_cost(self.slots, tiles, outputs, spec.partials_dtype, spec.out_dtype, self.target)
        return np.stack([cost.exchange_cycles, cost.compute_cycles, cost.sync_cycles])

    @cached_property
    def temp_bytes(self) -> np.ndarray:
        """Operands, results and gathered windows on the fullest tile."""
        spec = self.spec
        width = np.where(self.slots > 1, element_bytes(spec.partials_dtype), element_bytes(spec.out_dtype))
        results = product(output_lengths(self.block)) * width
        return np.asarray(self._operand_bytes + results + gathered_bytes(self.kind, spec, self.block))

    @cached_property
    def pieces(self) -> np.ndarray:
        """Contiguous parts, at least, in which the tile of the largest block receives operands that lie somewhere."""
        spec, block = self.spec, self.block
        total = np.zeros(self.splits.shape[1], np.int64)
        for is_free, memory, lengths in (
            (spec.lhs_is_free or self.lhs_stays, spec.lhs_memory, input_lengths(spec, block)),
            (spec.rhs_is_free or self.rhs_stays, spec.rhs_memory, weight_lengths(block)),
        ):
            if not is_free and memory:
                total = total + _runs(memory, lengths)
        return total

    @cached_property
    def bound_cycles(self) -> np.ndarray:
        """A lower bound of the cost."""
        how, spec = arithmetic(self.spec, self.target), self.spec
        rate: float = 1 / how.instructions_per_mac
        if how.precision is not None:
            vector = self.target.vector_width_bytes // (2 if how.precision == "half" else 4)
            amp = (
                self.target.fp16_amp_macs_per_cycle if how.precision == "half" else self.target.fp32_amp_macs_per_cycle
            )
            rate = amp if self.kind.uses_amp else vector
        macs = product(output_lengths(self.block)) * self.block.in_channels * product(self.block.kernel)
        gathering = self.gathering_cycles + copy_cycles(self.target, gathered_bytes(self.kind, spec, self.block))
        compute = (macs / (rate * prod(spec.lhs_dilation))).astype(np.int64) + gathering
        return self.exchange_cycles + self.reduction_cycles.sum(0) + self.target.internal_sync_cycles + compute

    @property
    def least_cycles(self) -> int:
        """No candidate is faster."""
        return int(self.bound_cycles.min())

    def fastest(self, bound_bytes: float, most_cycles: int | None = None) -> tuple[int, np.ndarray] | None:
        """The fastest candidate within a memory bound; of equally fast ones the smallest in memory.

        Args:
            bound_bytes: bound of `temp_bytes`.
            most_cycles: slower candidates need not be found.

        Returns:
            Its number and its cycles by part of `PlanCost`, or None when there is none.
        """
        fits = self.temp_bytes <= bound_bytes
        if most_cycles is not None:
            fits &= self.bound_cycles <= most_cycles
        left = np.flatnonzero(fits)
        if not left.size:
            return None
        first = left[np.argsort(self.bound_cycles[left], kind="stable")[:_FIRST_COSTED]]
        best = self.cost_parts(first).sum(0).min()
        left = left[self.bound_cycles[left] <= best]
        parts = self.cost_parts(left)
        cycles = parts.sum(0)
        chosen = int(np.lexsort((self.temp_bytes[left], cycles))[0])
        return int(left[chosen]), parts[:, chosen]

    def frugal(self, bound_bytes: float, most_cycles: int, piece_cycles: float) -> list[tuple[int, np.ndarray]]:
        """The candidates that only those of more tiles beat, within bounds of memory and cycles; the cheapest first.

        Args:
            bound_bytes: bound of `temp_bytes`.
            most_cycles: bound of cycles.
            piece_cycles: what a piece that is received is worth, beside cycles.

        Returns:
            Of each its number and its cycles by part of `PlanCost`.
        """
        left = np.flatnonzero((self.temp_bytes <= bound_bytes) & (self.bound_cycles <= most_cycles))
        if not left.size:
            return []
        parts = self.cost_parts(left)
        few = parts.sum(0) <= most_cycles
        left, parts = left[few], parts[:, few]
        tiles = np.asarray(product(list(self.splits[:, left])))
        order = np.lexsort((tiles, parts.sum(0) + piece_cycles * self.pieces[left]))
        fewest = np.minimum.accumulate(np.append(np.iinfo(np.int64).max, tiles[order]))[:-1]
        kept = order[tiles[order] < fewest]
        return [(int(left[n]), parts[:, n]) for n in kept]

    def smallest(self) -> tuple[int, np.ndarray]:
        """The candidate of least memory; of equally small ones the fastest."""
        left = np.flatnonzero(self.temp_bytes == self.temp_bytes.min())
        parts = self.cost_parts(left)
        chosen = int(parts.sum(0).argmin())
        return int(left[chosen]), parts[:, chosen]

    def cost_parts(self, numbers: np.ndarray) -> np.ndarray:
        """Cycles by part of `PlanCost`, int64[5, numbers], of some candidates."""
        block = Dims.of([length[numbers] for length in self.block])
        compute = block_cycles(self.kind, self.spec, block, self.target) + self.gathering_cycles[numbers]
        exchange, compute_after, sync = self.reduction_cycles[:, numbers]
        sync = self.target.internal_sync_cycles + sync
        rows = (self.exchange_cycles[numbers], compute, exchange, compute_after, sync)
        return np.stack(np.broadcast_arrays(*rows)).astype(np.int64)

    @cached_property
    def _input_bytes(self) -> np.ndarray:
        return np.asarray(product(input_lengths(self.spec, self.block))) * element_bytes(self.spec.lhs_dtype)

    @cached_property
    def _weight_bytes(self) -> np.ndarray:
        return np.asarray(product(weight_lengths(self.block))) * element_bytes(self.spec.rhs_dtype)

    @cached_property
    def _operand_bytes(self) -> np.ndarray:
        return self._input_bytes + self._weight_bytes
