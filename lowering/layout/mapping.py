"""Tile mappings: linear, by a planner's grid, and like that of another tensor; linear copies of huge views.

Source: poplibs `poputil/TileMapping.cpp`, `popops/ElementWiseUtil.cpp` (reference machine.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.layout.digits import variable_blocks, view_digits
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Copy, Graph, tile_gap
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Concat,
    Flat,
    Node,
    Reshaped,
    Tensor,
    TileMapping,
    Variable,
    blocked_mapping,
    element_bytes,
    flat_mapping,
    frozen,
    linear,
)

_SMALL_SHARE = 8  # assumed: a variable on an eighth of the tiles or less is small


def map_linearly(graph: Graph, tensor: Tensor, most_tiles: int | None = None) -> None:
    """Maps the unmapped variables of a tensor by the linear rule, small ones from `first_tile` on.

    The linear rule gives each tile one range of elements, in the order of tiles.

    Args:
        graph: graph of the variables.
        tensor: its mapped variables do not change.
        most_tiles: number of tiles to use, default those of one IPU.

    Raises:
        GraphError: for a variable of a graph whose user maps variables; constants are mapped anyway.
    """
    for variable in tensor.variables():
        if variable not in graph.mappings:
            check_may_place(graph, variable)
            tiles = most_tiles or graph.target.tiles_per_ipu
            mapping = linear(variable.size, element_bytes(variable.dtype), tiles)  # for its number of tiles
            first = first_tile(graph, len(mapping.tiles), tiles)
            graph.set_tile_mapping(variable, linear(variable.size, element_bytes(variable.dtype), tiles, first))


def first_tile(graph: Graph, num_tiles: int, most_tiles: int | None = None) -> int:
    """First tile of a new variable: behind the last small variable, to spread small ones; 0 for a large one."""
    tile_limit = most_tiles or graph.target.tiles_per_ipu
    if num_tiles > tile_limit // _SMALL_SHARE:
        return 0
    first = graph.next_tile if graph.next_tile + num_tiles <= tile_limit else 0
    graph.next_tile = first + num_tiles
    return first


def check_may_place(graph: Graph, variable: Variable) -> None:
    """Refuses to map a variable of a graph whose user maps variables; constants are mapped anyway."""
    if not graph.maps_automatically and not variable.is_constant:
        gap = tile_gap(graph, variable)
        line = variable.origin.line
        message = f"operand {gap.what}{f' (added at {line})' if line else ''}"
        raise GraphError(message, expected=gap.expected, got=gap.got, hint=gap.hint)


def linear_mapping(graph: Graph, size: int, dtype: object) -> Flat:
    """Linear mapping of `size` elements over the tiles of one IPU."""
    return linear(size, element_bytes(dtype), graph.target.tiles_per_ipu)


def map_by_plan(graph: Graph, tensor: Tensor, cuts: Sequence[np.ndarray], tile: np.ndarray) -> None:
    """Maps the unmapped variable of a view so that each block of the view is on one tile.

    A view of part of a variable, or whose blocks would be several blocks of the variable each, is mapped linearly.
    A mapped variable does not change.

    Args:
        graph: graph of the variable.
        tensor: view of one unmapped variable.
        cuts: cuts of each dimension of the view.
        tile: tile of each block, with as many dimensions as the view.

    Raises:
        GraphError: for a variable of a graph whose user maps variables.
    """
    if graph.is_mapped(tensor):
        return
    for unmapped in (v for v in tensor.variables() if v not in graph.mappings):
        check_may_place(graph, unmapped)
    digits = view_digits(tensor)  # index of the variable by indices of the view; None for a part of a variable
    if digits is None:
        map_linearly(graph, tensor)
        return
    (variable,) = tensor.variables()
    # Cuts of the variable, and for each of its blocks the number of the view's block that has it, along each dimension.
    bounds, blocks = variable_blocks(variable.shape, digits, cuts)
    counts = [len(bound) - 1 for bound in bounds]
    # A block of the view is several blocks of the variable: scattered in its memory.
    if prod(counts) > tile.size:
        map_linearly(graph, tensor)
        return
    block_tiles = np.broadcast_to(tile[blocks] if blocks else tile, counts)
    graph.set_tile_mapping(variable, blocked_mapping(bounds, frozen(block_tiles, np.int32)))


def map_alike(graph: Graph, tensor: Tensor, mapping: TileMapping | None) -> None:
    """Maps the unmapped variables of a tensor by a mapping of its shape where possible, else linearly.

    Ranges of elements (a mapping that is not `Blocked`) are possible for a whole variable only; None is linear.
    """
    if graph.is_mapped(tensor):
        return
    if isinstance(mapping, Blocked):
        map_by_plan(graph, tensor, mapping.cuts, mapping.tile)
    elif mapping is not None and tensor.is_whole_variable:
        (variable,) = tensor.variables()
        check_may_place(graph, variable)
        graph.set_tile_mapping(variable, mapping)
    map_linearly(graph, tensor)  # what is not mapped yet


def variable_dims(view: Affine) -> tuple[int | None, ...] | None:
    """Dimension of the variable that each dimension of a view runs along, None for one of size 1.

    A view that does more than permute and slice dimensions has none: the result is None.
    """
    shape = view.variable.shape
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    # Index of the view's first element in the variable.
    start = (0,) * len(shape) if view.is_empty else np.unravel_index(view.offset, shape)
    dims: list[int | None] = []
    for group in view.dims:  # (size, stride) of each piece of a dimension; several where it joins dimensions
        if not group:
            dims.append(None)
            continue
        (size, stride), *inner_pieces = group
        # Dimensions of size 1 have the stride of a neighbour, so they do not count.
        candidates = [d for d, s in enumerate(strides) if s == stride and shape[d] >= size and shape[d] > 1]
        if inner_pieces or len(candidates) != 1:
            return None
        (dim,) = candidates
        if dim in dims or start[dim] + size > shape[dim]:  # taken already, or the view leaves it at its end
            return None
        dims.append(dim)
    return tuple(dims)


def mapping_like(graph: Graph, tensor: Tensor) -> TileMapping | None:
    """Mapping of a new variable of `tensor.shape` with each element on the tile that has it in `tensor`.

    None where no simple mapping does that: several variables, broadcasts, strided or reversed views.
    """
    affine = tensor.affine  # None for a view of several variables, or without strides
    if affine is None or affine.variable not in graph.mappings:
        return None
    mapping = graph.mappings[affine.variable]
    if tensor.is_whole_variable:
        same_shape = tensor.shape == affine.variable.shape
        return mapping if same_shape or isinstance(mapping, Flat) else _mapping_of_reshape(mapping, tensor.shape)
    if isinstance(mapping, Flat):  # its ranges of elements are scattered in a slice
        return None
    order = variable_dims(affine)  # the variable's dimension along each of the view; None for strided views and others
    return None if order is None else _mapping_of_slice(affine, mapping, tensor.shape, order)


def layout_like(graph: Graph, tensor: Tensor) -> tuple[tuple[int, ...], TileMapping] | None:
    """Shape with as many elements as a tensor, and mapping of it with each element on the tile of the tensor's."""
    # A reshaped variable keeps the variable's shape: its blocks would be scattered in the shape of the view.
    affine = tensor.affine
    if affine is not None and tensor.is_whole_variable and affine.variable in graph.mappings:
        return affine.variable.shape, graph.mappings[affine.variable]
    mapping = mapping_like(graph, tensor)
    return None if mapping is None else (tensor.shape, mapping)


