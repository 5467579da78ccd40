"""Memory report: the bytes that every tile needs, by category and by role.

Input: a graph, a program, its effects and the costs of its leaves. Output: `MemoryReport`.
A tile's memory has three parts: bytes in use during the whole program (`memory.always_live`), bytes that variables and
buffers share, packed so that those that are never live together may have one address (`memory.live`, `packing`,
`memory.arena`), and gaps. Categories bear the names of Poplar's profile. Those with live ranges (`LIVE`) are reported
at each tile's own peak, so the categories of a tile add up to its total:

    variable, message, rearrangement, outputEdge, borrowed    at the peak, see `memory.live`
    gap                                                       unused at the peak: "alignment" pads items, "packing" is
                                                              between them
    the others                                                always, see `memory.always_live`

Source: Poplar & PopLibs user guide, "Profiling"; `borrowed` and `gap` are additions.
Limits: those of the modules named. Of a saved report other tiles than the fullest have their largest items only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Annotated, Any

import numpy as np

from ipujax.runtime.analysis import EffectsOf, Step, constants
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files.figure_kinds import BytesByTile, Flags
from ipujax.runtime.files.figure_records import FigureRecord, field_type, figure
from ipujax.runtime.files.kinds import Map, Record, Text
from ipujax.runtime.graph import Graph, Program, RemoteIn, StreamIn, leaves
from ipujax.runtime.memory.always_live import CODE, DATA, FIXED, Costs, fixed_bytes
from ipujax.runtime.memory.arena import pack_program, unshared_bytes, wide_variables
from ipujax.runtime.memory.chip import Arena
from ipujax.runtime.memory.contents import (
    ItemOnTiles,
    TileContents,
    VariableTiles,
    alignment_bytes,
    bytes_by_role,
    items_at_peak,
    tile_contents,
    variable_tiles,
)
from ipujax.runtime.memory.frames import Owner, frames_of
from ipujax.runtime.memory.live import LIVE, Borrowed, Occupancy
from ipujax.runtime.memory.live_item import ROLES, LiveItem, TilePeak, step_name
from ipujax.runtime.memory.memory_breakdown import LiveBytes, MemoryBreakdown, live_bytes, memory_breakdown
from ipujax.runtime.memory.overwritten_operands import with_results_in_place
from ipujax.runtime.memory.packing import round_up
from ipujax.runtime.not_copied import ReadOnlyMapping, Shared
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Variable, frozen

CATEGORIES = (*LIVE, "gap", *FIXED)
_BYTES = field_type(BytesByTile).kind
_ByCategory = Annotated[Mapping[str, BytesByTile], Record(dict.fromkeys(CATEGORIES, _BYTES))]
_ByRole = Annotated[Mapping[str, BytesByTile], Map(_BYTES, Text(ROLES), minimum=1)]


@dataclass(frozen=True, eq=False, repr=False)
class MemoryReport(FigureRecord, Shared):
    """Tile memory of one run of a program; each figure is computed when it is first read, or read from a file.

    Args:
        target: the machine.
        arguments: the variables that host streams write.
        constants: the constants of the program.
        fixed: bytes in use during the whole program, by category of `FIXED`, int64[num_tiles] each.
        program_occupancy: variables and buffers with live ranges; None where the report is read from a file.
        data: the figures as a file has them.
    """

    COPY_HINT = "profile.save(path), and ipu.Profile.load(path); a profile itself can be pickled"

    target: Target
    arguments: frozenset[Variable] = field(repr=False)
    constants: tuple[Variable, ...] = field(repr=False)
    fixed: Mapping[str, np.ndarray] = field(repr=False)
    program_occupancy: Occupancy | None = field(repr=False)
    data: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def from_data(cls, target: Target, data: Mapping[str, Any]) -> MemoryReport:
        """Return the report of `figures_as_data`."""
        sizes = field_type(_ByCategory).from_data(data["by_category"])
        return cls(target, frozenset(), (), ReadOnlyMapping({name: sizes[name] for name in FIXED}), None, data)

    @property
    def occupancy(self) -> Occupancy:
        """Variables and buffers with live ranges.

        Raises:
            ProfileError: the report is read from a file.
        """
        if self.program_occupancy is None:
            raise ProfileError("a saved profile has no live ranges", hint="liveness of profile.graph() has their bytes")
        return self.program_occupancy

    def __repr__(self) -> str:
        fullest = f"tile {self.worst_tile:,} needs {self.max_tile_bytes:,} of {self.target.bytes_per_tile:,} bytes"
        tiles = f"{len(self.tile_bytes):,} tiles of {self.target.name} {self.total_bytes:,} bytes"
        return f"{type(self).__name__}({fullest}, all {tiles}; see .tile_bytes, .by_category, .breakdown)"

    @cached_property
    def _arena(self) -> Arena:
        return pack_program(self.occupancy, self._fixed_bytes)

    @cached_property
    def tile_bytes(self) -> np.ndarray:
        """Bytes that each tile needs, gaps included, int64[num_tiles]."""
        return frozen(self._fixed_bytes + self.shared_bytes, np.int64)

    @property
    def least_bytes(self) -> np.ndarray:
        """A lower bound of `tile_bytes`, computed without packing, int64[num_tiles]."""
        return np.asarray(self.occupancy.peak(None).total + sum(self.fixed.values()), np.int64)

    @property
    def _fixed_bytes(self) -> np.ndarray:
        data = np.asarray(sum(self.fixed[name] for name in DATA), np.int64)
        return round_up(self.code_bytes) + round_up(data)

    @figure
    def by_category(self) -> _ByCategory:
        """Bytes that each tile needs by category, int64[num_tiles] each; they add up to `tile_bytes`."""
        live = self.occupancy.peak(None)
        gap = self.tile_bytes - live.total - sum(self.fixed.values())
        sizes = {**live.by_category, "gap": gap, **self.fixed}
        return ReadOnlyMapping({name: frozen(values, np.int64) for name, values in sizes.items()})

    @figure
    def by_role(self) -> _ByRole:
        """Bytes that each tile needs at its own peak, by role of `memory.ROLES`, int64[num_tiles] each.

        They add up to `tile_bytes`; roles without bytes are left out.
        """
        tiles = len(self.tile_bytes)
        roles = bytes_by_role(self._items_on(np.ones(tiles, bool)), tiles)
        return ReadOnlyMapping({name: frozen(values, np.int64) for name, values in roles.items()})

    @figure
    def live_bytes(self) -> LiveBytes:
        """Live bytes of the fullest tile at each step of the program, without gaps."""
        tile = self.worst_tile
        return live_bytes(self.occupancy, tile, sum(int(values[tile]) for values in self.fixed.values()))

    @figure
    def breakdown(self) -> MemoryBreakdown:
        """Bytes at the peak by variable, role, category and line, on the fullest tile and on the mean tile.

        They add up to `max_tile_bytes` and to `mean_tile_bytes`.
        """
        tiles = len(self.tile_bytes)
        step, origin = step_name(_innermost_step(None, self.worst_tile, self.occupancy))
        items = self._items_on(np.ones(tiles, bool))
        return memory_breakdown(items, self.worst_tile, step, origin, tiles)

    @property
    def peak(self) -> TilePeak:
        """The step at which the fullest tile is at its peak, and the items of the tile there."""
        items = tuple(item for item in self.breakdown.items if item.num_bytes)
        return TilePeak(self.breakdown.step, self.breakdown.origin, items)

    @property
    def peak_step(self) -> str:
        """The step at which the fullest tile is at its peak."""
        return self.breakdown.step

    @property
    def largest(self) -> tuple[LiveItem, ...]:
        """All items of the fullest tile at its peak, largest first; they add up to `max_tile_bytes`."""
        return self.peak.items

    @figure
    def contents(self) -> TileContents:
        """The largest items of each tile at its own peak; of targets with very many tiles, of the fullest."""
        return tile_contents(self.occupancy, self.constants, self._unnamed, self.tile_bytes)

    @cached_property
    def _unnamed(self) -> dict[LiveItem, np.ndarray]:
        """Bytes without a variable that are always in use, and gaps, int64[num_tiles] each."""
        # In the order of `_fixed_bytes`, code and data are rounded up once each.
        always = sum(self.fixed[name] for name in FIXED)
        alignment = self._fixed_bytes - always + alignment_bytes(self.occupancy, wide_variables(self.occupancy.graph))
        gaps = {"alignment": alignment, "packing": self.gap_bytes - alignment}
        rows = {LiveItem.without_variable(0, name): self.fixed[name] for name in FIXED if name != "constant"}
        return rows | {LiveItem.without_variable(0, "gap", name): values for name, values in gaps.items()}

    def _items_on(self, selected: np.ndarray) -> Iterator[ItemOnTiles]:
        """Yield the items of the selected tiles, each tile at its own peak."""
        return items_at_peak(self.occupancy, self.constants, self._unnamed, selected)

    @figure
    def variables(self) -> VariableTiles:
        """The largest variables with their bytes on each tile."""
        return variable_tiles(self.occupancy)

    @figure
    def borrowed(self) -> tuple[Borrowed, ...]:
        """The memory of neighbouring tiles that fallback vertices use, one entry a vertex."""
        self.occupancy.peak(None)  # reads the buffers of every step, and fills `borrowed` on the way
        return tuple(self.occupancy.borrowed.values())

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of the fullest tile."""
        return int(self.tile_bytes.max())

    @property
    def rough_bytes(self) -> int:
        """Bytes that a tile needs to have for the program, code included, packed only if that decides whether it fits.

        0 if the program fits even without sharing of memory; a lower bound if not even the peak live bytes fit. Code
        needs more than its own bytes: it can be fetched from a fixed share of a tile's memory, as in `Target.replace`.
        """
        if self._fits_unpacked:
            return 0
        capacity = self.target.bytes_per_tile
        code_bytes = ceil(int(self.code_bytes.max()) * capacity / max(1, self.limits["memory for code"]))
        lower_bound = max(code_bytes, int(self.least_bytes.max()))
        return lower_bound if lower_bound > capacity else self.max_tile_bytes

    @property
    def mean_tile_bytes(self) -> Fraction:
        """Mean bytes of a tile, exactly."""
        return Fraction(self.total_bytes, len(self.tile_bytes))

    @property
    def worst_tile(self) -> int:
        """The number of the fullest tile, the first of equal ones."""
        return int(self.tile_bytes.argmax())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tiles together."""
        return int(self.tile_bytes.sum())

    @property
    def gap_bytes(self) -> np.ndarray:
        """Bytes that each tile loses to packing and alignment, int64[num_tiles]."""
        return self.by_category["gap"]

    @figure
    def shared_bytes(self) -> BytesByTile:
        """Bytes of each tile that variables and buffers share, gaps included, int64[num_tiles]."""
        return self._arena.size

    @property
    def code_bytes(self) -> np.ndarray:
        """Bytes of code on each tile, int64[num_tiles]."""
        return np.asarray(sum(self.fixed[name] for name in CODE), np.int64)

    @figure
    def is_from_top(self) -> Annotated[np.ndarray, Flags(length="tiles")]:
        """True for tiles that are filled from the top down, as interleaved items need it; bool[num_tiles]."""
        return (self._arena.wide > 0) & (self.target.interleaved_bytes > 0)

    @property
    def limits(self) -> Mapping[str, int]:
        """Bytes that a tile has of each kind of memory: of all, and of the part from which code can be fetched."""
        capacity = self.target.bytes_per_tile
        return {"memory": capacity, "memory for code": capacity - self.target.interleaved_bytes}

    def needed(self, kind: str) -> np.ndarray:
        """Return the bytes of one kind of memory, a key of `limits`, that each tile needs, int64[num_tiles]."""
        return {"memory": self.tile_bytes, "memory for code": self.code_bytes}[kind]

    def lacking(self) -> dict[str, np.ndarray]:
        """Return the bytes that each tile lacks by kind of memory, int64[num_tiles] each; empty if all fits."""
        if self._fits_unpacked:
            return {}
        short = {kind: np.maximum(self.needed(kind) - limit, 0) for kind, limit in self.limits.items()}
        return {kind: values for kind, values in short.items() if values.any()}

    @cached_property
    def _fits_unpacked(self) -> bool:
        """Whether everything fits even if no items share memory."""
        if self.program_occupancy is None:
            return False  # the packed sizes are saved: no reason to estimate
        # Packing takes most of the time of a report, and programs that clearly fit do not need it.
        upper_bounds = {
            "memory": self._fixed_bytes + unshared_bytes(self.occupancy),
            "memory for code": self.code_bytes,
        }
        return all((upper_bounds[kind] <= limit).all() for kind, limit in self.limits.items())

    @property
    def overflowed_bytes(self) -> np.ndarray:
        """Bytes that each tile lacks, 0 where everything fits, int64[num_tiles]."""
        return np.maximum.reduce([np.zeros_like(self.tile_bytes), *self.lacking().values()])

    def at_peak(self, tile: int) -> TilePeak:
        """Return the step at which a tile is fullest, and the items of the tile there; they add up to `tile_bytes`.

        Raises:
            ProfileError: the report is read from a file, and the tile is not the fullest.
        """
        if tile == self.worst_tile:
            return self.peak
        if self.program_occupancy is None:
            message = "a saved profile lists the contents of the fullest tile only"
            raise ProfileError(message, expected=f"tile {self.worst_tile}", got=f"tile {tile}")
        return self._peak_of(tile)

    def _peak_of(self, tile: int) -> TilePeak:
        selected = np.arange(len(self.tile_bytes)) == tile
        step, origin = step_name(_innermost_step(None, tile, self.occupancy))
        items = memory_breakdown(self._items_on(selected), tile, step, origin, 1).items
        return TilePeak(step, origin, items)


def memory_report(graph: Graph, program: Program, effects: EffectsOf, costs: Costs) -> MemoryReport:
    """Return the memory report of a program."""
    frames = with_results_in_place(graph, frames_of(liveness(program, effects)))
    occupancy = Occupancy(graph, frames, costs)
    # Constants of equal names are in the graph's order: that of a set differs from process to process.
    position = {variable: number for number, variable in enumerate(graph.variables)}
    used = tuple(sorted(constants(program, effects), key=lambda v: (v.name, position.get(v, len(position)))))
    arguments = frozenset(
        variable
        for leaf in leaves(program)
        if isinstance(leaf, (StreamIn, RemoteIn))
        for variable in leaf.destination.variables()
    )
    fixed = fixed_bytes(graph, program, costs, occupancy.total(used))
    return MemoryReport(graph.target, arguments, used, ReadOnlyMapping(fixed), occupancy)


def _innermost_step(owner: Owner, tile: int, occupancy: Occupancy) -> Step | None:
    """Return the step at which a tile of a frame is fullest, the innermost if it is a call."""
    position = occupancy.fullest_step(owner, tile)
    if position is None:
        return None
    step = occupancy.frames.liveness[owner].steps[position]
    functions = occupancy.frames.functions_during(owner, step)
    inner_steps = (_innermost_step(function, tile, occupancy) for function in functions)
    return next((inner for inner in inner_steps if inner is not None), step)


_CATEGORIES = 4  # printed of each tile


def fullest_tiles(report: MemoryReport, count: int) -> Iterator[str]:
    """Yield a line for each of the `count` fullest tiles, the fullest first."""
    for tile in np.argsort(-report.tile_bytes, kind="stable")[:count].tolist():
        sizes = {name: int(values[tile]) for name, values in report.by_category.items()}
        largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:_CATEGORIES]
        categories = ", ".join(f"{name} {sizes[name]:,}" for name in largest) or "nothing"
        yield f"tile {tile}: {report.tile_bytes[tile]:,} of {report.target.bytes_per_tile:,} bytes: {categories}"
