"""What a copy between replicas costs one of them: its tiles' exchange, and the links between IPUs that all load.

Input: a graph of several replicas and a `CrossReplicaCopy` of it. Output: `CopyCost`, as of a copy between IPUs.

What one replica sends another is found as a copy in a system of two: the source in the first, the destination in the
second. Every pair of the replica map adds these flows to the links of the whole system (`links`), and every replica is
charged what the slowest needs. A replica that both sends and receives does so at the same time.
Source: as copies between IPUs, see `cost.transfer`.
Limits: a replica that copies to itself is charged as if another sent it that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ipujax.runtime.cost.compute_set import ExchangeCost
from ipujax.runtime.cost.ipu_window import compact
from ipujax.runtime.cost.links import link_cycles
from ipujax.runtime.cost.transfer import CopyCost, copy_cost
from ipujax.runtime.exchange import exchange_cycles, receive_cycles
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Graph, of_replicas, substituted
from ipujax.runtime.tensor import pad_tiles, renumber_tiles


def cross_replica_cost(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """What one run of a copy between replicas costs each of them.

    Args:
        graph: the graph of one replica; knows how many there are.
        copy: which.
    """
    target = graph.target
    between = _between_two(graph, copy)
    assert between.flows is not None or not copy.source.size, "two replicas share no IPU"
    num_ipus, tiles = target.num_ipus, target.num_tiles
    of_pair = np.zeros((num_ipus, num_ipus), np.int64)
    if between.flows is not None:
        of_pair = between.flows[:num_ipus, num_ipus:]
    flows = np.zeros((graph.replication_factor * num_ipus,) * 2, np.int64)
    for source, destination in copy.replica_map:
        if source != destination:
            rows, columns = (slice(r * num_ipus, (r + 1) * num_ipus) for r in (source, destination))
            flows[rows, columns] += of_pair
    cycles = link_cycles(flows, graph.system_target).reshape(-1, num_ipus).max(0)
    # Of the two replicas one sends and one receives; one that does both does as the first and as the second together.
    first = between.first_ipu * target.tiles_per_ipu
    parts = {name: pad_tiles(getattr(between.exchange, name), first, 2 * tiles) for name in _COUNTS}
    both = {name: part[:tiles] + part[tiles:] for name, part in parts.items()}
    receiving = receive_cycles(both["received_bytes"], np.zeros(tiles, np.int64), both["fragments"], target)
    ports = exchange_cycles(receiving, both["sent_bytes"], target)
    exchange = ExchangeCost(**{name: compact(values) for name, values in both.items()}, cycles=compact(ports))
    none = compact(np.zeros(tiles, np.int64))
    return CopyCost(0, exchange, none, of_pair, cycles)


_COUNTS = ("received_bytes", "sent_bytes", "fragments")


def _between_two(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """The cost of the copy from the first of two replicas to the second, in a system of their IPUs."""
    target = graph.target
    pair = Graph(of_replicas(target, 2))
    for variable in copy.source.variables():
        pair.mappings[variable] = graph.mappings[variable]
    received = {variable: replace(variable) for variable in copy.destination.variables()}
    second = np.arange(target.num_tiles, 2 * target.num_tiles, dtype=np.int32)
    for variable, there in received.items():
        mapping = renumber_tiles(graph.mappings[variable], second)
        assert mapping is not None, "every tile has its counterpart"
        pair.mappings[there] = mapping
    return copy_cost(pair, Copy(copy.source, substituted(copy.destination, received), copy.name))
