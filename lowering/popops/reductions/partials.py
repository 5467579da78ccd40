"""Combination of partial results by a monoid, in one to three stages; `partials_cost` has its cost.

Partial results are a tensor of one more dimension than the result, the first, whose indices are called slots. A stage
combines neighbouring slots, and leaves fewer.

`reduce_partials` spreads the results of a stage evenly over all tiles of the IPU, wherever the partials are mapped.
`reduce_partials_in_place` maps results to tiles of the partials they come from: every block of results is cut in parts,
and each part is combined on one of the tiles that have a partial of it. It uses no other tile, so that its cost does
not depend on the number of tiles.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from ipujax.lowering.layout import cut_again, mapping_like
from ipujax.lowering.popops.reductions.partials_cost import divide, grain, slots_after_stages, spread_blocks
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import reduce_codelet
from ipujax.runtime.graph import Access, Axis, Builder, Dim, Graph, Term, element
from ipujax.runtime.tensor import Blocked, Tensor, TileMapping, blocked_mapping, even_cuts, flat_mapping, frozen


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
