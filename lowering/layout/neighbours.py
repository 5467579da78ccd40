"""Blocked mappings of variables that an operation reads at several offsets, as stencils do.

In a linear mapping the row before an element is on another tile; in blocks only their borders are exchanged.

Input: operands over one index space that are views of unmapped variables: shifted slices, or concatenations of
such slices, as `jnp.roll` and padding make them. Output: a few candidate mappings of these variables.
Limits: grids are ranked as if the border of a block were received once, with its corners.
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

# In trials of two-dimensional stencils, which take some 50 ms each, the best grid was one of the first two.
_MOST_GRIDS = 2


def neighbour_mappings(
    graph: Graph,
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    compute_cycles: Callable[[np.ndarray], np.ndarray],
) -> list[dict[Variable, Blocked]]:
    """Candidate mappings of the variables that are read at several offsets, in order of expected cycles.

    Args:
        graph: mappings, target and cost per byte.
        operands: tensors of shape `shape`.
        shape: shape of the index space.
        compute_cycles: cycles of a vertex for numbers of elements, both [candidates].

    Returns:
        Proposals with one mapping for each of these variables; empty if there are none.
    """
    if sum(n > 1 for n in shape) < 2:
        return []
    views = [operand for operand in operands if not graph.is_mapped(operand)]
    stencils = [stencil for stencil in neighbours(views) if stencil.variable not in graph.mappings]
    if not stencils:
        return []
    grids = _grids(graph.target, stencils, shape)
    cycles = compute_cycles(total_elements([*grids.lengths])) + _moving_cycles(graph, stencils, grids)
    best = np.argsort(cycles, kind="stable")[:_MOST_GRIDS]
    return [{stencil.variable: _mapping(stencil, grids.placement(int(n))) for stencil in stencils} for n in best]


def _grids(target: Target, stencils: Sequence[Neighbours], shape: tuple[int, ...]) -> Grids:
    """Grids along the dimensions that every stencil follows; short rows are not cut."""
    width = max(element_bytes(stencil.variable.dtype) for stencil in stencils)
    tiles = min(target.tiles_per_ipu, max(1, prod(shape) * width // MIN_BYTES_PER_TILE))
    order = [d for d in range(len(shape)) if all(stencil.dims[d] is not None for stencil in stencils)]
    # A row of fewer bytes than a tile's least share would move in small pieces.
    order = [d for d in order if prod(shape[d:]) * width > MIN_BYTES_PER_TILE] or order
    return even_grids(shape, tuple(order), tiles)


def _moving_cycles(graph: Graph, stencils: Sequence[Neighbours], grids: Grids) -> np.ndarray:
    """Cycles of receiving the border of a block and copying the block, plus the cost of exchange code."""
    target = graph.target
    width = max(element_bytes(stencil.variable.dtype) for stencil in stencils)
    reach = np.array([stencil.high for stencil in stencils]).max(0) - np.array(
        [stencil.low for stencil in stencils]
    ).min(0)
    border = np.where(grids.blocks > 1, np.minimum(reach, grids.shape)[:, None], 0)
    elements = total_elements([*grids.lengths])
    received = (total_elements([*(grids.lengths + border)]) - elements) * width
    rows = np.cumprod(np.vstack((np.ones_like(elements), grids.lengths)), axis=0)[:-1]
    # A border is received from at most two sides; one across rows arrives as a piece for each row.
    pieces = np.sum(np.minimum(border, 2) * rows, axis=0)
    code_bytes = INSTRUCTION_BYTES * target.exchange_fragment_cycles * pieces
    # Rows of a shifted view are not contiguous in the block along the innermost dimension that is shifted.
    innermost = int(np.flatnonzero(reach)[-1])
    copied = len(stencils) * copy_cycles(elements * width, rows[innermost], target)
    receiving = receive_cycles(received, np.zeros_like(received), pieces, target)
    return receiving + copied + graph.byte_cost_cycles * code_bytes


def _mapping(stencil: Neighbours, placement: Blocked) -> Blocked:
    """Mapping that puts the middle of the elements a block reads on the tile of that block."""
    shape = stencil.variable.shape
    followed = [d for d, dim in enumerate(stencil.dims) if dim is not None]
    order = [dim for dim in stencil.dims if dim is not None]
    cuts = [frozen([0, n], np.int64) for n in shape]
    for d, dim in zip(followed, order, strict=True):
        inner = placement.cuts[d][1:-1]
        if inner.size:
            # Cuts move by half the offset, but stay inside of the variable, so that no block is empty.
            inner = inner + np.clip((stencil.low[d] + stencil.high[d]) // 2, 1 - inner[0], shape[dim] - 1 - inner[-1])
        cuts[dim] = frozen([0, *inner, shape[dim]], np.int64)
    order += [dim for dim in range(len(shape)) if dim not in order]
    tile = placement.tile.reshape([placement.tile.shape[d] for d in followed] + [1] * (len(shape) - len(followed)))
    return blocked_mapping(cuts, frozen(np.transpose(tile, np.argsort(order)), np.int32))
