"""Chooses the boxes of an operation's index space and their tiles by what they are charged.

Candidates are even grids, and the boxes in which operands lie already. Grids that use fewer tiles stay candidates
however many tiles there are, and their charge does not depend on that. Where halos are read, the cheapest few are tried
on a scratch graph; all other choices are by closed formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ipujax.lowering.layout.box_charge import Source, Work
from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.digits import view_digits
from ipujax.lowering.layout.grids import Grids, even_grids
from ipujax.lowering.layout.mapping import first_tile
from ipujax.lowering.layout.operand_parts import fewest_runs
from ipujax.lowering.layout.place import follow, nowhere
from ipujax.lowering.layout.trial import charged_price, least_charged
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE, Blocked, Tensor, blocked_mapping, element_bytes

_COSTED_AT_ONCE = 64
_MOST_TRIALS = 8  # grids tried where halos are read, which an estimate does not know to the cycle
_CROWDED_CYCLES = 1e12  # more than anything takes

# Adds the operation by a placement to a graph and a program.
Add = Callable[[Graph, ProgramSequence, Blocked], object]
# Cycles of what follows on a grid at a price of a byte, such as the combination of partial results: float[candidates].
After = Callable[[Grids, Target, float], np.ndarray]


def source_of(graph: Graph, tensor: Tensor) -> Source:
    """Whether an operation may place an operand: no tile mapping yet, and a view of one whole variable."""
    return "elsewhere" if graph.is_mapped(tensor) or view_digits(tensor) is None else "free"


def choose(
    graph: Graph,
    shape: Sequence[int],
    order: Sequence[int],
    work: Work,
    operands: Sequence[Tensor],
    add: Add,
    after: After | None = None,
    taken: Sequence[int] = (),
) -> Blocked:
    """Cuts an index space in boxes and puts each on a tile, as cheaply as can be.

    Args:
        graph: gives the target, and the mappings of the operands.
        shape: extents of the index space, each at least 1.
        order: the dimensions that may be cut.
        work: what is done on a box.
        operands: the tensor of each field that is read, in the order of fields.
        add: adds the operation by a placement to a graph and a program, for trials.
        after: cycles of what `add` adds behind the work itself; hashable.
        taken: fields that take no more memory where they are already. Others count as if they were placed, which
            spreads what works on large parts of them; without that, steps of small networks took up to 4 % more cycles.

    Returns:
        A placement of `shape`; dimensions not in `order` are whole.
    """
    shape, order = tuple(shape), tuple(order)
    if 0 in shape:
        return nowhere(shape)
    read = [number for number, field in enumerate(work.codelet.fields) if field.is_read]
    followed = {n: follow(graph, x, work.fields[n], shape, order) for n, x in zip(read, operands, strict=True)}
    by_estimate = work.is_exact or "elsewhere" in work.sources
    few = 1 if by_estimate else _MOST_TRIALS
    grids, numbers, cycles = _ranked(shape, order, work, graph.target, graph.byte_price_cycles, after, few)
    candidates, bounds = [grids.placement(n) for n in numbers], list(cycles)
    is_exact = [by_estimate] * len(candidates)
    for placement in dict.fromkeys(p for p in followed.values() if p is not None):
        numbers_here = [n for n, own in followed.items() if own is placement]
        candidates.append(placement)
        at_home = work.with_free(numbers_here)
        taken_bytes = _taken_bytes(placement, work, [n for n in numbers_here if n in taken])
        bounds.append(estimated_cycles(placement, at_home, after, graph) - graph.byte_price_cycles * taken_bytes)
        is_exact.append(by_estimate or at_home.is_exact)
    chosen = least_charged(candidates, bounds, lambda placement: _charge(graph, add, placement), is_exact)
    return _moved(graph, chosen) if any(chosen is grid for grid in candidates[: len(numbers)]) else chosen


def _moved(graph: Graph, placement: Blocked) -> Blocked:
    """A placement on tiles from 0 on, moved to where the last small one ended, if it is small."""
    first = first_tile(graph, placement.tile.size)
    return blocked_mapping(placement.cuts, placement.tile + np.int32(first)) if first else placement


def _charge(graph: Graph, add: Add, placement: Blocked) -> int:
    return charged_price(graph, lambda scratch, prog: add(scratch, prog, placement))


@remembered
def _ranked(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    work: Work,
    target: Target,
    byte_price: float,
    after: After | None,
    few: int,
) -> tuple[Grids, tuple[int, ...], tuple[float, ...]]:
    """The cheapest grids by estimate: of equals that with the smallest blocks worth a tile, then of fewest tiles."""
    grids = even_grids(shape, order, target.tiles_per_ipu)
    cycles = _cycles(work, grids, after, target, byte_price) + _crowding(work, grids, target)
    tiles, block_bytes = np.prod(grids.blocks, axis=0), _block_bytes(work, grids)
    first = np.lexsort((tiles, np.maximum(block_bytes, MIN_BYTES_PER_TILE), cycles))[:few]
    return grids, tuple(int(n) for n in first), tuple(float(cycles[n]) for n in first)


def _block_bytes(work: Work, grids: Grids) -> np.ndarray:
    """Bytes of the longest block of all fields."""
    total = np.zeros(grids.blocks.shape[1:], np.int64)
    for spans, field in zip(work.fields, work.codelet.fields, strict=True):
        total = total + total_elements([span.lengths(grids.lengths) for span in spans]) * element_bytes(field.dtype)
    return total


def _cycles(work: Work, grids: Grids, after: After | None, target: Target, byte_price: float) -> np.ndarray:
    """Cycles of an operation with what follows; infinite for grids that are dearer than another without that."""
    code_bytes = _piece_code_bytes(work, grids, target)
    cycles = work.cycles(grids, target) + byte_price * (code_bytes + work.placed_bytes(grids))
    if after is None:
        return cycles
    total = np.full(cycles.shape, np.inf)
    order = np.argsort(cycles, kind="stable")
    for start in range(0, len(order), _COSTED_AT_ONCE):
        some = order[start : start + _COSTED_AT_ONCE]
        if cycles[some[0]] > total.min():
            break
        total[some] = cycles[some] + after(grids.of(some), target, byte_price)
    return total


def _piece_code_bytes(work: Work, grids: Grids, target: Target) -> np.ndarray:
    """Code that moves operands and results in pieces, of a result as if its reader took one block."""
    runs = np.zeros(grids.blocks.shape[1:])
    for spans, field, source in zip(work.fields, work.codelet.fields, work.sources, strict=True):
        if field.is_written or source == "elsewhere":
            runs = runs + fewest_runs(spans, grids.lengths)
    return runs * target.exchange_fragment_cycles * INSTRUCTION_BYTES


def _crowding(work: Work, grids: Grids, target: Target) -> np.ndarray:
    """`crowding_cycles` of the largest block."""
    largest = np.zeros(grids.blocks.shape[1:])
    for spans, field in zip(work.fields, work.codelet.fields, strict=True):
        elements = total_elements([span.lengths(grids.lengths) for span in spans])
        largest = np.maximum(largest, elements * element_bytes(field.dtype))
    return crowding_cycles(largest, target)


def crowding_cycles(needed_bytes: np.ndarray, target: Target) -> np.ndarray:
    """More than any cycles, for each doubling by which a need exceeds what planners may use of a tile's memory."""
    most = max(1.0, target.available_memory_proportion * target.bytes_per_tile)
    return np.ceil(np.log2(np.maximum(needed_bytes, most) / most)) * _CROWDED_CYCLES


