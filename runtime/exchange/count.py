"""The general exchange count: what boxes of a view need is cut at the tile mapping, and the pieces are counted.

Input: `Demand`, runs of flat elements by box and the tiles that need each box, and `Homes`, where the elements live.
Output: `Traffic`, elements and fragments a tile. Linear in the number of runs and of their pieces.

The operand of a vertex is contiguous, so what is received goes right there, and what the tile has is copied there
unless it is the whole operand in one piece. Vertices of one tile that need the same box share one copy of it.

A fragment is a part that is contiguous in the memory of the tile it comes from and in the operand it goes to, both of
which keep the row-major order of the variable: a whole box that moves is one fragment, a part of it one for each row.
Limits: an operand of another order (a transposed read) counts the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from ipujax.runtime.exchange.homes import homes
from ipujax.runtime.exchange.runs import Runs, covered, pick, tidy, weighed
from ipujax.runtime.exchange.sample import sampled_if_many
from ipujax.runtime.exchange.shared_bus import Buses, shared_runs
from ipujax.runtime.tensor import TileMapping

MOST_RUNS = 1 << 21  # that an exchange is counted by, assumed: 1 µs and 200 bytes each; of more a sample is counted


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """What tiles exchange, each member int64[num_tiles].

    Counts are of elements of one byte, until `traffic` gives them their size.

    Args:
        received_bytes: bytes that arrive from other tiles.
        sent_bytes: bytes that leave, each once however many tiles receive it.
        fragments: contiguous parts that arrive (contiguous in the memory they leave and in the operand they become).
        local_bytes: bytes needed that are already on the tile.
        local_fragments: contiguous parts of those.
        shared_bytes: the part of `received_bytes` that all other tiles of the same exchange bus receive too.
        copied_bytes: local bytes copied to make the operands of vertices contiguous, once an operand.
        copied_fragments: contiguous parts of those.
    """

    received_bytes: np.ndarray
    sent_bytes: np.ndarray
    fragments: np.ndarray
    local_bytes: np.ndarray
    local_fragments: np.ndarray
    shared_bytes: np.ndarray
    copied_bytes: np.ndarray
    copied_fragments: np.ndarray


def copied(local: np.ndarray, local_parts: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements and parts of operands that are copied, as the whole operand is not in one piece on its tile.

    Args:
        local: elements of the operand of each tile that are on it.
        local_parts: contiguous parts of those.
        parts: contiguous parts of the whole operand.
    """
    is_scattered = (local > 0) & (parts > 1)
    return np.where(is_scattered, local, 0), np.where(is_scattered, local_parts, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Demand:
    """Which tiles need which elements.

    Args:
        runs: sorted and disjoint in each box.
        box_of_tile: the box a tile needs, −1 for none, int64[num_tiles].
        operands: where tiles need several boxes, which `runs` then has joined: these boxes one by one.
    """

    runs: Runs
    box_of_tile: np.ndarray
    operands: Operands | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Operands:
    """The boxes that vertices need, each once a tile.

    Args:
        runs: sorted and disjoint in each box.
        box: the box of each operand, int64[n].
        tile: its tile, int64[n].
    """

    runs: Runs
    box: np.ndarray
    tile: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Runs cut where the home tile changes, by box and element.

    Args:
        box: number of the box, int64[n].
        start: first flat element, int64[n].
        length: number of elements, int64[n].
        home: the tile that holds them, int64[n].
        first: whether the piece starts a fragment, bool[n].
        weight: number of pieces that each stands for, float64[n]; None where each is itself alone.
    """

    box: np.ndarray
    start: np.ndarray
    length: np.ndarray
    home: np.ndarray
    first: np.ndarray
    weight: np.ndarray | None = None

    @property
    def elements(self) -> np.ndarray:
        """Elements that each piece stands for, [n]."""
        return weighed(self.length, self.weight)

    @property
    def fragments(self) -> np.ndarray:
        """Fragments that start in what each piece stands for, [n]."""
        return weighed(self.first, self.weight)


def cut(runs: Runs, mappings: tuple[TileMapping, ...], most: float = inf) -> Pieces:
    """Cuts runs where the home tile changes.

    Args:
        runs: sorted and disjoint in each box.
        mappings: of the variables, in the order of the flat space.
        most: pieces beyond which a sample of about so many is given.
    """
    where = homes(mappings)
    box, start, length, weight, before = runs.box, runs.start, runs.length, runs.weight, runs.before
    at = last = where.run_of(start)
    if np.any(length > 1):
        last = where.run_of(start + length - 1)
    if np.any(last > at):
        row, within, each = sampled_if_many(at, last - at + 1, most)
        at = at[row] + within
        begin = np.maximum(start[row], where.start_of(at))
        box, start, length = box[row], begin, np.minimum((start + length)[row], where.end_of(at)) - begin
        weight = each if weight is None else weighed(weight[row], each)
        if before is not None or each is not None:
            ahead = -1 if before is None else before[row]
            before = np.where(within == 0, ahead, -1 if each is None else begin - 1)
    tile, rank = where.tile_of(at), where.rank_of(at) + start - where.start_of(at)
    first = np.ones(len(box), bool)
    first[1:] = (box[1:] != box[:-1]) | (tile[1:] != tile[:-1]) | (rank[1:] != rank[:-1] + length[:-1])
    if before is not None:
        behind = np.flatnonzero(before >= 0)
        home = where.run_of(before[behind])
        rank_before = where.rank_of(home) + before[behind] - where.start_of(home)
        first[behind] = (tile[behind] != where.tile_of(home)) | (rank[behind] != rank_before + 1)
    return Pieces(box, start, length, tile, first, weight)


def demand(parts: list[Runs], tile: np.ndarray, size: int, num_tiles: int) -> Demand:
    """What tiles need, where a tile may need several boxes.

    Args:
        parts: runs of the boxes, in any order.
        tile: tiles of the vertices of each box, −1 for none, int[boxes, vertices].
        size: elements of the flat space.
        num_tiles: tiles of the target.
    """
    runs = tidy(parts, size)
    box, column = np.nonzero(tile >= 0)
    tiles = tile[box, column].astype(np.int64)
    box_of_tile = np.full(num_tiles, -1, np.int64)
    box_of_tile[tiles] = box
    if np.array_equal(box_of_tile[tiles], box):
        return Demand(runs, box_of_tile)
    pairs = np.unique(tiles * len(tile) + box)
    tiles, box = np.divmod(pairs, len(tile))
    merged = tidy([pick(runs, box, tiles, len(tile))], size)
    box_of_tile = np.where(np.bincount(tiles, minlength=num_tiles) > 0, np.arange(num_tiles), -1)
    return Demand(merged, box_of_tile, Operands(runs, box, tiles))


def sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sums of `values` by `index`, int64[size]; exact below 2^53."""
    return np.rint(np.bincount(index, values, size)).astype(np.int64)


def count(wanted: Demand, mappings: tuple[TileMapping, ...], writes: bool, buses: Buses, once: bool = False) -> Traffic:
    """Counts the exchange of a demand.

    Args:
        wanted: which tiles read, or write, which elements.
        mappings: of the variables, in the order of the flat space.
        writes: the tiles send the elements home instead of receiving them.
        buses: which tiles share an exchange bus.
        once: whether it is known that no element is needed by two tiles.
    """
    pieces, num_tiles = cut(wanted.runs, mappings, MOST_RUNS), len(wanted.box_of_tile)
    elements, firsts = pieces.elements, pieces.fragments
    vertex_tiles = np.flatnonzero(wanted.box_of_tile >= 0)
    box_of = wanted.box_of_tile[vertex_tiles]
    num_boxes = int(max(pieces.box.max(initial=0), box_of.max(initial=0))) + 1
    at_home = wanted.box_of_tile[pieces.home] == pieces.box
    local = sums(pieces.home[at_home], elements[at_home], num_tiles)
    local_fragments = sums(pieces.home[at_home], firsts[at_home], num_tiles)
    moved, parts = -local, -local_fragments
    moved[vertex_tiles] += sums(pieces.box, elements, num_boxes)[box_of]
    parts[vertex_tiles] += sums(pieces.box, firsts, num_boxes)[box_of]
    if wanted.operands is None:
        copies = copied(local, local_fragments, parts + local_fragments)
    else:
        copies = _copied(wanted.operands, mappings, num_tiles)
    others = np.bincount(box_of, minlength=num_boxes)[pieces.box] - at_home  # other tiles that need a piece
    if writes:  # an element has one home, so no two tiles receive it
        received, none = sums(pieces.home, elements * others, num_tiles), np.zeros(num_tiles, np.int64)
        arriving = sums(pieces.home, firsts * others, num_tiles)
        return Traffic(received, moved, arriving, local, local_fragments, none, *copies)
    sent, shared = sums(pieces.home, elements * others, num_tiles), np.zeros(num_tiles, np.int64)
    if not once:
        where, needed = homes(mappings), Runs(pieces.box, pieces.start, pieces.length, pieces.weight)
        moving = others > 0
        weight = None if pieces.weight is None else pieces.weight[moving]
        union = covered(Runs(pieces.box[moving], pieces.start[moving], pieces.length[moving], weight), where.size)
        leaving = sums(where.tile_of(where.run_of(union.start)), weighed(union.length, union.weight), num_tiles)
        if leaving.sum() < sent.sum():  # some element goes to two tiles
            sent = leaving
            shared = shared_runs(needed, pieces.home, wanted.box_of_tile, buses.tiles(num_tiles))
    if pieces.weight is not None:  # by a sample a tile may seem to send more than it holds
        sent = np.minimum(sent, sum(mapping.elements_per_tile(num_tiles) for mapping in mappings))
    return Traffic(moved, sent, parts, local, local_fragments, shared, *copies)


def _copied(operands: Operands, mappings: tuple[TileMapping, ...], num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements and fragments of operands that are on their tile but not in one piece, int64[num_tiles] each."""
    pieces = cut(operands.runs, mappings, MOST_RUNS)
    elements, firsts = pieces.elements, pieces.fragments
    parts = sums(pieces.box, firsts, int(operands.box.max(initial=0)) + 1)
    key, wanted = pieces.box * num_tiles + pieces.home, operands.box * num_tiles + operands.tile
    order = np.argsort(wanted)
    at = np.minimum(np.searchsorted(wanted[order], key), len(order) - 1)
    at_home = wanted[order][at] == key
    operand = order[at[at_home]]
    scattered = parts[operands.box[operand]] > 1
    tile = operands.tile[operand[scattered]]
    held, first = elements[at_home][scattered], firsts[at_home][scattered]
    return sums(tile, held, num_tiles), sums(tile, first, num_tiles)
