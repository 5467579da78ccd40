"""Rule of the verifier on IPUs: a vertex touches memory of its own IPU only; data cross IPUs in a `Copy`.

The quick test compares the IPU of a whole vertex group with that of whole variables. Where one of them spans several
IPUs, the contiguous runs of all blocks decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import Bases, flat_bases
from ipujax.runtime.graph import Access, Graph, VertexGroup
from ipujax.runtime.tensor import TileMapping
from ipujax.runtime.verify.inventory import Connection, Inventory, access_runs, element_name


def cross_ipu(inventory: Inventory) -> Iterator[VerifyError]:
    """No vertex touches memory of another IPU."""
    target = inventory.graph.target
    if target.num_ipus == 1:
        return
    ipus = IpuLookup(inventory.graph)
    for connection in inventory.fields():
        if not ipus.is_surely_local(connection.group, connection.access):
            yield from _foreign_elements(ipus, connection)


class ForeignElements(NamedTuple):
    """Runs of memory that a vertex touches and that are not, or not all, on its IPU; a row each.

    Args:
        vertex: number of the vertex, as `vertex_blocks` lists them.
        element: first element on another IPU.
        ipu: that IPU.
        bases: the flat space of elements.
    """

    vertex: np.ndarray
    element: np.ndarray
    ipu: np.ndarray
    bases: Bases


class IpuLookup:
    """IPUs to which vertex groups and variables are mapped.

    Args:
        graph: holds the mappings.
    """

    def __init__(self, graph: Graph) -> None:
        self._mappings = graph.mappings
        self._tiles = graph.target.tiles_per_ipu
        self._cached: dict[object, int | None] = {}  # by vertex group or mapping, both compared by identity

    def is_surely_local(self, group: VertexGroup, access: Access) -> bool:
        """Return whether all vertices and all variables of an access are on one IPU."""
        vertex_ipu = self._of_group(group)
        memory_ipus = {self._of_mapping(self._mappings[v]) for v in access.tensor.variables()}
        return vertex_ipu is not None and memory_ipus == {vertex_ipu}

    def _of_group(self, group: VertexGroup) -> int | None:
        """Return the IPU of all vertices; None if there are several IPUs, or no vertices."""
        if group not in self._cached:
            self._cached[group] = self._common_ipu(group.tile[group.tile >= 0])
        return self._cached[group]

    def _of_mapping(self, mapping: TileMapping) -> int | None:
        """Return the IPU of all elements; None if there are several IPUs, or no elements."""
        if mapping not in self._cached:
            self._cached[mapping] = self._common_ipu(mapping.tiles)
        return self._cached[mapping]

    def _common_ipu(self, tiles: np.ndarray) -> int | None:
        if not tiles.size:
            return None
        low_ipu = int(tiles.min()) // self._tiles
        high_ipu = int(tiles.max()) // self._tiles
        return low_ipu if low_ipu == high_ipu else None

    def of_tile(self, tile: int) -> int:
        """Return the IPU of a tile."""
        return int(tile) // self._tiles

    def foreign_elements(self, group: VertexGroup, access: Access) -> ForeignElements:
        """Return which vertices touch memory of another IPU through an access."""
        variables = access.tensor.variables()
        bases = flat_bases(variables)
        runs = access_runs(group, access, bases)
        intervals = [self._mappings[v].runs() for v in variables]
        start = np.concatenate([part.starts + bases[v] for v, part in zip(variables, intervals, strict=True)])
        ipu = np.concatenate([part.tiles for part in intervals]) // self._tiles
        # Adjacent intervals of one IPU are joined, so that every run of a sound vertex falls in one interval.
        is_first = np.append(True, ipu[1:] != ipu[:-1])[: len(ipu)]
        start = start[is_first]
        ipu = ipu[is_first]
        vertex_ipu = group.tile[group.tile >= 0][runs.block] // self._tiles
        first = np.searchsorted(start, runs.start, side="right") - 1
        last = np.searchsorted(start, runs.start + runs.length - 1, side="right") - 1
        begins_elsewhere = ipu[first] != vertex_ipu
        bad = np.flatnonzero(begins_elsewhere | (first != last))
        # A run that begins on its vertex's IPU leaves it where the next interval begins.
        next_start = start[np.minimum(first[bad] + 1, len(start) - 1)]
        element = np.where(begins_elsewhere[bad], runs.start[bad], next_start)
        ipu_of_element = ipu[np.searchsorted(start, element, side="right") - 1]
        return ForeignElements(runs.block[bad], element, ipu_of_element, bases)


def _foreign_elements(ipus: IpuLookup, connection: Connection) -> Iterator[VerifyError]:
    """Yield an error for the first element on another IPU that a vertex touches through a field."""
    group = connection.group
    foreign = ipus.foreign_elements(group, connection.access)
    if foreign.vertex.size:
        vertex_ipu = ipus.of_tile(group.tile[group.tile >= 0][foreign.vertex[0]])
        element = element_name(int(foreign.element[0]), foreign.bases)
        yield VerifyError(
            "cross-ipu",
            f"a vertex on IPU {vertex_ipu} touches {element} on IPU {foreign.ipu[0]} through {connection}",
            where=connection.origin,
            expected="memory of its own IPU",
            hint="copy it to the other IPU first",
        )
