"""poputil: helpers to place tensors on tiles and to bring them to one shape, under PopLibs' names in snake_case."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.library import registrar
from ipujax.lowering.emit import placing
from ipujax.lowering.poputil import linear_mapping
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Copy
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.tensor import Tensor, concat

add_codelets = registrar("poputil")


def map_tensor_linearly(graph: Graph, x: Tensor) -> None:
    """Spreads the variables of a tensor over the tiles, in row-major order; those that lie on tiles stay there."""
    with placing(graph):
        map_linearly(graph, x)


def calc_linear_tile_mapping(graph: Graph, x: Tensor) -> list[list[tuple[int, int]]]:
    """For each tile the `(begin, end)` intervals of flat elements that spreading a tensor of this size gives it."""
    starts, lengths, tiles = linear_mapping(graph, x.size, x.dtype).runs()
    intervals: list[list[tuple[int, int]]] = [[] for _ in range(graph.target.num_tiles)]
    for start, length, tile in zip(starts.tolist(), lengths.tolist(), tiles.tolist(), strict=True):
        intervals[tile].append((start, start + length))
    return intervals


def get_tile_imbalance(graph: Graph, x: Tensor) -> int:
    """Elements of the fullest tile beyond an even share of a tensor's variables.

    Raises:
        GraphError: a variable that lies on no tile.
    """
    counts = np.zeros(graph.target.num_tiles, np.int64)
    for variable in x.variables():
        if variable not in graph.mappings:
            raise GraphError(f"{variable!r} lies on no tile", where=user_line(), hint="graph.set_tile_mapping")
        counts += graph.mappings[variable].elements_per_tile(graph.target.num_tiles)
    return int(counts.max()) - -(-int(counts.sum()) // graph.target.num_tiles)


def broadcast_to_match(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of tensors with dimensions of size 1 repeated, so that all have one shape, as numpy broadcasts.

    Raises:
        GraphError: shapes that do not broadcast.
    """
    try:
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
    except ValueError as error:
        got = [x.shape for x in tensors]
        raise GraphError("shapes do not broadcast", where=user_line(), got=got) from error
    rank = len(shape)
    return tuple(x.broadcast_in_dim(shape, range(rank - x.ndim, rank)) for x in tensors)


def duplicate(graph: Graph, x: Tensor, prog: Program, name: str = "duplicate") -> Tensor:
    """A copy of a tensor in a new variable, which lies on tiles as the tensor does."""
    clone: Any = getattr(graph, "clone", None)
    with placing(graph, [x]):
        if clone is None:
            copy = graph.add_variable(x.shape, x.dtype, name)
            map_linearly(graph, copy)
        else:
            copy = clone(x, name)
    prog.add(Copy(x, copy, name, graph.origin))
    return copy


__all__ = ["add_codelets", "broadcast_to_match", "calc_linear_tile_mapping", "concat", "duplicate"]
__all__ += ["get_tile_imbalance", "map_tensor_linearly"]
