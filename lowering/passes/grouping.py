"""Groups equations that are to become one, so that the groups can still be put in an order.

A group runs as a whole: nothing may depend on one of its equations and be needed by another. An equation joins the
groups of its producers where that holds. Each group knows its ancestors as bits, so a test is a few operations on
integers, and the whole is near-linear for the numbers of equations that jaxprs have (quadratic in bits).

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
    """The contracted graph: groups by the number of one of their equations, what they read, and their ancestors."""

    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        self._all_reads = reads
        self._group: list[int] = []
        self._members: dict[int, list[int]] = {}
        self._reads: dict[int, set[int]] = {}  # equations that a group reads
        self._ancestors: dict[int, int] = {}  # as bits, by number of equation

    def add(self, number: int) -> None:
        """Adds the next equation as a group of its own."""
        self._group.append(number)
        self._members[number] = [number]
        self._reads[number] = set(self._all_reads[number])
        self._ancestors[number] = self._above(self._reads[number])

    def _above(self, read: set[int]) -> int:
        bits = 0
        for group in {self._group[n] for n in read}:
            bits |= self._ancestors[group] | self._bits(group)
        return bits

    def _bits(self, group: int) -> int:
        return sum(1 << member for member in self._members[group])

    def try_merge(self, one: int, other: int) -> bool:
        """Merges the groups of two equations, unless something between them needs one and is needed by the other."""
        first, second = self._group[one], self._group[other]
        if first == second:
            return True
        inside = self._bits(first) | self._bits(second)
        read = {n for n in self._reads[first] | self._reads[second] if not inside >> n & 1}
        if any(self._ancestors[group] & inside for group in {self._group[n] for n in read}):
            return False
        for member in self._members[second]:
            self._group[member] = first
        self._members[first] = sorted(self._members[first] + self._members.pop(second))
        self._reads[first] = read
        del self._reads[second], self._ancestors[second]
        self._ancestors[first] = above = self._above(read)
        for group, ancestors in self._ancestors.items():
            if ancestors & inside:
                self._ancestors[group] = ancestors | inside | above
        return True

    def in_order(self) -> list[list[int]]:
        """The groups in an order in which they can run."""
        waits = {group: {self._group[n] for n in read} for group, read in self._reads.items()}
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
