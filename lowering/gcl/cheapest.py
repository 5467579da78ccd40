"""Which schedule a collective takes: the one whose rounds cost least on the links between the IPUs.

    rings      in the order of ranks; down one side of the ladder of IPU-Links and up the other
    two-phase  rings inside of each machine, or each pod, then a ring across
    doubling   for small values, where every round costs its latency

Estimates are those of `links` for the bytes of one round, with the sync and the steps on tiles that a round takes.
Limits: replicas of several IPUs are taken to send from the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.lowering.gcl.collective_schedules import Groups, Level, Pairs, Schedule
from ipujax.runtime.cache import remembered
from ipujax.runtime.cost import link_cycles
from ipujax.runtime.graph import Graph, of_replicas
from ipujax.runtime.target import Target

_STEPS_A_ROUND = 3  # compute sets of a round on a ring: the number of the chunk, its slice, the sum (or the store)


def choose(graph: Graph, groups: Groups, num_bytes: int, *, reduces_all: bool) -> Schedule:
    """The schedule that is expected to take least time.

    Args:
        graph: knows the machine and how many replicas there are.
        groups: replicas by rank, the same number in each.
        num_bytes: bytes of a replica's whole value.
        reduces_all: whether this is an all-reduce, which may double.
    """
    return _choose(graph.target, graph.replication_factor, groups, num_bytes, reduces_all)


@remembered
def _choose(target: Target, replicas: int, groups: Groups, num_bytes: int, reduces_all: bool) -> Schedule:
    system = of_replicas(target, replicas)
    schedules = list(candidates(system, target.num_ipus, groups, reduces_all))
    costs = [_cycles(schedule, num_bytes, system, target.num_ipus, reduces_all) for schedule in schedules]
    return schedules[int(np.argmin(costs))]


def candidates(system: Target, ipus_each: int, groups: Groups, reduces_all: bool) -> Iterator[Schedule]:
    """The schedules that a collective may take.

    Args:
        system: the machine of all replicas.
        ipus_each: IPUs of a replica.
        groups: replicas by rank, the same number in each.
        reduces_all: whether this is an all-reduce.
    """
    size = len(groups[0])
    yield Schedule((Level(groups),), "ring")
    if size > 2:
        yield Schedule((Level(_reordered(groups, _down_and_up(size))),), "ring along the ladder")
    for ipus in sorted({system.ipus_per_gateway, system.ipus_per_pod}):
        inner = ipus // ipus_each
        if 1 < inner < size and size % inner == 0 and _stays_within(groups, inner):
            for order in (list(range(inner)), _down_and_up(inner)):
                within = tuple(g[at : at + inner] for g in groups for at in range(0, size, inner))
                across = tuple(g[at::inner] for g in groups for at in range(inner))
                yield Schedule((Level(_reordered(within, order)), Level(across)), "two-phase")
    if reduces_all and size & (size - 1) == 0:
        yield Schedule((Level(groups, "doubling"),), "doubling")


def _down_and_up(size: int) -> list[int]:
    """Ranks down one side of the ladder and up the other."""
    return [*range(0, size, 2), *reversed(range(1, size, 2))]


def _reordered(groups: Groups, order: list[int]) -> Groups:
    return tuple(tuple(group[n] for n in order) for group in groups)


def _stays_within(groups: Groups, inner: int) -> bool:
    """Whether runs of `inner` ranks are all replicas of one machine (or pod) each."""
    table = np.array(groups).reshape(-1, inner) // inner
    return bool((table == table[:, :1]).all())


def _cycles(schedule: Schedule, num_bytes: int, system: Target, ipus_each: int, reduces_all: bool) -> int:
    """Cycles of a schedule, of both halves for an all-reduce, else of one."""
    total, held = 0, num_bytes
    step = system.internal_sync_cycles + system.exchange_startup_cycles
    for level in schedule.levels:
        held = -(-held // level.chunks)
        if level.kind == "doubling":
            rounds = [(swaps, 1) for swaps in level.swaps()]
        else:
            rounds = [(level.pairs, (level.size - 1) * (2 if reduces_all else 1))]
        steps = _STEPS_A_ROUND if level.kind == "ring" else 1
        for pairs, times in rounds:
            links = _link_cycles(pairs, held, system, ipus_each)
            total += times * (links + system.global_sync_cycles + steps * step)
    return total


def _link_cycles(pairs: Pairs, num_bytes: int, system: Target, ipus_each: int) -> int:
    flows = np.zeros((system.num_ipus,) * 2, np.int64)
    for source, destination in pairs:
        flows[source * ipus_each, destination * ipus_each] = num_bytes
    return int(link_cycles(flows, system).max())
