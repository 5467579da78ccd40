"""Exchange messages around a compute set, element by element.

Input: a graph, a vertex group and one of its fields. Output: arrays over messages, expanded from the same pieces that
`ipujax.runtime.exchange.traffic` counts, so that the tile interpreter tests the exchange as it was planned.

Limits: linear in the number of elements; for the tile interpreter and for tests.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.exchange import Demand, access_demand, cut_at_homes, flat_bases, mappings_of, ragged_rows
from ipujax.runtime.graph import Graph, VertexGroup
from ipujax.runtime.interpreter.tile_memory import Messages
from ipujax.runtime.tensor import TileMapping, Variable


def list_messages(graph: Graph, group: VertexGroup, number: int, results: bool) -> Messages:
    """List the elements that a field of a vertex group exchanges, each once for every tile that receives it."""
    # Of results vertices send to owners, the tiles that elements are mapped to; of operands owners send to vertices.
    access = group.accesses[number]
    demand = access_demand(group, access, graph.target.num_tiles)
    which, element, owner, vertex = _expand(demand, access.tensor.variables(), mappings_of(access.tensor, graph))
    source, destination = (vertex, owner) if results else (owner, vertex)
    return Messages(access.tensor.variables(), which, element, source, destination)


def _expand(
    demand: Demand, variables: tuple[Variable, ...], mappings: tuple[TileMapping, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return variable number, flat element, owner and demanding tile of all elements that another tile owns."""
    pieces = cut_at_homes(demand.runs, mappings)
    tiles = np.flatnonzero(demand.block_of_tile >= 0)
    block = demand.block_of_tile[tiles]
    # First a row for each pair of tile and piece of its block, then one for each element of the pieces from elsewhere.
    counts = np.bincount(pieces.block, minlength=int(block.max(initial=-1)) + 1)
    row, within = ragged_rows(counts[block])
    piece = (np.cumsum(counts) - counts)[block][row] + within
    tile = tiles[row]
    is_remote = pieces.home[piece] != tile
    piece = piece[is_remote]
    tile = tile[is_remote]
    row, within = ragged_rows(pieces.length[piece])
    flat = pieces.start[piece][row] + within
    bases = np.array(list(flat_bases(variables).values()))
    which = np.searchsorted(bases, flat, side="right") - 1
    return which, flat - bases[which], pieces.home[piece][row], tile[row]
