"""Combination of partial results by a monoid, in one to three stages, and what that is charged.

Two layouts. `reduce_partials` spreads the results of a stage evenly over all tiles of the IPU, wherever partials lie,
if asked to in whole rows where that is hardly less even.
Results of `reduce_partials_in_place` lie among the partials they come from: every box of results is cut in parts, and
each part is combined on one of the tiles that hold a partial of it. That needs no tile that has none, so what it is
charged does not depend on how many tiles there are.

Source of the stage counts: poplibs `poplin/ConvReducePlan.cpp` (reference machine.md §1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.layout import cut_again, mapping_like
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles
from ipujax.lowering.popops.vertices.reducers import reduce_codelet
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import copy_cycles
from ipujax.runtime.graph import (
    Access,
    Axis,
    Dim,
    Graph,
    Sequence as ProgramSequence,
    Term,
    element,
)
from ipujax.runtime.memory import INSTRUCTION_BYTES
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

# Most partials of one output that are combined in one stage: 1 stage below 16 partials, 2 below 125, then 3.
_STAGES = ((16, 1), (125, 2))
_MAX_STAGES = 3
_MIN_RECEIVED_BYTES = 256  # assumed: a tile that receives less is not worth its exchange code


@remembered
def kept_slots(slots: int) -> tuple[int, ...]:
    """Partials of one output after each stage, 1 after the last; no stage for one partial."""
    if slots <= 1:
        return ()
    stages = next((n for bound, n in _STAGES if slots < bound), _MAX_STAGES)
    kept, left = [], slots
    for stage in range(stages - 1, 0, -1):
        left = max(2, round(left ** (stage / (stage + 1))))
        kept.append(left)
    return (*kept, 1)


def spread_blocks(size: int, slots: Any, keep: Any, dtype: Any, tiles: Any) -> Any:
    """Over how many tiles, for each slot that is kept, a stage of `reduce_partials` spreads its outputs.

    Args:
        size: outputs.
        slots: partials of each, an int or int64 array as the next and the last.
        keep: how many of them are left after it.
        dtype: of the partials.
        tiles: how many tiles there are.
    """
    return np.maximum(1, np.minimum(tiles // keep, -(-size // _least_outputs(slots, keep, dtype))))


def longest_share(size: int, slots: Any, keep: Any, dtype: Any, tiles: Any) -> Any:
    """Outputs of the busiest tile of a stage; arguments as `spread_blocks`."""
    grains = -(-size // _grain(dtype))
    return np.minimum(size, -(-grains // spread_blocks(size, slots, keep, dtype, tiles)) * _grain(dtype))


def _least_outputs(slots: Any, keep: Any, dtype: Any) -> Any:
    """Fewest outputs that get a tile of their own."""
    return np.maximum(_grain(dtype), -(-_MIN_RECEIVED_BYTES // (element_bytes(dtype) * (slots // keep))))


def _grain(dtype: Any) -> int:
    return max(1, 8 // element_bytes(dtype))


def reduce_partials(
    graph: Graph, partials: Tensor, prog: ProgramSequence, name: str, most_tiles: int | None = None
) -> Tensor:
    """Combines dimension 0 of a tensor of partial results by its variable's monoid, spread evenly over tiles.

    Args:
        graph: graph to add to.
        partials: [slots, …], all of a variable with a monoid.
        prog: program the compute sets are added to.
        name: debug name.
        most_tiles: how many tiles may combine, default those of one IPU.

    Returns:
        A new tensor of shape `partials.shape[1:]`.
    """
    monoid, shape, tiles = _monoid(partials), partials.shape[1:], most_tiles or graph.target.tiles_per_ipu
    flat = partials.reshape((partials.shape[0], prod(shape)))
    for keep in kept_slots(partials.shape[0]) or (1,):
        slots, size = flat.shape
        slot_cuts = even_cuts(slots, keep)
        kept = len(slot_cuts) - 1
        cuts = even_cuts(size, int(spread_blocks(size, slots, kept, flat.dtype, tiles)), _grain(flat.dtype))
        counts = kept, len(cuts) - 1
        tile = frozen(np.arange(prod(counts)).reshape(counts) % tiles, np.int32)
        is_last = keep == 1
        placed: TileMapping = blocked_mapping((even_cuts(keep, keep), cuts), tile)
        if is_last:
            placed = flat_mapping(size, cuts[:-1], tile[0])
        flat = _stage(graph, flat, monoid, (slot_cuts, cuts), tile, placed, shape if is_last else None, prog, name)
    return flat


def reduce_partials_in_place(graph: Graph, partials: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    """Combines dimension 0 of a tensor of partial results by its variable's monoid, on the tiles that hold them.

    Arguments and result are those of `reduce_partials`, which is what happens where partials lie in no boxes.
    """
    mapping, monoid = mapping_like(graph, partials), _monoid(partials)
    if not isinstance(mapping, Blocked) or len(mapping.cuts[0]) - 1 != partials.shape[0] or not partials.size:
        return reduce_partials(graph, partials, prog, name)
    for keep in kept_slots(partials.shape[0]):
        slots, cuts, owners = partials.shape[0], list(mapping.cuts[1:]), mapping.tile
        longest = tuple(int(np.diff(cut).max()) for cut in cuts)
        parts = stage_parts(slots, keep, longest, partials.dtype, monoid, graph.target, graph.byte_price_cycles)
        slot_cuts = even_cuts(slots, keep)
        if cuts:
            cuts[parts.dim], block, part = cut_again(cuts[parts.dim], parts.count)
            owners = np.take(owners, block, 1 + parts.dim)
        else:
            part = np.zeros(1, np.int64)
        first, depth = slot_cuts[:-1, None], np.diff(slot_cuts)[:, None]
        # Not always the first tile of those that hold a part: what small reductions take would add up there.
        slot = first + (part + graph.next_tile) % depth
        shape = [len(slot), *[1] * len(cuts)]
        if cuts:
            shape[1 + parts.dim] = len(part)
        tile = frozen(np.take_along_axis(owners, slot.reshape(shape), 0), np.int32)
        kept = blocked_mapping((even_cuts(keep, keep), *cuts), tile)
        if keep == 1:
            placed = blocked_mapping(cuts, tile[0])
            return _stage(graph, partials, monoid, (slot_cuts, *cuts), tile, placed, partials.shape[1:], prog, name)
        partials = _stage(graph, partials, monoid, (slot_cuts, *cuts), tile, kept, None, prog, name)
        mapping = kept
    return partials.reshape(partials.shape[1:])


def _monoid(partials: Tensor) -> str:
    (variable,) = partials.variables()
    assert variable.monoid is not None, "partials carry their monoid"
    return variable.monoid


def _stage(
    graph: Graph,
    partials: Tensor,
    monoid: str,
    cuts: Sequence[np.ndarray],
    tile: np.ndarray,
    placed: TileMapping,
    shape: tuple[int, ...] | None,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Adds one stage on a grid of slots and elements; `shape` is that of the result after the last."""
    elements = [element(d) for d in range(1, partials.ndim)]
    if shape is None:
        kept = (len(cuts[0]) - 1, *partials.shape[1:])
        out = graph.add_variable(kept, partials.dtype, f"{name}/partials", placed, monoid)
        access = Access(out, (Dim((Term(0, 1, "block"),)), *elements))
    else:
        out = graph.add_variable(shape, partials.dtype, name, placed)
        access = Access(out.reshape(partials.shape[1:]), tuple(elements))
    axes = (Axis("slot", cuts[0], "reduce"), *(Axis(f"d{d}", cut) for d, cut in enumerate(cuts[1:])))
    codelet, accesses = (
        reduce_codelet(monoid, partials.dtype, (0,)),
        (Access(partials, (element(0), *elements)), access),
    )
    add_vertices(graph, codelet, axes, accesses, tile, prog, f"{name}/reduce")
    return out


