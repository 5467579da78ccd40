"""Cycles of data between IPUs: on the IPU-Links of a pod, which are a ladder, and on the gateways between pods.

In a pod IPUs 2r and 2r + 1 share rung r; neighbouring rungs are joined on both sides. Data for the other side crosses
its own rung first, then climbs. Data for another pod leaves through the gateway of its IPU's machine, which all IPUs of
the machine share, and arrives through that of its destination. Every flow loads every link on its route, and an
exchange lasts one latency, and until the fullest link of the route is done.

    pair   4 links    between the two IPUs of a rung, for data that stays on the rung
    cross  2 links    between the two IPUs of a rung, for data that climbs afterwards
    up     2 links    from one rung to the next
    down   2 links    from one rung to the one before
    out    1          the gateway of a machine, towards other pods
    in     1          the same, from other pods

Input: bytes from each IPU to each other. Output: cycles for each IPU.
Source: the ladder: poplibs `lib/poplibs_test/Util.cpp` (reference machine.md §1.5); gateways: M2000 data sheet
(reference A3). Systems with another number of links than the ladder's ten keep these shares, which is `assumed`.
Limits: no ring closure; one latency an exchange, however many hops, bytes and pieces (a published blur whose strips
are cut by columns sends single pixels, and takes longer than this, see docs/fidelity.md); the path from an IPU to its
gateway, and between gateways, is free.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.target import Target

_LINKS = {"pair": 4, "cross": 2, "up": 2, "down": 2}  # poplibs_test Util.cpp via reference 1.5
_PAIR, _CROSS, _UP, _DOWN, _OUT, _IN = range(6)
Link = tuple[int, int]  # IPU it leaves, or first IPU of the machine; number of its kind


def route(source: int, destination: int, target: Target) -> list[Link]:
    """Return the links from one IPU to another, in order."""
    pod = target.ipus_per_pod
    if source // pod != destination // pod:
        gateway = target.ipus_per_gateway
        return [(source - source % gateway, _OUT), (destination - destination % gateway, _IN)]
    base = source - source % pod
    return [(base + ipu, kind) for ipu, kind in _ladder(source - base, destination - base)]


def _ladder(source: int, destination: int) -> list[Link]:
    """Return the links from one IPU of a pod to another, numbered within it."""
    changes_side = (source ^ destination) & 1
    if source // 2 == destination // 2:
        return [(source, _PAIR)] if changes_side else []
    crossing = [(source, _CROSS)] if changes_side else []
    first_climb = source ^ changes_side
    climb = range(first_climb, destination, 2 if destination > first_climb else -2)
    return crossing + [(ipu, _UP if destination > first_climb else _DOWN) for ipu in climb]


def link_cycles(flows: np.ndarray, target: Target) -> np.ndarray:
    """Return the cycles of each IPU in one exchange between IPUs.

    Args:
        flows: bytes from each IPU (row) to each other (column), int64[num_ipus, num_ipus]; the diagonal is ignored.
        target: the system.

    Returns:
        int64[num_ipus, *machines]; 0 for IPUs that neither send nor receive.
    """
    rate = _bytes_per_cycle(target)
    pairs = [(int(s), int(d)) for s, d in np.argwhere(flows) if s != d]
    # One row more: the last rung of an odd number of IPUs has a second side, over which a route may climb.
    load = np.zeros((len(flows) + 1, len(rate)), np.int64)
    latency = np.rint(np.asanyarray(target.global_exchange_latency_seconds * target.clock_hz)).astype(np.int64)
    routes = [route(s, d, target) for s, d in pairs]
    for (s, d), links in zip(pairs, routes, strict=True):
        for ipu, kind in links:
            load[ipu, kind] += flows[s, d]
    busy = np.ceil(load.reshape(*load.shape, *[1] * (rate.ndim - 1)) / rate).astype(np.int64)
    cycles = np.zeros((len(flows), *busy.shape[2:]), busy.dtype)
    for (s, d), links in zip(pairs, routes, strict=True):
        # A sender and its receiver are busy until the fullest link between them is.
        ipus, kinds = zip(*links, strict=True)
        cycles[[s, d]] = np.maximum(cycles[[s, d]], latency + busy[list(ipus), list(kinds)].max(0))
    return cycles


def _bytes_per_cycle(target: Target) -> np.ndarray:
    """Return the rate of each kind of link, float64[kinds, *machines]."""
    per_link = target.ipu_link_bytes_per_second * target.ipu_link_efficiency
    share = target.ipu_links_per_ipu / sum(_LINKS.values())
    gateway = target.gateway_bytes_per_second
    per_second = [*(per_link * share * links for links in _LINKS.values()), gateway, gateway]
    return np.stack(np.broadcast_arrays(*per_second)) / target.clock_hz
