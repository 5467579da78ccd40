"""Sets of integers as sorted intervals, for flat elements of variables of any size.

Input and output: `Intervals`. All operations sort and scan a few arrays, linear in the number of intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class Intervals:
    """Disjoint intervals [start, stop) in rising order that do not touch; made by `intervals`.

    Args:
        start: first element of each, int64[n].
        stop: one past its last element, int64[n].
    """

    start: np.ndarray
    stop: np.ndarray

    def __or__(self, other: Intervals) -> Intervals:
        """Return the union."""
        return intervals(np.append(self.start, other.start), np.append(self.stop, other.stop))

    def __and__(self, other: Intervals) -> Intervals:
        """Return the intersection."""
        bounds = np.concatenate([self.start, other.start, self.stop, other.stop])
        num_starts = len(self.start) + len(other.start)
        # A sweep over all bounds: where one interval starts as another stops, the overlap is empty and dropped below.
        step = np.where(np.arange(len(bounds)) < num_starts, 1, -1)
        order = np.argsort(bounds, kind="stable")
        overlap = np.flatnonzero(np.cumsum(step[order]) == 2)
        bounds = np.append(bounds[order], 0)
        return intervals(bounds[overlap], bounds[overlap + 1])

    def find_lacking(self, start: np.ndarray, stop: np.ndarray) -> int | None:
        """Return an element of some intervals, none empty, that is not in this set; None when all are."""
        # Intervals of this set do not touch, so one of them must contain each whole interval.
        number = np.searchsorted(self.start, start, side="right") - 1
        reach = np.append(self.stop, np.int64(-1))[number]
        lacking = np.flatnonzero(reach < stop)
        return int(max(reach[lacking[0]], start[lacking[0]])) if lacking.size else None


def intervals(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """Return the set of all elements of some intervals in any order, which may overlap, touch or be empty."""
    filled = stop > start
    order = np.argsort(start[filled], kind="stable")
    start = start[filled][order]
    reach = np.maximum.accumulate(stop[filled][order])
    first = np.append(True, start[1:] > reach[:-1])[: len(start)]
    last = np.append(first[1:], True)[: len(start)]
    return Intervals(start[first], reach[last])


def empty_set() -> Intervals:
    return intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
