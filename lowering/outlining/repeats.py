"""Finds runs of equations that a jaxpr computes several times, nearly in linear time.

Input: a jaxpr, and where runs may lie. Output: windows of equations that are equal and do not overlap, those first that
gain most.

Lengths to try come from windows of 4, 8, 16, … equations: where the next equal window is at one distance for many in a
row, either the jaxpr is periodic there (layers), with that distance as its period, or else a run of that many equations
comes twice. Of each length the equal windows that gain most are found among all starts, so that a period is cut where
least values pass. Limits: of very many lengths those with most equations to save are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ipujax.lowering.outlining.dataflow import Dataflow, Windows
from ipujax.lowering.outlining.function_call import gain, gain_of

_SHORTEST = 4  # equations of a run
_MOST_LENGTHS = 48
_MOST_TRIED = 256  # equal windows of a length, each time that the best are looked for
_SHORT_PERIOD = 32  # of shorter periods several may make one run


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal windows that do not overlap.

    Args:
        length: equations of each.
        starts: the first equation of each, in order.
    """

    length: int
    starts: tuple[int, ...]


def find_repeats(flow: Dataflow, groups: np.ndarray, byte_price: float) -> list[Repeat]:
    """Finds repeats that do not overlap each other.

    Args:
        flow: the equations.
        groups: for each equation a number, int64; a run lies in equations of one number, and in none of those below 0.
        byte_price: cycles that a byte is worth.
    """
    return list(_Search(flow, groups, byte_price).best_first())


class _Search:
    def __init__(self, flow: Dataflow, groups: np.ndarray, byte_price: float) -> None:
        self._flow, self._groups, self._byte_price = flow, groups.copy(), byte_price
        self._refused: set[tuple[int, int]] = set()  # lengths and numbers of windows
        self._windows: dict[int, Windows] = {}
        self._find_room()

    def _find_room(self) -> None:
        """For each start the number of equations that a run from there can have."""
        count, changes = self._flow.count, np.flatnonzero(np.diff(self._groups)) + 1
        starts = np.arange(count)
        ends = np.append(changes, count)[np.searchsorted(changes, starts, "right")]
        self._room = np.where(self._groups < 0, 0, ends - starts)

    def best_first(self) -> Iterator[Repeat]:
        """Repeats that are worth it, the best of those that remain each time."""
        waiting: list[tuple[float, int, tuple[int, ...]]] = []

        def push(length: int) -> None:
            best = self._best(length)
            if best is not None:
                heappush(waiting, best)

        for length in self._lengths():
            push(length)
        while waiting:
            _, length, starts = heappop(waiting)
            if (self._room[list(starts)] >= length).all():  # others have not taken of it, and so it is still the best
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
        """Lengths to try."""
        gains: dict[int, int] = {}  # equations that repeats of a length save, at most
        size = _SHORTEST
        while size < self._flow.count:
            found: dict[int, int] = {}
            for distance, equal in self._stretches(size):
                for length in _lengths_of(distance, equal):
                    found[length] = found.get(length, 0) + equal
            gains |= {length: max(equal, gains.get(length, 0)) for length, equal in found.items()}
            size *= 2
        return sorted(gains, key=lambda length: (-gains[length], length))[:_MOST_LENGTHS]

    def _stretches(self, size: int) -> Iterator[tuple[int, int]]:
        """Where windows of a size have their next equal at one distance: the distance, and equations that are equal."""
        starts = np.flatnonzero(self._room >= size)
        starts = starts[starts + size <= self._flow.count]
        numbers = self._of(size).numbers[starts]
        order = np.argsort(numbers, kind="stable")
        again = numbers[order[1:]] == numbers[order[:-1]]
        first, following = starts[order[:-1]][again], starts[order[1:]][again]
        in_order = np.argsort(first)
        first, distances = first[in_order], (following - first)[in_order]
        if not len(first):
            return
        breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(distances) != 0)) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(first)], strict=True):
            yield int(distances[begin]), end - begin + size - 1

    def _best(self, length: int) -> tuple[float, int, tuple[int, ...]] | None:
        """The equal windows of a length that gain most: what they gain, negated, their length and where they begin."""
        windows = self._of(length)
        starts = np.flatnonzero(self._room[: len(windows.numbers)] >= length)
        if not len(starts):
            return None
        by_kind = starts[np.argsort(windows.numbers[starts], kind="stable")]
        sorted_numbers = windows.numbers[by_kind]
        begins = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
        ends = np.append(begins[1:], len(by_kind))
        numbers, first, counts = sorted_numbers[begins], by_kind[begins], ends - begins
        most = gain(windows.code[first], windows.copies[first], counts, self._byte_price)
        best, tried = (0.0, length, tuple[int, ...]()), 0
        for kind in np.lexsort((first, windows.elements[first], -most)).tolist():
            if most[kind] <= -best[0] or tried == _MOST_TRIED:
                break
            key = length, int(numbers[kind])
            if counts[kind] < 2 or key in self._refused:
                continue
            apart, tried = _apart(by_kind[ends[kind] - counts[kind] : ends[kind]].tolist(), length), tried + 1
            copied = self._flow.copied(apart, length).tolist()
            gained = gain_of(self._flow.work(apart[0], length), copied, len(apart), self._byte_price)
            if gained <= 0:
                self._refused.add(key)
            elif gained > -best[0]:
                best = -gained, length, tuple(apart)
        return best if best[2] else None


def _apart(starts: Sequence[int], length: int) -> list[int]:
    """Of ascending starts those whose windows do not overlap."""
    apart = list[int]()
    for start in starts:
        if not apart or start >= apart[-1] + length:
            apart.append(start)
    return apart


def _lengths_of(distance: int, equal: int) -> Iterator[int]:
    """Lengths of windows where so many equations equal those at a distance."""
    if distance > equal:
        yield equal
        return
    length = distance
    while length <= max(distance, min(_SHORT_PERIOD, equal)):
        if length >= _SHORTEST:
            yield length
        length *= 2
