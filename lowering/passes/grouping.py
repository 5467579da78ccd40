"""Groups equations that are to become one, so that the groups can still be put in an order.

A group runs as a whole: nothing may depend on one of its equations and be needed by another. An equation joins the
groups of its producers where that holds. What must run before a group is kept as the bits of one integer, so a test is
one operation for each group that is read; memory is a bit for each pair of equations.

Input: for each equation the numbers of those it reads, and a key: only equations of one key go together. Output: the
groups, in an order in which they can run, each at the place of its last equation or as soon after as it can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


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
        self._sources: dict[int, set[int]] = {}  # of each group those that it reads
        self._readers: dict[int, set[int]] = {}
        self._before: dict[int, int] = {}  # of each group all that must run before it, a bit each

    def add(self, number: int) -> None:
        """Adds the next equation as a group of its own."""
        self._group.append(number)
        self._members[number] = [number]
        self._sources[number], self._readers[number] = {self._group[read] for read in self._reads[number]}, set()
        self._before[number] = 0
        for group in self._sources[number]:
            self._readers[group].add(number)
            self._before[number] |= self._before[group] | 1 << group

    def try_merge(self, one: int, other: int) -> bool:
        """Merges the groups of two equations, unless something between them needs one and is needed by the other."""
        first, second = self._group[one], self._group[other]
        if first == second:
            return True
        if self._is_far_before(first, second) or self._is_far_before(second, first):
            return False
        for member in self._members[second]:
            self._group[member] = first
        self._members[first] = sorted(self._members[first] + self._members.pop(second))
        for ways, back in ((self._sources, self._readers), (self._readers, self._sources)):
            for group in ways[second]:
                back[group].remove(second)
                back[group].add(first)
            ways[first] = (ways[first] | ways.pop(second)) - {first, second}
        own = 1 << first | 1 << second
        self._before[first] = (self._before[first] | self._before.pop(second)) & ~own
        self._tell_readers(first, 1 << second)
        return True

    def _is_far_before(self, one: int, other: int) -> bool:
        """Whether a group must run before another with something between them."""
        return any(self._before[group] >> one & 1 for group in self._sources[other])

    def _tell_readers(self, group: int, gone: int) -> None:
        """All groups behind one learn what must run before it, and that another is part of it."""
        before = self._before[group] | 1 << group
        waiting = list(self._readers[group])
        while waiting:
            reader = waiting.pop()
            known = self._before[reader]
            if known & gone or before & ~known:  # else those behind it know it too
                self._before[reader] = (known | before) & ~gone
                waiting += self._readers[reader]

    def in_order(self) -> list[list[int]]:
        """The groups in an order in which they can run."""
        waits = {group: len(sources) for group, sources in self._sources.items()}
        ready = [(self._members[group][-1], group) for group, count in waits.items() if not count]
        heapq.heapify(ready)
        order: list[list[int]] = []
        while ready:
            _, group = heapq.heappop(ready)
            order.append(self._members[group])
            for reader in self._readers[group]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (self._members[reader][-1], reader))
        return order
