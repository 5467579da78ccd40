"""Search for runs of equations that a jaxpr repeats, nearly in linear time.

Input: a jaxpr, and the groups of equations that runs may join. Output: disjoint equal windows, in order of gain.
Candidate lengths come from windows of 4, 8, 16, … equations: where many consecutive windows have their next equal
at one distance, the jaxpr is periodic (layers) with that period, or a run of that many equations occurs twice. All
starts are tried for a length, so that a period is cut where fewest values cross.
Limits: of very many lengths those that save most equations are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ipujax.lowering.outlining.dataflow import Dataflow, Windows
from ipujax.lowering.outlining.function_call import gain, gain_of

_SHORTEST = 4  # equations of a run
_MAX_LENGTHS = 48  # candidate lengths of one jaxpr
_MAX_TRIED = 256  # equal windows of a length in one search for the best
_SHORT_PERIOD = 32  # equations; several shorter periods may be one run


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal windows that do not overlap."""

    length: int  # equations of each window
    starts: tuple[int, ...]  # first equation of each, in order


def find_repeats(flow: Dataflow, groups: np.ndarray, byte_cost: float) -> list[Repeat]:
    """Repeats that do not overlap each other; a run has equations of one number in `groups`, none below 0."""
    return list(_Search(flow, groups, byte_cost).best_first())


class _Search:
    def __init__(self, flow: Dataflow, groups: np.ndarray, byte_cost: float) -> None:
        self._flow = flow
        self._groups = groups.copy()
        self._byte_cost = byte_cost
        self._refused: set[tuple[int, int]] = set()  # (length, window number) without a gain
        self._windows: dict[int, Windows] = {}
        self._find_room()

    def _find_room(self) -> None:
        """Sets the number of equations that a run from each start can have."""
        count = self._flow.count
        changes = np.flatnonzero(np.diff(self._groups)) + 1
        starts = np.arange(count)
        group_ends = np.append(changes, count)[np.searchsorted(changes, starts, "right")]
        self._room = np.where(self._groups < 0, 0, group_ends - starts)

    def best_first(self) -> Iterator[Repeat]:
        """Repeats with a gain, each the best of those that remain."""
        waiting: list[tuple[float, int, tuple[int, ...]]] = []

        def push(length: int) -> None:
            best = self._best(length)
            if best is not None:
                heappush(waiting, best)

        for length in self._lengths():
            push(length)
        while waiting:
            _, length, starts = heappop(waiting)
            # No other repeat has taken any of its equations, so it is still the best.
            if (self._room[list(starts)] >= length).all():
                yield Repeat(length, starts)
                for start in starts:
                    self._groups[start : start + length] = -1
                self._find_room()
            push(length)

    def _of(self, length: int) -> Windows:
        if length not in self._windows:
            self._windows[length] = self._flow.windows(length)
        return self._windows[length]

    def _lengths(self) -> list[int]:
        """Lengths of repeats to try, those that may save most equations first."""
        gains: dict[int, int] = {}  # upper bound of equations that repeats of a length save
        size = _SHORTEST
        while size < self._flow.count:
            savings: dict[int, int] = {}
            for distance, equal in self._stretches(size):
                for length in _lengths_of(distance, equal):
                    savings[length] = savings.get(length, 0) + equal
            gains |= {length: max(equal, gains.get(length, 0)) for length, equal in savings.items()}
            size *= 2
        return sorted(gains, key=lambda length: (-gains[length], length))[:_MAX_LENGTHS]

    def _stretches(self, size: int) -> Iterator[tuple[int, int]]:
        """Stretches of windows with their next equal at one distance: (distance, equal equations)."""
        starts = np.flatnonzero(self._room >= size)
        starts = starts[starts + size <= self._flow.count]
        numbers = self._of(size).numbers[starts]
        order = np.argsort(numbers, kind="stable")
        has_next = numbers[order[1:]] == numbers[order[:-1]]
        first = starts[order[:-1]][has_next]
        next_equal = starts[order[1:]][has_next]
        in_order = np.argsort(first)
        distances = (next_equal - first)[in_order]
        first = first[in_order]
        if not len(first):
            return
        # A stretch ends where starts are not consecutive or the distance changes.
        breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(distances) != 0)) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(first)], strict=True):
            yield int(distances[begin]), end - begin + size - 1

    def _best(self, length: int) -> tuple[float, int, tuple[int, ...]] | None:
        """Equal windows of a length with the highest gain: the gain, negated, the length and the starts."""
        windows = self._of(length)
        starts = np.flatnonzero(self._room[: len(windows.numbers)] >= length)
        if not len(starts):
            return None
        # A kind is all windows of one number, which are equal; arrays from `begins` on have one element a kind.
        by_kind = starts[np.argsort(windows.numbers[starts], kind="stable")]
        sorted_numbers = windows.numbers[by_kind]
        begins = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
        kind_ends = np.append(begins[1:], len(by_kind))
        numbers = sorted_numbers[begins]
        first = by_kind[begins]
        counts = kind_ends - begins
        upper_bounds = gain(windows.code[first], windows.copies[first], counts, self._byte_cost)
        best: tuple[float, int, tuple[int, ...]] = (0.0, length, ())
        num_tried = 0
        # By falling upper bound; the real gain needs the elements that calls copy.
        for kind in np.lexsort((first, windows.elements[first], -upper_bounds)).tolist():
            if upper_bounds[kind] <= -best[0] or num_tried == _MAX_TRIED:
                break
            key = length, int(numbers[kind])
            if counts[kind] < 2 or key in self._refused:
                continue
            disjoint = _disjoint(by_kind[kind_ends[kind] - counts[kind] : kind_ends[kind]].tolist(), length)
            num_tried += 1
            copied = self._flow.copied(disjoint, length).tolist()
            cycles_saved = gain_of(self._flow.work(disjoint[0], length), copied, len(disjoint), self._byte_cost)
            if cycles_saved <= 0:
                self._refused.add(key)
            elif cycles_saved > -best[0]:
                best = -cycles_saved, length, tuple(disjoint)
        return best if best[2] else None


def _disjoint(starts: Sequence[int], length: int) -> list[int]:
    """Starts, from ascending ones, whose windows do not overlap."""
    disjoint: list[int] = []
    for start in starts:
        if not disjoint or start >= disjoint[-1] + length:
            disjoint.append(start)
    return disjoint


def _lengths_of(distance: int, equal: int) -> Iterator[int]:
    """Candidate lengths of a stretch of equations that equal those at a distance."""
    if distance > equal:
        yield equal
        return
    length = distance
    while length <= max(distance, min(_SHORT_PERIOD, equal)):
        if length >= _SHORTEST:
            yield length
        length *= 2