def _mapping_of_slice(view: Affine, mapping: Blocked, shape: tuple[int, ...], order: tuple[int | None, ...]) -> Blocked:
    """Mapping of a slice in the order of its dimensions: the blocks of the variable, cut at the ends of the slice.

    Args:
        view: the slice.
        mapping: mapping of its variable.
        shape: shape of the slice.
        order: the variable's dimension along each of the slice, None for one of size 1, as by `variable_dims`.
    """
    variable = view.variable
    first = [0] * len(variable.shape)
    if variable.size:
        first = [int(i) for i in np.unravel_index(view.offset, variable.shape)]
    cuts: list[np.ndarray] = []
    # Numbers of the blocks that the slice meets, along each dimension of the variable: the one with its first
    # element, and below, where the slice has a dimension along this one, all up to its last element.
    picks = [
        np.searchsorted(bounds, np.array([start]), side="right") - 1
        for bounds, start in zip(mapping.cuts, first, strict=True)
    ]
    for view_dim, dim in enumerate(order):
        if dim is None:
            cuts.append(frozen([0, shape[view_dim]], np.int64))
            continue
        start = first[dim]
        stop = start + shape[view_dim]
        inner_cuts = mapping.cuts[dim][(mapping.cuts[dim] > start) & (mapping.cuts[dim] < stop)]
        bounds = np.concatenate([[start], inner_cuts, [stop]])
        picks[dim] = np.searchsorted(mapping.cuts[dim], bounds[:-1], side="right") - 1
        cuts.append(frozen(bounds - start, np.int64))
    # The tiles of the sliced blocks, then in the order of the view's dimensions.
    tile = mapping.tile[np.ix_(*picks)]
    followed = [dim for dim in order if dim is not None]
    dropped = [dim for dim in range(len(variable.shape)) if dim not in followed]
    tile = np.transpose(tile, followed + dropped).reshape([len(c) - 1 for c in cuts])
    return blocked_mapping(tuple(cuts), tile)


