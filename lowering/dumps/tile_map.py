"""Which tiles hold which variable of a graph, as JSON.

    map      ::= {"target", "num_tiles", "variables": [variable…]}
    variable ::= {"name", "dtype", "shape", "line", "tiles": [tile…], "elements": [of each of them…], "mapping"}
    mapping  ::= {"blocks": {"cuts": [[0, …] of each dimension], "tiles": [of each block, row-major]}}
               | {"intervals": {"starts": [first element, row-major…], "tiles": [of each interval]}}
               | null for what has no mapping

Input: a graph. Output: dicts and lists. Tiles are those of one replica.
Source: PopART user guide, "Saving the tensor map"; the form is ours, for intervals alone would take gigabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Blocked, TileMapping, Variable, dtype_name

Json = dict[str, Any]


def tile_map(graph: Graph) -> Json:
    """Where every variable lies.

    Args:
        graph: variables and their mappings.
    """
    num_tiles = graph.target.num_tiles
    rows = [_row(variable, graph.mappings.get(variable), num_tiles) for variable in graph.variables]
    return {"target": graph.target.name, "num_tiles": num_tiles, "variables": rows}


def _row(variable: Variable, mapping: TileMapping | None, num_tiles: int) -> Json:
    held = np.zeros(0, np.int64) if mapping is None else mapping.elements_per_tile(num_tiles)
    tiles = np.flatnonzero(held)
    return {
        "name": variable.name,
        "dtype": dtype_name(variable.dtype),
        "shape": list(variable.shape),
        "line": variable.origin.line,
        "tiles": tiles.tolist(),
        "elements": held[tiles].tolist(),
        "mapping": None if mapping is None else _mapping(mapping),
    }


def _mapping(mapping: TileMapping) -> Json:
    if isinstance(mapping, Blocked):
        return {"blocks": {"cuts": [cut.tolist() for cut in mapping.cuts], "tiles": mapping.tiles.tolist()}}
    return {"intervals": {"starts": mapping.starts.tolist(), "tiles": mapping.tiles.tolist()}}
