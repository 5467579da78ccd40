"""The ids of everything in a profile: compute sets, exchanges, programs, vertex types, as positions in lists.

`sections.programs` fills a `Numbering`; the sections of a profile, and its text, read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipujax.runtime.cost import CopyCost, ExchangeCost, StreamCost
from ipujax.runtime.graph import Leaf, Program, VertexGroup

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing a leaf does, as a program of its own: a phase on all tiles.

    Args:
        type: the program's type tag.
        cycles: cycles of each tile, int64[tiles].
        data: bytes each tile sends and receives, int64[tiles]; None for compute.
        facts: ids of what it runs, and its name.
        moved_bytes: bytes that arrive, on all tiles or the host; 0 for compute.
        exchange: the exchange inside an IPU that it is; None for everything else.
    """

    type: str
    cycles: np.ndarray
    data: np.ndarray | None
    facts: Json
    moved_bytes: int = 0
    exchange: ExchangeCost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetRow:
    """One compute set of the profile; arrays are int64[tiles], the tiles of whole IPUs.

    Args:
        name: debug name.
        first_ipu: the IPU of the first tile of the arrays.
        cycles: cycles of its compute phase.
        active: those in which a worker issues an instruction.
        vertices: how many vertices of each type.
        active_by_type: active cycles of all tiles, by vertex type.
        groups: the vertices, those that copy left out.
    """

    name: str
    first_ipu: int
    cycles: np.ndarray
    active: np.ndarray
    vertices: dict[str, int]
    active_by_type: dict[str, int]
    groups: tuple[VertexGroup, ...] = ()


@dataclass(slots=True)
class Numbering:
    """Ids of everything in one executable, and what each step of its program is.

    Args:
        compute_sets: by id.
        exchanges: exchanges inside IPUs by id, each with its first IPU.
        external: exchanges between IPUs by id.
        host: exchanges with the host by id.
        programs: the entries of `programs`.
        functions: for each function the id of its body.
        activities: of each leaf, with their program ids.
        control: the program ids of all other nodes.
        root: the id of the whole program.
    """

    compute_sets: list[ComputeSetRow] = field(default_factory=list)
    exchanges: list[tuple[int, ExchangeCost]] = field(default_factory=list)
    external: list[tuple[int, CopyCost]] = field(default_factory=list)
    host: list[tuple[Leaf, StreamCost]] = field(default_factory=list)
    programs: list[Json] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    activities: dict[Program, list[tuple[int, Activity]]] = field(default_factory=dict)
    control: dict[Program, list[int]] = field(default_factory=dict)
    root: int = 0

    def add(self, entry: Json) -> int:
        """Adds a program; returns its id."""
        self.programs.append(entry)
        return len(self.programs) - 1

    def activity_ids(self, node: Program) -> list[int]:
        """The ids of what a leaf does; none for other nodes, and for a leaf that does nothing."""
        return [number for number, _ in self.activities.get(node, ())]

    def programs_of(self, node: Program) -> list[int]:
        """The ids of the programs that stand for a node; none for a leaf that does nothing."""
        return self.control[node] if node in self.control else self.activity_ids(node)

    def type_of(self, node: Program) -> str:
        """The type tag of the main one of these programs."""
        types = [self.programs[number]["type"] for number in self.programs_of(node)]
        return "OnTileExecute" if "OnTileExecute" in types else types[-1]

    def vertex_types(self) -> list[str]:
        """The names of the vertex types that run, in order."""
        return sorted({name for row in self.compute_sets for name in row.vertices})
