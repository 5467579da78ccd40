"""Combination of partial results by a monoid, in one to three stages; `partials_cost` says what it is charged.

Two layouts. `reduce_partials` spreads the results of a stage evenly over all tiles of the IPU, wherever partials lie,
if asked to in whole rows where that is hardly less even.
Results of `reduce_partials_in_place` lie among the partials they come from: every box of results is cut in parts, and
each part is combined on one of the tiles that hold a partial of it. That needs no tile that has none, so what it is
charged does not depend on how many tiles there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout import cut_again, mapping_like
from ipujax.lowering.popops.reductions.partials_cost import divided, grain, kept_slots, spread_blocks
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import reduce_codelet
from ipujax.runtime.graph import (
    Access,
    Axis,
    Dim,
    Graph,
    Sequence as ProgramSequence,
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
        cuts = even_cuts(size, int(spread_blocks(size, slots, kept, flat.dtype, tiles)), grain(flat.dtype))
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
        longest = np.array([[np.diff(cut).max()] for cut in cuts], np.int64)
        stage = np.array([slots]), np.array([keep])
        parts = divided(*stage, longest, partials.dtype, monoid, graph.target, graph.byte_price_cycles)
        dim, slot_cuts = int(parts.dim[0]), even_cuts(slots, keep)
        if cuts:
            cuts[dim], block, part = cut_again(cuts[dim], int(parts.count[0]))
            owners = np.take(owners, block, 1 + dim)
        else:
            part = np.zeros(1, np.int64)
        first, depth = slot_cuts[:-1, None], np.diff(slot_cuts)[:, None]
        # Not always the first tile of those that hold a part: what small reductions take would add up there.
        slot = first + (part + graph.next_tile) % depth
        shape = [len(slot), *[1] * len(cuts)]
        if cuts:
            shape[1 + dim] = len(part)
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
