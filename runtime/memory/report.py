"""The memory of every tile, by what it is used for.

Input: a graph, a program, its effects and the costs of its leaves. Output: `MemoryReport`.
Three parts make up a tile's memory: what is there during the whole program (`memory.always_live`), what variables and
buffers share, packed so that what never lives at one time may lie in one place (`memory.live`, `packing`,
`memory.arena`), and gaps. Categories bear the names of Poplar's profile. What overlaps in time (`LIVE`) is reported as
it is at each tile's own peak, so the categories of a tile add up to its total:

    variable, message, rearrangement, outputEdge, borrowed    at the peak, see `memory.live`
    gap                                                       what packing and alignment leave unused at the peak
    the others                                                always, see `memory.always_live`

Source: Poplar & PopLibs user guide, "Profiling"; `borrowed` and `gap` are additions.
Limits: those of the modules named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from types import MappingProxyType

import numpy as np

from ipujax.runtime.analysis import EffectsOf, Step, constants
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.graph import (
    Graph,
    Program,
    RemoteIn,
    StreamIn,
    leaves,
)
from ipujax.runtime.memory.always_live import CODE, DATA, FIXED, Costs, fixed_bytes
from ipujax.runtime.memory.arena import pack_program, unshared_bytes
from ipujax.runtime.memory.chip import Arena
from ipujax.runtime.memory.contents import TileContents, tile_contents
from ipujax.runtime.memory.frames import Owner, frames_of
from ipujax.runtime.memory.live import LIVE, Borrowed, Occupancy
from ipujax.runtime.memory.live_bytes import LiveBytes, live_bytes
from ipujax.runtime.memory.live_item import LiveItem, step_name
from ipujax.runtime.memory.packing import round_up
from ipujax.runtime.memory.role_bytes import bytes_by_role, role_of_variable
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Variable, frozen
from ipujax.runtime.tensor.roles import CONSTANTS

ALWAYS = FIXED
CATEGORIES = (*LIVE, "gap", *ALWAYS)


@dataclass(frozen=True, eq=False, repr=False)
class MemoryReport:
    """Tile memory of one run of a program, found out as it is asked for.

    Args:
        target: the machine.
        arguments: the variables that hold what the host sends.
        constants: the constants of the program.
        fixed: what is there during the whole program, by category of `FIXED`, int64[num_tiles] each.
        occupancy: what is there for some of the time.
    """

    target: Target
    arguments: frozenset[Variable] = field(repr=False)
    constants: tuple[Variable, ...] = field(repr=False)
    fixed: Mapping[str, np.ndarray] = field(repr=False)
    occupancy: Occupancy = field(repr=False)

    def __repr__(self) -> str:
        used, have = self.max_tile_bytes, self.target.bytes_per_tile
        fullest = f"tile {self.worst_tile:,} needs {used:,} of {have:,} bytes"
        tiles = f"{len(self.tile_bytes):,} tiles of {self.target.name} {self.total_bytes:,} bytes"
        return f"{type(self).__name__}({fullest}, all {tiles}; see .tile_bytes, .by_category, .largest)"

    @cached_property
    def _arena(self) -> Arena:
        return pack_program(self.occupancy, self._fixed_bytes)

    @cached_property
    def tile_bytes(self) -> np.ndarray:
        """Bytes each tile needs, gaps included, int64[num_tiles]."""
        return frozen(self._fixed_bytes + self._arena.size, np.int64)

    @property
    def least_bytes(self) -> np.ndarray:
        """Bytes that each tile needs at least, found without packing, int64[num_tiles]."""
        return np.asarray(self.occupancy.peak(None).total + sum(self.fixed.values()), np.int64)

    @property
    def _fixed_bytes(self) -> np.ndarray:
        data = np.asarray(sum(self.fixed[name] for name in DATA), np.int64)
        return round_up(self.code_bytes) + round_up(data)

    @cached_property
    def by_category(self) -> Mapping[str, np.ndarray]:
        """The same by category, each int64[num_tiles]; they add up to `tile_bytes`."""
        live = self.occupancy.peak(None)
        gap = self.tile_bytes - live.total - sum(self.fixed.values())
        layers = {**live.by_category, "gap": gap, **self.fixed}
        return MappingProxyType({name: frozen(layer, np.int64) for name, layer in layers.items()})

    @cached_property
    def by_role(self) -> Mapping[str, np.ndarray]:
        """Bytes each tile needs by what they are for, each tile at its own peak; they add up to `tile_bytes`.

        Returns:
            int64[num_tiles] for each of `memory.ROLES` that some tile has.
        """
        roles = bytes_by_role(self.occupancy, self.by_category)
        return MappingProxyType({name: frozen(values, np.int64) for name, values in roles.items()})

    @cached_property
    def live_bytes(self) -> LiveBytes:
        """How full the fullest tile is at each step of the program, without gaps."""
        tile = self.worst_tile
        return live_bytes(self.occupancy, tile, sum(int(values[tile]) for values in self.fixed.values()))

    @cached_property
    def _worst(self) -> tuple[str, Origin, tuple[LiveItem, ...]]:
        return self.at_peak(self.worst_tile)

    @property
    def peak_step(self) -> str:
        """The step at which the worst tile is fullest."""
        return self._worst[0]

    @property
    def largest(self) -> tuple[LiveItem, ...]:
        """All that the worst tile holds at its peak, largest first; it adds up to `max_tile_bytes`."""
        return self._worst[2]

    @cached_property
    def contents(self) -> TileContents:
        """The largest things on each tile at its own peak; of very many tiles, on the fullest."""
        return tile_contents(self.occupancy, self.constants, self._unnamed, self.tile_bytes)

    @property
    def _unnamed(self) -> dict[str, np.ndarray]:
        """What is there all the time and is no variable, and gaps, by category, int64[num_tiles] each."""
        return {name: self.by_category[name] for name in ("gap", *FIXED) if name != "constant"}

    @property
    def borrowed(self) -> tuple[Borrowed, ...]:
        """Fallback vertices that need more than their own tile."""
        self.occupancy.peak(None)  # which looks at every step
        return tuple(self.occupancy.borrowed.values())

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of the fullest tile."""
        return int(self.tile_bytes.max())

    @property
    def rough_bytes(self) -> int:
        """About the size of tiles that is needed, code included: exact only where packing decides whether that fits.

        0 where everything fits even unpacked; where not even what lives at one time fits, as much as that needs. As
        `Target.replace` has it, the same share of a tile is for code.
        """
        if self._fits_unpacked():
            return 0
        have = self.target.bytes_per_tile
        code_bytes = ceil(int(self.code_bytes.max()) * have / max(1, self.limits["memory for code"]))
        least = max(code_bytes, int(self.least_bytes.max()))
        return least if least > have else self.max_tile_bytes

    @property
    def worst_tile(self) -> int:
        """The fullest tile, the first of them if there are several."""
        return int(self.tile_bytes.argmax())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tiles."""
        return int(self.tile_bytes.sum())

    @property
    def gap_bytes(self) -> np.ndarray:
        """Bytes each tile loses to packing and alignment, int64[num_tiles]."""
        return self.by_category["gap"]

    @property
    def shared_bytes(self) -> np.ndarray:
        """Bytes of each tile that variables and buffers share, gaps included, int64[num_tiles]."""
        return self._arena.size

    @property
    def code_bytes(self) -> np.ndarray:
        """Bytes of code on each tile, int64[num_tiles]."""
        return np.asarray(sum(self.fixed[name] for name in CODE), np.int64)

    @property
    def is_from_top(self) -> np.ndarray:
        """Whether what is shared lies from the top of memory down, for it must be interleaved, bool[num_tiles]."""
        return (self._arena.wide > 0) & (self.target.interleaved_bytes > 0)

    @property
    def limits(self) -> Mapping[str, int]:
        """Bytes that a tile has of each kind of memory: of all, and of that from which code can be fetched."""
        have = self.target.bytes_per_tile
        return {"memory": have, "memory for code": have - self.target.interleaved_bytes}

    def needed(self, kind: str) -> np.ndarray:
        """Bytes of one kind of memory that each tile needs, int64[num_tiles].

        Args:
            kind: one of `limits`.
        """
        return {"memory": self.tile_bytes, "memory for code": self.code_bytes}[kind]

    def lacking(self) -> dict[str, np.ndarray]:
        """Bytes of each kind of memory that each tile lacks, int64[num_tiles]; empty when everything fits."""
        if self._fits_unpacked():
            return {}
        short = {kind: np.maximum(self.needed(kind) - limit, 0) for kind, limit in self.limits.items()}
        return {kind: values for kind, values in short.items() if values.any()}

    def _fits_unpacked(self) -> bool:
        """Whether everything fits even if nothing shares memory: then there is no need to pack."""
        most = {"memory": self._fixed_bytes + unshared_bytes(self.occupancy), "memory for code": self.code_bytes}
        return all((most[kind] <= limit).all() for kind, limit in self.limits.items())

    @property
    def overflowed_bytes(self) -> np.ndarray:
        """Bytes each tile lacks, 0 where everything fits, int64[num_tiles]."""
        return np.maximum.reduce([np.zeros_like(self.tile_bytes), *self.lacking().values()])

    def at_peak(self, tile: int) -> tuple[str, Origin, tuple[LiveItem, ...]]:
        """The step at which a tile is fullest, where it comes from, and what the tile holds then.

        Args:
            tile: which.

        Returns:
            What it holds comes largest first; the bytes add up to `tile_bytes`.
        """
        step, items = _at_peak(None, tile, self.occupancy)
        held = ((v, self.occupancy.bytes_on_tile(v, tile)) for v in self.constants)
        items += [LiveItem.of(v, size, "constant", CONSTANTS) for v, size in held if size]
        items += [LiveItem.always(size, name) for name, sizes in self._unnamed.items() if (size := int(sizes[tile]))]
        return *step_name(step), tuple(sorted(items, key=lambda item: (-item.num_bytes, item.name)))


def memory_report(graph: Graph, program: Program, effects: EffectsOf, costs: Costs) -> MemoryReport:
    """Finds how much memory every tile needs, and what for.

    Args:
        graph: variables, mappings and vertices.
        program: the control tree.
        effects: the effects of its nodes.
        costs: the cost of each leaf.
    """
    occupancy = Occupancy(graph, frames_of(liveness(program, effects)), costs)
    # Constants of equal names are in the graph's order: that of a set differs from process to process.
    place = {variable: number for number, variable in enumerate(graph.variables)}
    used = tuple(sorted(constants(program, effects), key=lambda v: (v.name, place.get(v, len(place)))))
    arguments = frozenset(
        variable
        for leaf in leaves(program)
        if isinstance(leaf, (StreamIn, RemoteIn))
        for variable in leaf.destination.variables()
    )
    fixed = fixed_bytes(graph, program, costs, occupancy.total(used))
    return MemoryReport(graph.target, arguments, used, MappingProxyType(fixed), occupancy)


def _at_peak(owner: Owner, tile: int, occupancy: Occupancy) -> tuple[Step | None, list[LiveItem]]:
    """The step at which one tile of a frame is fullest, the innermost if it is a call, and what it holds then."""
    position = occupancy.fullest_step(owner, tile)
    if position is None:
        return None, []
    frame = occupancy.frames.liveness[owner]
    step: Step = frame.steps[position]
    held = ((v, occupancy.bytes_on_tile(v, tile)) for v in frame.live_at(position))
    items = [LiveItem.of(v, size, "variable", role_of_variable(occupancy, v)) for v, size in held if size]
    items += [LiveItem.buffer(step, size, name) for name, size in occupancy.buffers_on_tile(step, tile)]
    for function in reversed(occupancy.frames.functions_during(owner, step)):
        inner, more = _at_peak(function, tile, occupancy)
        step, items = inner or step, items + more
    return step, items
