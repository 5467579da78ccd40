"""Variables that an operation reads at several offsets, as stencils do: their mappings, and one array around a block.

In a linear mapping the row before an element is on another tile; in blocks only their borders are exchanged. For each
variable the dimensions along which it is followed are found first, with the smallest and largest offset.

Where several operands are parts of one view a little larger than the index space, a vertex is connected to that view:
it has one array in its memory instead of one for each operand.

Input: operands over one index space that are views of variables: shifted slices, or concatenations of such slices, as
`jnp.roll` and padding make them. Output: a few candidate mappings of unmapped variables; shared windows, and the
position of each operand in them.
Limits: grids are ranked as if the border of a block were received with its corners. Windows are of slices of a
whole array, rolls of it, and slices of it padded with its edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub

import numpy as np

from ipujax.lowering.layout.grids import Grids, even_grids, total_elements
from ipujax.lowering.layout.mapping import variable_dims
from ipujax.runtime.exchange import copy_cycles, receive_code_bytes, receive_cycles
from ipujax.runtime.graph import Graph
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
    concat,
    element_bytes,
    frozen,
)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Range of offsets at which the points of an index space read one variable."""

    variable: Variable
    dims: tuple[int | None, ...]  # its dimension that each dimension of the index space follows, None for one of size 1
    low: tuple[int, ...]  # smallest offset of a point along each dimension of the index space
    high: tuple[int, ...]  # largest offset


@dataclass(frozen=True, slots=True)
class Part:
    """Rectangle of an operand that is a rectangle of a variable."""

    variable: Variable
    dims: tuple[int | None, ...]  # the variable's dimension along each of the operand, None for one of size 1
    # Position in the variable minus position in the operand, along each dimension of the operand; modulo the extent
    # along a dimension of a concatenation, because a roll continues at the other end
    offsets: tuple[int, ...]
    size: int


def neighbours(operands: Iterable[Tensor]) -> list[Neighbours]:
    """Variables that operands of one shape read at several offsets, and in no other way, to map them in blocks.

    A stencil is such a variable: its elements are read at the same point of the index space and at neighbours of it.
    """
    parts: dict[Variable, list[Part]] = {}
    irregular: set[Variable] = set()  # variables that are read in another way
    views = list(operands)
    # No variable is read twice: the usual case.
    if all(count == 1 for count in Counter(variable for view in views for variable in view.variables()).values()):
        return []
    for operand in views:
        rectangles = parts_of(operand)  # None if the operand is no join of rectangles of variables
        for part in rectangles or ():
            parts.setdefault(part.variable, []).append(part)
        irregular.update(operand.variables() if rectangles is None else ())
    stencils = [
        _joint_range(variable, rectangles) for variable, rectangles in parts.items() if variable not in irregular
    ]
    # None: parts of the operands follow different dimensions of the variable, as x and its transpose do, so that no
    # blocks of it suit all of them. With one offset only, the variable is shifted but read once.
    return [stencil for stencil in stencils if stencil is not None and stencil.low != stencil.high]


def parts_of(operand: Tensor) -> list[Part] | None:
    """Rectangles of which a view is a concatenation; None for any other view."""
    parts = _rectangles_of_node(operand.node, (0,) * operand.ndim, (False,) * operand.ndim)
    return None if parts is None else list(parts)


def _rectangles_of_node(node: Node, at: tuple[int, ...], joined_dims: tuple[bool, ...]) -> Iterable[Part] | None:
    """Rectangles of which a part of an operand is a concatenation, with their offsets from variables.

    Args:
        node: the part.
        at: position of its first element in the operand.
        joined_dims: for each dimension whether a concatenation around the part joins parts along it.

    Returns:
        The rectangles; None for another view, as one with a broadcast, a stride, or no elements.
    """
    if isinstance(node, Concat):
        joined_inside = tuple(is_joined or d == node.axis for d, is_joined in enumerate(joined_dims))
        # Position of each part: along the joined axis that of the node, plus where the part begins. The last bound is
        # the end of the node, hence `strict=False`.
        starts = (tuple(n + bound * (d == node.axis) for d, n in enumerate(at)) for bound in node.bounds)
        nested = [
            _rectangles_of_node(part, start, joined_inside) for part, start in zip(node.parts, starts, strict=False)
        ]
        return None if None in nested else [part for parts in nested if parts is not None for part in parts]
    dims = variable_dims(node) if isinstance(node, Affine) and not node.is_empty else None
    if not isinstance(node, Affine) or dims is None:
        return None
    shape = node.variable.shape
    if len(dims) == len(shape) and all(dim in (None, d) for d, dim in enumerate(dims)):
        # A single row has no stride to tell its dimension by: it is that of the other parts.
        dims = tuple(range(len(shape)))
    first = [int(n) for n in np.unravel_index(node.offset, shape)]
    rows = zip(dims, at, joined_dims, strict=True)
    # Position in the variable minus position in the operand; modulo the extent where parts are joined, for a roll.
    offsets = [
        0 if dim is None else _offset_on_ring(first[dim] - position, shape[dim]) if is_joined else first[dim] - position
        for dim, position, is_joined in rows
    ]
    return [Part(node.variable, dims, tuple(offsets), prod(node.shape))]


