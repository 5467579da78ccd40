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

Input: `Flows`, the pairs of IPUs that exchange and their bytes. Output: cycles for each IPU.
Source: the ladder: poplibs `lib/poplibs_test/Util.cpp` (reference machine.md §1.5); gateways: M2000 data sheet
(reference A3). Systems with another number of links than the ladder's ten keep these shares, which is `assumed`.
Limits: no ring closure; one latency an exchange, however many hops, bytes and pieces (a published blur whose strips
are cut by columns sends single pixels, and takes longer than this, see docs/fidelity.md); the path from an IPU to its
gateway, and between gateways, is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ipujax.runtime.target import Target
from ipujax.runtime.tensor import frozen

_LINKS = {"pair": 4, "cross": 2, "up": 2, "down": 2}  # poplibs_test Util.cpp via reference 1.5
_PAIR, _CROSS, _UP, _DOWN, _OUT, _IN = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Bytes between pairs of IPUs, different ones but for `folded`; pairs that exchange nothing are not listed.

    Args:
        num_ipus: of the system.
        senders: an IPU of each pair, rising, int64[pairs].
        receivers: the other, rising for each sender, int64[pairs].
        num_bytes: bytes that it receives from the first, at least 1, int64[pairs].
    """

    num_ipus: int
    senders: np.ndarray
    receivers: np.ndarray
    num_bytes: np.ndarray

    @staticmethod
    def of(num_ipus: int, senders: ArrayLike, receivers: ArrayLike, num_bytes: ArrayLike) -> Flows:
        """Return the sums of equal pairs, without bytes of an IPU to itself and pairs of none."""
        sources, destinations, counts = np.broadcast_arrays(
            *(np.asarray(values, np.int64) for values in (senders, receivers, num_bytes))
        )
        counted = np.flatnonzero((sources != destinations) & (counts > 0))
        pairs, place = np.unique(sources[counted] * num_ipus + destinations[counted], return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, place, counts[counted])
        return Flows(num_ipus, *(frozen(values, np.int64) for values in (*np.divmod(pairs, num_ipus), total)))

    def plus(self, other: Flows) -> Flows:
        """Return these flows and others of the same IPUs."""
        rows = zip(self._pairs, other._pairs, strict=True)
        return Flows.of(self.num_ipus, *map(np.concatenate, rows))

    @property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.senders, self.receivers, self.num_bytes

    def matrix(self) -> np.ndarray:
        """Return the bytes from each IPU (row) to each other (column), int64[num_ipus, num_ipus]."""
        flows = np.zeros((self.num_ipus, self.num_ipus), np.int64)
        flows[self.senders, self.receivers] = self.num_bytes
        return flows

    def crossing(self) -> np.ndarray:
        """Return whether each IPU sends or receives, bool[num_ipus]."""
        crosses = np.zeros(self.num_ipus, bool)
        crosses[self.senders] = True
        crosses[self.receivers] = True
        return crosses

    def folded(self) -> Flows:
        """Return flows from the first of two replicas to the second as those inside one, an IPU to itself included."""
        num_ipus = self.num_ipus // 2
        return Flows(num_ipus, self.senders, frozen(self.receivers - num_ipus, np.int64), self.num_bytes)

    def between_replicas(self, replica_map: Sequence[tuple[int, int]], replicas: int) -> Flows:
        """Return the flows of all replicas, of those from the first of two to the second, for each pair of a map.

        Args:
            replica_map: pairs of replicas, from and to.
            replicas: number of replicas, each with half of the IPUs.
        """
        num_ipus = self.num_ipus // 2
        first, second = np.array(replica_map, np.int64).reshape(-1, 2).T[:, :, None]
        senders, receivers = first * num_ipus + self.senders, second * num_ipus + self.receivers - num_ipus
        return Flows.of(replicas * num_ipus, senders.ravel(), receivers.ravel(), np.tile(self.num_bytes, len(first)))


@dataclass(frozen=True, slots=True, eq=False)
class _Hops:
    """Links of the routes of some pairs, those of each pair together: int64[links].

    Args:
        pair: number of the pair.
        ipu: IPU that the link leaves, or first IPU of the machine of a gateway.
        kind: number of its kind.
    """

    pair: np.ndarray
    ipu: np.ndarray
    kind: np.ndarray


def _links_of_routes(senders: np.ndarray, receivers: np.ndarray, target: Target) -> _Hops:
    """Return the links from each sender to its receiver, another IPU."""
    pod, gateway = target.ipus_per_pod, target.ipus_per_gateway
    is_other_pod = senders // pod != receivers // pod
    is_same_rung = ~is_other_pod & (senders // 2 == receivers // 2)
    climbs = ~is_other_pod & ~is_same_rung
    base = senders - senders % pod  # sides and rungs are those within a pod
    changes_side = (senders - base ^ receivers - base) & 1
    first_climb = base + (senders - base ^ changes_side)
    length = np.where(climbs, np.abs(receivers - first_climb) // 2, 0)
    climbing = np.repeat(np.arange(len(senders)), length)
    rung = np.arange(len(climbing)) - np.repeat(np.cumsum(length) - length, length)
    is_up = (receivers > first_climb)[climbing]
    parts = [
        (np.flatnonzero(is_other_pod), senders - senders % gateway, _OUT),
        (np.flatnonzero(is_other_pod), receivers - receivers % gateway, _IN),
        (np.flatnonzero(is_same_rung), senders, _PAIR),
        (np.flatnonzero(climbs & (changes_side > 0)), senders, _CROSS),
    ]
    pair = np.concatenate([climbing, *(pairs for pairs, _, _ in parts)])
    ipu = np.concatenate(
        [first_climb[climbing] + np.where(is_up, 2, -2) * rung, *(ipus[pairs] for pairs, ipus, _ in parts)]
    )
    kind = np.concatenate([np.where(is_up, _UP, _DOWN), *(np.full(len(pairs), kind) for pairs, _, kind in parts)])
    order = np.argsort(pair, kind="stable")
    return _Hops(pair[order], ipu[order], kind[order])


def link_cycles(flows: Flows, target: Target) -> np.ndarray:
    """Return the cycles of each IPU in one exchange between IPUs.

    Args:
        flows: bytes between IPUs.
        target: the system.

    Returns:
        int64[num_ipus, *machines]; 0 for IPUs that neither send nor receive.
    """
    rate = _bytes_per_cycle(target)
    hops = _links_of_routes(flows.senders, flows.receivers, target)
    # One row more: the last rung of an odd number of IPUs has a second side, over which a route may climb.
    load = np.zeros((flows.num_ipus + 1, len(rate)), np.int64)
    np.add.at(load, (hops.ipu, hops.kind), flows.num_bytes[hops.pair])
    latency = np.rint(np.asanyarray(target.global_exchange_latency_seconds * target.clock_hz)).astype(np.int64)
    of_hops = load[hops.ipu, hops.kind].reshape(-1, *[1] * (rate.ndim - 1))
    busy = np.ceil(of_hops / rate[hops.kind]).astype(np.int64)
    cycles = np.zeros((flows.num_ipus, *busy.shape[1:]), np.int64)
    if len(hops.pair):
        # A sender and its receiver are busy until the fullest link between them is.
        starts = np.flatnonzero(np.diff(hops.pair, prepend=-1))
        fullest = latency + np.maximum.reduceat(busy, starts)
        for ipus_of_side in (flows.senders, flows.receivers):
            np.maximum.at(cycles, ipus_of_side, fullest)
    return cycles


def _bytes_per_cycle(target: Target) -> np.ndarray:
    """Return the rate of each kind of link, float64[kinds, *machines]."""
    per_link = target.ipu_link_bytes_per_second * target.ipu_link_efficiency
    share = target.ipu_links_per_ipu / sum(_LINKS.values())
    gateway = target.gateway_bytes_per_second
    per_second = [*(per_link * share * links for links in _LINKS.values()), gateway, gateway]
    return np.stack(np.broadcast_arrays(*per_second)) / target.clock_hz
