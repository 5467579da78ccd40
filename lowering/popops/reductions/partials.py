"""Combination of partial results by a monoid, in one to three stages; `partials_cost` has its cost.

Partial results are a tensor of one more dimension than the result, the first, whose indices are called slots. A stage
combines neighbouring slots, and leaves fewer.

`reduce_partials` spreads the results of a stage evenly over all tiles of the IPU, wherever the partials are mapped.
`reduce_partials_in_place` maps results to tiles of the partials they come from: every block of results is cut in parts,
and each part is combined on one of the tiles that have a partial of it. It uses no other tile, so that its cost does
not depend on the number of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout import cut_again, mapping_like
from ipujax.lowering.popops.reductions.partials_cost import divide, grain, slots_after_stages, spread_blocks
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import reduce_codelet
from ipujax.runtime.graph import (
    Access,
    Axis,
    Builder,
    Dim,
    Graph,
    Term,
    element,
)
from ipujax.runtime.tensor import (
    Blocked,
    Tensor,
    TileMapping,
    blocked_mapping,
    even_cuts,
    flat_mapping,
    frozen,
)


def reduce_partials(builder: Builder, partials: Tensor, max_tiles: int | None = None) -> Tensor:
    """Combines partial results by their variable's monoid; returns a new tensor without the slots.

    Args:
        partials: a variable with a monoid, slots in dimension 0.
        max_tiles: number of tiles that results are spread over, from tile 0; None for all of an IPU.
    """
    monoid = _monoid(partials)
    shape = partials.shape[1:]
    tiles = max_tiles or builder.graph.target.tiles_per_ipu
    flat = partials.reshape((partials.shape[0], prod(shape)))
    for stage_slots in slots_after_stages(partials.shape[0]) or (1,):  # a single partial result is copied
        slots, size = flat.shape
        slot_cuts = even_cuts(slots, stage_slots)
        slot_blocks = len(slot_cuts) - 1
        cuts = even_cuts(size, int(spread_blocks(size, slots, slot_blocks, flat.dtype, tiles)), grain(flat.dtype))
        counts = slot_blocks, len(cuts) - 1
        tile = frozen(np.arange(prod(counts)).reshape(counts) % tiles, np.int32)
        is_last = stage_slots == 1
        mapping: TileMapping = blocked_mapping((even_cuts(stage_slots, stage_slots), cuts), tile)
        if is_last:
            mapping = flat_mapping(size, cuts[:-1], tile[0])
        flat = _add_stage(builder, flat, monoid, (slot_cuts, cuts), tile, mapping, shape if is_last else None)
    return flat


def reduce_partials_in_place(builder: Builder, partials: Tensor) -> Tensor:
    """Combines partial results on their own tiles; returns a new tensor without the slots.

    Where `partials` are not mapped in blocks, each of one slot, results are spread as by `reduce_partials`.
    """
    graph = builder.graph
    mapping = mapping_like(graph, partials)
    monoid = _monoid(partials)
    if not isinstance(mapping, Blocked) or len(mapping.cuts[0]) - 1 != partials.shape[0] or not partials.size:
        return reduce_partials(builder, partials)
    for stage_slots in slots_after_stages(partials.shape[0]):
        grid_cuts, tile = _divide_among_owners(graph, partials, mapping, monoid, stage_slots)
        if stage_slots == 1:
            mapping = blocked_mapping(grid_cuts[1:], tile[0])
            return _add_stage(builder, partials, monoid, grid_cuts, tile, mapping, partials.shape[1:])
        mapping = blocked_mapping((even_cuts(stage_slots, stage_slots), *grid_cuts[1:]), tile)
        partials = _add_stage(builder, partials, monoid, grid_cuts, tile, mapping, None)
    return partials.reshape(partials.shape[1:])


def _divide_among_owners(
    graph: Graph, partials: Tensor, mapping: Blocked, monoid: str, stage_slots: int
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Divides each block of results of a stage among the tiles that have a partial result of it.

    Returns the cuts of the grid of vertices, slots first, and the tile of each.
    """
    slots = partials.shape[0]
    cuts = list(mapping.cuts[1:])
    owners = mapping.tile
    longest = np.array([[np.diff(cut).max()] for cut in cuts], np.int64)
    stage = np.array([slots]), np.array([stage_slots])
    division = divide(*stage, longest, partials.shape[1:], partials.dtype, monoid, graph.target, graph.byte_cost_cycles)
    dim = int(division.dim[0])
    slot_cuts = even_cuts(slots, stage_slots)
    part = np.zeros(1, np.int64)  # number of each part within its block
    if cuts:
        cuts[dim], old_block, part = cut_again(cuts[dim], int(division.count[0]))
        owners = np.take(owners, old_block, 1 + dim)
    first_slot = slot_cuts[:-1, None]
    depth = np.diff(slot_cuts)[:, None]
    # Not always the first of the tiles with a part: results of small reductions would pile up on it.
    slot = first_slot + (part + graph.next_tile) % depth
    shape = [len(slot), *[1] * len(cuts)]
    if cuts:
        shape[1 + dim] = len(part)
    tile = frozen(np.take_along_axis(owners, slot.reshape(shape), 0), np.int32)
    return (slot_cuts, *cuts), tile


def _monoid(partials: Tensor) -> str:
    (variable,) = partials.variables()
    assert variable.monoid is not None, "partials carry their monoid"
    return variable.monoid


def _add_stage(
    builder: Builder,
    partials: Tensor,
    monoid: str,
    cuts: Sequence[np.ndarray],
    tile: np.ndarray,
    mapping: TileMapping,
    shape: tuple[int, ...] | None,
) -> Tensor:
    """Adds one stage; returns its results.

    Args:
        builder: graph, program and debug name.
        partials: partial results before the stage.
        monoid: monoid by which they combine.
        cuts: cuts of the grid of vertices, slots first.
        tile: tile of each vertex.
        mapping: mapping of the results.
        shape: shape of the final result in the last stage; None before it, for partial results again.
    """
    elements = [element(d) for d in range(1, partials.ndim)]
    if shape is None:
        stage_shape = (len(cuts[0]) - 1, *partials.shape[1:])
        out = builder.graph.add_variable(stage_shape, partials.dtype, f"{builder.name}/partials", mapping, monoid)
        access = Access(out, (Dim((Term(0, 1, "block"),)), *elements))
    else:
        out = builder.graph.add_variable(shape, partials.dtype, builder.name, mapping)
        access = Access(out.reshape(partials.shape[1:]), tuple(elements))
    axes = (Axis("slot", cuts[0], "reduce"), *(Axis(f"d{d}", cut) for d, cut in enumerate(cuts[1:])))
    codelet = reduce_codelet(monoid, partials.dtype, (0,))
    accesses = (Access(partials, (element(0), *elements)), access)
    add_vertices(builder.named("reduce"), codelet, axes, accesses, tile)
    return out
