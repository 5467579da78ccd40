"""Groups equations that are to become one, so that the groups can still be put in an order.

A group runs as a whole: nothing may depend on one of its equations and be needed by another. An equation joins the
groups of its producers where that holds. Which groups run before which is kept as bits, so a test is a few operations
on arrays; memory is a bit for each pair of equations.

Input: for each equation the numbers of those it reads, and a key: only equations of one key go together. Output: the
groups, in an order in which they can run, each at the place of its last equation or as soon after as it can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np


def grouped(reads: Sequence[Sequence[int]], keys: Sequence[Hashable | None]) -> list[list[int]]:
    """Groups of equations by number.

    Args:
        reads: for each equation the earlier equations that it must follow.
        keys: for each equation what its group must have in common, None for one that stays alone.

    Returns:
        The groups, in order; within a group equations are in their own order.
    """
    groups = _Groups(reads)
    for number, key in enumerate(keys):
        groups.add(number)
        if key is not None:
            for producer in sorted(set(reads[number]), reverse=True):
                if keys[producer] == key:
                    groups.try_merge(producer, number)
    return groups.in_order()


class _Groups:
    """The contracted graph: groups by the number of one of their equations, and which of them must run before which."""

    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        self._reads = reads
        self._group: list[int] = []
        self._members: dict[int, list[int]] = {}
        self._before = np.zeros((len(reads), -(-len(reads) // 8)), np.uint8)  # of each group all others, as bits

    def add(self, number: int) -> None:
        """Adds the next equation as a group of its own."""
        self._group.append(number)
        self._members[number] = [number]
        for group in {self._group[read] for read in self._reads[number]}:
            self._before[number] |= self._before[group]
            self._before[number, group >> 3] |= _bit(group)

    def try_merge(self, one: int, other: int) -> bool:
        """Merges the groups of two equations, unless something between them needs one and is needed by the other."""
        first, second = self._group[one], self._group[other]
        if first == second:
            return True
        after_first, after_second = self._after(first), self._after(second)
        if (after_first & self._all_before(second)).any() or (after_second & self._all_before(first)).any():
            return False
        for member in self._members[second]:
            self._group[member] = first
        self._members[first] = sorted(self._members[first] + self._members.pop(second))
        before = self._before[first] | self._before[second]
        for group in (first, second):
            before[group >> 3] &= ~_bit(group)
        self._before[second] = 0
        self._before[first] = before
        before = before.copy()
        before[first >> 3] |= _bit(first)
        after = after_first | after_second
        after[[first, second]] = False
        self._before[after] |= before
        self._before[:, second >> 3] &= ~_bit(second)
        return True

    def _after(self, group: int) -> np.ndarray:
        """Which groups can only run after one, bool[equations]."""
        return self._before[:, group >> 3] & _bit(group) != 0

    def _all_before(self, group: int) -> np.ndarray:
        """Which groups must run before one, bool[equations]."""
        return np.unpackbits(self._before[group], count=len(self._reads), bitorder="little").view(bool)

    def in_order(self) -> list[list[int]]:
        """The groups in an order in which they can run."""
        waits = {
            group: {self._group[read] for member in members for read in self._reads[member]} - {group}
            for group, members in self._members.items()
        }
        readers: dict[int, list[int]] = {}
        for group, before in waits.items():
            for other in before:
                readers.setdefault(other, []).append(group)
        ready = [(self._members[group][-1], group) for group, before in waits.items() if not before]
        heapq.heapify(ready)
        order: list[list[int]] = []
        while ready:
            _, group = heapq.heappop(ready)
            order.append(self._members[group])
            for reader in readers.get(group, []):
                waits[reader].discard(group)
                if not waits[reader]:
                    heapq.heappush(ready, (self._members[reader][-1], reader))
        return order


def _bit(number: int) -> np.uint8:
    """The bit of a group within its byte."""
    return np.uint8(1 << (number & 7))
