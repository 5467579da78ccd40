"""The general exchange count: runs that tiles need are cut at the tile mapping, and the pieces are counted.

Input: `Demand`, runs of flat elements by block and the tiles that need each block, and `Homes`, the tiles that elements
are mapped to. Output: `Traffic`, elements and fragments a tile. Linear in the number of runs and of their pieces.

The operand of a vertex is contiguous: received elements arrive in place, and elements on the tile are copied there
unless the operand is on the tile in one piece. Vertices of one tile that need the same block share one copy of it.

A fragment is contiguous in the memory of the tile that sends it and in the operand, both of which have the row-major
order of the variable: a complete block is one fragment, a part of it one for each row. The sender needs an instruction
for each. The receiver sets source and address where one of them changes: successive fragments from one tile, which are
neighbours in the operand, are one receive.
Limits: an operand of another order (a transposed read) counts the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from ipujax.runtime.exchange.homes import find_homes
from ipujax.runtime.exchange.runs import Runs, merge_runs, scale_by_weight, select_blocks, union_runs
from ipujax.runtime.exchange.sample import list_or_sample
from ipujax.runtime.exchange.shared_bus import Buses, shared_runs
from ipujax.runtime.tensor import TileMapping

MAX_RUNS = 1 << 21  # of an exchange that are all counted, assumed: 1 µs and 200 bytes each; beyond, a sample


@dataclass(frozen=True, eq=False, slots=True)
class Traffic:
    """Data that tiles exchange, each member int64[num_tiles].

    Counts are of elements of one byte, until `exchange.traffic` scales them by the size of an element.

    Args:
        received_bytes: bytes that arrive from other tiles.
        sent_bytes: bytes that leave, each counted once however many tiles receive it.
        fragments: contiguous parts that arrive (contiguous in the sender's memory and in the operand).
        receives: parts that arrive, each from one tile and contiguous in the operand.
        sends: contiguous parts that leave, each counted once however many tiles receive it.
        local_bytes: needed bytes that are already on the tile.
        local_fragments: contiguous parts of those.
        shared_bytes: the part of `received_bytes` that all other tiles of the same exchange bus receive too.
        copied_bytes: local bytes copied to make the operands of vertices contiguous, counted once an operand.
        copied_fragments: contiguous parts of those.
    """

    received_bytes: np.ndarray
    sent_bytes: np.ndarray
    fragments: np.ndarray
    receives: np.ndarray
    sends: np.ndarray
    local_bytes: np.ndarray
    local_fragments: np.ndarray
    shared_bytes: np.ndarray
    copied_bytes: np.ndarray
    copied_fragments: np.ndarray


def copied_parts(local: np.ndarray, local_parts: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return elements and parts copied to make operands contiguous: local ones of operands in several parts."""
    is_scattered = (local > 0) & (parts > 1)
    return np.where(is_scattered, local, 0), np.where(is_scattered, local_parts, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Demand:
    """Elements that each tile needs.

    Args:
        runs: sorted and disjoint in each block.
        block_of_tile: block that a tile needs, −1 for none, int64[num_tiles].
        operands: the single blocks, where a tile needs several and `runs` has their union.
    """

    runs: Runs
    block_of_tile: np.ndarray
    operands: Operands | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Operands:
    """Blocks that vertices need, each counted once a tile.

    Args:
        runs: sorted and disjoint in each block.
        block: block of each operand, int64[n].
        tile: its tile, int64[n].
    """

    runs: Runs
    block: np.ndarray
    tile: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """Runs cut where the home tile changes, sorted by block and element.

    Args:
        block: number of the block, int64[n].
        start: first flat element, int64[n].
        length: number of elements, int64[n].
        home: tile that they are mapped to, int64[n].
        first: whether the piece starts a fragment, bool[n].
        first_of_home: whether the piece before it in its block is mapped to another tile, or none is, bool[n]; in a
            sample the share of the pieces that each stands for, float64[n].
        weight: number of pieces that each stands for, float64[n]; None where every piece stands for itself.
    """

    block: np.ndarray
    start: np.ndarray
    length: np.ndarray
    home: np.ndarray
    first: np.ndarray
    first_of_home: np.ndarray
    weight: np.ndarray | None = None

    @property
    def elements(self) -> np.ndarray:
        """Elements that each piece stands for, [n]."""
        return scale_by_weight(self.length, self.weight)

    @property
    def fragments(self) -> np.ndarray:
        """Fragments that start in the pieces that each stands for, [n]."""
        return scale_by_weight(self.first, self.weight)

    @property
    def receives(self) -> np.ndarray:
        """Receives that start in the pieces that each stands for, [n]."""
        return scale_by_weight(self.first_of_home, self.weight)


def cut_at_homes(runs: Runs, mappings: tuple[TileMapping, ...], max_pieces: float = inf) -> Pieces:
    """Cut runs, sorted and disjoint in each block, where the home tile changes.

    Args:
        runs: the runs.
        mappings: of the variables, in the order of the flat space.
        max_pieces: limit beyond which about so many are sampled.
    """
    homes = find_homes(mappings)
    block, start, length, weight, before = runs.block, runs.start, runs.length, runs.weight, runs.before
    home = last_home = homes.run_of(start)
    if np.any(length > 1):
        last_home = homes.run_of(start + length - 1)
    if np.any(last_home > home):
        row, within, sample_weight = list_or_sample(home, last_home - home + 1, max_pieces)
        home = home[row] + within
        stop = np.minimum((start + length)[row], homes.end_of(home))
        block = block[row]
        start = np.maximum(start[row], homes.start_of(home))
        length = stop - start
        weight = sample_weight if weight is None else scale_by_weight(weight[row], sample_weight)
        if before is not None or sample_weight is not None:
            before_run = -1 if before is None else before[row]
            before = np.where(within == 0, before_run, -1 if sample_weight is None else start - 1)
    tile = homes.tile_of(home)
    rank = homes.rank_of(home) + start - homes.start_of(home)
    first_of_home = np.ones(len(block), bool)
    first_of_home[1:] = (block[1:] != block[:-1]) | (tile[1:] != tile[:-1])
    first = first_of_home.copy()
    first[1:] |= rank[1:] != rank[:-1] + length[:-1]
    if weight is None:
        return Pieces(block, start, length, tile, first, first_of_home)
    # In a sample the piece listed before need not be the neighbour: compare with the element before instead.
    if before is not None:
        behind = np.flatnonzero(before >= 0)
        home = homes.run_of(before[behind])
        rank_before = homes.rank_of(home) + before[behind] - homes.start_of(home)
        first[behind] = (tile[behind] != homes.tile_of(home)) | (rank[behind] != rank_before + 1)
    return Pieces(block, start, length, tile, first, _changes_in_sample(block, first_of_home, weight), weight)


def _changes_in_sample(block: np.ndarray, differs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Estimate the share of the pieces that a sampled one stands for whose home is not that of the piece before it."""
    # If a home changes from piece to piece with probability p, of samples w pieces apart 1 − (1 − p)^w differ.
    follows = np.append(False, block[1:] == block[:-1])
    pairs = np.maximum(1, np.bincount(block, follows))
    differing = np.bincount(block, follows & differs) / pairs
    return np.where(follows, 1 - (1 - differing[block]) ** (1 / weight), 1 / weight)


def demand_of_blocks(parts: list[Runs], tile: np.ndarray, size: int, num_tiles: int) -> Demand:
    """Build the demand of blocks, from their runs in any order and `tile` of each vertex, int64[blocks, vertices]."""
    # A tile of −1 is no vertex. `size` is the number of elements of the flat space.
    runs = merge_runs(parts, size)
    block, column = np.nonzero(tile >= 0)
    tiles = tile[block, column].astype(np.int64)
    block_of_tile = np.full(num_tiles, -1, np.int64)
    block_of_tile[tiles] = block
    if np.array_equal(block_of_tile[tiles], block):  # no tile needs two
        return Demand(runs, block_of_tile)
    # Some tile needs several blocks: it receives their union once, while copies are counted by operand.
    pairs = np.unique(tiles * len(tile) + block)
    tiles, block = np.divmod(pairs, len(tile))
    merged = merge_runs([select_blocks(runs, block, tiles, len(tile))], size)
    block_of_tile = np.where(np.bincount(tiles, minlength=num_tiles) > 0, np.arange(num_tiles), -1)
    return Demand(merged, block_of_tile, Operands(runs, block, tiles))


def sum_by_index(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sum `values` by `index`, int64[size]; exact below 2^53, as `np.bincount` adds in float64."""
    return np.rint(np.bincount(index, values, size)).astype(np.int64)


def count_traffic(
    demand: Demand, mappings: tuple[TileMapping, ...], writes: bool, buses: Buses, is_disjoint: bool = False
) -> Traffic:
    """Count the exchange of a demand, in elements; with `writes` the tiles send them home instead of receiving them."""
    # `is_disjoint` asserts that no two tiles need one element, which saves the count of those that several do.
    pieces = cut_at_homes(demand.runs, mappings, MAX_RUNS)
    num_tiles = len(demand.block_of_tile)
    elements = pieces.elements
    fragments = pieces.fragments
    vertex_tiles = np.flatnonzero(demand.block_of_tile >= 0)
    block_of = demand.block_of_tile[vertex_tiles]
    num_blocks = int(max(pieces.block.max(initial=0), block_of.max(initial=0))) + 1
    at_home = demand.block_of_tile[pieces.home] == pieces.block
    local = sum_by_index(pieces.home[at_home], elements[at_home], num_tiles)
    local_fragments = sum_by_index(pieces.home[at_home], fragments[at_home], num_tiles)

    def of_vertices(counts: np.ndarray) -> np.ndarray:
        total = np.zeros(num_tiles, np.int64)
        total[vertex_tiles] = sum_by_index(pieces.block, counts, num_blocks)[block_of]
        return total

    remote = of_vertices(elements) - local
    receives = of_vertices(pieces.receives) - sum_by_index(pieces.home[at_home], pieces.receives[at_home], num_tiles)
    all_fragments = of_vertices(fragments)
    if demand.operands is None:
        copies = copied_parts(local, local_fragments, all_fragments)
    else:
        copies = _copied_operand_parts(demand.operands, mappings, num_tiles)
    receivers = np.bincount(block_of, minlength=num_blocks)[pieces.block] - at_home  # other tiles that need a piece
    at_owners = sum_by_index(pieces.home, elements * receivers, num_tiles)
    shared = np.zeros(num_tiles, np.int64)
    if writes:  # an element has one home, so no two tiles receive it
        # The part of a result that one tile stores leaves at once, and arrives at an address of its own a fragment.
        arriving = sum_by_index(pieces.home, fragments * receivers, num_tiles)
        return Traffic(at_owners, remote, arriving, arriving, receives, local, local_fragments, shared, *copies)
    sent = at_owners
    sends = _sends(pieces, receivers > 0, is_disjoint, num_tiles)
    if not is_disjoint:
        homes = find_homes(mappings)
        needed = Runs(pieces.block, pieces.start, pieces.length, pieces.weight)
        union = union_runs(needed.take(receivers > 0), homes.size)
        union_elements = scale_by_weight(union.length, union.weight)
        multicast = sum_by_index(homes.tile_of(homes.run_of(union.start)), union_elements, num_tiles)
        if multicast.sum() < sent.sum():  # some element goes to two tiles
            sent = multicast
            shared = shared_runs(needed, pieces.home, demand.block_of_tile, buses.tiles(num_tiles))
    if pieces.weight is not None:  # estimated from a sample, a tile may seem to send more than is mapped to it
        sent = np.minimum(sent, sum(mapping.elements_per_tile(num_tiles) for mapping in mappings))
    arriving = all_fragments - local_fragments
    return Traffic(remote, sent, arriving, receives, sends, local, local_fragments, shared, *copies)


def _sends(pieces: Pieces, leaves: np.ndarray, is_disjoint: bool, num_tiles: int) -> np.ndarray:
    """Return the fragments that leave each tile; those of one start are one, which several tiles receive."""
    number = np.flatnonzero(leaves & pieces.first)
    if not is_disjoint:
        number = number[np.unique(pieces.start[number], return_index=True)[1]]
    return sum_by_index(pieces.home[number], pieces.fragments[number], num_tiles)


def _copied_operand_parts(
    operands: Operands, mappings: tuple[TileMapping, ...], num_tiles: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return elements and fragments that each tile copies: its local parts of operands in several pieces."""
    pieces = cut_at_homes(operands.runs, mappings, MAX_RUNS)
    parts = sum_by_index(pieces.block, pieces.fragments, int(operands.block.max(initial=0)) + 1)
    # Pieces and operands meet by (block, tile): a piece is local to an operand of its block on its home tile.
    piece_key = pieces.block * num_tiles + pieces.home
    operand_key = operands.block * num_tiles + operands.tile
    order = np.argsort(operand_key)
    position = np.minimum(np.searchsorted(operand_key[order], piece_key), len(order) - 1)
    at_home = operand_key[order][position] == piece_key
    operand = order[position[at_home]]
    scattered = parts[operands.block[operand]] > 1
    tile = operands.tile[operand[scattered]]
    local, fragments = (values[at_home][scattered] for values in (pieces.elements, pieces.fragments))
    return sum_by_index(tile, local, num_tiles), sum_by_index(tile, fragments, num_tiles)
