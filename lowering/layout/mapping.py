"""Tile mapping helpers: linear, by a planner's grid, and like another tensor.

Source: poplibs `poputil/TileMapping.cpp`, `popops/ElementWiseUtil.cpp` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout.digits import boxes_of_variable, view_digits
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Flat,
    Tensor,
    TileMapping,
    Variable,
    blocked_mapping,
    element_bytes,
    flat_mapping,
    frozen,
    linear,
)

_SMALL_SHARE = 8  # assumed: what is on an eighth of the tiles or less is small


def map_linearly(graph: Graph, tensor: Tensor, most_tiles: int | None = None) -> None:
    """Maps the unmapped variables of a tensor by the linear rule, small ones from `first_tile` on.

    Args:
        graph: holds the variables.
        tensor: nothing happens to what of it is mapped.
        most_tiles: over the first so many tiles, default those of one IPU.

    Raises:
        GraphError: for a variable of a graph that leaves placing variables to its user; constants are placed anyway.
    """
    for variable in tensor.variables():
        if variable not in graph.mappings:
            check_may_place(graph, variable)
            tiles = most_tiles or graph.target.tiles_per_ipu
            mapping = linear(variable.size, element_bytes(variable.dtype), tiles)
            first = first_tile(graph, len(mapping.tiles), tiles)
            graph.set_tile_mapping(variable, linear(variable.size, element_bytes(variable.dtype), tiles, first))


def first_tile(graph: Graph, num_tiles: int, most_tiles: int | None = None) -> int:
    """The tile to start at: behind the last that was on few tiles, so that small things do not pile up on the first.

    Args:
        graph: remembers where the last one ended.
        num_tiles: how many are needed.
        most_tiles: how many there are, default those of one IPU.

    Returns:
        0 for what is not small.
    """
    most = most_tiles or graph.target.tiles_per_ipu
    if num_tiles > most // _SMALL_SHARE:
        return 0
    first = graph.next_tile if graph.next_tile + num_tiles <= most else 0
    graph.next_tile = first + num_tiles
    return first


def check_may_place(graph: Graph, variable: Variable) -> None:
    """Refuses to place a variable of a graph that leaves that to its user; constants are placed anyway.

    Raises:
        GraphError: naming the variable and the line that added it.
    """
    if not graph.maps_automatically and not variable.is_constant:
        line = variable.origin.line
        raise GraphError(
            f"unmapped variable {variable!r}{f', added at {line},' if line else ''} is an operand",
            expected="a tile for each of its elements",
            hint="graph.set_tile_mapping",
        )


def linear_mapping(graph: Graph, size: int, dtype: object) -> Flat:
    """The linear mapping of `size` elements over the tiles of one IPU."""
    return linear(size, element_bytes(dtype), graph.target.tiles_per_ipu)


def map_by_plan(graph: Graph, tensor: Tensor, cuts: Sequence[np.ndarray], tile: np.ndarray) -> None:
    """Maps the unmapped variable under a view so that each box of the view lies on one tile.

    A view that is not the whole variable, or whose boxes would be several of it each, falls back to the linear rule.
    Nothing happens when the variable is mapped already.

    Args:
        graph: holds the variable.
        tensor: a view of one unmapped variable.
        cuts: boundaries of each dimension of the view.
        tile: tile of each box, one dimension for each of the view's.

    Raises:
        GraphError: for a variable of a graph that leaves placing variables to its user.
    """
    if graph.is_mapped(tensor):
        return
    for unmapped in (v for v in tensor.variables() if v not in graph.mappings):
        check_may_place(graph, unmapped)
    digits = view_digits(tensor)
    if digits is None:
        map_linearly(graph, tensor)
        return
    (variable,) = tensor.variables()
    bounds, blocks = boxes_of_variable(variable.shape, digits, cuts)
    counts = [len(bound) - 1 for bound in bounds]
    if prod(counts) > tile.size:
        map_linearly(graph, tensor)
        return
    boxes = np.broadcast_to(tile[blocks] if blocks else tile, counts)
    graph.set_tile_mapping(variable, blocked_mapping(bounds, frozen(boxes, np.int32)))


def map_alike(graph: Graph, tensor: Tensor, mapping: TileMapping | None) -> None:
    """Maps what is not mapped of a tensor by a mapping of its shape, where that can be done, else linearly.

    Raises:
        GraphError: for a variable of a graph that leaves placing variables to its user.
    """
    if graph.is_mapped(tensor):
        return
    if isinstance(mapping, Blocked):
        map_by_plan(graph, tensor, mapping.cuts, mapping.tile)
    elif mapping is not None and tensor.is_whole_variable:
        (variable,) = tensor.variables()
        check_may_place(graph, variable)
        graph.set_tile_mapping(variable, mapping)
    map_linearly(graph, tensor)


def variable_dims(view: Affine) -> tuple[int | None, ...] | None:
    """For each dimension of a view the variable's dimension it runs along, forwards in steps of one.

    None stands for a dimension of size 1. Returns None when the view is not such a permutation (with slices) of one
    variable's dimensions: reshaped, broadcast, reversed, strided or of several variables. A slice of joined dimensions
    that goes on in the next row is none either.
    """
    shape = view.variable.shape
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    first = (0,) * len(shape) if view.is_empty else np.unravel_index(view.offset, shape)
    found: list[int | None] = []
    for group in view.dims:
        if not group:
            found.append(None)
            continue
        (size, stride), *more = group
        matches = [d for d, s in enumerate(strides) if s == stride and shape[d] >= size and shape[d] > 1]
        if more or len(matches) != 1 or matches[0] in found or first[matches[0]] + size > shape[matches[0]]:
            return None
        found.append(matches[0])
    return tuple(found)


def mapping_like(graph: Graph, tensor: Tensor) -> TileMapping | None:
    """A mapping for a new variable of `tensor.shape` that puts each element where `tensor` has it.

    Returns None when there is none of a simple form: several variables, broadcasts, strided or reversed views.
    """
    affine = tensor.affine
    if affine is None or affine.variable not in graph.mappings:
        return None
    mapping = graph.mappings[affine.variable]
    if tensor.is_whole_variable:
        same_shape = tensor.shape == affine.variable.shape
        return mapping if same_shape or isinstance(mapping, Flat) else _reshaped(mapping, tensor.shape)
    if isinstance(mapping, Flat):
        return None
    order = variable_dims(affine)
    return None if order is None else _sliced(affine.variable, mapping, affine.offset, tensor.shape, order)


def layout_like(graph: Graph, tensor: Tensor) -> tuple[tuple[int, ...], TileMapping] | None:
    """A shape of as many elements, and a mapping of it that puts each element where `tensor` has it.

    A reshaped variable keeps its own shape: its boxes would be shreds in another one.
    """
    affine = tensor.affine
    if affine is not None and tensor.is_whole_variable and affine.variable in graph.mappings:
        return affine.variable.shape, graph.mappings[affine.variable]
    mapping = mapping_like(graph, tensor)
    return None if mapping is None else (tensor.shape, mapping)


def _sliced(
    variable: Variable, mapping: Blocked, offset: int, shape: tuple[int, ...], order: tuple[int | None, ...]
) -> Blocked | None:
    first = [int(i) for i in np.unravel_index(offset, variable.shape)] if variable.size else [0] * len(variable.shape)
    cuts: list[np.ndarray] = []
    picks: list[np.ndarray] = [np.zeros(1, np.int64)] * len(variable.shape)
    for number, start in enumerate(first):
        picks[number] = np.searchsorted(mapping.cuts[number], np.array([start]), side="right") - 1
    for view_dim, dim in enumerate(order):
        if dim is None:
            cuts.append(frozen([0, shape[view_dim]], np.int64))
            continue
        start, stop = first[dim], first[dim] + shape[view_dim]
        inside = mapping.cuts[dim][(mapping.cuts[dim] > start) & (mapping.cuts[dim] < stop)]
        bounds = np.concatenate([[start], inside, [stop]])
        picks[dim] = np.searchsorted(mapping.cuts[dim], bounds[:-1], side="right") - 1
        cuts.append(frozen(bounds - start, np.int64))
    boxes = mapping.tile[np.ix_(*picks)]
    kept = [dim for dim in order if dim is not None]
    rest = [dim for dim in range(len(variable.shape)) if dim not in kept]
    boxes = np.transpose(boxes, kept + rest).reshape([len(c) - 1 for c in cuts])
    return blocked_mapping(tuple(cuts), boxes)


@remembered
def _reshaped(mapping: Blocked, shape: tuple[int, ...]) -> TileMapping | None:
    """The mapping of the same flat elements under another shape: leading cuts kept where sizes agree, else flat."""
    old = mapping.shape
    same = 0
    while same < min(len(old), len(shape)) and old[same] == shape[same]:
        same += 1
    if all(len(c) <= 2 for c in mapping.cuts[same:]):
        rest = [frozen([0, n] if n else [0], np.int64) for n in shape[same:]]
        cuts = (*mapping.cuts[:same], *rest)
        return blocked_mapping(cuts, mapping.tile.reshape([len(c) - 1 for c in cuts]))
    starts, _, tiles = mapping.runs()
    if len(starts) > 4 * np.unique(tiles).size:  # in shreds: following it would cost more than one exchange
        return None
    return flat_mapping(prod(shape), starts, tiles)


def tile_balance(mapping: TileMapping, num_tiles: int) -> float:
    """Mean over maximal elements a tile, of all tiles of the target."""
    counts = mapping.elements_per_tile(num_tiles)
    return float(counts.mean() / counts.max()) if counts.size and counts.max() else 1.0