@remembered
def _mapping_of_reshape(mapping: Blocked, shape: tuple[int, ...]) -> TileMapping | None:
    """Mapping of the same elements, in row-major order, in another shape: in blocks if only leading dimensions of equal
    size are cut, else in ranges of elements; None where these would be too many.
    """
    old = mapping.shape
    num_equal = 0  # leading dimensions of equal size
    while num_equal < min(len(old), len(shape)) and old[num_equal] == shape[num_equal]:
        num_equal += 1
    if all(len(c) <= 2 for c in mapping.cuts[num_equal:]):  # one block, of two bounds, along all other dimensions
        # A dimension without elements has no block.
        uncut_dims = [frozen([0, n] if n else [0], np.int64) for n in shape[num_equal:]]
        cuts = (*mapping.cuts[:num_equal], *uncut_dims)
        return blocked_mapping(cuts, mapping.tile.reshape([len(c) - 1 for c in cuts]))
    starts, _, tiles = mapping.runs()
    # So scattered, more than 4 runs a tile (assumed), that following it would cost more than one exchange.
    if len(starts) > 4 * np.unique(tiles).size:
        return None
    return flat_mapping(prod(shape), starts, tiles)


# Assumed: each listed element of a view takes 16 bytes and 20 ns of the compiler.
_MAX_LISTED_ELEMENTS = 1 << 25


def copied_if_huge(builder: Builder, x: Tensor) -> Tensor:
    """Returns the tensor, or a copy in a variable if further views of it would list very many elements."""
    graph = builder.graph
    if x.size <= _MAX_LISTED_ELEMENTS or not _is_reshaped(x.node):
        return x
    map_linearly(graph, x)
    out = graph.add_variable(x.shape, x.dtype, f"{builder.name}/rearranged", linear_mapping(graph, x.size, x.dtype))
    builder.prog.add(Copy(x, out, f"{builder.name}/rearrange", graph.origin))
    return out


def _is_reshaped(node: Node) -> bool:
    return isinstance(node, Reshaped) or (isinstance(node, Concat) and any(map(_is_reshaped, node.parts)))
