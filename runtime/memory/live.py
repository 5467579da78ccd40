"""What tiles hold for some of the time: how much of each variable, which buffers at each step, and the peak of a tile.

Input: a graph, the frames of its program and the costs of its leaves. Output: `Occupancy`.

    variable        variables, while live
    message         received operands, during their compute set
    rearrangement   operands made contiguous on their tile, during their compute set
    outputEdge      results before they are sent to the tile that stores them, during their compute set
    borrowed        operands and results of a fallback vertex that needs several tiles, during its compute set

A fallback vertex is one that runs a whole operation; when its buffers take more than half a tile, they are spread
evenly over as many neighbouring tiles of its IPU as there are half tiles in them.
Source: names: Poplar & PopLibs user guide, "Memory by category"; `borrowed` is an addition.
Limits: copies and streams write to where the data belongs, without a message buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.analysis import Liveness, Step
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import Execute, Graph
from ipujax.runtime.memory.always_live import Costs
from ipujax.runtime.memory.frames import Frames, Owner
from ipujax.runtime.tensor import Origin, TileMapping, Variable, element_bytes

LIVE = ("variable", "message", "rearrangement", "outputEdge", "borrowed")

Layer = tuple[str, int, np.ndarray]  # category, first tile, bytes of each tile from there on


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory a fallback vertex takes from neighbouring tiles.

    Args:
        name: its compute set.
        tile: the tile of the vertex.
        num_bytes: bytes in all.
        num_tiles: tiles it is spread over.
        origin: where it comes from.
    """

    name: str
    tile: int
    num_bytes: int
    num_tiles: int
    origin: Origin


@dataclass(slots=True)
class Peak:
    """The peak of each tile over a frame, what it is made of, and the position of its step; int64[num_tiles] each."""

    total: np.ndarray
    layers: dict[str, np.ndarray]
    position: np.ndarray


