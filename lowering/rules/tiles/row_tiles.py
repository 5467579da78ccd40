"""Tiles of the rows of an array: those of its mapping, and those that a user names.

A tile array has a row for each tile along its first axis. Limits: of a view whose mapping has no closed form, such as
a concatenation, the tiles are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.lowering.layout import mapping_like
from ipujax.lowering.popops import place_operand, spans
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor, blocked_mapping, even_cuts

UNKNOWN = -1


def tile_of_rows(graph: Graph, tensor: Tensor) -> np.ndarray:
    """Tile of each row, int32[rows]; `UNKNOWN` for a row on several tiles, or without a mapping."""
    rows = tensor.shape[0]
    if not (graph.is_mapped(tensor) and tensor.size):
        return np.full(rows, UNKNOWN, np.int32)
    mapping = mapping_like(graph, tensor)
    if mapping is None:
        # Rows of a concatenation are parts of one variable each.
        return np.array([_tile_of(graph, tensor[row]) for row in range(rows)], np.int32)
    starts, _, tiles = mapping.runs()
    row_elements = tensor.size // rows
    first_elements = np.arange(rows) * row_elements
    first_runs = np.searchsorted(starts, first_elements, "right") - 1
    last_runs = np.searchsorted(starts, first_elements + row_elements - 1, "right") - 1
    # Runs of one tile in a row have equal numbers of changes before them.
    changes = np.cumsum(np.diff(tiles, prepend=tiles[:1]) != 0)
    is_on_one = changes[first_runs] == changes[last_runs]
    return np.where(is_on_one, tiles[first_runs], UNKNOWN).astype(np.int32)


def _tile_of(graph: Graph, tensor: Tensor) -> int:
    mapping = mapping_like(graph, tensor)
    tiles = set() if mapping is None else set(mapping.tiles.reshape(-1).tolist())
    return tiles.pop() if len(tiles) == 1 else UNKNOWN


def add_rows(graph: Graph, shape: Sequence[int], dtype: Any, name: str, tile: np.ndarray) -> Tensor:
    """Adds a variable with each row on its tile."""
    cuts = [even_cuts(n, n if dim == 0 else 1) for dim, n in enumerate(shape)]
    mapping = blocked_mapping(cuts, tile.reshape(-1, *(1 for _ in shape[1:])))
    return graph.add_variable(tuple(shape), dtype, name, mapping)


def place_rows(graph: Graph, tensor: Tensor, tile: np.ndarray) -> None:
    """Maps each row of an unmapped tensor to its tile."""
    rows = len(tile)
    placement = blocked_mapping([even_cuts(rows, rows)], tile)
    dims = (0, *(None for _ in tensor.shape[1:]))
    place_operand(graph, tensor, spans(tensor.shape, dims), placement)


def tiles_in_range(graph: Graph, tiles: Sequence[int], name: str) -> np.ndarray:
    """The user's tiles, int32[tiles].

    Raises:
        ArgumentValueError: for tiles that the target lacks.
    """
    num_tiles = graph.target.num_tiles
    lacking = [tile for tile in tiles if tile >= num_tiles]
    if lacking:
        raise ArgumentValueError(
            f"{name}: tiles the device lacks",
            where=graph.origin,
            expected=f"tiles 0 … {num_tiles - 1:,}",
            got=f"tile {lacking[0]:,}" if len(lacking) == 1 else f"tiles {lacking[0]:,} … {lacking[-1]:,}",
            hint="fewer rows a device, or ipu.IPUModel with more tiles",
        )
    return np.array(tiles, np.int32)
