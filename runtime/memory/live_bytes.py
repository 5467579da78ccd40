"""How full one tile is at each step of the program.

Input: what lies on tiles for some of the time, and always. Output: `LiveBytes`. The steps are those of the program
itself, a call of a function with the most that the function needs.
Limits: of neighbouring steps of long programs the fullest is listed. Gaps between variables come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import step_name
from ipujax.runtime.tensor import frozen

MOST_STEPS = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class LiveBytes:
    """Bytes that are live on one tile, step by step in program order.

    Args:
        tile: its number.
        steps: names of steps.
        num_bytes: at each step, what is always there included, int64[steps].
        always_bytes: what is always there.
        shown_of: how many steps the program has.
    """

    tile: int
    steps: tuple[str, ...]
    num_bytes: np.ndarray
    always_bytes: int
    shown_of: int

    @property
    def peak(self) -> int:
        """The number of the step with most bytes, the first of them; 0 in a program without steps."""
        return int(self.num_bytes.argmax()) if len(self.num_bytes) else 0


def live_bytes(occupancy: Occupancy, tile: int, always_bytes: int) -> LiveBytes:
    """Bytes that are live on a tile at each step.

    Args:
        occupancy: what is there for some of the time.
        tile: which.
        always_bytes: what is always there.
    """
    frame = occupancy.frames.liveness[None]
    change = np.zeros(len(frame.steps) + 1, np.int64)
    for interval in frame.intervals:
        size = occupancy.bytes_on_tile(interval.variable, tile)
        change[interval.first] += size
        change[interval.last + 1] -= size
    total = always_bytes + change.cumsum()[:-1]
    for position, step in enumerate(frame.steps):
        total[position] += sum(size for _, size in occupancy.buffers_on_tile(step, tile))
        called = occupancy.frames.functions_during(None, step)
        total[position] += sum(int(occupancy.peak(function).total[tile]) for function in called)
    width = max(1, -(-len(total) // MOST_STEPS))
    shown = [n + int(total[n : n + width].argmax()) for n in range(0, len(total), width)]
    names = tuple(step_name(frame.steps[n])[0] for n in shown)
    return LiveBytes(tile, names, frozen(total[shown], np.int64), always_bytes, len(total))
