"""Cells of a table of programs: cycles, time, the fullest tile, and the line of source that limits a program.

Input: a profile. Output: texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Row, duration, size

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

PROGRAM_HEAD: Row = ("cycles", "time", "fullest tile", "limited by")


def program_cells(profile: Profile) -> Row:
    """Return the cells of a program under `PROGRAM_HEAD`."""
    memory = profile.memory
    capacity_bytes = profile.target.bytes_per_tile
    fits = "" if memory.max_tile_bytes <= capacity_bytes else ", does not fit"
    tile = f"{size(memory.max_tile_bytes)} of {size(capacity_bytes)}, tile {memory.worst_tile}{fits}"
    try:
        cycles = f"{profile.cycles:,}"
        time = duration(profile.seconds)
        slowest = profile.operations(1)
    except ProfileError:  # a trip count is data
        return "depend on data", "", tile, "Options(trip_counts=…) makes them known"
    limit = [f"{op.dominant} of {op.names[0]}, {100 * op.share:.0f} %, {op.origin.line}" for op in slowest]
    return cycles, time, tile, "".join(limit).rstrip(", ")
