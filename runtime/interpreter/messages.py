"""Exchange messages, element by element: what moves between tiles around a compute set.

Input: a graph, a vertex group and one of its fields. Output: arrays over messages,
expanded from the same pieces that `ipujax.runtime.exchange.traffic` counts. Linear in the number of elements: for the
tile interpreter, which so runs the exchange as it was planned, and for tests.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.exchange import Demand, access_demand, cut_at_homes, flat_bases, mappings_of, ragged_rows
from ipujax.runtime.graph import Graph, VertexGroup
from ipujax.runtime.interpreter.tile_memory import Messages
from ipujax.runtime.tensor import TileMapping, Variable


def messages(graph: Graph, group: VertexGroup, number: int, results: bool) -> Messages:
    """What one field of a vertex group moves, each element once a tile that receives it.

    Args:
        graph: holds the target and the mappings of the field's variables.
        group: the vertices.
        number: number of the field.
        results: from vertices to owners after the compute set, instead of from owners to vertices before it.
    """
    access = group.accesses[number]
    wanted = access_demand(group, access, graph.target.num_tiles)
    which, element, owner, vertex = _listed(wanted, access.tensor.variables(), mappings_of(access.tensor, graph))
    source, destination = (vertex, owner) if results else (owner, vertex)
    return Messages(access.tensor.variables(), which, element, source, destination)


def _listed(
    wanted: Demand, variables: tuple[Variable, ...], mappings: tuple[TileMapping, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number of the variable, flat element, owner and tile that needs it, of all that are not on their tile."""
    pieces = cut_at_homes(wanted.runs, mappings)
    tiles = np.flatnonzero(wanted.block_of_tile >= 0)
    block = wanted.block_of_tile[tiles]
    counts = np.bincount(pieces.block, minlength=int(block.max(initial=-1)) + 1)
    row, within = ragged_rows(counts[block])
    piece, tile = (np.cumsum(counts) - counts)[block][row] + within, tiles[row]
    away = pieces.home[piece] != tile
    piece, tile = piece[away], tile[away]
    row, within = ragged_rows(pieces.length[piece])
    flat = pieces.start[piece][row] + within
    bases = np.array(list(flat_bases(variables).values()))
    which = np.searchsorted(bases, flat, side="right") - 1
    return which, flat - bases[which], pieces.home[piece][row], tile[row]
