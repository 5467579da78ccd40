"""Cost of a copy between replicas: the exchange of one replica's tiles, and the links between IPUs under all flows.

Input: a graph of several replicas and a `CrossReplicaCopy` of it. Output: `CopyCost`, as of a copy between IPUs.

The flow from one replica to another is that of a copy in a system of two: the source in the first, the destination in
the second. Every pair of the replica map adds these flows to the links of the whole system (`links`), and the cost of
every replica is that of the slowest. A replica that both sends and receives does so at the same time.
Source: as copies between IPUs, see `cost.transfer`.
Limits: a replica that copies to itself costs as if another sent the data.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ipujax.runtime.cost.compute_set import ExchangeCost
from ipujax.runtime.cost.ipu_window import compact
from ipujax.runtime.cost.links import link_cycles
from ipujax.runtime.cost.transfer import CopyCost, copy_cost
from ipujax.runtime.exchange import exchange_cycles, receive_cycles
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Graph, of_replicas, substitute
from ipujax.runtime.tensor import pad_tiles, renumber_tiles


def cross_replica_cost(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """Return the cost of one run of a copy between replicas, for each of them; `graph` is of one replica."""
    target = graph.target
    pair_cost = _between_two(graph, copy)
    assert pair_cost.flows is not None or not copy.source.size, "two replicas share no IPU"
    num_ipus = target.num_ipus
    tiles = target.num_tiles
    pair_flows = np.zeros((num_ipus, num_ipus), np.int64)
    if pair_cost.flows is not None:
        pair_flows = pair_cost.flows[:num_ipus, num_ipus:]
    flows = np.zeros((graph.replication_factor * num_ipus,) * 2, np.int64)
    for source, destination in copy.replica_map:
        if source != destination:
            rows, columns = (slice(r * num_ipus, (r + 1) * num_ipus) for r in (source, destination))
            flows[rows, columns] += pair_flows
    cycles = link_cycles(flows, graph.system_target).reshape(-1, num_ipus).max(0)
    # Of the two replicas one sends and one receives; a replica of a ring does both, so it has the sum of their counts.
    first = pair_cost.first_ipu * target.tiles_per_ipu
    parts = {name: pad_tiles(getattr(pair_cost.exchange, name), first, 2 * tiles) for name in _COUNTS}
    counts = {name: part[:tiles] + part[tiles:] for name, part in parts.items()}
    receiving_cycles = receive_cycles(counts["received_bytes"], np.zeros(tiles, np.int64), counts["fragments"], target)
    port_cycles = exchange_cycles(receiving_cycles, counts["sent_bytes"], target)
    exchange = ExchangeCost(**{name: compact(values) for name, values in counts.items()}, cycles=compact(port_cycles))
    no_copies = compact(np.zeros(tiles, np.int64))
    return CopyCost(0, exchange, no_copies, pair_flows, cycles)


_COUNTS = ("received_bytes", "sent_bytes", "fragments")


def _between_two(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """Return the cost of the copy from the first of two replicas to the second, in a system of their IPUs."""
    target = graph.target
    pair = Graph(of_replicas(target, 2))
    for variable in copy.source.variables():
        pair.mappings[variable] = graph.mappings[variable]
    # The destination may be the source's variable: in the system of two it is one of its own, on the second replica.
    received = {variable: replace(variable) for variable in copy.destination.variables()}
    second_tiles = np.arange(target.num_tiles, 2 * target.num_tiles, dtype=np.int32)
    for variable, received_variable in received.items():
        mapping = renumber_tiles(graph.mappings[variable], second_tiles)
        assert mapping is not None, "every tile has its counterpart"
        pair.mappings[received_variable] = mapping
    return copy_cost(pair, Copy(copy.source, substitute(copy.destination, received), copy.name))