class Occupancy:
    """Bytes of variables and buffers on tiles.

    Args:
        graph: variables, mappings and vertices.
        frames: the liveness of the program and its functions.
        costs: the cost of each leaf.
    """

    def __init__(self, graph: Graph, frames: Frames, costs: Costs) -> None:
        self.graph, self.frames, self.target = graph, frames, graph.target
        self.borrowed: dict[tuple[str, int], Borrowed] = {}
        self._costs = costs
        self._held: dict[tuple[TileMapping, int], tuple[int, np.ndarray]] = {}
        self._peaks: dict[Owner, Peak] = {}
        self._narrow_peaks: dict[Owner, list[Layer]] = {}
        self._layers: dict[Step, tuple[Layer, ...]] = {}

    def held(self, variable: Variable) -> tuple[int, np.ndarray]:
        """Bytes of a variable on each tile, from the first tile that holds any."""
        key = self.graph.mappings[variable], element_bytes(variable.dtype)
        if key not in self._held:
            counts = key[0].elements_per_tile(self.target.num_tiles)
            tiles = np.flatnonzero(counts)
            first, stop = (int(tiles[0]), int(tiles[-1]) + 1) if len(tiles) else (0, 0)
            self._held[key] = first, counts[first:stop] * key[1]
        return self._held[key]

    def on_tile(self, variable: Variable, tile: int) -> int:
        """Bytes of a variable on one tile."""
        return _at(tile, *self.held(variable))

    def total(self, variables: Iterable[Variable]) -> np.ndarray:
        """Bytes of some variables together, int64[num_tiles]."""
        total = np.zeros(self.target.num_tiles, np.int64)
        for variable in variables:
            self._add(total, variable, 1)
        return total

    def _add(self, total: np.ndarray, variable: Variable, sign: int) -> tuple[int, int]:
        """Adds a variable to `total`, in place; returns the range of tiles that changed."""
        first, values = self.held(variable)
        total[first : first + len(values)] += sign * values
        return first, first + len(values)

    def buffers(self, step: Step) -> tuple[Layer, ...]:
        """What occupies memory during one step only."""
        if step not in self._layers:
            self._layers[step] = tuple(self._buffers(step))
        return self._layers[step]

    def _buffers(self, step: Step) -> Iterator[Layer]:
        cost = self._costs.get(step) if isinstance(step, Execute) else None
        if not isinstance(cost, ComputeSetCost):
            return
        first = cost.first_ipu * self.target.tiles_per_ipu
        layers = [
            ("message", first, cost.before.received_bytes),
            ("rearrangement", first, cost.rearrangement_bytes),
            ("outputEdge", first, cost.after.sent_bytes),
        ]
        if cost.compute_set in self.graph.fallbacks:
            layers = self._lend(cost, layers)
        yield from (layer for layer in layers if layer[2].any())

    def _lend(self, cost: ComputeSetCost, layers: list[Layer]) -> list[Layer]:
        """Moves the buffers of vertices that need more than half a tile to neighbouring tiles, evenly."""
        need = np.sum([values for _, _, values in layers], axis=0)
        half, per_ipu = self.target.bytes_per_tile // 2, self.target.tiles_per_ipu
        borrowed = np.zeros(len(need), np.int64)
        keep = np.ones(len(need), np.int64)
        for tile in np.flatnonzero(need > half):
            size, ipu = int(need[tile]), int(tile) // per_ipu
            count = min(-(-size // half), per_ipu)
            neighbours = ipu * per_ipu + (int(tile) % per_ipu + np.arange(count)) % per_ipu
            borrowed[neighbours] += np.diff(np.arange(count + 1) * size // count)
            keep[tile] = 0
            number = cost.first_ipu * per_ipu + int(tile)
            name, origin = cost.compute_set.name, cost.compute_set.origin
            self.borrowed[name, number] = Borrowed(name, number, size, count, origin)
        return [(name, first, values * keep) for name, first, values in layers] + [("borrowed", layers[0][1], borrowed)]

    def buffers_on(self, step: Step, tile: int) -> list[tuple[str, int]]:
        """The buffers of a step on one tile: category and bytes."""
        found = [(name, _at(tile, first, values)) for name, first, values in self.buffers(step)]
        return [(name, size) for name, size in found if size]

    def peak(self, owner: Owner) -> Peak:
        """The peak of every tile over the steps of a frame, with the frames it makes room for."""
        if owner not in self._peaks:
            self._peaks[owner] = self._find_peak(owner, self.frames.of[owner])
        return self._peaks[owner]

    def _find_peak(self, owner: Owner, frame: Liveness) -> Peak:
        tiles = self.target.num_tiles
        held, total = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
        peak = Peak(total, {name: np.zeros(tiles, np.int64) for name in LIVE}, np.zeros(tiles, np.int64))
        starts, ends = changes(frame)
        for position, step in enumerate(frame.steps):
            for variable in ends[position]:
                self._add(held, variable, -1)
            changed = [self._add(held, variable, 1) for variable in starts[position]]
            extra = list(self.buffers(step))
            for function in self.frames.during(owner, step):
                extra += self._peak_layers(function)
            changed += [(first, first + len(values)) for _, first, values in extra]
            if changed:
                window = slice(min(first for first, _ in changed), max(stop for _, stop in changed))
                _raise_peak(window, position, held, extra, peak)
        return peak

    def _peak_layers(self, owner: Owner) -> list[Layer]:
        """The layers of the peak of a frame, of the tiles that have some: most functions are on one IPU of many."""
        if owner not in self._narrow_peaks:
            used = {name: np.flatnonzero(values) for name, values in self.peak(owner).layers.items()}
            ranges = {name: (int(tiles[0]), int(tiles[-1]) + 1) for name, tiles in used.items() if len(tiles)}
            layers = self.peak(owner).layers
            self._narrow_peaks[owner] = [
                (name, first, layers[name][first:stop]) for name, (first, stop) in ranges.items()
            ]
        return self._narrow_peaks[owner]

    def fullest_step(self, owner: Owner, tile: int) -> int | None:
        """The position of the step of a frame at which one tile is fullest, None in a frame without steps."""
        return int(self.peak(owner).position[tile]) if self.frames.of[owner].steps else None


def _at(tile: int, first: int, values: np.ndarray) -> int:
    return int(values[tile - first]) if first <= tile < first + len(values) else 0


def changes(frame: Liveness) -> tuple[list[list[Variable]], list[list[Variable]]]:
    """The variables that begin to live at each step, and those that lived up to the step before."""
    starts: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    ends: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    for interval in frame.intervals:
        starts[interval.first].append(interval.variable)
        ends[interval.last + 1].append(interval.variable)
    return starts, ends


def _raise_peak(window: slice, position: int, held: np.ndarray, extra: Iterable[Layer], peak: Peak) -> None:
    """Notes, in place, the tiles of a window that are fuller than ever."""
    total = held[window].copy()
    for _, first, values in extra:
        total[first - window.start : first - window.start + len(values)] += values
    fuller = np.flatnonzero(total > peak.total[window])
    if not len(fuller):
        return
    peak.total[window][fuller], peak.position[window][fuller] = total[fuller], position
    here = {"variable": held[window].copy()}
    for name, first, values in extra:
        part = here.setdefault(name, np.zeros(len(total), np.int64))
        part[first - window.start : first - window.start + len(values)] += values
    for name, layer in peak.layers.items():
        layer[window][fuller] = here[name][fuller] if name in here else 0