# --- charges of `reduce_partials_in_place` ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """The division of boxes of results in a stage.

    Args:
        dim: which dimension, of those behind the slots.
        count: in how many parts.
        longest: lengths of the longest part.
        cycles: what the stage is charged.
    """

    dim: int
    count: int
    longest: tuple[int, ...]
    cycles: int


def combined_cycles(
    slots: int, longest: tuple[int, ...], dtype: Any, monoid: str, target: Target, byte_price: float
) -> int:
    """Cycles of `reduce_partials_in_place` for partials that each lie on a tile of their own.

    Args:
        slots: partials of each result.
        longest: lengths of the largest box of results.
        dtype: of the partials.
        monoid: how they combine.
        target: the machine.
        byte_price: cycles that a byte of exchange code is worth when parts are chosen.
    """
    return combined(slots, longest, dtype, monoid, target, byte_price)[0]


@remembered
def combined(
    slots: int, longest: tuple[int, ...], dtype: Any, monoid: str, target: Target, byte_price: float
) -> tuple[int, tuple[int, ...]]:
    """`combined_cycles`, to which the arguments go, and the lengths of the largest box in which results then lie."""
    total = 0
    for keep in kept_slots(slots):
        parts = stage_parts(slots, keep, longest, dtype, monoid, target, byte_price)
        total, slots, longest = total + parts.cycles, keep, parts.longest
    return total, longest


@remembered
def stage_parts(
    slots: int, keep: int, longest: tuple[int, ...], dtype: Any, monoid: str, target: Target, byte_price: float
) -> Parts:
    """The cheapest dimension and number of parts for one stage: at most one for each partial that is combined."""
    depth, width, size = -(-slots // keep), element_bytes(dtype), prod(longest)
    options = [
        (dim, count)
        for dim, extent in enumerate(longest or (1,))
        for count in _part_counts(min(slots // keep, extent, -(-size * width * depth // _MIN_RECEIVED_BYTES)))
        if count > 1 or dim == 0
    ]
    dim, count = np.array(options, np.int64).T
    extent, before = np.array(longest or (1,))[dim], np.cumprod((1, *longest))[dim]
    length, shortest = -(-extent // count), extent // count
    inner = size // extent
    runs = np.where(count > 1, before, 1)
    elements = length * inner
    compute = reduce_cycles(monoid, dtype, elements, np.asarray(depth), target)
    # A tile puts the part it has itself between those that arrive; no two tiles receive the same.
    copied = copy_cycles(elements * width, runs, target)
    # A tile that combines no part itself sends all it has.
    sent = np.where(count < depth, size, size - shortest * inner) * width
    payload = np.ceil(np.maximum((depth - 1) * elements * width, sent) / target.exchange_bytes_per_cycle)
    pieces = (depth - 1) * runs
    work = np.maximum(payload, pieces * target.exchange_fragment_cycles)
    cycles = target.internal_sync_cycles + target.exchange_startup_cycles + work + copied + compute
    code_bytes = pieces * target.exchange_fragment_cycles * INSTRUCTION_BYTES
    best = int(np.argmin(cycles + byte_price * code_bytes))
    lengths = tuple(int(length[best]) if d == dim[best] else n for d, n in enumerate(longest))
    return Parts(int(dim[best]), int(count[best]), lengths, int(cycles[best]))


def _part_counts(most: int) -> list[int]:
    """Powers of two up to a number, and that number, at least 1."""
    most = max(1, most)
    powers = [1 << n for n in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]
