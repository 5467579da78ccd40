"""Candidate plans of one kind of vertex, costed as arrays.

Each candidate has a cheap lower bound: exchange, reduction, and its multiply-adds at the peak rate. The full formula is
computed for those of least bound first, then only for those whose bound is below the best cost, so that the choice is
the same as if all were costed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from ipujax.lowering.layout import split_candidates
from ipujax.lowering.layout.grids import grids
from ipujax.lowering.poplin.cycles import Count, ceil_div, product
from ipujax.lowering.poplin.partials import partials_cost
from ipujax.lowering.poplin.rearranged import rearranged, rearrangement_cycles
from ipujax.lowering.poplin.spec import BATCH, FIELD, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, Memory, arithmetic
from ipujax.lowering.poplin.vertex_kinds import (
    VertexKind,
    block_cycles,
    gathered_bytes,
    input_lengths,
    output_lengths,
    sums_in_half,
    weight_lengths,
)
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import copy_cycles, exchange_cycles, receive_cycles, sync_cycles
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, element_bytes

# Limit of the candidate splits of one dimension, by the number of dimensions that can be split: keeps the grid small.
# Up to three it excludes none, as in PopLibs: thinned to 48 the plans of large products took up to 7 % more cycles.
_MAX_SPLITS = {1: 512, 2: 512, 3: 512, 4: 32, 5: 14, 6: 10, 7: 8}
_MANY_DIMS_MAX_SPLITS = 4
_FIRST_COSTED = 128  # candidates of least bound; assumed


def _regions(memory: Memory, lengths: Sequence[Count]) -> np.ndarray:
    """Number of contiguous regions of a block in an operand's memory, for each candidate.

    Args:
        memory: (axis, size) of each dimension in memory, outermost first; an axis may be several of them.
        lengths: lengths of the block along each axis, one entry a candidate.
    """
    remaining = list(lengths)  # of each axis, in units of what the inner dimensions already seen hold of it
    regions = np.ones((), np.int64)
    is_contiguous = np.ones((), bool)  # whether the block has all of the inner dimensions
    for axis, size in reversed(memory):
        is_full = remaining[axis] % size == 0
        length = np.minimum(remaining[axis], size)
        remaining[axis] = ceil_div(remaining[axis], size)
        regions = np.where(is_contiguous, regions, regions * length)
        is_contiguous = is_contiguous & is_full
    return regions


def output_order(kind: VertexKind, rank: int) -> list[int]:
    """Axes of results, in the order in which tiles are numbered.

    Output channels are innermost, rows when operands are swapped, so that neighbouring tiles share activations.
    """
    outputs = [BATCH, *range(FIELD, FIELD + rank)]
    return [OUT_CHANNELS, *outputs] if kind.is_swapped else [*outputs, OUT_CHANNELS]


class _OfOperands(NamedTuple):
    """A figure of the inputs and of the weights, for each candidate."""

    inputs: np.ndarray
    weights: np.ndarray


class CostedCandidate(NamedTuple):
    """One of several candidates: its number, and its cycles by part of `PlanCost`, int64[5]."""

    number: int
    cost_parts: np.ndarray


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidate plans of one kind of vertex; arrays have one entry a candidate.

    Args:
        spec: the convolution.
        kind: the kind of vertex.
        target: the machine.
        grains: multiples that the cuts of each dimension are.
        splits: blocks of each dimension, int64[dimensions, candidates].
        block: lengths of the largest block.
        lhs_stays: whether vertices are on the tiles of all activations that they read.
        rhs_stays: whether vertices are on the tiles of all weights that they read.
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
    def of(kind: VertexKind, spec: ConvSpec, target: Target, grain: Dims[int]) -> Candidates:
        """The ways to cut a convolution into blocks, one for each vertex, of which there are as many as tiles at most.

        Args:
            kind: the kind of vertex.
            spec: the convolution.
            target: the machine, of which plans use one IPU.
            grain: for each dimension, the number that the lengths of its blocks are multiples of, but for the last.
        """
        splits = _splits(spec.extents, grain, target.tiles_per_ipu).astype(np.int64)
        # The longest block has its share of the grains, rounded up, but no more than the dimension.
        longest = [
            np.minimum(ceil_div(ceil_div(extent, g), split) * g, extent)
            for extent, g, split in zip(spec.extents, grain, splits, strict=True)
        ]
        return Candidates(spec, kind, target, grain, splits, Dims.of(longest))

    @cached_property
    def slots(self) -> np.ndarray:
        """Partial results of each output element."""
        return np.asarray(
            product(list(self.splits[[IN_CHANNELS, *range(FIELD + len(self.spec.in_field), len(self.splits))]]))
        )

    @cached_property
    def exchange_cycles(self) -> np.ndarray:
        """Cycles to receive the operands: in full, apart from blocks that the plan maps to the tiles that use them."""
        pairs = zip(self._received_bytes, self._shared_on_bus, strict=True)
        receiving = sum(receive_cycles(bytes_, np.where(shared, bytes_, 0), 0, self.target) for bytes_, shared in pairs)
        return np.asarray(exchange_cycles(receiving, 0, self.target))

    @cached_property
    def _shared_on_bus(self) -> _OfOperands:
        """For each candidate whether the tiles of a bus, which receive together, read equal inputs, and equal weights.

        Tiles are numbered along the axes of results, see `output_order`; of a split output channel the tiles read the
        same inputs, of any other axis the same weights. Neighbouring tiles differ in the innermost axis that is split,
        if that is split evenly among those of a bus.
        """
        width = self.target.tiles_per_exchange_bus
        num_candidates = self.splits.shape[1]
        is_innermost = np.ones(num_candidates, bool)  # no axis inside of this one is split
        inputs = np.zeros_like(is_innermost)
        weights = np.zeros_like(is_innermost)
        for axis in reversed(output_order(self.kind, len(self.spec.in_field))):
            is_even = is_innermost & (self.splits[axis] > 1) & (self.splits[axis] % width == 0)
            (inputs if axis == OUT_CHANNELS else weights)[is_even] = True
            is_innermost &= self.splits[axis] == 1
        return _OfOperands(inputs, weights)

    @cached_property
    def gathering_cycles(self) -> np.ndarray:
        """Cycles to copy operands of which only a part is received to contiguous memory, next to the tile's own part.

        The AMP reads an operand in pieces, but for activations with a halo; rearranged operands are copied anyway.
        """
        total = np.zeros(self.splits.shape[1], np.int64)
        reordered = rearranged(self.kind, self.spec, self.target)
        inputs_need_one_piece = not self.kind.uses_amp or reordered.has_halo
        weights_need_one_piece = not self.kind.uses_amp
        received = self._received_bytes
        for block_bytes, received_bytes, may_be_gathered in (
            (self._input_bytes, received.inputs, inputs_need_one_piece and not reordered.lhs),
            (self._weight_bytes, received.weights, weights_need_one_piece and not reordered.rhs),
        ):
            is_gathered = (received_bytes > 0) & (received_bytes < block_bytes) & may_be_gathered
            total += copy_cycles(np.where(is_gathered, block_bytes, 0), copied_fragments=0, target=self.target)
        return total

    @cached_property
    def _received_bytes(self) -> _OfOperands:
        """Bytes of inputs and of weights that the tile of the largest block receives."""
        spec = self.spec
        rank = len(spec.in_field)
        field = self.splits[FIELD : FIELD + rank]
        kernel = self.splits[FIELD + rank :]
        reordered = rearranged(self.kind, spec, self.target)
        # All bytes of the block, unless the vertices are where the operand is or the plan maps it (below).
        inputs = self._input_bytes * (not self.lhs_stays)
        if spec.lhs_is_free and not self.lhs_stays and not reordered.lhs:
            # Along a field dimension an input is cut as often as outputs or the kernel are, and shared by the others.
            lengths = [ceil_div(n, np.maximum(f, k)) for n, f, k in zip(spec.in_field, field, kernel, strict=True)]
            block = self.block
            elements = block.batch * block.groups * block.in_channels * product(lengths)
            # Tiles that read one block of inputs: those of other output channels, and of the dimension that shares it.
            users = self.splits[OUT_CHANNELS] * product(list(np.minimum(field, kernel)))
            inputs = self._bytes_from_other_tiles(inputs, elements * element_bytes(spec.lhs_dtype), users)
        weights = self._weight_bytes * (not self.rhs_stays)
        if spec.rhs_is_free and not self.rhs_stays and not reordered.rhs:
            users = self.splits[BATCH] * product(list(field))  # tiles that read one block of weights
            weights = self._bytes_from_other_tiles(weights, weights, users)
        return _OfOperands(inputs, weights)

    def _bytes_from_other_tiles(self, block_bytes: np.ndarray, mapped_bytes: np.ndarray, users: Count) -> np.ndarray:
        """Bytes of a block from other tiles, when the operand is spread evenly over the tiles that use it.

        A block of which each user would store less than is worth a tile is mapped to some of them only: others receive
        all of it.

        Args:
            block_bytes: bytes of the block.
            mapped_bytes: the part of it that is mapped to its users, and not to neighbours that read it too.
            users: number of tiles that use it.
        """
        is_on_all = mapped_bytes // MIN_BYTES_PER_TILE >= users
        is_on_one_tile = product(list(self.splits)) == 1
        local_bytes = np.where(is_on_all | is_on_one_tile, mapped_bytes // users, 0)
        return np.maximum(block_bytes - local_bytes, 0)

    @cached_property
    def reduction_cycles(self) -> np.ndarray:
        """Exchange, compute and sync cycles of combining partial results, int64[3, candidates]."""
        spec = self.spec
        extents = spec.extents
        outputs = prod((extents.batch, extents.groups, extents.out_channels, *extents.field))
        tiles = np.asarray(product(list(self.splits)))
        dtypes = spec.partials_dtype, spec.out_dtype
        cost = partials_cost(self.slots, tiles, outputs, *dtypes, extents.out_channels, self.target)
        return np.stack([cost.exchange_cycles, cost.compute_cycles, cost.sync_cycles])

    @cached_property
    def temp_bytes(self) -> np.ndarray:
        """Bytes on the fullest tile: operands, results and gathered windows; or, if more, partial results twice.

        To combine partial results, tiles receive as many bytes as they have of them.
        """
        spec = self.spec
        has_partials = self.slots > 1
        width = np.where(has_partials, element_bytes(spec.partials_dtype), element_bytes(spec.vertex_dtype))
        results = product(output_lengths(self.block)) * width
        multiplying = self._operand_bytes + results + gathered_bytes(self.kind, spec, self.block)
        return np.asarray(np.maximum(multiplying, 2 * results * has_partials))

    @cached_property
    def fragments(self) -> np.ndarray:
        """Lower bound of the exchange fragments in which the tile of the largest block receives mapped operands.

        An operand that the plan maps, or that stays where it is, has none.
        """
        spec = self.spec
        block = self.block
        total = np.zeros(self.splits.shape[1], np.int64)
        for is_free, memory, lengths in (
            (spec.lhs_is_free or self.lhs_stays, spec.lhs_memory, input_lengths(spec, block)),
            (spec.rhs_is_free or self.rhs_stays, spec.rhs_memory, weight_lengths(block)),
        ):
            if not is_free and memory:
                total = total + _regions(memory, lengths)
        return total

    def within(self, bound_bytes: float, max_cycles: int) -> Candidates:
        """Candidates within bounds of memory and of cycles, and perhaps others: a cheap selection of most of them."""
        fast = self._take(self._mac_cycles <= max_cycles)
        small = fast._take(fast.temp_bytes <= bound_bytes)
        return small._take(small._mac_cycles + small.exchange_cycles <= max_cycles)

    def _take(self, is_taken: np.ndarray) -> Candidates:
        """The candidates for which `is_taken`; values that were computed for all are computed again."""
        numbers = np.flatnonzero(is_taken)
        return replace(self, splits=self.splits[:, numbers], block=Dims.of([x[numbers] for x in self.block]))

    @cached_property
    def _mac_cycles(self) -> np.ndarray:
        """Lower bound of the cycles of the largest block's multiply-adds: at the peak rate of the kind of vertex."""
        spec = self.spec
        arith = arithmetic(spec, self.target)
        rate: float = 1 / arith.instructions_per_mac  # multiply-adds a cycle
        if arith.precision is not None:
            is_half = arith.precision == "half"
            vector = self.target.vector_width_bytes // (2 if is_half else 4)  # elements of a vector
            amp = self.target.fp16_amp_macs_per_cycle if is_half else self.target.fp32_amp_macs_per_cycle
            # Without the AMP two channels are summed at once where sums are half precision, see `hmac_cycles`.
            rate = (
                amp
                if self.kind.uses_amp or self.kind.is_wide
                else vector * (2 if is_half and sums_in_half(spec) else 1)
            )
        # All products; with a dilated input those with the zeros between its elements are left out.
        macs = product(output_lengths(self.block)) * self.block.in_channels * product(self.block.kernel)
        return np.asarray((macs / (rate * prod(spec.lhs_dilation))).astype(np.int64))

    @cached_property
    def lower_bound_cycles(self) -> np.ndarray:
        """Lower bound of the estimated cycles."""
        slots = self.slots
        copying = self.gathering_cycles + rearrangement_cycles(self.kind, self.spec, self.block, self.target, slots)
        compute = self._mac_cycles + copying
        return self.exchange_cycles + self.reduction_cycles.sum(0) + sync_cycles(1, self.target) + compute

    @property
    def min_bound_cycles(self) -> int:
        """Lower bound of the estimated cycles of all candidates."""
        return int(self.lower_bound_cycles.min())

    def fastest(self, bound_bytes: float, max_cycles: int | None = None) -> CostedCandidate | None:
        """Fastest candidate within a memory bound, of equals the smaller; None if none is within the bounds.

        Candidates whose lower bound exceeds `max_cycles` are left out. Only those are costed in full whose lower bound
        is below the cost of one that is costed already.
        """
        is_fitting = self.temp_bytes <= bound_bytes
        if max_cycles is not None:
            is_fitting &= self.lower_bound_cycles <= max_cycles
        fitting = np.flatnonzero(is_fitting)
        if not fitting.size:
            return None
        bounds = self.lower_bound_cycles[fitting]
        promising = fitting[np.argsort(bounds, kind="stable")[:_FIRST_COSTED]]
        best_cycles = self.cost_parts(promising).sum(0).min()  # the sum of the parts of each candidate
        # `promising` again, since the bound of a vertex that skips zeros of a dilated input may exceed its cost.
        fitting = np.union1d(promising, fitting[bounds <= best_cycles])
        parts = self.cost_parts(fitting)
        fastest = int(np.lexsort((self.temp_bytes[fitting], parts.sum(0)))[0])  # by cycles, then by bytes
        return CostedCandidate(int(fitting[fastest]), parts[:, fastest])

    def trade_off(self, bound_bytes: float, max_cycles: int, fragment_cycles: float) -> list[CostedCandidate]:
        """Trade-off curve of cost and tiles, within bounds of memory and cycles; the cheapest candidate first.

        Each further one uses fewer tiles than all cheaper ones. The cost includes `fragment_cycles` for each exchange
        fragment.
        """
        fitting = np.flatnonzero((self.temp_bytes <= bound_bytes) & (self.lower_bound_cycles <= max_cycles))
        if not fitting.size:
            return []
        parts = self.cost_parts(fitting)
        is_fast = parts.sum(0) <= max_cycles
        fitting = fitting[is_fast]
        parts = parts[:, is_fast]
        tiles = np.asarray(product(list(self.splits[:, fitting])))
        # By cost, then by tiles (`lexsort` has the first key last).
        order = np.lexsort((tiles, parts.sum(0) + fragment_cycles * self.fragments[fitting]))
        # Fewest tiles of all cheaper candidates; of the cheapest, which has none, any number.
        cheaper_tiles = np.minimum.accumulate(np.append(np.iinfo(np.int64).max, tiles[order]))[:-1]
        unbeaten = order[tiles[order] < cheaper_tiles]
        return [CostedCandidate(int(fitting[n]), parts[:, n]) for n in unbeaten]

    def smallest(self) -> CostedCandidate:
        """Candidate of least memory; of equally small ones the fastest."""
        smallest = np.flatnonzero(self.temp_bytes == self.temp_bytes.min())
        parts = self.cost_parts(smallest)
        fastest = int(parts.sum(0).argmin())
        return CostedCandidate(int(smallest[fastest]), parts[:, fastest])

    def cost_parts(self, numbers: np.ndarray) -> np.ndarray:
        """Cycles of some candidates, in the parts of a `PlanCost`, int64[5, candidates]; `numbers` index candidates."""
        block = Dims.of([length[numbers] for length in self.block])
        slots = self.slots[numbers]
        copying = rearrangement_cycles(self.kind, self.spec, block, self.target, slots) + self.gathering_cycles[numbers]
        compute = block_cycles(self.kind, self.spec, block, self.target) + copying
        exchange, combining, sync = self.reduction_cycles[:, numbers]
        sync = sync_cycles(1, self.target) + sync
        rows = (self.exchange_cycles[numbers], compute, exchange, combining, sync)
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


@remembered
def _splits(extents: Dims[int], grain: Dims[int], max_blocks: int) -> np.ndarray:
    """Numbers of blocks of each dimension worth trying, uint[dimensions, candidates].

    The dtype is as narrow as can be, since results are remembered.

    Args:
        extents: length of each dimension.
        grain: for each dimension, the number that the lengths of its blocks are multiples of.
        max_blocks: most blocks of a candidate, all dimensions together.
    """
    extents_and_grains = list(zip(extents, grain, strict=True))  # of each dimension
    splittable_dims = sum(extent > g for extent, g in extents_and_grains)
    limit = _MAX_SPLITS.get(max(1, splittable_dims), _MANY_DIMS_MAX_SPLITS)
    splits = grids([split_candidates(extent, g, limit) for extent, g in extents_and_grains], max_blocks)
    return splits.astype(np.min_scalar_type(max_blocks))
