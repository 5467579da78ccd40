"""Live bytes of one tile at each step of the program.

Input: live ranges, and the bytes that are always in use. Output: `LiveBytes`. The steps are those of the program
itself; a call of a function counts with the peak of the function.
Limits: of neighbouring steps of long programs the fullest is listed. Gaps between variables come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.files.figure_kinds import BYTES, Bytes, TileIndex
from ipujax.runtime.files.figure_records import Length
from ipujax.runtime.files.kinds import List
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import step_name
from ipujax.runtime.tensor import frozen

MAX_STEPS = 2_000
_LISTED = "steps of the fullest tile"


@dataclass(frozen=True, slots=True, eq=False)
class LiveBytes:
    """Live bytes of one tile, step by step in program order.

    Args:
        tile: its number.
        steps: names of the listed steps.
        num_bytes: live bytes at each listed step, `always_bytes` included, int64[steps].
        always_bytes: bytes in use at every step.
        shown_of: number of steps of the program.
    """

    tile: TileIndex
    steps: Annotated[tuple[str, ...], Length(_LISTED)]
    num_bytes: Annotated[np.ndarray, List(BYTES, _LISTED)]
    always_bytes: Bytes
    shown_of: int

    @property
    def peak(self) -> int:
        """The number of the fullest listed step, the first of equal ones; 0 in a program without steps."""
        return int(self.num_bytes.argmax()) if len(self.num_bytes) else 0


def live_bytes(occupancy: Occupancy, tile: int, always_bytes: int) -> LiveBytes:
    """Return the live bytes of a tile at each step of the program; `always_bytes` are in use at every step."""
    frame = occupancy.frames.liveness[None]
    change = np.zeros(len(frame.steps) + 1, np.int64)  # difference to the step before, summed up below
    for interval in frame.intervals:
        size = occupancy.bytes_on_tile(interval.variable, tile)
        change[interval.first] += size
        change[interval.last + 1] -= size
    total = always_bytes + change.cumsum()[:-1]
    for position, step in enumerate(frame.steps):
        total[position] += sum(size for _, size in occupancy.buffers_on_tile(step, tile))
        functions = occupancy.frames.functions_during(None, step)
        total[position] += sum(int(occupancy.peak(function).total[tile]) for function in functions)
    # One step of each window of neighbours, the fullest, so that the peak is always listed.
    width = max(1, -(-len(total) // MAX_STEPS))
    listed = [n + int(total[n : n + width].argmax()) for n in range(0, len(total), width)]
    names = tuple(step_name(frame.steps[n])[0] for n in listed)
    return LiveBytes(tile, names, frozen(total[listed], np.int64), always_bytes, len(total))
