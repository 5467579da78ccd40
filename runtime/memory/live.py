"""Bytes with live ranges on tiles: variables, the buffers of each step, and the peak of each tile.

Input: a graph, the frames of its program and the costs of its leaves. Output: `Occupancy`.

    variable        variables, while live
    message         received operands, during their compute set
    rearrangement   operands made contiguous on their tile, during their compute set
    outputEdge      results before they are sent to the tile that stores them, during their compute set
    borrowed        operands and results of a fallback vertex that needs several tiles, during its compute set

A fallback vertex is one that runs a whole operation; when its buffers take more than half a tile, they are spread
evenly over as many neighbouring tiles of its IPU as there are half tiles in them.
Source: names: Poplar & PopLibs user guide, "Memory by category"; `borrowed` is an addition.
Limits: copies and streams write to the tiles of their destination, without a message buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.analysis import Liveness, Step
from ipujax.runtime.cost import ComputeSetCost, bytes_in_memory
from ipujax.runtime.cost.ipu_window import mapping_range
from ipujax.runtime.files.figure_kinds import TileIndex
from ipujax.runtime.graph import Execute, Graph
from ipujax.runtime.memory.always_live import Costs
from ipujax.runtime.memory.frames import Frames, Owner
from ipujax.runtime.tensor import Origin, TileMapping, Variable, frozen, pad_tiles, shift_tiles

LIVE = ("variable", "message", "rearrangement", "outputEdge", "borrowed")

Piece = tuple[str, int, np.ndarray]  # category, first tile, bytes of each tile from there on


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory of neighbouring tiles that a fallback vertex uses.

    Args:
        name: its compute set.
        tile: the tile of the vertex.
        num_bytes: bytes on all tiles together.
        num_tiles: tiles over which they are spread.
        origin: origin of the compute set.
    """

    name: str
    tile: TileIndex
    num_bytes: int
    num_tiles: int
    origin: Origin


@dataclass(slots=True)
class Peak:
    """The peak of each tile over the steps of a frame, int64[num_tiles] each.

    Args:
        total: peak live bytes.
        by_category: the same by category of `LIVE`.
        position: position of the step of the peak, the first of equal ones.
    """

    total: np.ndarray
    by_category: dict[str, np.ndarray]
    position: np.ndarray

    def padded(self, first: int, num_tiles: int) -> Peak:
        """Return the peak of tiles from `first` on as that of all tiles, those of the others empty."""
        by_category = {name: pad_tiles(values, first, num_tiles) for name, values in self.by_category.items()}
        return Peak(pad_tiles(self.total, first, num_tiles), by_category, pad_tiles(self.position, first, num_tiles))


