"""The memory of every tile, by what it is used for, and the refusal of programs that do not fit.

Input: a graph, a program, its liveness and the costs of its leaves. Output: `MemoryReport`, or `TileMemoryError`.
Categories bear the names of Poplar's profile; what overlaps in time (`LIVE`) is reported as it is at each tile's own
peak, so the categories of a tile add up to its total:

    variable             variables, while live
    message              received operands, during their compute set
    rearrangement        operands made contiguous on their tile, during their compute set
    outputEdge           results before they are sent to the tile that stores them, during their compute set
    borrowed             operands and results of a fallback vertex that needs several tiles, during its compute set
    constant, vertexInstanceState, vertexCode, controlCode, internalExchangeCode, stack    always

A fallback vertex is one that runs a whole operation; when its buffers take more than half a tile, they are spread
evenly over as many neighbouring tiles of its IPU as there are half tiles in them.
Source: categories and the constants below: Poplar & PopLibs user guide, "Profiling".
Limits: no gaps, alignment, memory elements or interleaving; code sizes are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.cost import ComputeSetCost, ExchangeCost
from ipujax.runtime.effects import EffectsOf
from ipujax.runtime.errors import TileMemoryError
from ipujax.runtime.graph import Graph
from ipujax.runtime.liveness import Liveness, Step, constants, liveness
from ipujax.runtime.mapping import TileMapping
from ipujax.runtime.program import Call, Execute, Function, If, Program, RepeatWhile, Switch
from ipujax.runtime.steps import Leaf, is_free, leaf_name, leaf_origin, leaves
from ipujax.runtime.target import Target
from ipujax.runtime.tile_window import tile_range
from ipujax.runtime.transfer_cost import CopyCost, StreamCost, SyncCost
from ipujax.runtime.variable import Origin, Variable, element_bytes
from ipujax.runtime.vertices import NO_TILE

# Derived from the example summary in the user guide, "Profile summary output": 1,216 tiles, 43 compute sets.
STACK_BYTES = 3_168  # 3,852,288 B of stacks / 1,216 tiles
CONTROL_BYTES_PER_STEP = 9  # 467,696 B of control code / 1,216 tiles / 43 compute sets
INSTRUCTION_BYTES = 4  # reference A2: one control slot is one instruction
SEND_WORDS = 4_148  # most 4-byte words of one send instruction, reference machine.md §1.4

LIVE = ("variable", "message", "rearrangement", "outputEdge", "borrowed")
ALWAYS = ("constant", "vertexInstanceState", "vertexCode", "controlCode", "internalExchangeCode", "stack")
CATEGORIES = LIVE + ALWAYS

Costs = Mapping[Leaf, ComputeSetCost | CopyCost | StreamCost | SyncCost]
_Layer = tuple[str, int, np.ndarray]  # category, first tile, bytes of each tile from there on


@dataclass(frozen=True, slots=True)
class LiveItem:
    """Something in the memory of one tile.

    Args:
        name: debug name, with dtype and shape for a variable.
        num_bytes: its bytes on that tile.
        category: one of `CATEGORIES`.
        origin: where it comes from.
    """

    name: str
    num_bytes: int
    category: str
    origin: Origin

    def __str__(self) -> str:
        place = f", {self.origin}" if self.origin != Origin() else ""
        return f"{self.num_bytes:>12,} B  {self.name} ({self.category}){place}"


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


@dataclass(frozen=True, slots=True, eq=False)
class MemoryReport:
    """Tile memory of one run of a program.

    Args:
        tile_bytes: bytes each tile needs at its own peak, int64[num_tiles].
        by_category: the same by category, each int64[num_tiles]; they add up to `tile_bytes`.
        largest: what the worst tile holds at its peak, largest first.
        peak_step: the step of that peak.
        peak_origin: where that step comes from.
        borrowed: fallback vertices that need more than their own tile.
    """

    tile_bytes: np.ndarray
    by_category: Mapping[str, np.ndarray]
    largest: tuple[LiveItem, ...]
    peak_step: str
    peak_origin: Origin
    borrowed: tuple[Borrowed, ...]

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of the fullest tile."""
        return int(self.tile_bytes.max())

    @property
    def worst_tile(self) -> int:
        """The fullest tile, the first of them if there are several."""
        return int(self.tile_bytes.argmax())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tiles, each at its own peak."""
        return int(self.tile_bytes.sum())


def memory_report(graph: Graph, program: Program, effects: EffectsOf, costs: Costs) -> MemoryReport:
    """Finds how much memory every tile needs, and what for.

    Args:
        graph: variables, mappings and vertices.
        program: the control tree.
        effects: the effects of its nodes.
        costs: the cost of each leaf.
    """
    frame = liveness(program, effects)
    sweep = _Sweep(graph, costs)
    live = sweep.peak(frame)
    used = constants(program, effects)
    always = _always(graph, program, costs, used, sweep)
    by_category = {**live.layers, **always}
    tile_bytes = np.asarray(sum(by_category.values()), np.int64)
    for array in (tile_bytes, *by_category.values()):
        array.setflags(write=False)
    worst = int(tile_bytes.argmax())
    step, items = sweep.at_peak(frame, worst)
    items += [LiveItem(repr(v), size, "constant", v.origin) for v in used if (size := sweep.variable_on(v, worst))]
    items += [LiveItem(name, int(always[name][worst]), name, Origin()) for name in ALWAYS[1:] if always[name][worst]]
    items.sort(key=lambda item: (-item.num_bytes, item.name))
    return MemoryReport(tile_bytes, by_category, tuple(items), *_name_of(step), tuple(sweep.borrowed.values()))


def check_memory(report: MemoryReport, target: Target) -> None:
    """Refuses a program that does not fit.

    Raises:
        TileMemoryError: naming the worst tile, how many bytes it lacks, what is largest there and when.
    """
    need, have = report.max_tile_bytes, target.bytes_per_tile
    if need <= have:
        return
    over = int((report.tile_bytes > have).sum())
    lines = [f"    {item}" for item in report.largest[:5]]
    raise TileMemoryError(
        "\n".join(
            [
                f"out of memory on {over:,} of {target.num_tiles:,} tiles, worst on tile {report.worst_tile}, "
                f"by {need - have:,} bytes, while running {report.peak_step}",
                "  largest on that tile:",
                *lines,
            ]
        ),
        where=report.peak_origin if report.peak_origin != Origin() else None,
        expected=f"at most {have:,} bytes a tile",
        got=f"{need:,} bytes",
        hint=_memory_hint(report, target),
    )


def _memory_hint(report: MemoryReport, target: Target) -> str:
    total, capacity = report.total_bytes, target.total_memory_bytes
    largest = report.largest[0]
    if total <= capacity:
        share = 100 * total / capacity
        hint = (
            f"all tiles together need only {share:.0f} % of their memory: make {largest.name} smaller "
            f"({largest.num_bytes:,} bytes on that tile), or map it to more tiles if you map it yourself"
        )
    else:
        hint = (
            f"all tiles together need {total:,} of {capacity:,} bytes: a smaller batch, jax.checkpoint to recompute "
            "activations, or a narrower dtype"
        )
    return (
        f"{hint}; bytes_per_tile={report.max_tile_bytes} to see what more memory would do; "
        "Options(allow_out_of_memory=True) for the profile of a program that does not fit"
    )


def _name_of(step: Step | None) -> tuple[str, Origin]:
    match step:
        case None:
            return "nothing", Origin()
        case If() | Switch() | RepeatWhile():
            return "a decision", step.origin
        case Call(function):
            return function.name, Origin()
    return leaf_name(step), leaf_origin(step)


def _always(
    graph: Graph, program: Program, costs: Costs, used: frozenset[Variable], sweep: _Sweep
) -> dict[str, np.ndarray]:
    """What every tile holds during the whole program, by category."""
    tiles = graph.target.num_tiles
    layers = {name: np.zeros(tiles, np.int64) for name in ALWAYS}
    for variable in used:
        sweep.add(layers["constant"], variable, 1)
    seen: set[object] = set()
    code: dict[str, tuple[int, np.ndarray]] = {}
    steps = 0
    for leaf in leaves(program):
        key = leaf.compute_set if isinstance(leaf, Execute) else leaf
        if key in seen or is_free(leaf):
            continue
        seen.add(key)
        steps += 1
        for group in graph.groups[leaf.compute_set] if isinstance(leaf, Execute) else ():
            (first, stop), there = tile_range(group.tile), group.tile[group.tile != NO_TILE]
            on_tile = np.bincount(there - first, minlength=stop - first)
            layers["vertexInstanceState"][first:stop] += on_tile * group.codelet.state_bytes
            size, where = code.get(group.codelet.name, (0, np.zeros(tiles, bool)))
            where[there] = True
            code[group.codelet.name] = max(size, group.codelet.code_bytes), where
        for exchange, first in _exchanges(costs[leaf], graph.target):
            window = layers["internalExchangeCode"][first : first + len(exchange.cycles)]
            sends = -(-exchange.sent_bytes // (SEND_WORDS * 4))
            window += INSTRUCTION_BYTES * (exchange.fragments * graph.target.exchange_fragment_cycles + sends)
    for size, where in code.values():
        layers["vertexCode"] += size * where
    layers["controlCode"] += CONTROL_BYTES_PER_STEP * steps
    layers["stack"] += STACK_BYTES
    return layers


def _exchanges(
    cost: ComputeSetCost | CopyCost | StreamCost | SyncCost, target: Target
) -> Iterator[tuple[ExchangeCost, int]]:
    """The exchanges of a leaf between tiles, each with its first tile."""
    if isinstance(cost, ComputeSetCost):
        for exchange in (cost.before, cost.after):
            yield exchange, cost.first_ipu * target.tiles_per_ipu
    elif isinstance(cost, CopyCost):
        yield cost.exchange, cost.first_ipu * target.tiles_per_ipu


@dataclass(slots=True)
class _Peak:
    """The peak of each tile over a frame, and what it is made of, int64[num_tiles] each."""

    total: np.ndarray
    layers: dict[str, np.ndarray]


class _Sweep:
    """Walks the steps of frames, keeping count of every tile's bytes."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs, self.target = graph, costs, graph.target
        self.borrowed: dict[tuple[str, int], Borrowed] = {}
        self._held: dict[tuple[TileMapping, int], tuple[int, np.ndarray]] = {}
        self._frames: dict[Function, _Peak] = {}
        self._layers: dict[Step, list[_Layer]] = {}

    def held(self, variable: Variable) -> tuple[int, np.ndarray]:
        """Bytes of a variable on each tile, from the first tile that holds any."""
        key = self.graph.mappings[variable], element_bytes(variable.dtype)
        if key not in self._held:
            counts = key[0].elements_per_tile(self.target.num_tiles)
            tiles = np.flatnonzero(counts)
            first, stop = (int(tiles[0]), int(tiles[-1]) + 1) if len(tiles) else (0, 0)
            self._held[key] = first, counts[first:stop] * key[1]
        return self._held[key]

    def variable_on(self, variable: Variable, tile: int) -> int:
        """Bytes of a variable on one tile."""
        first, values = self.held(variable)
        return int(values[tile - first]) if first <= tile < first + len(values) else 0

    def add(self, total: np.ndarray, variable: Variable, sign: int) -> tuple[int, int]:
        """Adds a variable to `total`, in place; returns the range of tiles that changed."""
        first, values = self.held(variable)
        total[first : first + len(values)] += sign * values
        return first, first + len(values)

    def layers(self, step: Step) -> list[_Layer]:
        """What occupies memory during one step only."""
        if step not in self._layers:
            self._layers[step] = list(self._of_step(step))
        return self._layers[step]

    def _of_step(self, step: Step) -> Iterator[_Layer]:
        cost = self.costs.get(step) if isinstance(step, Execute) else None
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

    def _lend(self, cost: ComputeSetCost, layers: list[_Layer]) -> list[_Layer]:
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

    def frame(self, call: Call, frame: Liveness) -> _Peak:
        """The peak of a called function's frame."""
        if call.function not in self._frames:
            self._frames[call.function] = self.peak(frame.functions[call.function])
        return self._frames[call.function]

    def peak(self, frame: Liveness) -> _Peak:
        """The peak of every tile over the steps of a frame."""
        tiles = self.target.num_tiles
        held, peak = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
        layers = {name: np.zeros(tiles, np.int64) for name in LIVE}
        starts, ends = _events(frame)
        for position, step in enumerate(frame.steps):
            for variable in ends[position]:
                self.add(held, variable, -1)
            changed = [self.add(held, variable, 1) for variable in starts[position]]
            extra = list(self.layers(step))
            if isinstance(step, Call):
                extra += [(name, 0, values) for name, values in self.frame(step, frame).layers.items()]
            changed += [(first, first + len(values)) for _, first, values in extra]
            if changed:
                window = slice(min(first for first, _ in changed), max(stop for _, stop in changed))
                _raise_peak(window, held, extra, peak, layers)
        return _Peak(peak, layers)

    def at_peak(self, frame: Liveness, tile: int) -> tuple[Step | None, list[LiveItem]]:
        """The step at which one tile of a frame is fullest, and what it holds then."""
        starts, ends = _events(frame)
        held, best, found = 0, -1, None
        for position, step in enumerate(frame.steps):
            held += sum(self.variable_on(v, tile) for v in starts[position])
            held -= sum(self.variable_on(v, tile) for v in ends[position])
            need = held + sum(size for _, size in self._layers_on(step, tile))
            if isinstance(step, Call):
                need += int(self.frame(step, frame).total[tile])
            if need > best:
                best, found = need, position
        if found is None:
            return None, []
        step = frame.steps[found]
        items = [
            LiveItem(repr(v), size, "variable", v.origin)
            for v in frame.live_at(found)
            if (size := self.variable_on(v, tile))
        ]
        items += [
            LiveItem(f"<{c}:{_name_of(step)[0]}>", n, c, _name_of(step)[1]) for c, n in self._layers_on(step, tile)
        ]
        if isinstance(step, Call):
            inner, more = self.at_peak(frame.functions[step.function], tile)
            return inner or step, items + more
        return step, items

    def _layers_on(self, step: Step, tile: int) -> list[tuple[str, int]]:
        """The bytes of each layer of a step on one tile."""
        return [
            (name, int(values[tile - first]))
            for name, first, values in self.layers(step)
            if first <= tile < first + len(values) and values[tile - first]
        ]


def _events(frame: Liveness) -> tuple[list[list[Variable]], list[list[Variable]]]:
    """The variables that begin to live at each step, and those that lived up to the step before."""
    starts: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    ends: list[list[Variable]] = [[] for _ in range(len(frame.steps) + 1)]
    for interval in frame.intervals:
        starts[interval.first].append(interval.variable)
        ends[interval.last + 1].append(interval.variable)
    return starts, ends


def _raise_peak(
    window: slice, held: np.ndarray, extra: list[_Layer], peak: np.ndarray, layers: dict[str, np.ndarray]
) -> None:
    """Notes, in place, the tiles of a window that are fuller than ever."""
    here = {"variable": held[window].copy()}
    for name, first, values in extra:
        part = here.setdefault(name, np.zeros(window.stop - window.start, np.int64))
        part[first - window.start : first - window.start + len(values)] += values
    total = np.sum(list(here.values()), axis=0)
    fuller = total > peak[window]
    if not fuller.any():
        return
    peak[window][fuller] = total[fuller]
    for name, layer in layers.items():
        layer[window][fuller] = here[name][fuller] if name in here else 0
