"""Contents of the fullest tiles, as lines of the log.

Input: a memory report. Output: a line for each of the fullest tiles, with its bytes and their largest categories.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.runtime.memory.report import MemoryReport

_CATEGORIES = 4  # printed of each tile


def fullest_tiles(report: MemoryReport, count: int) -> Iterator[str]:
    """Yield a line for each of the `count` fullest tiles, the fullest first."""
    for tile in np.argsort(-report.tile_bytes, kind="stable")[:count].tolist():
        sizes = {name: int(values[tile]) for name, values in report.by_category.items()}
        largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:_CATEGORIES]
        categories = ", ".join(f"{name} {sizes[name]:,}" for name in largest) or "nothing"
        yield f"tile {tile}: {report.tile_bytes[tile]:,} of {report.target.bytes_per_tile:,} bytes: {categories}"
