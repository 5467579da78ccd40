"""poputil: tile mapping and broadcasting of tensors, under PopLibs' names in snake_case.

Source: poputil `TileMapping.hpp`, `Broadcast.hpp`, `Util.hpp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import linear_mapping, map_linearly, mapping_like
from ipujax.poplar.graph import Graph as PoplarGraph
from ipujax.poplar.library import check_arguments, check_tensors, registrar
from ipujax.public import public_names
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Copy, Graph, Sequence as Program, tile_gap
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    VECTOR_BYTES,
    Flat,
    Tensor,
    concat,
    element_bytes,
    even_cuts,
    flat_mapping,
    owners,
)

add_codelets = registrar("poputil")


def map_tensor_linearly(
    graph: PoplarGraph, x: Tensor, min_elements_per_tile: int | None = None, grain_size: int | None = None
) -> None:
    """Map the elements of a tensor to the tiles linearly, in row-major order.

    Args:
        graph: graph of the tensor.
        x: the tensor.
        min_elements_per_tile: lower bound of elements on a tile, if the tensor has as many; 128 bytes when None.
        grain_size: number of elements that are never split; those of a vector of the machine when None.

    Raises:
        GraphError: a value that is not a tensor, or numbers below 1.

    Source: poputil::mapTensorLinearly.
    """
    check_tensors("map_tensor_linearly", x)
    mapping = _make_linear_mapping(graph, x.size, x.dtype, min_elements_per_tile, grain_size)
    graph.set_tile_mapping(x, mapping if x.is_whole_variable else owners(mapping))


def calc_linear_tile_mapping(
    graph: Graph, x: Tensor, min_elements_per_tile: int | None = None, grain_size: int | None = None
) -> list[list[tuple[int, int]]]:
    """Return the linear mapping of a tensor: for each tile the `(begin, end)` intervals of flat elements.

    Arguments as of `map_tensor_linearly`.

    Source: poputil::calcLinearTileMapping.
    """
    starts, lengths, tiles = _make_linear_mapping(graph, x.size, x.dtype, min_elements_per_tile, grain_size).runs()
    intervals: list[list[tuple[int, int]]] = [[] for _ in range(graph.target.num_tiles)]
    for start, length, tile in zip(starts.tolist(), lengths.tolist(), tiles.tolist(), strict=True):
        intervals[tile].append((start, start + length))
    return intervals


def _make_linear_mapping(graph: Graph, size: int, dtype: Any, minimum: int | None, grain: int | None) -> Flat:
    """Return a mapping in flat order to as many tiles as each get `minimum` elements, in multiples of `grain`."""
    if minimum is None and grain is None:
        return linear_mapping(graph, size, dtype)
    grain = max(1, VECTOR_BYTES // element_bytes(dtype)) if grain is None else grain
    minimum = -(-MIN_BYTES_PER_TILE // element_bytes(dtype)) if minimum is None else minimum
    if minimum < 1 or grain < 1:
        got = f"{minimum} elements a tile, grains of {grain}"
        raise GraphError("minimum and grain of a linear mapping", expected="at least 1", got=got)
    # The minimum is rounded up to grains, the number of tiles down: no tile has fewer elements, unless all have.
    parts = min(graph.target.tiles_per_ipu, max(1, size // (-(-minimum // grain) * grain)))
    bounds = even_cuts(size, parts, grain)
    return flat_mapping(size, bounds[:-1], np.arange(len(bounds) - 1, dtype=np.int32))


def get_tile_imbalance(graph: Graph, x: Tensor) -> int:
    """Return the number of elements on the fullest tile in excess of an even share of a tensor's variables.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    counts = np.zeros(graph.target.num_tiles, np.int64)
    for variable in x.variables():
        if variable not in graph.mappings:
            gap = tile_gap(graph, variable)
            raise GraphError(gap.what, expected=gap.expected, got=gap.got, hint=gap.hint)
        counts += graph.mappings[variable].elements_per_tile(graph.target.num_tiles)
    return int(counts.max()) - -(-int(counts.sum()) // graph.target.num_tiles)


def broadcast_to_match(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of tensors with dimensions of size 1 repeated, so that all have one shape, as numpy broadcasts.

    Raises:
        GraphError: shapes that do not broadcast.
    """
    try:
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
    except ValueError as error:
        got = [x.shape for x in tensors]
        raise GraphError("shapes do not broadcast", got=got) from error
    # NumPy aligns trailing dimensions.
    rank = len(shape)
    return tuple(x.broadcast_in_dim(shape, range(rank - x.ndim, rank)) for x in tensors)


def can_broadcast_to_match(*tensors: Tensor) -> bool:
    """Return True if tensors broadcast to one shape."""
    try:
        np.broadcast_shapes(*(x.shape for x in tensors))
    except ValueError:
        return False
    return True


def clone(graph: Graph, x: Tensor, name: str = "clone", dtype: Any = None) -> Tensor:
    """Create a variable with the shape and tile mapping of a tensor, and its type or another.

    Raises:
        MappingError: an element of the tensor without a tile.
    """
    mapping = mapping_like(graph, x)
    new = graph.add_variable(x.shape, x.dtype if dtype is None else dtype, name, mapping)
    if mapping is None and isinstance(graph, PoplarGraph):  # a view whose mapping has no simple form
        graph.set_tile_mapping(new, graph.get_tile_mapping(x))
    map_linearly(graph, new)  # no effect if mapped above
    return new


def duplicate(graph: Graph, x: Tensor, prog: Program, name: str = "duplicate") -> Tensor:
    """Copy a tensor to a new variable with the same tile mapping.

    Source: poputil::duplicate.
    """
    with placing(graph, [x]):  # refuses an unmapped `x`, whose mapping cannot be copied
        copy = clone(graph, x, name)
    prog.add(Copy(x, copy, name, graph.origin))
    return copy


__all__ = ["add_codelets", "broadcast_to_match", "calc_linear_tile_mapping", "can_broadcast_to_match", "clone"]
__all__ += ["concat", "duplicate", "get_tile_imbalance", "map_tensor_linearly"]
__dir__ = public_names(globals())
check_arguments(globals())
