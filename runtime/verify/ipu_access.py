"""Rule of the verifier on IPUs: a vertex touches memory of its own IPU only; data cross IPUs in a `Copy`.

The quick test compares the IPU of a whole vertex group with that of whole variables. Where one of them spans several
IPUs, the contiguous runs of all blocks decide.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import flat_bases
from ipujax.runtime.graph import VertexGroup
from ipujax.runtime.tensor import TileMapping
from ipujax.runtime.verify.inventory import Connection, Inventory, access_runs, element_name


def cross_ipu(inventory: Inventory) -> Iterator[VerifyError]:
    """No vertex touches memory of another IPU."""
    target = inventory.graph.target
    if target.num_ipus == 1:
        return
    ipus = _IpuLookup(inventory, target.tiles_per_ipu)
    for connection in inventory.fields():
        vertex_ipu = ipus.of_group(connection.group)
        memory_ipus = {ipus.of_mapping(inventory.graph.mappings[v]) for v in connection.access.tensor.variables()}
        if vertex_ipu is None or memory_ipus != {vertex_ipu}:
            yield from ipus.crossings(connection)


class _IpuLookup:
    """IPUs to which vertex groups and variables are mapped.

    Args:
        inventory: holds the mappings.
        tiles_per_ipu: tiles of one IPU.
    """

    def __init__(self, inventory: Inventory, tiles_per_ipu: int) -> None:
        self._mappings = inventory.graph.mappings
        self._tiles = tiles_per_ipu
        self._cached: dict[object, int | None] = {}  # by vertex group or mapping, both compared by identity

    def of_group(self, group: VertexGroup) -> int | None:
        """Return the IPU of all vertices; None if there are several IPUs, or no vertices."""
        if group not in self._cached:
            self._cached[group] = self._common_ipu(group.tile[group.tile >= 0])
        return self._cached[group]

    def of_mapping(self, mapping: TileMapping) -> int | None:
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

    def crossings(self, connection: Connection) -> Iterator[VerifyError]:
        """Yield an error for the first element on another IPU that a vertex touches through a field."""
        group = connection.group
        variables = connection.access.tensor.variables()
        bases = flat_bases(variables)
        runs = access_runs(group, connection.access, bases)
        parts = [self._mappings[v].runs() for v in variables]
        start = np.concatenate([part[0] + bases[v] for v, part in zip(variables, parts, strict=True)])
        ipu = np.concatenate([part[2] for part in parts]) // self._tiles
        # Adjacent intervals of one IPU are joined, so that every run of a sound vertex falls in one interval.
        is_first = np.append(True, ipu[1:] != ipu[:-1])[: len(ipu)]
        start = start[is_first]
        ipu = ipu[is_first]
        # `runs.block` numbers the vertices that exist, as `vertex_blocks` lists them.
        vertex_ipu = group.tile[group.tile >= 0][runs.block] // self._tiles
        first = np.searchsorted(start, runs.start, side="right") - 1
        last = np.searchsorted(start, runs.start + runs.length - 1, side="right") - 1
        bad = np.flatnonzero((ipu[first] != vertex_ipu) | (first != last))
        if bad.size:
            i = bad[0]
            flat = runs.start[i] if ipu[first[i]] != vertex_ipu[i] else start[first[i] + 1]
            memory_ipu = ipu[np.searchsorted(start, flat, side="right") - 1]
            yield VerifyError(
                "cross-ipu",
                f"a vertex on IPU {vertex_ipu[i]} touches {element_name(int(flat), bases)} on IPU {memory_ipu} "
                f"through {connection}",
                where=connection.origin,
                expected="memory of its own IPU",
                hint="copy it to the other IPU first",
            )
