"""Tile map of a graph as JSON: the tiles of every variable, and its elements on each.

    map      ::= {"target", "num_tiles", "variables": [variable…]}
    variable ::= {"name", "dtype", "shape", "line", "tiles": [tile…], "elements": [of each of them…], "mapping"}
    mapping  ::= {"blocks": {"cuts": [[0, …] of each dimension], "tiles": [of each block, row-major]}}
               | {"intervals": {"starts": [first element, row-major…], "tiles": [of each interval]}}
               | null without a mapping

Input: a graph. Output: dicts and lists. Tiles are those of one replica.
Source: PopART user guide, "Saving the tensor map"; the form is ours, for intervals alone would take gigabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Blocked, TileMapping, Variable, dtype_name

Json = dict[str, Any]


class TileMap(dict[str, Any]):
    """Tile map as a dict of JSON values; a short `repr` for consoles, all of it as `str`."""

    def __repr__(self) -> str:
        rows = self["variables"]
        most = max(rows, key=lambda row: len(row["tiles"]), default=None)
        widest = f", the widest, {most['name']!r}, on {len(most['tiles']):,}" if most else ""
        return (
            f"TileMap({len(rows):,} variables on {self['num_tiles']:,} tiles of {self['target']}{widest}; "
            '["variables"] lists the name, line, tiles, elements and mapping of each, print() shows it all)'
        )

    def __str__(self) -> str:
        return dict.__repr__(self)


def tile_map(graph: Graph) -> TileMap:
    """Return the tile map of a graph."""
    num_tiles = graph.target.num_tiles
    rows = [_row(variable, graph.mappings.get(variable), num_tiles) for variable in graph.variables]
    return TileMap(target=graph.target.name, num_tiles=num_tiles, variables=rows)


def _row(variable: Variable, mapping: TileMapping | None, num_tiles: int) -> Json:
    """Entry of a variable: of its tiles only those that hold elements."""
    elements = np.zeros(0, np.int64) if mapping is None else mapping.elements_per_tile(num_tiles)
    tiles = np.flatnonzero(elements)
    return {
        "name": variable.name,
        "dtype": dtype_name(variable.dtype),
        "shape": list(variable.shape),
        "line": variable.origin.line,
        "tiles": tiles.tolist(),
        "elements": elements[tiles].tolist(),
        "mapping": None if mapping is None else _mapping(mapping),
    }


def _mapping(mapping: TileMapping) -> Json:
    if isinstance(mapping, Blocked):
        return {"blocks": {"cuts": [cut.tolist() for cut in mapping.cuts], "tiles": mapping.tiles.tolist()}}
    return {"intervals": {"starts": mapping.starts.tolist(), "tiles": mapping.tiles.tolist()}}