class Occupancy:
    """Bytes of variables and buffers on tiles; peaks are computed when first asked for.

    Args:
        graph: variables, mappings and vertices.
        frames: the liveness of the program and its functions.
        costs: the cost of each leaf.
    """

    def __init__(self, graph: Graph, frames: Frames, costs: Costs) -> None:
        self.graph = graph
        self.frames = frames
        self.target = graph.target
        self.borrowed: dict[tuple[str, int], Borrowed] = {}
        self._costs = costs
        self._padded_lengths = graph.padded_lengths
        # Counted by mapping and element size: most variables of a model share a few mappings, as equal IPUs do.
        self._bytes_by_mapping: dict[tuple[TileMapping, float], np.ndarray] = {}
        self._bytes_by_tile: dict[Variable, tuple[int, np.ndarray]] = {}
        self._peaks: dict[Owner, Peak] = {}
        self._tiles: dict[Owner, range] = {}
        self._peak_pieces: dict[Owner, list[Piece]] = {}
        self._buffers: dict[Step, tuple[Piece, ...]] = {}

    def bytes_by_tile(self, variable: Variable) -> tuple[int, np.ndarray]:
        """Return the first tile of a variable, and its bytes on each tile from there on."""
        if variable not in self._bytes_by_tile:
            mapping = self.graph.mappings[variable]
            low, high = mapping_range(mapping)
            first = low // self.target.tiles_per_ipu * self.target.tiles_per_ipu
            key = shift_tiles(mapping, -first), bytes_in_memory(variable, self._padded_lengths)
            if key not in self._bytes_by_mapping:
                counts = key[0].elements_per_tile(high - first)[low - first :]
                self._bytes_by_mapping[key] = frozen(np.ceil(counts * key[1]), np.int64)
            self._bytes_by_tile[variable] = low, self._bytes_by_mapping[key]
        return self._bytes_by_tile[variable]

    def bytes_on_tile(self, variable: Variable, tile: int) -> int:
        """Return the bytes of a variable on one tile."""
        return _at(tile, *self.bytes_by_tile(variable))

    def total(self, variables: Iterable[Variable]) -> np.ndarray:
        """Return the bytes of some variables together, int64[num_tiles]."""
        total = np.zeros(self.target.num_tiles, np.int64)
        for variable in variables:
            self._add(total, variable, 1, 0)
        return total

    def _add(self, total: np.ndarray, variable: Variable, sign: int, first_tile: int) -> tuple[int, int]:
        """Add a variable to `total` of tiles from `first_tile` on, in place; return the range of it that changed."""
        first, values = self.bytes_by_tile(variable)
        first -= first_tile * bool(len(values))
        total[first : first + len(values)] += sign * values
        return first, first + len(values)

    def buffers(self, step: Step) -> tuple[Piece, ...]:
        """Return the buffers that are live during one step only, by category."""
        if step not in self._buffers:
            self._buffers[step] = tuple(self._find_buffers(step))
        return self._buffers[step]

    def _find_buffers(self, step: Step) -> Iterator[Piece]:
        """Yield the buffers of a compute set's exchanges and rearrangements; those of a fallback spread over tiles."""
        cost = self._costs.get(step) if isinstance(step, Execute) else None
        if not isinstance(cost, ComputeSetCost):
            return
        first = cost.first_ipu * self.target.tiles_per_ipu
        pieces = [
            ("message", first, cost.before.received_bytes),
            ("rearrangement", first, cost.rearrangement_bytes),
            ("outputEdge", first, cost.after.sent_bytes),
        ]
        if cost.compute_set in self.graph.notes.fallbacks:
            pieces = self._spread_over_neighbours(cost, pieces)
        yield from (piece for piece in pieces if piece[2].any())

    def _spread_over_neighbours(self, cost: ComputeSetCost, pieces: list[Piece]) -> list[Piece]:
        """Move the buffers of vertices that need more than half a tile to neighbouring tiles, evenly."""
        need = np.sum([values for _, _, values in pieces], axis=0)
        half = self.graph.planned_tile_bytes // 2
        per_ipu = self.target.tiles_per_ipu
        borrowed = np.zeros(len(need), np.int64)
        fits_alone = np.ones(len(need), np.int64)
        for tile in np.flatnonzero(need > half):
            size = int(need[tile])
            ipu = int(tile) // per_ipu
            count = min(-(-size // half), per_ipu)
            # From the vertex's tile upwards, and from the first tile of the same IPU after its last.
            neighbours = ipu * per_ipu + (int(tile) % per_ipu + np.arange(count)) % per_ipu
            borrowed[neighbours] += np.diff(np.arange(count + 1) * size // count)
            fits_alone[tile] = 0
            number = cost.first_ipu * per_ipu + int(tile)
            name = cost.compute_set.name
            self.borrowed[name, number] = Borrowed(name, number, size, count, cost.compute_set.origin)
        remaining = [(name, first, values * fits_alone) for name, first, values in pieces]
        return [*remaining, ("borrowed", pieces[0][1], borrowed)]

    def buffers_on_tile(self, step: Step, tile: int) -> list[tuple[str, int]]:
        """Return category and bytes of each buffer of a step on one tile."""
        sizes = [(name, _at(tile, first, values)) for name, first, values in self.buffers(step)]
        return [(name, size) for name, size in sizes if size]

    def peak(self, owner: Owner) -> Peak:
        """Return the peak of every tile over the steps of a frame, inner frames included."""
        peak = self.peak_on_ipus(owner)
        return peak.padded(self.tiles_of(owner).start, self.target.num_tiles) if owner else peak

    def peak_on_ipus(self, owner: Owner) -> Peak:
        """Return the peak of a frame on its IPUs, see `tiles_of`."""
        if owner not in self._peaks:
            self._peaks[owner] = self._find_peak(owner, self.frames.liveness[owner])
        return self._peaks[owner]

    def tiles_of(self, owner: Owner) -> range:
        """Return the tiles of the IPUs on which a frame has bytes, and of those between; all for the program."""
        if owner is None:
            return range(self.target.num_tiles)
        if owner not in self._tiles:
            frame = self.frames.liveness[owner]
            pieces = [self.bytes_by_tile(interval.variable) for interval in frame.intervals]
            for step in frame.steps:
                pieces += [(first, values) for _, first, values in self._pieces_of(owner, step)]
            ranges = [(first, first + len(values)) for first, values in pieces if len(values)]
            width = self.target.tiles_per_ipu
            low, high = min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=1)
            self._tiles[owner] = range(low // width * width, -(-high // width) * width)
        return self._tiles[owner]

    def _pieces_of(self, owner: Owner, step: Step) -> list[Piece]:
        """Return what a step has beside variables: buffers, and the frames of functions that it calls."""
        # An inner frame counts with its own peak, as if all of its tiles were fullest at one moment.
        functions = self.frames.functions_during(owner, step)
        return [*self.buffers(step), *(piece for function in functions for piece in self._pieces_at_peak(function))]

    def _find_peak(self, owner: Owner, frame: Liveness) -> Peak:
        """Walk the steps of a frame; return the most bytes of each tile, their categories, and the step of that."""
        tiles = self.tiles_of(owner)
        live_bytes = np.zeros(len(tiles), np.int64)  # of variables at the current step
        by_category = {name: np.zeros(len(tiles), np.int64) for name in LIVE}
        peak = Peak(np.zeros(len(tiles), np.int64), by_category, np.zeros(len(tiles), np.int64))
        starts, ends = starts_and_ends(frame)
        # A step may run often: the ramps of a pipeline of s stages have s² calls of its parts.
        pieces_of: dict[Step, list[Piece]] = {}
        for position, step in enumerate(frame.steps):
            for variable in ends[position]:
                self._add(live_bytes, variable, -1, tiles.start)
            changed = [self._add(live_bytes, variable, 1, tiles.start) for variable in starts[position]]
            if step not in pieces_of:
                pieces_of[step] = [(name, first - tiles.start, x) for name, first, x in self._pieces_of(owner, step)]
            pieces = pieces_of[step]
            changed += [(first, first + len(values)) for _, first, values in pieces]
            if changed:  # tiles where nothing started cannot be fuller than before
                window = slice(min(first for first, _ in changed), max(stop for _, stop in changed))
                _raise_peak(window, position, live_bytes, pieces, peak)
        return peak

    def _pieces_at_peak(self, owner: Owner) -> list[Piece]:
        """Return the peak of a frame by category, cut to the tiles with bytes: most functions use one IPU of many."""
        if owner not in self._peak_pieces:
            by_category = self.peak_on_ipus(owner).by_category
            used = {name: np.flatnonzero(values) for name, values in by_category.items()}
            ranges = {name: (int(tiles[0]), int(tiles[-1]) + 1) for name, tiles in used.items() if len(tiles)}
            start = self.tiles_of(owner).start
            self._peak_pieces[owner] = [
                (name, start + first, by_category[name][first:stop]) for name, (first, stop) in ranges.items()
            ]
        return self._peak_pieces[owner]

    def fullest_step(self, owner: Owner, tile: int) -> int | None:
        """Return the position of the step of a frame at which a tile is fullest, None in a frame without steps."""
        return int(self.peak(owner).position[tile]) if self.frames.liveness[owner].steps else None


def _at(tile: int, first: int, values: np.ndarray) -> int:
    return int(values[tile - first]) if first <= tile < first + len(values) else 0


def starts_and_ends(frame: Liveness) -> tuple[list[list[Variable]], list[list[Variable]]]:
    """Return, for each step, the variables whose live range starts at it, and those whose range ended before it."""
    starts: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    ends: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    for interval in frame.intervals:
        starts[interval.first].append(interval.variable)
        ends[interval.last + 1].append(interval.variable)
    return starts, ends


def _raise_peak(window: slice, position: int, live_bytes: np.ndarray, pieces: Iterable[Piece], peak: Peak) -> None:
    """Record, in place, the tiles of a window that are fuller at a step than at all steps before."""
    total = live_bytes[window].copy()
    for _, first, values in pieces:
        total[first - window.start : first - window.start + len(values)] += values
    fuller = np.flatnonzero(total > peak.total[window])
    if not len(fuller):
        return
    peak.total[window][fuller] = total[fuller]
    peak.position[window][fuller] = position
    # The division by category is only built for steps that raise a peak, which are few.
    by_category = {"variable": live_bytes[window].copy()}
    for name, first, values in pieces:
        part = by_category.setdefault(name, np.zeros(len(total), np.int64))
        part[first - window.start : first - window.start + len(values)] += values
    for name, values in peak.by_category.items():
        values[window][fuller] = by_category[name][fuller] if name in by_category else 0