def _offset_on_ring(offset: int, extent: int) -> int:
    """The offset of least size that is equal modulo the extent, because a roll continues at the other end."""
    return (offset + extent // 2) % extent - extent // 2


def _joint_range(variable: Variable, parts: Sequence[Part]) -> Neighbours | None:
    """Range of offsets over all parts of a variable; None if they follow different dimensions, or one twice.

    `part.dims[d]` is the variable's dimension along dimension d of the index space, None for one of size 1.
    """
    dims: list[int | None] = []
    low: list[int] = []
    high: list[int] = []
    for d in range(len(parts[0].dims)):
        followed = {part.dims[d] for part in parts} - {None}
        if len(followed) > 1:
            return None
        dim = next(iter(followed), None)
        offsets = [part.offsets[d] for part in parts if part.dims[d] == dim]
        dims.append(dim)
        low.append(min(offsets))
        high.append(max(offsets))
    used = [dim for dim in dims if dim is not None]  # one twice: along different dimensions for two parts
    return Neighbours(variable, tuple(dims), tuple(low), tuple(high)) if len(set(used)) == len(used) else None


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
    if sum(n > 1 for n in shape) < 2:  # along a single dimension blocks are a linear mapping
        return []
    views = [operand for operand in operands if not graph.is_mapped(operand)]
    stencils = [stencil for stencil in neighbours(views) if stencil.variable not in graph.mappings]
    if not stencils:
        return []
    grids = _grids_of_stencils(graph.target, stencils, shape)
    moving = sum(_moving_cycles(graph, stencil, grids) for stencil in stencils)
    cycles = compute_cycles(total_elements([*grids.lengths])) + moving
    best = np.argsort(cycles, kind="stable")[:_MOST_GRIDS]  # numbers of the grids that are proposed
    return [
        {stencil.variable: _mapping_to_blocks(stencil, grids.placement(int(n))) for stencil in stencils} for n in best
    ]


def _grids_of_stencils(target: Target, stencils: Sequence[Neighbours], shape: tuple[int, ...]) -> Grids:
    """Grids along the dimensions that every stencil follows; short rows are not cut."""
    width = max(element_bytes(stencil.variable.dtype) for stencil in stencils)
    tiles = min(target.tiles_per_ipu, max(1, prod(shape) * width // MIN_BYTES_PER_TILE))
    order = [d for d in range(len(shape)) if all(stencil.dims[d] is not None for stencil in stencils)]
    # A row of fewer bytes than a tile's least share would move in small pieces.
    order = [d for d in order if prod(shape[d:]) * width > MIN_BYTES_PER_TILE] or order
    return even_grids(shape, tuple(order), tiles)


def _moving_cycles(graph: Graph, stencil: Neighbours, grids: Grids) -> np.ndarray:
    """Cycles of receiving the border of a block of a variable and copying the block, plus the cost of exchange code.

    Args:
        graph: target and cost per byte.
        stencil: the variable, and the offsets at which it is read.
        grids: candidate grids of the index space, whose cycles are returned, float[candidates].
    """
    target = graph.target
    width = element_bytes(stencil.variable.dtype)
    reach = np.subtract(stencil.high, stencil.low)  # elements of the border along each dimension
    border = np.where(grids.blocks > 1, np.minimum(reach, grids.shape)[:, None], 0)  # none without another block
    elements = total_elements([*grids.lengths])
    received = (total_elements([*(grids.lengths + border)]) - elements) * width
    # Along each dimension: the number of rows that a border across it is in, those of the dimensions outside of it.
    rows = np.cumprod(np.vstack((np.ones_like(elements), grids.lengths)), axis=0)[:-1]
    # A border is received from at most two sides; one across rows arrives as a piece for each row.
    pieces = np.sum(np.minimum(border, 2) * rows, axis=0)
    # Rows of a shifted view are not contiguous in the block along the innermost dimension that is shifted.
    innermost = int(np.flatnonzero(reach)[-1])
    copied = copy_cycles(elements * width, rows[innermost], target)
    receiving = receive_cycles(received, np.zeros_like(received), pieces, target)
    return receiving + copied + graph.byte_cost_cycles * receive_code_bytes(pieces, target)


def _mapping_to_blocks(stencil: Neighbours, placement: Blocked) -> Blocked:
    """Mapping of a variable that puts the middle of the elements a block reads on the tile of that block.

    `placement` is the index space on tiles.
    """
    shape = stencil.variable.shape
    # Dimensions of the index space along a dimension of the variable, and these dimensions of the variable.
    followed = [d for d, dim in enumerate(stencil.dims) if dim is not None]
    order = [dim for dim in stencil.dims if dim is not None]
    cuts = [frozen([0, n], np.int64) for n in shape]  # of the variable, at first one block
    for d, dim in zip(followed, order, strict=True):
        inner = placement.cuts[d][1:-1]
        if inner.size:
            # Cuts move by half the offset, but stay inside of the variable, so that no block is empty.
            inner = inner + np.clip((stencil.low[d] + stencil.high[d]) // 2, 1 - inner[0], shape[dim] - 1 - inner[-1])
        cuts[dim] = frozen([0, *inner, shape[dim]], np.int64)
    # The tiles in the order of the variable's dimensions; those that the index space does not follow are not cut.
    order += [dim for dim in range(len(shape)) if dim not in order]
    tile = placement.tile.reshape([placement.tile.shape[d] for d in followed] + [1] * (len(shape) - len(followed)))
    return blocked_mapping(cuts, frozen(np.transpose(tile, np.argsort(order)), np.int32))


# Extends (view, dim, first, end) to that range of the dimension; both bounds may be beyond the view.
_Widen = Callable[[Tensor, int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """View that contains several operands."""

    tensor: Tensor  # the view
    reach: tuple[int, ...]  # its length minus that of the index space, along each dimension
    begins: dict[int, tuple[int, ...]]  # by the number of each operand, its first index in each dimension


def shared_windows(operands: Sequence[Tensor | None], longest: Sequence[int]) -> list[SharedWindow]:
    """Windows: views that contain several shifted views of one variable, so that a tile reads its block of them once.

    Only those that take fewer bytes than the operands they replace. In `operands` None stands for no tensor; `longest`
    is the lengths of the largest block.
    """
    views: dict[tuple[Variable, ...], dict[int, Tensor]] = {}
    for number, operand in enumerate(operands):
        if operand is not None:
            views.setdefault(operand.variables(), {})[number] = operand
    repeated = [(key[0], group) for key, group in views.items() if len(key) == 1 and len(group) > 1]
    windows = (_window_of_variable(variable, group, longest) for variable, group in repeated)
    return [window for window in windows if window is not None]


def _window_of_variable(variable: Variable, views: Mapping[int, Tensor], longest: Sequence[int]) -> SharedWindow | None:
    """Smallest view that contains most views of a variable, so that a tile reads its block of that once for all.

    None where separate blocks of the views take fewer bytes.

    Args:
        variable: the variable.
        views: operands of one shape that are views of it, by number.
        longest: lengths of the largest block of the index space.
    """
    view_offsets = {number: _offset_of_largest_part(view, len(variable.shape)) for number, view in views.items()}
    offsets = {number: offset for number, offset in view_offsets.items() if offset is not None}
    if not offsets:
        return None
    # Smallest and largest offset along each dimension.
    low, high = (tuple(map(pick, zip(*offsets.values(), strict=True))) for pick in (min, max))
    shape = views[next(iter(offsets))].shape
    reach = tuple(map(sub, high, low))  # elements that the window has more than a view, along each dimension
    # From this number on, separate blocks of the operands take more elements than the window.
    fewest = prod(map(add, longest, reach)) // max(1, prod(longest)) + 1
    if len(offsets) < fewest:
        return None
    begins = {number: tuple(map(sub, offset, low)) for number, offset in offsets.items()}

    def window_by(widen: _Widen) -> SharedWindow:
        """The view from the lowest to the highest offset, and the operands that are parts of it.

        `widen` says what is beyond the ends of the variable: its other end, or its edge again.
        """
        window = Tensor.of(variable)
        for d, extent in enumerate(shape):
            window = widen(window, d, low[d], high[d] + extent)
        # Operands that are exactly the part of the window at their offset.
        matching = {
            number: offset
            for number, offset in begins.items()
            if _part_at(window, offset, shape).node == views[number].node
        }
        return SharedWindow(window, reach, matching)

    # Padding with edges gives offsets around 0, no larger than the reach.
    can_repeat_edges = all(-r <= a and b <= r for a, b, r in zip(low, high, reach, strict=True))
    extensions = (_on_ring, _with_edges) if can_repeat_edges else (_on_ring,)
    best = max(map(window_by, extensions), key=lambda candidate: len(candidate.begins))
    return best if len(best.begins) >= fewest else None


def _offset_of_largest_part(view: Tensor, rank: int) -> tuple[int, ...] | None:
    """Offset of the largest part of a view that follows all dimensions of its variable in order."""
    parts = parts_of(view)
    if not parts or not rank or any(part.dims != tuple(range(rank)) for part in parts):
        return None
    return max(parts, key=lambda part: part.size).offsets


def _part_at(view: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    return view.slice(begin, list(map(add, begin, shape)))


def _on_ring(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """Range of one dimension that continues at the other end."""
    extent = view.shape[dim]
    ranges = ((extent + first, extent), (max(first, 0), min(end, extent)), (0, end - extent))
    return concat([view.slice(low, high, axis=dim) for low, high in ranges if low < high <= extent], dim)


def _with_edges(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """Range of one dimension, with the first and the last index repeated beyond the ends."""
    extent = view.shape[dim]
    ranges = [(0, 1)] * -first + [(max(first, 0), min(end, extent))] + [(extent - 1, extent)] * (end - extent)
    return concat([view.slice(low, high, axis=dim) for low, high in ranges], dim)
