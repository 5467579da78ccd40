"""Rule of the verifier on IPUs: a vertex touches memory of its own IPU only; what crosses IPUs is a `Copy`.

Judged by the IPUs of whole vertex groups and whole variables where each is one; otherwise by the contiguous runs of all
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import flat_bases
from ipujax.runtime.graph import VertexGroup
from ipujax.runtime.tensor import TileMapping
from ipujax.runtime.verify.facts import Connection, Facts, access_runs, element_name


def cross_ipu(facts: Facts) -> Iterator[VerifyError]:
    """No vertex touches memory of another IPU."""
    target = facts.graph.target
    if target.num_ipus == 1:
        return
    ipus = _Ipus(facts, target.tiles_per_ipu)
    for connection in facts.fields():
        one = ipus.of_group(connection.group)
        owners = {ipus.of_mapping(facts.graph.mappings[v]) for v in connection.access.tensor.variables()}
        if one is None or owners != {one}:
            yield from ipus.crossings(connection)


class _Ipus:
    """Which IPUs groups and variables lie on.

    Args:
        facts: holds the mappings.
        tiles_per_ipu: tiles of one IPU.
    """

    def __init__(self, facts: Facts, tiles_per_ipu: int) -> None:
        self._mappings = facts.graph.mappings
        self._tiles = tiles_per_ipu
        self._known: dict[object, int | None] = {}

    def of_group(self, group: VertexGroup) -> int | None:
        """The IPU of all vertices, or None where they have several (or none)."""
        if group not in self._known:
            self._known[group] = self._only(group.tile[group.tile >= 0])
        return self._known[group]

    def of_mapping(self, mapping: TileMapping) -> int | None:
        """The IPU that holds all elements, or None where several do (or there are none)."""
        if mapping not in self._known:
            self._known[mapping] = self._only(mapping.tiles)
        return self._known[mapping]

    def _only(self, tiles: np.ndarray) -> int | None:
        low, high = (int(tiles.min()), int(tiles.max())) if tiles.size else (0, -1)
        return low // self._tiles if low // self._tiles == high // self._tiles else None

    def crossings(self, connection: Connection) -> Iterator[VerifyError]:
        """The first element one vertex of a field touches on another IPU."""
        group, variables = connection.group, connection.access.tensor.variables()
        bases = flat_bases(variables)
        runs = access_runs(group, connection.access, bases)
        parts = [self._mappings[v].runs() for v in variables]
        start = np.concatenate([part[0] + bases[v] for v, part in zip(variables, parts, strict=True)])
        ipu = np.concatenate([part[2] for part in parts]) // self._tiles
        # Neighbouring intervals of one IPU count as one, so that every run of a sound vertex lies in one.
        new = np.append(True, ipu[1:] != ipu[:-1])[: len(ipu)]
        start, ipu = start[new], ipu[new]
        own = group.tile[group.tile >= 0][runs.block] // self._tiles
        first = np.searchsorted(start, runs.start, side="right") - 1
        last = np.searchsorted(start, runs.start + runs.length - 1, side="right") - 1
        bad = np.flatnonzero((ipu[first] != own) | (first != last))
        if bad.size:
            i = bad[0]
            at = runs.start[i] if ipu[first[i]] != own[i] else start[first[i] + 1]
            owner = ipu[np.searchsorted(start, at, side="right") - 1]
            yield VerifyError(
                "cross-ipu",
                f"a vertex on IPU {own[i]} touches {element_name(int(at), bases)} on IPU {owner} through {connection}",
                where=connection.where,
                expected="memory of its own IPU",
                hint="copy it to the other IPU first",
            )
