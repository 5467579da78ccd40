"""Groups of equations that become one, such that the groups still have an order.

A group runs as one equation: no other group may depend on one of its equations and be needed by another. An
equation joins the groups of its producers where that holds. The predecessors of a group are the bits of one
integer, so a test is one operation for each group that is read; memory is a bit for each pair of equations.
Input: for each equation the numbers of its producers, and the key of its group. Output: groups in an order in which
they can run, each at the position of its last equation or as soon after as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def grouped(reads: Sequence[Sequence[int]], keys: Sequence[Hashable | None]) -> list[list[int]]:
    """Groups equations that can run as one, greedily from the first on; returns the groups in an order of execution.

    A group may not need a value that depends on another of its values by way of an equation outside. Equations are
    known by number.

    Args:
        reads: for each equation the numbers of those that it must follow.
        keys: key of each equation: those of a group have equal ones; None for one that stays alone.
    """
    groups = _Groups(reads)
    for number, key in enumerate(keys):
        groups.add_equation(number)
        if key is not None:
            # The last producers first: they hold the group that the equation most likely continues.
            for producer in sorted(set(reads[number]), reverse=True):
                if keys[producer] == key:
                    groups.merge_if_possible(producer, number)
    return groups.in_order()


class _Groups:
    """Contracted dependency graph; a group has the number of one of its equations."""

    def __init__(self, reads: Sequence[Sequence[int]]) -> None:
        self._reads = reads
        self._group: list[int] = []
        self._members: dict[int, list[int]] = {}
        self._sources: dict[int, set[int]] = {}  # group → groups that it reads
        self._readers: dict[int, set[int]] = {}
        self._predecessors: dict[int, int] = {}  # group → a bit for each group that must run before it

    def add_equation(self, number: int) -> None:
        """Adds an equation as a group of its own, after all that it reads."""
        self._group.append(number)
        self._members[number] = [number]
        self._sources[number] = {self._group[read] for read in self._reads[number]}
        self._readers[number] = set()
        self._predecessors[number] = 0
        for group in self._sources[number]:
            self._readers[group].add(number)
            self._predecessors[number] |= self._predecessors[group] | 1 << group

    def merge_if_possible(self, first_equation: int, second_equation: int) -> None:
        """Merges the groups of two equations into that of the first, unless a third group is between them.

        Such a group, which depends on one and is needed by the other, would run before and after the merged one.
        """
        first = self._group[first_equation]
        second = self._group[second_equation]
        if first == second or self._has_between(first, second) or self._has_between(second, first):
            return
        for member in self._members[second]:
            self._group[member] = first
        self._members[first] = sorted(self._members[first] + self._members.pop(second))
        # Edges from and to the second group become those of the first, which has none to itself.
        for edges, reversed_edges in ((self._sources, self._readers), (self._readers, self._sources)):
            for group in edges[second]:
                reversed_edges[group].remove(second)
                reversed_edges[group].add(first)
            edges[first] = (edges[first] | edges.pop(second)) - {first, second}
        merged_bits = 1 << first | 1 << second
        self._predecessors[first] = (self._predecessors[first] | self._predecessors.pop(second)) & ~merged_bits
        self._tell_readers(first, 1 << second)

    def _has_between(self, group: int, later: int) -> bool:
        """True if a third group must run after `group` and before `later`."""
        return any(self._predecessors[between] >> group & 1 for between in self._sources[later])

    def _tell_readers(self, group: int, merged_bit: int) -> None:
        """Updates the predecessors of all groups that depend on a group, after another one was merged into it.

        `merged_bit` is the bit of the merged group, which no longer exists. Sets of groups are integers, a bit a group.
        """
        predecessors = self._predecessors[group] | 1 << group
        waiting = list(self._readers[group])
        while waiting:
            reader = waiting.pop()
            old = self._predecessors[reader]
            # Without news for this group there is none for those behind it.
            if old & merged_bit or predecessors & ~old:
                self._predecessors[reader] = (old | predecessors) & ~merged_bit
                waiting += self._readers[reader]

    def in_order(self) -> list[list[int]]:
        """The groups in a topological order: each after those that it reads, else by their last members."""
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
