"""Choice of the placement of an operation: the blocks of its index space and their tiles, by lowest cost.

Candidates are even grids, and the placements that mapped operands have. Grids that use fewer tiles stay candidates
whatever the number of tiles, and their cost does not depend on it. Choices are by closed formulas, which only estimate
the cost where halos are read: to try the eight best grids there on a scratch graph changed no benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from ipujax.lowering.layout.digits import view_digits
from ipujax.lowering.layout.grid_cost import Source, Work
from ipujax.lowering.layout.grids import Grids, even_grids, total_elements
from ipujax.lowering.layout.mapping import first_tile
from ipujax.lowering.layout.operand_parts import fewest_runs
from ipujax.lowering.layout.place import empty_placement, unmoved_placement
from ipujax.runtime.cache import remembered_and_stored
from ipujax.runtime.exchange import receive_code_bytes
from ipujax.runtime.graph import Graph
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, Blocked, Tensor, blocked_mapping, element_bytes

_COSTED_AT_FIRST = 64  # grids in the first batch, assumed
_CROWDING_CYCLES = 1e12  # above the cost of any operation

# Cost of the steps after the operation, such as combining partials: (grids, target, cost per byte) → float[candidates].
CostAfter = Callable[[Grids, Target, float], np.ndarray]


def source_of(graph: Graph, tensor: Tensor) -> Source:
    """An unmapped view of one whole variable, which an operation may map, is "free"; others are from "elsewhere"."""
    return "elsewhere" if graph.is_mapped(tensor) or view_digits(tensor) is None else "free"


def choose(
    graph: Graph,
    shape: Sequence[int],
    order: Sequence[int],
    work: Work,
    operands: Sequence[Tensor],
    cost_after: CostAfter | None = None,
    unmoved_fields: Sequence[int] = (),
) -> Blocked:
    """Cuts an index space into blocks and places each on a tile, at the lowest estimated cost.

    Args:
        graph: target and mappings of the operands.
        shape: extents of the index space, each at least 1.
        order: dimensions that may be cut.
        work: codelet of the operation, and the use of its fields.
        operands: tensor of each field that is read, in the order of fields.
        cost_after: cycles of the steps behind the operation itself, as combining partials; hashable.
        unmoved_fields: fields whose bytes are not counted where they are mapped. Others count as if placed, which
            spreads operations on large parts of them; without that, steps of small networks took up to 4 % more
            cycles.

    Returns:
        Placement of `shape`; dimensions not in `order` are not cut.
    """
    shape = tuple(shape)
    order = tuple(order)
    if 0 in shape:
        return empty_placement(shape)
    number, least_cycles = _best_grid(shape, order, work, graph.target, graph.byte_cost_cycles, cost_after)
    grid = chosen = even_grids(shape, order, graph.target.tiles_per_ipu).placement(number)
    # Beside it the placements by which some operands do not move; their fields cost no exchange.
    for placement, unmoved in _fields_unmoved_by(graph, shape, order, work, operands).items():
        unmoved_bytes = _unmoved_bytes(placement, work, [n for n in unmoved if n in unmoved_fields])
        unmoved_cost = graph.byte_cost_cycles * unmoved_bytes
        cycles = estimated_cycles(
            placement, work.with_free(unmoved), cost_after, graph, most=least_cycles + unmoved_cost
        )
        cycles -= unmoved_cost
        if cycles < least_cycles:
            chosen, least_cycles = placement, cycles
    # Only a grid may start at another tile: the placement of a mapped operand has its tiles.
    return _on_next_tiles(graph, grid) if chosen is grid else chosen


def even_placement(
    graph: Graph, shape: tuple[int, ...], order: tuple[int, ...], work: Work, cost_after: CostAfter | None
) -> Blocked:
    """Cuts an index space evenly at the lowest estimated cost, as `choose` does where no operand is mapped.

    Args:
        graph: target and cost per byte.
        shape: extents of the index space, each at least 1.
        order: dimensions that may be cut.
        work: codelet of the operation, and the use of its fields.
        cost_after: cycles of the steps behind the operation itself; None without.
    """
    number, _ = _best_grid(shape, order, work, graph.target, graph.byte_cost_cycles, cost_after)
    return even_grids(shape, order, graph.target.tiles_per_ipu).placement(number)


def _fields_unmoved_by(
    graph: Graph, shape: tuple[int, ...], order: tuple[int, ...], work: Work, operands: Sequence[Tensor]
) -> dict[Blocked, list[int]]:
    """Placements of the index space by which mapped operands do not move: with each the numbers of these fields.

    Args:
        graph: mappings of the operands.
        shape: extents of the index space.
        order: dimensions that may be cut.
        work: codelet of the operation, and the use of its fields.
        operands: tensor of each field that is read, in the order of fields.
    """
    read_fields = [number for number, field in enumerate(work.codelet.fields) if field.is_read]
    fields: dict[Blocked, list[int]] = {}
    for number, operand in zip(read_fields, operands, strict=True):
        placement = unmoved_placement(graph, operand, work.fields[number].spans, shape, order)
        if placement is not None:
            fields.setdefault(placement, []).append(number)
    return fields


def _on_next_tiles(graph: Graph, placement: Blocked) -> Blocked:
    """Placement of a few tiles, moved behind the last small one; a large one stays on the tiles from 0 on."""
    first = first_tile(graph, placement.tile.size)
    return blocked_mapping(placement.cuts, placement.tile + np.int32(first)) if first else placement


def _is_grid(
    value: tuple[int, float],
    shape: tuple[int, ...],
    order: tuple[int, ...],
    work: Work,
    target: Target,
    byte_cost: float,
    cost_after: CostAfter | None,
) -> bool:
    """Return whether a value from a file, number and cycles of a grid, can be the result of `_best_grid`."""
    return 0 <= value[0] < even_grids(shape, order, target.tiles_per_ipu).blocks.shape[1]


@remembered_and_stored(_is_grid)
def _best_grid(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    work: Work,
    target: Target,
    byte_cost: float,
    cost_after: CostAfter | None,
) -> tuple[int, float]:
    """Number of the even grid of lowest estimated cycles, and the estimate.

    Of equals that with the smallest blocks worth a tile, then that of fewest tiles. Its number is that in
    `even_grids(shape, order, …)`, of cuts along the dimensions `order` of an index space `shape`.
    """
    grids = even_grids(shape, order, target.tiles_per_ipu)
    cycles = _weighted_cycles(work, grids, cost_after, target, byte_cost) + _crowding_penalty(work, grids, target)
    tiles = np.prod(grids.blocks, axis=0)
    block_bytes = _block_bytes(work, grids)
    # The last key is the first one to sort by.
    best = int(np.lexsort((tiles, np.maximum(block_bytes, MIN_BYTES_PER_TILE), cycles))[0])
    return best, float(cycles[best])


def _block_bytes(work: Work, grids: Grids) -> np.ndarray:
    """Bytes that the longest block reads and writes, int64[candidates]."""
    total = np.zeros(grids.blocks.shape[1:], np.int64)
    for use, field in zip(work.fields, work.codelet.fields, strict=True):
        total = total + total_elements([span.lengths(grids.lengths) for span in use.spans]) * element_bytes(field.dtype)
    return total


def _weighted_cycles(
    work: Work, grids: Grids, cost_after: CostAfter | None, target: Target, byte_cost: float, most: float = inf
) -> np.ndarray:
    """Cycles of an operation with its following steps, plus the cost of its code and operands, float[grids].

    Infinite for grids that a cheaper total rules out, or that reach `most` without the following steps. `cost_after`
    has the cost of these, None of none; `byte_cost` is the cost of a byte of a tile's memory.
    """
    code_bytes = _piece_code_bytes(work, grids, target)
    cycles = work.cycles(grids, target) + byte_cost * (code_bytes + work.placed_bytes(grids))
    if cost_after is None:
        return cycles
    total = np.full(cycles.shape, np.inf)
    order = np.argsort(cycles, kind="stable")
    start = 0
    # By rising cycles, since `cost_after` takes long for all, until the remaining grids cost more without the following
    # steps than the best one with them. Batches grow, since a small one takes as long as a few hundred grids.
    while start < len(order) and cycles[order[start]] <= total.min() and cycles[order[start]] < most:
        stop = 2 * start + _COSTED_AT_FIRST
        batch = order[start:stop]
        total[batch] = cycles[batch] + cost_after(grids.of(batch), target, byte_cost)
        start = stop
    return total


def _piece_code_bytes(work: Work, grids: Grids, target: Target) -> np.ndarray:
    """Bytes of code that moves operands and results in pieces; a result as if its reader took one block."""
    runs = np.zeros(grids.blocks.shape[1:])
    for use, field in zip(work.fields, work.codelet.fields, strict=True):
        if field.is_written or use.source == "elsewhere":
            runs = runs + fewest_runs(use.spans, grids.lengths)
    return receive_code_bytes(runs, target)


def _crowding_penalty(work: Work, grids: Grids, target: Target) -> np.ndarray:
    """Penalty of grids whose block of any one field is too large for a tile."""
    largest_bytes = np.zeros(grids.blocks.shape[1:])
    for use, field in zip(work.fields, work.codelet.fields, strict=True):
        elements = total_elements([span.lengths(grids.lengths) for span in use.spans])
        largest_bytes = np.maximum(largest_bytes, elements * element_bytes(field.dtype))
    return crowding_cycles(largest_bytes, target)


def crowding_cycles(needed_bytes: np.ndarray, target: Target) -> np.ndarray:
    """Penalty above any real cost, for each doubling by which bytes exceed a planner's share of a tile."""
    usable_bytes = target.operation_bytes
    return np.ceil(np.log2(np.maximum(needed_bytes, usable_bytes) / usable_bytes)) * _CROWDING_CYCLES


