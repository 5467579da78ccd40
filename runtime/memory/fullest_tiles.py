"""What the fullest tiles hold, in lines for the log.

Input: a memory report. Output: a line for each of the fullest tiles, with its bytes and their largest categories.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.runtime.memory.report import MemoryReport

_CATEGORIES = 4  # shown of each tile


def fullest_tiles(report: MemoryReport, count: int) -> Iterator[str]:
    """The lines of the fullest tiles, the fullest first.

    Args:
        report: what every tile needs.
        count: how many tiles.
    """
    for tile in np.argsort(-report.tile_bytes, kind="stable")[:count].tolist():
        parts = {name: int(values[tile]) for name, values in report.by_category.items()}
        largest = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])[:_CATEGORIES]
        held = ", ".join(f"{name} {parts[name]:,}" for name in largest)
        yield f"tile {tile}: {report.tile_bytes[tile]:,} of {report.target.bytes_per_tile:,} bytes: {held or 'nothing'}"
