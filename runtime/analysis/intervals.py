"""Sets of integers as sorted intervals, for facts about the flat elements of variables of any size.

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
        """What lies in either."""
        return intervals(np.append(self.start, other.start), np.append(self.stop, other.stop))

    def __and__(self, other: Intervals) -> Intervals:
        """What lies in both."""
        at = np.concatenate([self.start, other.start, self.stop, other.stop])
        opened = len(self.start) + len(other.start)
        step = np.where(np.arange(len(at)) < opened, 1, -1)
        order = np.argsort(at, kind="stable")
        inside = np.flatnonzero(np.cumsum(step[order]) == 2)
        at = np.append(at[order], 0)
        return intervals(at[inside], at[inside + 1])

    def first_lacking(self, start: np.ndarray, stop: np.ndarray) -> int | None:
        """An element of some intervals that does not lie in this set, or None when all do.

        Args:
            start: first elements, int64[n].
            stop: one past the last elements, each greater than its start, int64[n].
        """
        number = np.searchsorted(self.start, start, side="right") - 1
        reach = np.append(self.stop, np.int64(-1))[number]
        lacking = np.flatnonzero(reach < stop)
        return int(max(reach[lacking[0]], start[lacking[0]])) if lacking.size else None


def intervals(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """The set of all elements of some intervals in any order, that may overlap, touch or be empty."""
    some = stop > start
    start, stop = start[some], stop[some]
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    first = np.append(True, start[1:] > reach[:-1])[: len(start)]
    last = np.append(first[1:], True)[: len(start)]
    return Intervals(start[first], reach[last])


def nothing() -> Intervals:
    """The empty set."""
    return intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