def grid_of(placement: Blocked) -> Grids:
    """Grids with one candidate, the given placement."""
    blocks = np.array([[len(cut) - 1] for cut in placement.cuts], np.int64).reshape(-1, 1)
    longest = np.array([[int(np.diff(cut).max())] for cut in placement.cuts], np.int64).reshape(-1, 1)
    return Grids(placement.shape, blocks, longest)


def estimated_cycles(
    placement: Blocked, work: Work, cost_after: CostAfter | None, graph: Graph, most: float = inf
) -> float:
    """Estimated cycles of an operation by one placement, to compare it with grids; bytes of tiles count as cycles too.

    A tile with several blocks computes them one after the other. Infinite where the cost is at least `most` and the
    steps of `cost_after` need not be known for that.
    """
    grid = grid_of(placement)
    target = graph.target
    cycles = _weighted_cycles(work, grid, cost_after, target, graph.byte_cost_cycles, most) + _crowding_penalty(
        work, grid, target
    )
    more_blocks = int(np.bincount(placement.tile.ravel()).max()) - 1
    return float(cycles[0] + more_blocks * np.ravel(work.compute_cycles(grid.lengths, target))[0])


def cycles_in_place(placement: Blocked, work: Work, number: int, cost_after: CostAfter | None, graph: Graph) -> float:
    """Estimated cost on the placement of a mapped operand, given by the number of its field."""
    cycles = estimated_cycles(placement, work.with_free([number]), cost_after, graph)
    return cycles - graph.byte_cost_cycles * _unmoved_bytes(placement, work, [number])


def _unmoved_bytes(placement: Blocked, work: Work, numbers: Sequence[int]) -> float:
    """Bytes of some fields on the fullest tile, as `Work.placed_bytes` counts them if they are free."""
    grid = grid_of(placement)
    return float((work.with_free(numbers).placed_bytes(grid) - work.placed_bytes(grid))[0])
