"""How long data between IPUs takes on the IPU-Links: the ladder.

IPUs 2r and 2r + 1 share rung r; neighbouring rungs are joined on both sides. Data for the other side crosses its own
rung first, then climbs. Every flow loads every link it crosses, and an exchange lasts until the fullest link it uses is
done.

    pair   4 links    between the two IPUs of a rung, for what stays on the rung
    cross  2 links    between the two IPUs of a rung, for what climbs afterwards
    up     2 links    from one rung to the next
    down   2 links    from one rung to the one before

Input: bytes from each IPU to each other. Output: cycles for each IPU.
Source: poplibs `lib/poplibs_test/Util.cpp` (reference machine.md §1.5). Systems with another number of links than its
ten keep these shares, which is `assumed`.
Limits: no ring closure, no gateway links, no latency a hop.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.target import Target

_LINKS = {"pair": 4, "cross": 2, "up": 2, "down": 2}  # poplibs_test Util.cpp via reference 1.5
_KINDS = tuple(_LINKS)


def route(source: int, destination: int) -> list[tuple[int, int]]:
    """The links from one IPU to another, in order, each as (IPU it leaves, number of its kind)."""
    side = (source ^ destination) & 1
    if source // 2 == destination // 2:
        return [(source, 0)] if side else []
    crossing = [(source, 1)] if side else []
    first = source ^ side
    climb = range(first, destination, 2 if destination > first else -2)
    return crossing + [(ipu, 2 if destination > first else 3) for ipu in climb]


def link_cycles(flows: np.ndarray, target: Target) -> np.ndarray:
    """Cycles each IPU needs for one exchange between IPUs.

    Args:
        flows: bytes from each IPU (row) to each other (column), int64[num_ipus, num_ipus]; the diagonal is ignored.
        target: the system.

    Returns:
        int64[num_ipus]; 0 for IPUs that neither send nor receive.
    """
    per_link = target.ipu_link_bytes_per_second * target.ipu_link_efficiency / target.clock_hz
    share = target.ipu_links_per_ipu / sum(_LINKS.values())
    bytes_per_cycle = np.array([per_link * share * _LINKS[kind] for kind in _KINDS])
    pairs = [(int(s), int(d)) for s, d in np.argwhere(flows) if s != d]
    load = np.zeros((len(flows) + 1, len(_KINDS)), np.int64)
    routes = [route(s, d) for s, d in pairs]
    for (s, d), links in zip(pairs, routes, strict=True):
        for ipu, kind in links:
            load[ipu, kind] += flows[s, d]
    busy = np.ceil(load / bytes_per_cycle).astype(np.int64)
    cycles = np.zeros(len(flows), np.int64)
    for (s, d), links in zip(pairs, routes, strict=True):
        slowest = max(int(busy[link]) for link in links)
        cycles[[s, d]] = np.maximum(cycles[[s, d]], slowest)
    return cycles
