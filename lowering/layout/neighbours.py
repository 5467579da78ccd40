"""Boxes for variables that an operation reads at several offsets, as stencils do.

Of a variable that lies linearly, the row before an element is on another tile; in boxes, only what is along their sides
moves.

Input: the operands of an operation over one index space. Those that count are views of variables that lie nowhere yet:
shifted slices, or such slices joined again, as `jnp.roll` and padding make them. Output: mappings of these variables, a
few that are worth a trial.
Limits: grids are ranked as if what a box reads around itself were received once, with its corners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ipujax.lowering.layout.counts import total_elements
from ipujax.lowering.layout.grids import Grids, even_grids
from ipujax.lowering.layout.mapping import variable_dims
from ipujax.runtime.exchange import copy_cycles, receive_cycles
from ipujax.runtime.graph import Graph
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    Affine,
    Blocked,
    Concat,
    Node,
    Tensor,
    Variable,
    blocked_mapping,
    element_bytes,
    frozen,
)

_MOST_GRIDS = 2  # of stencils in two dimensions the best by a trial, of 20 to 50 ms, was always one of them


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the points of an index space read of one variable.

    Args:
        variable: what they read.
        dims: the dimension of the variable that each dimension of the index space follows, None for one of size 1.
        low: for each dimension of the index space the least offset at which a point reads.
        high: the largest.
    """

    variable: Variable
    dims: tuple[int | None, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    def mapping(self, placement: Blocked) -> Blocked:
        """The mapping with the middle of what a box of points reads on the tile of that box."""
        shape, followed = self.variable.shape, [d for d, dim in enumerate(self.dims) if dim is not None]
        order = [dim for dim in self.dims if dim is not None]
        cuts = [frozen([0, n], np.int64) for n in shape]
        for d, dim in zip(followed, order, strict=True):
            inner = placement.cuts[d][1:-1] + (self.low[d] + self.high[d]) // 2
            cuts[dim] = frozen([0, *inner, shape[dim]], np.int64)
        order += [dim for dim in range(len(shape)) if dim not in order]
        tile = placement.tile.reshape([placement.tile.shape[d] for d in followed] + [1] * (len(shape) - len(followed)))
        return blocked_mapping(cuts, frozen(np.transpose(tile, np.argsort(order)), np.int32))


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
    found = [one for one in _neighbours(views) if one.variable not in graph.mappings]
    if not found:
        return []
    grids = _grids(graph.target, found, shape)
    cycles = compute_cycles(total_elements([*grids.lengths])) + _moving_cycles(graph, found, grids, len(views))
    best = np.argsort(cycles, kind="stable")[:_MOST_GRIDS]
    return [{one.variable: one.mapping(grids.placement(int(n))) for one in found} for n in best]


def _grids(target: Target, found: Sequence[Neighbours], shape: tuple[int, ...]) -> Grids:
    """The grids of the index space along dimensions that all follow; short rows are left whole."""
    width = max(element_bytes(one.variable.dtype) for one in found)
    tiles = min(target.tiles_per_ipu, max(1, prod(shape) * width // MIN_BYTES_PER_TILE))
    order = [d for d in range(len(shape)) if all(one.dims[d] is not None for one in found)]
    order = [d for d in order if prod(shape[d:]) * width > MIN_BYTES_PER_TILE] or order
    return even_grids(shape, tuple(order), tiles)


def _moving_cycles(graph: Graph, found: Sequence[Neighbours], grids: Grids, num_views: int) -> np.ndarray:
    """Cycles to receive what is around a box and to copy each view of the box, with what the code for that is worth."""
    target, width = graph.target, max(element_bytes(one.variable.dtype) for one in found)
    reach = np.array([one.high for one in found]).max(0) - np.array([one.low for one in found]).min(0)
    around = np.where(grids.blocks > 1, np.minimum(reach, grids.shape)[:, None], 0)
    elements = total_elements([*grids.lengths])
    received = (total_elements([*(grids.lengths + around)]) - elements) * width
    rows = np.cumprod(np.vstack((np.ones_like(elements), grids.lengths)), axis=0)[:-1]
    pieces = np.sum(np.minimum(around, 2) * rows, axis=0)  # a side is one piece where it is rows of its box
    code_bytes = INSTRUCTION_BYTES * target.exchange_fragment_cycles * pieces
    innermost = int(np.flatnonzero(reach)[-1])  # along which rows of a shifted view are not those of the box
    copied = num_views * copy_cycles(elements * width, rows[innermost], target)
    receiving = receive_cycles(received, np.zeros_like(received), pieces, target)
    return receiving + copied + graph.byte_price_cycles * code_bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of an operand that is a rectangle of a variable.

    Args:
        variable: that variable.
        dims: its dimensions along those of the operand, None for one of size 1.
        offsets: for each dimension of the operand, where in the variable it is, relative to where in the operand.
    """

    variable: Variable
    dims: tuple[int | None, ...]
    offsets: tuple[int, ...]


def _neighbours(operands: Iterable[Tensor]) -> list[Neighbours]:
    parts, others = dict[Variable, list[_Part]](), set[Variable]()
    for operand in operands:
        own = _parts(operand.node, (0,) * operand.ndim)
        for part in own or ():
            parts.setdefault(part.variable, []).append(part)
        others.update(operand.variables() if own is None else ())
    several = [_together(variable, own) for variable, own in parts.items() if variable not in others]
    return [one for one in several if one is not None and one.low != one.high]


def _parts(node: Node, at: tuple[int, ...]) -> list[_Part] | None:
    """The rectangles of a view whose first element is at some place of an operand; None for other views."""
    if isinstance(node, Concat):
        found: list[_Part] = []
        for part, first in zip(node.parts, node.bounds[:-1], strict=True):
            inner = _parts(part, tuple(n + first * (d == node.axis) for d, n in enumerate(at)))
            if inner is None:
                return None
            found += inner
        return found
    dims = variable_dims(node) if isinstance(node, Affine) and not node.is_empty else None
    if not isinstance(node, Affine) or dims is None:
        return None
    start = np.unravel_index(node.offset, node.variable.shape)
    offsets = [0 if dim is None else int(start[dim]) - here for dim, here in zip(dims, at, strict=True)]
    return [_Part(node.variable, dims, tuple(offsets))]


def _together(variable: Variable, parts: Sequence[_Part]) -> Neighbours | None:
    """What all parts of a variable read; None where they follow it in different ways."""
    dims, low, high = list[int | None](), list[int](), list[int]()
    for d in range(len(parts[0].dims)):
        followed = {part.dims[d] for part in parts} - {None}
        if len(followed) > 1:
            return None
        dim = next(iter(followed), None)
        offsets = [0]
        if dim is not None:
            offsets = [_on_ring(part.offsets[d], variable.shape[dim]) for part in parts if part.dims[d] == dim]
        dims.append(dim)
        low.append(min(offsets))
        high.append(max(offsets))
    taken = [dim for dim in dims if dim is not None]
    return Neighbours(variable, tuple(dims), tuple(low), tuple(high)) if len(set(taken)) == len(taken) else None


def _on_ring(offset: int, extent: int) -> int:
    """An offset where what is rolled beyond the end is next to the beginning."""
    return (offset + extent // 2) % extent - extent // 2
