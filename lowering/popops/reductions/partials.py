"""Combination of partial results by a monoid, in one to three stages, and its cost.

Partial results are a tensor of one more dimension than the result, the first, whose indices are called slots. A stage
combines neighbouring slots, and leaves fewer.

`reduce_partials` spreads the results of a stage evenly over all tiles of the IPU, wherever the partials are mapped.
`reduce_partials_in_place` maps results to tiles of the partials they come from: every block of results is cut in parts,
and each part is combined on one of the tiles that have a partial of it. It uses no other tile, so that its cost does
not depend on the number of tiles.

The cost is computed from numbers of partial results and lengths of blocks of results, of all candidates of a choice at
once: cycles, and the division of results, as arrays of one column a candidate.
Source of the stage counts: poplibs `poplin/ConvReducePlan.cpp` (reference machine.md §1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.layout import ceil_div, cut_again, mapping_like
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import reduce_codelet, reduce_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import copy_cycles, receive_code_bytes, receive_cycles, row_of, slow_copy_cycles, superstep
from ipujax.runtime.graph import Access, Axis, Builder, Dim, Graph, Term, element
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    Blocked,
    Tensor,
    TileMapping,
    blocked_mapping,
    element_bytes,
    even_cuts,
    flat_mapping,
    frozen,
)

# Stages by partials of one output: 1 stage below 16 partials, 2 below 125, then 3.
_STAGES = ((16, 1), (125, 2))
_MAX_STAGES = 3
_MIN_RECEIVED_BYTES = 256  # assumed: a tile that receives less is not worth its exchange code


@remembered
def slots_after_stages(slots: int) -> tuple[int, ...]:
    """Number of partial results of one output after each stage that combines them; the last stage leaves 1.

    `slots` is their number before the first stage; one needs no stage. Stages keep the numbers that a tile receives
    and combines at once small.
    """
    if slots <= 1:
        return ()
    stages = next((n for bound, n in _STAGES if slots < bound), _MAX_STAGES)
    counts: list[int] = []
    for stage in range(stages - 1, 0, -1):  # equal depths: the first of three stages leaves slots ** (2 / 3)
        slots = max(2, round(slots ** (stage / (stage + 1))))
        counts.append(slots)
    return (*counts, 1)


def spread_blocks(size: int, slots: Any, slots_after: Any, dtype: Any, tiles: Any) -> Any:
    """Number of tiles that the `size` outputs of each slot after a stage of `reduce_partials` are spread over.

    Other arguments are those of `longest_share`, and `tiles` the tiles of all slots.
    """
    return np.maximum(1, np.minimum(tiles // slots_after, -(-size // _min_outputs(slots, slots_after, dtype))))


def longest_share(size: int, slots: Any, slots_after: Any, dtype: Any, tiles: Any) -> Any:
    """Outputs of the busiest tile of a stage of `reduce_partials`, of `size` in total.

    `slots` and `slots_after` are the partials of each output before and after the stage, int or int64 arrays.
    """
    grains = -(-size // grain(dtype))
    return np.minimum(size, -(-grains // spread_blocks(size, slots, slots_after, dtype, tiles)) * grain(dtype))


def _min_outputs(slots: Any, slots_after: Any, dtype: Any) -> Any:
    """Smallest number of outputs that a tile is used for."""
    return np.maximum(grain(dtype), -(-_MIN_RECEIVED_BYTES // (element_bytes(dtype) * (slots // slots_after))))


def grain(dtype: Any) -> int:
    """Results of a dtype that are written by one 64-bit store."""
    return max(1, 8 // element_bytes(dtype))


@remembered
def stages(slots: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`slots_after_stages` of many candidates as tables: partial results of one output before and after each stage.

    Args:
        slots: number of partial results of an output, for each candidate.

    Returns:
        Two arrays, int64[stages, candidates]; 1 in both where a candidate has no such stage.
    """
    counts = [slots_after_stages(count) for count in slots]
    table = np.ones((max(map(len, counts), default=0), len(slots)), np.int64)
    for column, slots_after in enumerate(counts):
        table[: len(slots_after), column] = slots_after
    return frozen(np.vstack((slots, table))[:-1], np.int64), frozen(table, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Division of blocks of results among the tiles of their partials, one entry a candidate.

    Args:
        dim: dimension that is cut, of those after the slots, int64[candidates].
        count: number of parts, int64[candidates].
        longest: lengths of the longest part, int64[dimensions, candidates]; of a result without dimensions one of 1.
        cycles: estimated cycles of the stage, int64[candidates].
    """

    dim: np.ndarray
    count: np.ndarray
    longest: np.ndarray
    cycles: np.ndarray


class CombiningCost(NamedTuple):
    """Cost of `reduce_partials_in_place`, one entry a candidate.

    Args:
        cycles: estimated cycles, int64[candidates].
        longest: lengths of the largest block of its results, int64[dimensions, candidates].
    """

    cycles: np.ndarray
    longest: np.ndarray


def combining_cost(
    slots: np.ndarray,
    longest: np.ndarray,
    shape: Sequence[int],
    dtype: Any,
    monoid: str,
    target: Target,
    cycles_per_byte: float,
) -> CombiningCost:
    """Estimated cost of `reduce_partials_in_place` after each of many candidate partitions of an operation.

    Args:
        slots: partials of each result, each on a tile of its own, int64[candidates].
        longest: lengths of the largest block of results before it is divided, int64[dimensions, candidates].
        shape: shape of all results.
        dtype: their dtype.
        monoid: monoid by which partials combine.
        target: the machine.
        cycles_per_byte: cost of a byte of exchange code.
    """
    counts, inverse = np.unique(slots, return_inverse=True)  # candidates with equally many have equal stages
    total = np.zeros(len(slots), np.int64)
    longest = longest.copy()
    for stage_before, stage_after in zip(*stages(tuple(counts.tolist())), strict=True):
        running = np.flatnonzero(stage_before[inverse] > 1)  # candidates that have the stage
        before, after = stage_before[inverse[running]], stage_after[inverse[running]]
        division = divide(before, after, longest[:, running], shape, dtype, monoid, target, cycles_per_byte)
        total[running] += division.cycles
        longest[:, running] = division.longest
    return CombiningCost(total, longest)


@remembered
def combining_cycles(
    slots: int,
    longest: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: Any,
    monoid: str,
    target: Target,
    cycles_per_byte: float,
) -> int:
    """Cycles to combine partial results after an operation, on the tiles that have them.

    Args:
        slots: partial results of each result, each on a tile of its own.
        longest: lengths of the largest block of results.
        shape: shape of all results.
        dtype: their dtype.
        monoid: monoid by which partial results combine.
        target: the machine.
        cycles_per_byte: cost of a byte of exchange code.
    """
    lengths = np.array(longest, np.int64)[:, None]
    cost = combining_cost(np.array([slots]), lengths, shape, dtype, monoid, target, cycles_per_byte)
    return int(cost.cycles[0])


def divide(
    slots: np.ndarray,
    slots_after: np.ndarray,
    longest: np.ndarray,
    shape: Sequence[int],
    dtype: Any,
    monoid: str,
    target: Target,
    cycles_per_byte: float,
) -> Division:
    """Cheapest division of each block of results among the tiles that have its partial results, for one stage.

    A block is cut into equal parts along one dimension; each part is combined by one of the tiles, which receives it
    from the others. All dimensions and several numbers of parts are tried, at most one part for each partial result.

    Args:
        slots: partial results of each result before the stage, int64[candidates].
        slots_after: partial results of each result after it, likewise.
        longest: lengths of the largest block of results, int64[dimensions, candidates].
        shape: shape of all results.
        dtype: their dtype.
        monoid: monoid by which partial results combine.
        target: the machine.
        cycles_per_byte: cost of a byte of exchange code.
    """
    longest = longest if len(longest) else np.ones((1, len(slots)), np.int64)  # a scalar as one dimension
    depth = ceil_div(slots, slots_after)  # partial results that are combined into one
    # A part for each tile at most, none without elements, and none that is too small to be received.
    received_bytes = np.prod(longest, axis=0) * element_bytes(dtype) * depth
    max_parts = np.minimum(slots // slots_after, longest)
    max_parts = np.minimum(max_parts, ceil_div(received_bytes, _MIN_RECEIVED_BYTES))
    # Numbers of parts that are tried: powers of two up to the bound, and the bound, along each dimension.
    powers = 1 << np.arange(int(max_parts.max(initial=1)).bit_length() + 1)
    count = np.minimum(powers[:, None], np.maximum(1, max_parts)[:, None])
    length = ceil_div(longest[:, None], count)
    cycles, code_bytes = _cost_of_parts(longest, count, depth, slots_after == 1, shape, dtype, monoid, target)
    all_options = (-1, len(slots))  # dimensions and powers, as one axis
    best = np.argmin((cycles + cycles_per_byte * code_bytes).reshape(all_options), axis=0)
    count, cycles, length = (x.reshape(all_options)[best, np.arange(len(slots))] for x in (count, cycles, length))
    dim = best // len(powers)  # dimension that is cut, for each candidate
    is_cut = np.arange(len(longest))[:, None] == dim
    return Division(dim, count, np.where(is_cut, length, longest), cycles.astype(np.int64))


def _cost_of_parts(
    longest: np.ndarray,
    count: np.ndarray,
    depth: np.ndarray,
    is_last: np.ndarray,
    shape: Sequence[int],
    dtype: Any,
    monoid: str,
    target: Target,
) -> tuple[np.ndarray, np.ndarray]:
    """Cost of one stage of combining partial results, for several numbers of parts that each block is cut into.

    Args:
        longest: lengths of the largest block of results, int64[dimensions, candidates].
        count: numbers of parts, if a block is cut along that dimension alone, int64[dimensions, options, candidates].
        depth: partial results that are combined into one, each on a tile of its own, int64[candidates].
        is_last: whether the stage makes the final results, bool[candidates].
        shape: shape of all results.
        dtype: their dtype.
        monoid: monoid by which partial results combine.
        target: the machine.

    Returns:
        Cycles, and bytes of the code by which a tile receives its part, [dimensions, options, candidates] both.
    """
    width = element_bytes(dtype)
    size = np.prod(longest, axis=0)
    extent = longest[:, None]
    # Of a row-major block: indices of the dimensions outside of the cut one, and elements that share an index of it.
    outer = np.cumprod(np.vstack((np.ones_like(size), longest)), axis=0)[:-1, None]
    index_elements = size // extent
    regions = np.where(count > 1, outer, 1)  # contiguous regions of a part
    elements = ceil_div(extent, count) * index_elements  # of the longest part
    compute = reduce_cycles(monoid, dtype, elements, depth, target)
    # A tile sends its partial results but for the part that it combines: with fewer parts than tiles some tile combines
    # none. It receives its part from each other tile, in contiguous pieces that no other tile receives.
    sent = np.where(count < depth, size, size - extent // count * index_elements) * width
    pieces = (depth - 1) * regions
    receiving = receive_cycles((depth - 1) * elements * width, shared_bytes=0, receives=pieces, target=target)
    # In the superstep it copies its own part between those that arrive. Results of the last stage are then copied into
    # rows of the whole result, which takes the slow path where rows are no whole vectors.
    slow_cycles = slow_copy_cycles(row_of(shape), width, own=elements, received=0)
    putting_cycles = copy_cycles(copied_bytes=0, copied_fragments=0, target=target, slow_cycles=slow_cycles)
    cycles = superstep(
        target,
        receiving_cycles=receiving,
        sent_bytes=sent,
        copied_bytes=elements * width,
        copied_fragments=regions,
        compute_cycles=compute + np.where(is_last, putting_cycles, 0),
    ).total_cycles
    return cycles, receive_code_bytes(pieces, target)


class _StageGrid(NamedTuple):
    """Vertices of a stage.

    Args:
        cuts: where they cut each dimension of the partials, slots first.
        tile: tile of each vertex.
    """

    cuts: tuple[np.ndarray, ...]
    tile: np.ndarray


def reduce_partials(builder: Builder, partials: Tensor, max_tiles: int | None = None) -> Tensor:
    """Combines partial results by their variable's monoid, in stages; returns a new tensor without dimension 0.

    The results of each stage are spread evenly over tiles, whichever tiles have the partial results.

    Args:
        builder: graph and program to add to, and the debug name.
        partials: a variable with a monoid; dimension 0 has the slots, one for each partial result of an element.
        max_tiles: number of tiles that results are spread over, from tile 0; None for all of an IPU.
    """
    monoid = _monoid(partials)
    shape = partials.shape[1:]
    tiles = max_tiles or builder.graph.target.tiles_per_ipu
    flat = partials.reshape((partials.shape[0], prod(shape)))
    for slots_after in slots_after_stages(partials.shape[0]) or (1,):  # a single partial result is copied
        slots, size = flat.shape
        slot_cuts = even_cuts(slots, slots_after)
        num_blocks = spread_blocks(size, slots=slots, slots_after=slots_after, dtype=flat.dtype, tiles=tiles)
        cuts = even_cuts(size, int(num_blocks), grain(flat.dtype))
        counts = slots_after, len(cuts) - 1
        # Blocks in rotation on the tiles, those of the first remaining slot first.
        tile = frozen(np.arange(prod(counts)).reshape(counts) % tiles, np.int32)
        is_last = slots_after == 1
        mapping: TileMapping = blocked_mapping((even_cuts(slots_after, slots_after), cuts), tile)
        if is_last:  # the result has its own shape again, whose dimensions the cuts do not follow
            mapping = flat_mapping(size, cuts[:-1], tile[0])
        grid = _StageGrid((slot_cuts, cuts), tile)
        flat = _add_stage(builder, flat, monoid, grid, mapping, result_shape=shape if is_last else None)
    return flat


def reduce_partials_in_place(builder: Builder, partials: Tensor) -> Tensor:
    """Combines partial results on the tiles that have them, in stages; returns a new tensor without dimension 0.

    `partials` is a variable with a monoid whose dimension 0 has the slots, one for each partial result of an element.
    Each tile combines a part of the results that it has a partial one of. If they are not mapped in blocks of one
    slot each, results are spread over all tiles instead, by `reduce_partials`.
    """
    graph = builder.graph
    mapping = mapping_like(graph, partials)
    monoid = _monoid(partials)
    if not isinstance(mapping, Blocked) or len(mapping.cuts[0]) - 1 != partials.shape[0] or not partials.size:
        return reduce_partials(builder, partials)
    for slots_after in slots_after_stages(partials.shape[0]):
        grid = _divide_among_owners(graph, partials, mapping, monoid, slots_after)
        _, *result_cuts = grid.cuts
        if slots_after == 1:
            mapping = blocked_mapping(tuple(result_cuts), grid.tile[0])
            return _add_stage(builder, partials, monoid, grid, mapping, result_shape=partials.shape[1:])
        mapping = blocked_mapping((even_cuts(slots_after, slots_after), *result_cuts), grid.tile)
        partials = _add_stage(builder, partials, monoid, grid, mapping, result_shape=None)
    return partials.reshape(partials.shape[1:])


def _divide_among_owners(graph: Graph, partials: Tensor, mapping: Blocked, monoid: str, slots_after: int) -> _StageGrid:
    """Divides the vertices of one stage among the tiles that have the partial results, in the cheapest way.

    Args:
        graph: for its target, cost per byte, and the tile that is next in rotation.
        partials: partial results before the stage, slots in dimension 0.
        mapping: their mapping, in blocks of one slot.
        monoid: monoid by which they combine.
        slots_after: partial results of each element after the stage.

    Returns:
        The blocks of results that vertices compute, and for each the tile, one of the owners of a partial result of it.
    """
    slots = partials.shape[0]
    cuts = list(mapping.cuts[1:])
    owners = mapping.tile
    longest = np.array([[np.diff(cut).max()] for cut in cuts], np.int64)
    stage = np.array([slots]), np.array([slots_after])
    # Each block is cut further along one dimension, so that several of its owners combine a part of it.
    division = divide(*stage, longest, partials.shape[1:], partials.dtype, monoid, graph.target, graph.byte_cost_cycles)
    dim = int(division.dim[0])
    slot_cuts = even_cuts(slots, slots_after)
    part = np.zeros(1, np.int64)  # number of each part within its block
    if cuts:
        cuts[dim], old_block, part = cut_again(cuts[dim], int(division.count[0]))
        # Owners of the part are those of the block that it was cut from; dimension 0 of `owners` is that of slots.
        owners = np.take(owners, old_block, 1 + dim)
    first_slot = slot_cuts[:-1, None]
    depth = np.diff(slot_cuts)[:, None]
    # The parts of a block go to the tiles of its slots in turn, from one in rotation on: if always from the first,
    # results of small reductions would pile up on it.
    slot = first_slot + (part + graph.next_tile) % depth
    shape = [len(slot), *[1] * len(cuts)]
    if cuts:
        shape[1 + dim] = len(part)
    tile = frozen(np.take_along_axis(owners, slot.reshape(shape), 0), np.int32)
    return _StageGrid((slot_cuts, *cuts), tile)


def _monoid(partials: Tensor) -> str:
    (variable,) = partials.variables()
    assert variable.monoid is not None, "partials carry their monoid"
    return variable.monoid


def _add_stage(
    builder: Builder,
    partials: Tensor,
    monoid: str,
    grid: _StageGrid,
    mapping: TileMapping,
    *,
    result_shape: tuple[int, ...] | None,
) -> Tensor:
    """Adds the vertices and the result variable of one stage of combining partial results; returns the variable.

    Args:
        builder: graph, program and debug name.
        partials: partial results before the stage, slots in dimension 0.
        monoid: monoid by which they combine.
        grid: cuts of the partial results for the vertices, and their tiles.
        mapping: mapping of the results.
        result_shape: shape of the final result in the last stage; None before it, for partial results again.
    """
    elements = [element(d) for d in range(1, partials.ndim)]
    slot_cuts, *result_cuts = grid.cuts
    if result_shape is None:
        stage_shape = (len(slot_cuts) - 1, *partials.shape[1:])
        out = builder.graph.add_variable(stage_shape, partials.dtype, f"{builder.name}/partials", mapping, monoid)
        access = Access(out, (Dim((Term(0, 1, "block"),)), *elements))
    else:
        out = builder.graph.add_variable(result_shape, partials.dtype, builder.name, mapping)
        access = Access(out.reshape(partials.shape[1:]), tuple(elements))
    axes = (Axis("slot", slot_cuts, "reduce"), *(Axis(f"d{d}", cut) for d, cut in enumerate(result_cuts)))
    codelet = reduce_codelet(monoid, partials.dtype, (0,))
    accesses = (Access(partials, (element(0), *elements)), access)
    add_vertices(builder.named("reduce"), codelet, axes, accesses, grid.tile)
    return out
