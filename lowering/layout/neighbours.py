"""Boxes for variables that an operation reads at several offsets, as stencils do.

Of a variable that lies linearly, the row before an element is on another tile; in boxes, only what is along their sides
moves.

Input: the operands of an operation over one index space. Those that count are views of variables that lie nowhere yet:
shifted slices, or such slices joined again, as `jnp.roll` and padding make them. Output: mappings of these variables, a
few that are worth a trial.
Limits: grids are ranked as if what a box reads around itself were received once, with its corners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.grids import Grids, even_grids
from ipujax.lowering.layout.offsets import Neighbours, neighbours
from ipujax.runtime.exchange import copy_cycles, receive_cycles
from ipujax.runtime.graph import Graph
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    Blocked,
    Tensor,
    Variable,
    blocked_mapping,
    element_bytes,
    frozen,
)

_MOST_GRIDS = 2  # of stencils in two dimensions the best by a trial, which takes some 50 ms, was one of them


def neighbour_mappings(
    graph: Graph,
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    compute_cycles: Callable[[np.ndarray], np.ndarray],
) -> list[dict[Variable, Blocked]]:
    """Mappings of the variables that are read at several offsets, those expected to be cheapest first.

    Args:
        graph: knows what is mapped, the target and the price of a byte.
        operands: tensors of one shape.
        shape: that shape.
        compute_cycles: cycles of a vertex for numbers of elements, both [candidates].

    Returns:
        In each proposal a mapping of each of these variables; no proposal where there are none.
    """
    if sum(n > 1 for n in shape) < 2:
        return []
    views = [operand for operand in operands if not graph.is_mapped(operand)]
    found = [one for one in neighbours(views) if one.variable not in graph.mappings]
    if not found:
        return []
    grids = _grids(graph.target, found, shape)
    cycles = compute_cycles(total_elements([*grids.lengths])) + _moving_cycles(graph, found, grids)
    best = np.argsort(cycles, kind="stable")[:_MOST_GRIDS]
    return [{one.variable: _mapping(one, grids.placement(int(n))) for one in found} for n in best]


def _grids(target: Target, found: Sequence[Neighbours], shape: tuple[int, ...]) -> Grids:
    """The grids of the index space along dimensions that all follow; short rows are left whole."""
    width = max(element_bytes(one.variable.dtype) for one in found)
    tiles = min(target.tiles_per_ipu, max(1, prod(shape) * width // MIN_BYTES_PER_TILE))
    order = [d for d in range(len(shape)) if all(one.dims[d] is not None for one in found)]
    order = [d for d in order if prod(shape[d:]) * width > MIN_BYTES_PER_TILE] or order
    return even_grids(shape, tuple(order), tiles)


def _moving_cycles(graph: Graph, found: Sequence[Neighbours], grids: Grids) -> np.ndarray:
    """Cycles to receive what is around a box and to copy the box, with what the code for that is worth."""
    target, width = graph.target, max(element_bytes(one.variable.dtype) for one in found)
    reach = np.array([one.high for one in found]).max(0) - np.array([one.low for one in found]).min(0)
    around = np.where(grids.blocks > 1, np.minimum(reach, grids.shape)[:, None], 0)
    elements = total_elements([*grids.lengths])
    received = (total_elements([*(grids.lengths + around)]) - elements) * width
    rows = np.cumprod(np.vstack((np.ones_like(elements), grids.lengths)), axis=0)[:-1]
    pieces = np.sum(np.minimum(around, 2) * rows, axis=0)  # a side is one piece where it is rows of its box
    code_bytes = INSTRUCTION_BYTES * target.exchange_fragment_cycles * pieces
    innermost = int(np.flatnonzero(reach)[-1])  # along which rows of a shifted view are not those of the box
    copied = len(found) * copy_cycles(elements * width, rows[innermost], target)
    receiving = receive_cycles(received, np.zeros_like(received), pieces, target)
    return receiving + copied + graph.byte_price_cycles * code_bytes


def _mapping(one: Neighbours, placement: Blocked) -> Blocked:
    """The mapping with the middle of what a box of points reads on the tile of that box."""
    shape, followed = one.variable.shape, [d for d, dim in enumerate(one.dims) if dim is not None]
    order = [dim for dim in one.dims if dim is not None]
    cuts = [frozen([0, n], np.int64) for n in shape]
    for d, dim in zip(followed, order, strict=True):
        inner = placement.cuts[d][1:-1]
        if inner.size:
            inner = inner + np.clip((one.low[d] + one.high[d]) // 2, 1 - inner[0], shape[dim] - 1 - inner[-1])
        cuts[dim] = frozen([0, *inner, shape[dim]], np.int64)
    order += [dim for dim in range(len(shape)) if dim not in order]
    tile = placement.tile.reshape([placement.tile.shape[d] for d in followed] + [1] * (len(shape) - len(followed)))
    return blocked_mapping(cuts, frozen(np.transpose(tile, np.argsort(order)), np.int32))
