"""What neighbouring tiles receive together, because they share an exchange bus and need the same data.

The tiles of one bus may join their ports: data that all of them receive then arrives at the rates of all together.
Input: the tiles of each bus, and what each tile needs, as runs of flat elements or as boxes. Output: for each tile the
elements it receives and every other tile of its bus receives too.
Source: two adjacent tiles that receive the same data get twice the width (poplibs `ExchangeEstimator.cpp`, reference
machine.md A1, §2). Data of which only a part is common is treated part by part, which is `assumed`.
Limits: a bus of more than two tiles joins all of its tiles or none. Whoever sends does so at one tile's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange.runs import Runs, joined, weighed
from ipujax.runtime.exchange.sample import ragged


@dataclass(frozen=True, slots=True)
class Buses:
    """How tiles share exchange buses: `width` neighbours of one IPU a bus.

    Args:
        width: tiles of a bus.
        tiles_per_ipu: a bus does not reach beyond an IPU; those left over have a bus to themselves.
    """

    width: int
    tiles_per_ipu: int

    @property
    def period(self) -> int:
        """Tile numbers may be counted from any multiple of this without changing who shares a bus."""
        return self.width if self.tiles_per_ipu % self.width == 0 else self.tiles_per_ipu

    def tiles(self, num_tiles: int) -> np.ndarray:
        """The tiles of each full bus of the first `num_tiles`, int64[buses, width]; none where a bus is one tile."""
        return _bus_tiles(self.width, self.tiles_per_ipu, num_tiles)


@remembered
def _bus_tiles(width: int, tiles_per_ipu: int, num_tiles: int) -> np.ndarray:
    if width == 1:
        return np.zeros((0, 1), np.int64)
    ipus = np.arange(-(-num_tiles // tiles_per_ipu))[:, None, None] * tiles_per_ipu
    buses = np.arange(tiles_per_ipu // width)[:, None] * width
    tiles = (ipus + buses + np.arange(width)).reshape(-1, width)
    return tiles[tiles[:, -1] < num_tiles]


def shared_boxes(
    lines: Sequence[tuple[np.ndarray, np.ndarray]],
    edges: Sequence[np.ndarray],
    box: np.ndarray,
    vertex_of_tile: np.ndarray,
    buses: np.ndarray,
) -> np.ndarray:
    """Elements each tile shares, where each tile has one vertex, and vertices and mapping are boxes of one grid.

    Args:
        lines: for each dimension first index and number of indices each vertex needs, int64[vertices] each.
        edges: for each dimension the boundaries of the mapping, int64[blocks + 1].
        box: the box of the mapping on the tile of each vertex, −1 for none, int64[vertices].
        vertex_of_tile: −1 for none, int64[tiles].
        buses: tiles of each bus, int64[buses, width].

    Returns:
        int64[tiles].
    """
    shared = np.zeros(len(vertex_of_tile), np.int64)
    vertices = vertex_of_tile[buses]
    full = np.all(vertices >= 0, axis=1)
    vertices, tiles = vertices[full], buses[full]
    if not len(vertices):
        return shared
    low = [start[vertices].max(1) for start, _ in lines]
    high = [(start + length)[vertices].min(1) for start, length in lines]
    common = np.ones(len(vertices), np.int64)
    for first, end in zip(low, high, strict=True):
        common *= np.maximum(end - first, 0)
    for column in range(vertices.shape[1]):
        mine = box[vertices[:, column]]
        blocks = np.unravel_index(np.maximum(mine, 0), [len(edge) - 1 for edge in edges])
        held = (mine >= 0).astype(np.int64)
        for first, end, edge, block in zip(low, high, edges, blocks, strict=True):
            held *= np.maximum(np.minimum(end, edge[block + 1]) - np.maximum(first, edge[block]), 0)
        common -= held
    shared[tiles] = common[:, None]
    return shared


def shared_runs(pieces: Runs, home: np.ndarray, box_of_tile: np.ndarray, buses: np.ndarray) -> np.ndarray:
    """Elements each tile shares, from the runs of boxes.

    Args:
        pieces: what boxes need, sorted and disjoint in each box, cut where the tile that holds them changes.
        home: that tile, int64[pieces].
        box_of_tile: the box each tile needs, −1 for none, int64[tiles].
        buses: tiles of each bus, int64[buses, width].

    Returns:
        int64[tiles].
    """
    shared = np.zeros(len(box_of_tile), np.int64)
    boxes = box_of_tile[buses]
    full = np.all(boxes >= 0, axis=1)
    boxes, tiles = np.sort(boxes[full], axis=1), buses[full]
    if not len(boxes):
        return shared
    needs, need_of_bus = _distinct_rows(boxes)
    common, home = _common(pieces, home, needs)
    elements = weighed(common.length, common.weight)
    received = np.rint(np.bincount(common.box, elements, len(needs))).astype(np.int64)[need_of_bus]
    # What a tile of the bus holds itself it does not receive.
    bus_of_tile = np.full(len(box_of_tile), -1, np.int64)
    bus_of_tile[tiles] = np.arange(len(tiles))[:, None]
    bus = bus_of_tile[home]
    inside = (bus >= 0) & (need_of_bus[bus] == common.box)
    received -= np.rint(np.bincount(bus[inside], elements[inside], len(received))).astype(np.int64)
    shared[tiles] = received[:, None]
    return shared


def _distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different rows of an array of numbers from 0 on, and which of them each row is."""
    first, number = np.arange(len(rows)), np.zeros(len(rows), np.int64)
    for column in rows.T:  # `np.unique(axis=0)` takes ten times as long
        key = number * (int(rows.max()) + 1) + column
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return rows[first], number


def _common(pieces: Runs, home: np.ndarray, needs: np.ndarray) -> tuple[Runs, np.ndarray]:
    """What several boxes have in common.

    Args:
        pieces: as for `shared_runs`.
        home: as for `shared_runs`.
        needs: the boxes of each set of them, rising, int64[sets, width].

    Returns:
        Runs with the number of the set for the box, and the tile that holds each.
    """
    counts = np.bincount(pieces.box, minlength=int(needs.max()) + 1)
    first = np.cumsum(counts) - counts
    alike = needs[:, 0] == needs[:, -1]
    row, within = ragged(counts[needs[alike, 0]])
    piece = first[needs[alike, 0]][row] + within
    weight = None if pieces.weight is None else pieces.weight[piece]
    same = Runs(np.flatnonzero(alike)[row], pieces.start[piece], pieces.length[piece], weight)
    if np.all(alike):
        return same, home[piece]
    mixed, width = needs[~alike].ravel(), needs.shape[1]
    row, within = ragged(counts[mixed])
    at = first[mixed][row] + within
    need, start, end = np.flatnonzero(~alike)[row // width], pieces.start[at], (pieces.start + pieces.length)[at]
    # A sweep over starts and ends, ends first: where all boxes are open, the one opened last contains what follows.
    span = int((pieces.start + pieces.length).max(initial=0)) + 1
    position = np.concatenate([need * span + start, need * span + end])
    order = np.argsort(2 * position + np.repeat([1, 0], len(at)), kind="stable")
    position, number = position[order], order % max(len(at), 1)
    depth = np.cumsum(np.where(order < len(at), 1, -1))
    length = np.diff(position, append=position[-1:])
    open_ = (depth == width) & (length > 0)
    weight = None if pieces.weight is None else pieces.weight[at[number[open_]]]
    found = Runs(need[number[open_]], position[open_] % span, length[open_], weight)
    return joined([same, found]), np.concatenate([home[piece], home[at[number[open_]]]])
