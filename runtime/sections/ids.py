"""Ids of compute sets, exchanges, programs and vertex types in a profile: positions in lists.

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
    """Phase of a leaf on all tiles, which is a program of the profile.

    Args:
        type: the program's type tag.
        cycles: of each tile, int64[tiles].
        data: bytes that each tile sends and receives, int64[tiles]; None for compute.
        fields: further fields of the program: its name, and the id of its compute set or exchange.
        moved_bytes: bytes that arrive, on all tiles or the host; 0 for compute.
        exchange: an exchange inside an IPU; None for other activities.
    """

    type: str
    cycles: np.ndarray
    data: np.ndarray | None
    fields: Json
    moved_bytes: int = 0
    exchange: ExchangeCost | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetRow:
    """Compute set of a profile; arrays are int64[tiles], the tiles of whole IPUs.

    Args:
        name: debug name.
        first_ipu: the IPU of the first tile of the arrays.
        cycles: of its compute phase.
        active: cycles in which a worker issues an instruction.
        vertices: number of vertices by type.
        active_by_type: active cycles of all tiles, by vertex type.
        groups: the vertices without those that copy.
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
    """Ids of an executable's compute sets, exchanges and programs, and the programs of each node of its tree.

    Args:
        compute_sets: by id.
        exchanges: exchanges inside IPUs by id, each with its first IPU.
        external: copies between IPUs by id, each with its first IPU.
        host: exchanges with the host by id.
        programs: the entries of `programs` by id.
        functions: program id of the body of each function.
        activities: (program id, activity) of each leaf.
        control: program ids of all other nodes.
        root: program id of the root.
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
        """Add a program; return its id."""
        self.programs.append(entry)
        return len(self.programs) - 1

    def activity_ids(self, node: Program) -> list[int]:
        """Return the program ids of a leaf's activities; none for a leaf that takes no time, and for other nodes."""
        return [number for number, _ in self.activities.get(node, ())]

    def programs_of(self, node: Program) -> list[int]:
        """Return the program ids of a node; none for a leaf that takes no time."""
        return self.control[node] if node in self.control else self.activity_ids(node)

    def type_of(self, node: Program) -> str:
        """Return the type tag of a node's main program."""
        # A step of several programs is named by its compute; of others the last is the node itself, after its sync.
        types = [self.programs[number]["type"] for number in self.programs_of(node)]
        return "OnTileExecute" if "OnTileExecute" in types else types[-1]

    def vertex_type_languages(self) -> dict[str, str]:
        """Return the language of each vertex type that runs, "C++" where codelets of one name have both.

        Copies on the tile run Poplar's own code, which is in assembly.
        """
        codelets = (group.codelet for row in self.compute_sets for group in row.groups)
        in_cpp = {codelet.name for codelet in codelets if codelet.language == "C++"}
        return {name: "C++" if name in in_cpp else "assembly" for name in self.vertex_types()}

    def vertex_types(self) -> list[str]:
        """Return the names of the vertex types that run, in alphabetical order."""
        return sorted({name for row in self.compute_sets for name in row.vertices})