def grid_of(placement: Blocked) -> Grids:
    """A placement as the one candidate of a grid."""
    blocks = np.array([[len(cut) - 1] for cut in placement.cuts], np.int64).reshape(-1, 1)
    longest = np.array([[int(np.diff(cut).max())] for cut in placement.cuts], np.int64).reshape(-1, 1)
    return Grids(placement.shape, blocks, longest)


def estimated_cycles(placement: Blocked, work: Work, after: After | None, graph: Graph) -> float:
    """Cycles on one placement; the boxes of one tile are worked on one after the other."""
    grid, target = grid_of(placement), graph.target
    cycles = _cycles(work, grid, after, target, graph.byte_price_cycles) + _crowding(work, grid, target)
    more_boxes = int(np.bincount(placement.tile.ravel()).max()) - 1
    return float(cycles[0] + more_boxes * np.ravel(work.compute_cycles(grid.lengths, target))[0])


def cycles_in_place(placement: Blocked, work: Work, number: int, after: After | None, graph: Graph) -> float:
    """Cycles on the placement that an operand, given by the number of its field, has already."""
    cycles = estimated_cycles(placement, work.with_free([number]), after, graph)
    return cycles - graph.byte_price_cycles * _taken_bytes(placement, work, [number])


def _taken_bytes(placement: Blocked, work: Work, numbers: Sequence[int]) -> float:
    """Bytes of some fields on the fullest tile, which `Work.placed_bytes` counts if they are free."""
    grid = grid_of(placement)
    return float((work.with_free(numbers).placed_bytes(grid) - work.placed_bytes(grid))[0])
