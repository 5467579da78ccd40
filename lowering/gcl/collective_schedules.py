"""Schedules of collectives as data: levels of groups of replicas.

    schedule ::= level…                 outermost last
    level    ::= ring | doubling        of groups of replicas, all at the same time

On a *ring* of n replicas a value is n chunks. In each of n - 1 rounds of the first half every replica sends a chunk to
the next one, which adds its own; then each has the sum of one chunk, and n - 1 rounds of the second half pass the sums
on. With several levels a replica continues with its chunk among the replicas of the next level, which have the same
chunk, before the second half: rings in each machine, then a ring of machines. *Doubling* is for small values: in round
k every replica swaps its value with the one whose number differs in bit k.

Every group of a level has as many replicas, a power of two for doubling, which can only be the last level.
Source: closed forms of ring, two halves and doubling: reference parallel.md §4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Groups = tuple[tuple[int, ...], ...]  # of replicas, each in order
Pairs = tuple[tuple[int, int], ...]  # (source, destination)


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of replicas that communicate at the same time.

    Args:
        groups: the replicas of each group, in the order of the ring.
        kind: "ring" or "doubling".
    """

    groups: Groups
    kind: Literal["ring", "doubling"] = "ring"

    @property
    def size(self) -> int:
        """Replicas of a group."""
        return len(self.groups[0])

    @property
    def chunks(self) -> int:
        """Number of chunks of a value."""
        return self.size if self.kind == "ring" else 1

    @property
    def pairs(self) -> Pairs:
        """(replica, next replica of its ring) of all replicas."""
        return tuple((a, b) for group in self.groups for a, b in zip(group, (*group[1:], group[0]), strict=True))

    def swaps(self) -> Iterator[Pairs]:
        """(replica, partner) of all replicas, for each round of doubling."""
        bit = 1
        while bit < self.size:
            # XOR with the bit is its own inverse: both partners send to each other in one round.
            yield tuple((group[n], group[n ^ bit]) for group in self.groups for n in range(self.size))
            bit *= 2

    def positions(self, replicas: int) -> np.ndarray:
        """Position of each replica in its group, int64[replicas]; -1 for those of no group."""
        positions = np.full(replicas, -1, np.int64)
        for group in self.groups:
            positions[list(group)] = np.arange(self.size)
        return positions


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective over all levels; the value of level k + 1 is the chunk that a replica has after level k.

    Args:
        levels: one or more.
        name: debug name.
    """

    levels: tuple[Level, ...]
    name: str

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of the value at each level."""
        return tuple(level.chunks for level in self.levels)

    def places(self, groups: Groups) -> np.ndarray:
        """Rank that has each chunk after the first half, int64[chunks of each level]; equal in all groups."""
        ranks = {replica: rank for rank, replica in enumerate(groups[0])}
        positions = [level.positions(1 + max(map(max, groups))) for level in self.levels]
        places = np.zeros(self.chunks, np.int64)
        for replica, rank in ranks.items():
            # Doubling has one chunk, so the position counts modulo the number of chunks.
            places[tuple(int(position[replica]) % n for position, n in zip(positions, self.chunks, strict=True))] = rank
        return places
