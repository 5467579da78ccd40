"""Data that neighbouring tiles receive together, because they share an exchange bus and need the same elements.

Tiles of one bus may join their ports: data that all of them receive then arrives at the rates of all together.
Input: the tiles of each bus, and the demand of each tile, as runs of flat elements or as blocks. Output: for each tile
the elements that it receives and every other tile of its bus receives too.
Source: two adjacent tiles that receive the same data get twice the width (poplibs `ExchangeEstimator.cpp`, reference
machine.md A1, §2). Treating data that are partly common part by part is `assumed`.
Limits: a bus of more than two tiles joins all of its tiles or none. A sender sends at the rate of one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange.runs import Runs, concat_runs, scale_by_weight
from ipujax.runtime.exchange.sample import ragged_rows


@dataclass(frozen=True, slots=True)
class Buses:
    """Sharing of exchange buses: `width` neighbours of one IPU a bus.

    Args:
        width: tiles of a bus.
        tiles_per_ipu: a bus does not reach beyond an IPU; tiles that remain over have a bus to themselves.
    """

    width: int
    tiles_per_ipu: int

    @property
    def period(self) -> int:
        """Distance that tile numbers may be shifted by without changing which tiles share a bus."""
        return self.width if self.tiles_per_ipu % self.width == 0 else self.tiles_per_ipu

    def tiles(self, num_tiles: int) -> np.ndarray:
        """Return the tiles of each full bus of the first `num_tiles`, int64[buses, width]; no buses of one tile."""
        return _bus_tiles(self.width, self.tiles_per_ipu, num_tiles)


@remembered
def _bus_tiles(width: int, tiles_per_ipu: int, num_tiles: int) -> np.ndarray:
    if width == 1:
        return np.zeros((0, 1), np.int64)
    ipus = np.arange(-(-num_tiles // tiles_per_ipu))[:, None, None] * tiles_per_ipu
    buses = np.arange(tiles_per_ipu // width)[:, None] * width
    tiles = (ipus + buses + np.arange(width)).reshape(-1, width)
    return tiles[tiles[:, -1] < num_tiles]


def shared_blocks(
    lines: Sequence[tuple[np.ndarray, np.ndarray]],
    edges: Sequence[np.ndarray],
    block: np.ndarray,
    vertex_of_tile: np.ndarray,
    buses: np.ndarray,
) -> np.ndarray:
    """Count the elements that each tile shares, int64[tiles], for one vertex a tile and a mapping in blocks."""
    # `lines`: for each dimension first index and number of indices that each vertex needs, int64[vertices] each.
    # `edges`: boundaries of the mapping. `block`: the mapping's block on the tile of each vertex, −1 for none.
    # `vertex_of_tile`: −1 for none. `buses`: tiles of each bus, int64[buses, width].
    shared = np.zeros(len(vertex_of_tile), np.int64)
    vertices = vertex_of_tile[buses]
    full = np.all(vertices >= 0, axis=1)  # a bus with an idle tile joins no ports
    vertices = vertices[full]
    tiles = buses[full]
    if not len(vertices):
        return shared
    low = [start[vertices].max(1) for start, _ in lines]
    high = [(start + length)[vertices].min(1) for start, length in lines]
    common = np.ones(len(vertices), np.int64)
    for first, end in zip(low, high, strict=True):
        common *= np.maximum(end - first, 0)
    # An element on a tile of the bus is not received by that tile, so it is not shared.
    for lane in range(vertices.shape[1]):
        local_block = block[vertices[:, lane]]
        index = np.unravel_index(np.maximum(local_block, 0), [len(edge) - 1 for edge in edges])
        local = (local_block >= 0).astype(np.int64)
        for first, end, edge, number in zip(low, high, edges, index, strict=True):
            local *= np.maximum(np.minimum(end, edge[number + 1]) - np.maximum(first, edge[number]), 0)
        common -= local
    shared[tiles] = common[:, None]
    return shared


def shared_runs(pieces: Runs, home: np.ndarray, block_of_tile: np.ndarray, buses: np.ndarray) -> np.ndarray:
    """Count the elements that each tile shares, int64[tiles], from pieces as of `count` and their home tiles."""
    # `block_of_tile` is −1 for tiles without a block; `buses` are the tiles of each bus, int64[buses, width].
    shared = np.zeros(len(block_of_tile), np.int64)
    blocks = block_of_tile[buses]
    full = np.all(blocks >= 0, axis=1)
    blocks = np.sort(blocks[full], axis=1)
    tiles = buses[full]
    if not len(blocks):
        return shared
    needs, need_of_bus = _distinct_rows(blocks)  # most buses of a broadcast need the same blocks
    common, home = _common_runs(pieces, home, needs)
    elements = scale_by_weight(common.length, common.weight)
    received = np.rint(np.bincount(common.block, elements, len(needs))).astype(np.int64)[need_of_bus]
    # An element on a tile of the bus is not received by that tile.
    bus_of_tile = np.full(len(block_of_tile), -1, np.int64)
    bus_of_tile[tiles] = np.arange(len(tiles))[:, None]
    bus = bus_of_tile[home]
    inside = (bus >= 0) & (need_of_bus[bus] == common.block)
    received -= np.rint(np.bincount(bus[inside], elements[inside], len(received))).astype(np.int64)
    shared[tiles] = received[:, None]
    return shared


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of an array of numbers from 0 on, and the number of each row among them."""
    first, number = np.arange(len(rows)), np.zeros(len(rows), np.int64)
    for column in rows.T:  # `np.unique(axis=0)` takes ten times as long
        key = number * (int(rows.max()) + 1) + column
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return rows[first], number


def _common_runs(pieces: Runs, home: np.ndarray, needs: np.ndarray) -> tuple[Runs, np.ndarray]:
    """Return the runs common to each row of blocks in `needs`, numbered by row, and the home tile of each run."""
    counts = np.bincount(pieces.block, minlength=int(needs.max()) + 1)
    first = np.cumsum(counts) - counts
    alike = needs[:, 0] == needs[:, -1]  # sets of one block, rows being sorted: its runs are the intersection
    row, within = ragged_rows(counts[needs[alike, 0]])
    piece = first[needs[alike, 0]][row] + within
    same = replace(pieces.take(piece), block=np.flatnonzero(alike)[row])
    if np.all(alike):
        return same, home[piece]
    mixed = needs[~alike].ravel()
    width = needs.shape[1]
    row, within = ragged_rows(counts[mixed])
    at = first[mixed][row] + within
    listed = replace(pieces.take(at), block=np.flatnonzero(~alike)[row // width])
    # A sweep over starts and ends, ends first: where all blocks are open, the run opened last covers what follows.
    span = int((pieces.start + pieces.length).max(initial=0)) + 1
    start = listed.block * span + listed.start
    position = np.concatenate([start, start + listed.length])
    order = np.argsort(2 * position + np.repeat([1, 0], len(at)), kind="stable")
    position = position[order]
    number = order % max(len(at), 1)
    depth = np.cumsum(np.where(order < len(at), 1, -1))
    length = np.diff(position, append=position[-1:])
    is_open = (depth == width) & (length > 0)
    opened = number[is_open]
    overlaps = replace(listed.take(opened), start=position[is_open] % span, length=length[is_open])
    return concat_runs([same, overlaps]), np.concatenate([home[piece], home[at[opened]]])
