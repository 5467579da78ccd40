"""Schedules of collectives as data, levels of groups of replicas, and the choice of the cheapest.

The choice has least cost on the links between the IPUs:

    rings      in the order of ranks; down one side of the ladder of IPU-Links and up the other
    two ways   half of a value goes around such a ring one way, and half the other, over the links in both directions
    two-phase  rings inside each machine, or each pod, then a ring across
    doubling   for small values, for which each round costs its latency

Costs are link cycles for the bytes of one round, with the sync and the compute sets of a round.
Limits: replicas of several IPUs are assumed to send from their first IPU.

    schedule ::= level…                 outermost last
    level    ::= ring | doubling        of groups of replicas, all at the same time

On a *ring* of n replicas a value is n chunks. In each of n - 1 rounds of the first half every replica sends a chunk to
the next one, which adds its own; then each has the sum of one chunk, and n - 1 rounds of the second half pass the sums
on. With several levels a replica continues with its chunk among the replicas of the next level, which have the same
chunk, before the second half: rings in each machine, then a ring of machines. *Doubling* is for small values: in round
k every replica swaps its value with the one whose number differs in bit k.

Every group of a level has as many replicas, a power of two for doubling, which can only be the last level.
Source: closed forms of ring, two halves and doubling: reference parallel.md §4; two ways, for replicas of one IPU:
poplibs `popops/ReplicatedCollectives.cpp` (2020), `BIDIRECTIONAL_RING_PAIR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ipujax.lowering.gcl.stacked import Groups, Pairs
from ipujax.runtime.cache import remembered
from ipujax.runtime.cost import Flows, link_cycles
from ipujax.runtime.exchange import least_cycles
from ipujax.runtime.graph import Graph, of_replicas
from ipujax.runtime.target import Target


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

    @property
    def backwards(self) -> Level:
        """These rings in the other direction."""
        return Level(tuple(group[::-1] for group in self.groups), self.kind)

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
        ways: 2 if half of a value goes around the rings one way and half the other, at the same time; else 1.
    """

    levels: tuple[Level, ...]
    name: str
    ways: int = 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of the value at each level."""
        return tuple(level.chunks for level in self.levels)

    def places(self, groups: Groups) -> np.ndarray:
        """Rank that has each chunk after the reduce-scatter, before the all-gather: int64[chunks of each level]."""
        num_replicas = 1 + max(map(max, groups))
        positions = [level.positions(num_replicas) for level in self.levels]
        places = np.zeros(self.chunks, np.int64)
        # Equal in all groups, as levels treat them alike, so that the first stands for any.
        for rank, replica in enumerate(groups[0]):
            # At each level a replica ends with the chunk of its position on the ring; doubling has one chunk, number 0.
            chunk = tuple(int(position[replica]) % n for position, n in zip(positions, self.chunks, strict=True))
            places[chunk] = rank
        return places


_COMPUTE_SETS_A_ROUND = 3  # on a ring: the number of the chunk, its slice, the sum (or the store)


def choose(graph: Graph, groups: Groups, num_bytes: int, *, reduces_all: bool) -> Schedule:
    """Chooses the schedule of least cost for a value of `num_bytes` a replica; `reduces_all` for an all-reduce."""
    return _choose(graph.target, graph.replication_factor, groups, num_bytes, reduces_all)


@remembered
def estimated_cycles(system: Target, groups: Groups, num_bytes: int, reduces_all: bool) -> int:
    """Estimated cycles of the schedule that `choose` takes, on a machine whose ranks are its IPUs."""
    schedules = candidates(system, 1, groups, reduces_all)
    return min(_cycles(schedule, num_bytes, system, 1, reduces_all) for schedule in schedules)


@remembered
def _choose(target: Target, replicas: int, groups: Groups, num_bytes: int, reduces_all: bool) -> Schedule:
    system = of_replicas(target, replicas)
    schedules = list(candidates(system, target.num_ipus, groups, reduces_all))
    costs = [_cycles(schedule, num_bytes, system, target.num_ipus, reduces_all) for schedule in schedules]
    # Of equal costs the first: plain rings come before schedules of several levels.
    return schedules[int(np.argmin(costs))]


def candidates(system: Target, ipus_each: int, groups: Groups, reduces_all: bool) -> Iterator[Schedule]:
    """Lists the schedules of a collective.

    Args:
        system: the machine of all replicas.
        ipus_each: IPUs of a replica.
        groups: replicas by rank, in groups of one size.
        reduces_all: whether it is an all-reduce, the only one that may be by doubling.
    """
    size = len(groups[0])
    yield Schedule((Level(groups),), "ring")
    # With two ranks both orders are one ring.
    if size > 2:
        yield Schedule((Level(_reordered(groups, _down_and_up(size))),), "ring along the ladder")
        if reduces_all and ipus_each == 1:
            yield Schedule((Level(groups),), "ring both ways", ways=2)
            yield Schedule((Level(_reordered(groups, _down_and_up(size))),), "ring both ways along the ladder", ways=2)
    for ipus in sorted({system.ipus_per_gateway, system.ipus_per_pod}):
        inner = ipus // ipus_each  # replicas of one machine, or of one pod
        if 1 < inner < size and size % inner == 0 and _stays_within(groups, inner):
            # First rings of the ranks in one machine, then rings of the ranks with one place in their machines.
            within = tuple(g[start : start + inner] for g in groups for start in range(0, size, inner))
            across = tuple(g[start::inner] for g in groups for start in range(inner))
            for order in (list(range(inner)), _down_and_up(inner)):
                yield Schedule((Level(_reordered(within, order)), Level(across)), "two-phase")
    # Partners differ in one bit of their rank: the ranks of a group must be a power of two.
    if reduces_all and size & (size - 1) == 0:
        yield Schedule((Level(groups, "doubling"),), "doubling")


def _down_and_up(size: int) -> list[int]:
    """Ranks in the order of a ring along a ladder of IPU-Links: even ones down one side, odd ones up the other."""
    return [*range(0, size, 2), *reversed(range(1, size, 2))]


def _reordered(groups: Groups, order: list[int]) -> Groups:
    return tuple(tuple(group[n] for n in order) for group in groups)


def _stays_within(groups: Groups, inner: int) -> bool:
    """True if each run of `inner` ranks is all replicas of one machine (or pod)."""
    # Replicas are numbered machine by machine, so the quotient is the number of the machine.
    table = np.array(groups).reshape(-1, inner) // inner
    return bool((table == table[:, :1]).all())


def _cycles(schedule: Schedule, num_bytes: int, system: Target, ipus_each: int, reduces_all: bool) -> int:
    """Cost of a schedule in cycles, for values of `num_bytes`: of both halves of an all-reduce, else of one."""
    total = 0
    chunk_bytes = -(-num_bytes // schedule.ways)
    compute_set_cycles = least_cycles(system)
    for level in schedule.levels:
        # Levels are nested: each works on the chunk that the previous one leaves.
        chunk_bytes = -(-chunk_bytes // level.chunks)
        # Pairs of replicas that send to each other, and in how many rounds.
        if level.kind == "doubling":  # its swaps give every replica the whole sum: nothing is left to gather
            rounds = [(swaps, 1) for swaps in level.swaps()]
            compute_sets = 1  # of a round: the sum
        else:
            pairs = level.pairs + (level.backwards.pairs if schedule.ways > 1 else ())
            rounds = [(pairs, (level.size - 1) * (2 if reduces_all else 1))]
            compute_sets = _COMPUTE_SETS_A_ROUND * schedule.ways
        for pairs, num_rounds in rounds:
            round_cycles = _link_cycles(pairs, chunk_bytes, system, ipus_each)
            total += num_rounds * (round_cycles + system.global_sync_cycles + compute_sets * compute_set_cycles)
    return total


def _link_cycles(pairs: Pairs, num_bytes: int, system: Target, ipus_each: int) -> int:
    """Cycles in which the link with most bytes carries `num_bytes` from the first IPU of each source replica."""
    sources, destinations = np.array(pairs, np.int64).reshape(-1, 2).T * ipus_each
    return int(link_cycles(Flows.of(system.num_ipus, sources, destinations, num_bytes), system).max())
