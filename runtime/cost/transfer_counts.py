"""Cycles of copies and host transfers on each IPU, of one target or of arrays of machines.

Input: costs of one target by tile, or a graph and a leaf of its program and `Machines`. Output: `CopyCycles` and
`StreamCycles`, from which clocks are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.cost.busiest_tiles import CopyingCounts, ExchangeCounts
from ipujax.runtime.cost.compute_set_counts import of_all_ipus
from ipujax.runtime.cost.copy_costs import CopyCost, CopyCosts, CopyCounts, copy_counts, cross_replica_counts
from ipujax.runtime.cost.links import Flows, link_cycles
from ipujax.runtime.cost.transfer import StreamCounts
from ipujax.runtime.exchange import geometry, mappings_from
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Graph
from ipujax.runtime.target import Machines, Target
from ipujax.runtime.tensor import pad_tiles


@dataclass(frozen=True, slots=True, eq=False)
class CopyCycles:
    """Cycles of a copy on each IPU, those of its slowest tile: int64[num_ipus, *machines].

    Args:
        ports: of sending and receiving.
        copying: of copies on tiles.
        flows: bytes between IPUs; None when all stays inside.
        links: of data that leaves or reaches it; None as `flows`.
    """

    ports: np.ndarray
    copying: np.ndarray
    flows: Flows | None
    links: np.ndarray | None


@dataclass(frozen=True, slots=True, eq=False)
class StreamCycles:
    """Cycles of a host transfer on each IPU, int64[num_ipus, *machines], and whether each took part in it before."""

    cycles: np.ndarray
    earlier: np.ndarray


def slowest_tiles_of_copy(cost: CopyCost, target: Target) -> CopyCycles:
    """Return the cycles of a copy on each IPU of a target, from those of its tiles."""
    most_cycles = np.array([ipu.most_cycles for ipu in cost.ipus], np.int64).T
    ports, copying = (pad_tiles(cycles, cost.first_ipu, target.num_ipus) for cycles in most_cycles)
    return CopyCycles(ports, copying, cost.flows, cost.link_cycles)


def copying_counts(graph: Graph, copy: Copy) -> CopyingCounts:
    """Return what a copy moves on its own tiles."""
    return copying_of(copy_counts(graph, copy))


def copying_of(parts: CopyCounts) -> CopyingCounts:
    """Return the copies on own tiles among what a copy moves."""
    copied = np.stack([parts.local_bytes, parts.local_fragments, parts.slow_cycles])
    return CopyingCounts.by_tile(copied, parts.window)


def copy_key(graph: Graph, copy: Copy, first_tile: int) -> object | None:
    """Return all that the counts of a copy inside an IPU depend on, with its tiles counted from the first.

    None where a list of elements is part of that.
    """
    tensors = (copy.source, copy.destination)
    views = tuple(map(geometry, tensors))
    if None in views:
        return None
    return "copy", views, copy.source.dtype, *(mappings_from(first_tile, tensor, graph) for tensor in tensors)


def copy_cycles_on(graph: Graph, copy: Copy | CrossReplicaCopy, costs: CopyCosts) -> Callable[[Machines], CopyCycles]:
    """Return a function from machines to the cycles of a copy; its counts are made once.

    Args:
        graph: of the copy.
        copy: the copy.
        costs: of the copies of the graph, whose parts are counted once.
    """
    parts = cross_replica_counts(graph, copy) if isinstance(copy, CrossReplicaCopy) else costs.counts(copy)
    operands = np.stack(
        [parts.received_bytes - parts.shared_bytes, parts.shared_bytes, parts.receives, parts.fragments]
    )
    received = [operands] if parts.received_bytes.any() else []
    exchange = ExchangeCounts.by_tile(received, np.stack([parts.sent_bytes, parts.sends]), parts.window)
    copying = copying_of(parts)
    num_ipus = graph.target.num_ipus

    def link_part(target: Target) -> np.ndarray:
        assert parts.link_flows is not None
        cycles = link_cycles(parts.link_flows, target)
        machines = cycles.shape[1:] or (1,)
        return np.asanyarray(cycles.reshape(-1, num_ipus, *machines).max(0))

    def on(machines: Machines) -> CopyCycles:
        ports = machines.evaluate(exchange.cycles, len(exchange.ipu))
        copies = machines.evaluate(copying.cycles, len(copying.ipu))
        links = None if parts.link_flows is None else machines.evaluate(link_part, parts.link_flows.num_ipus)
        first = parts.window.first_ipu
        ports, copies = (of_all_ipus(values, first, machines.target) for values in (ports, copies))
        return CopyCycles(ports, copies, parts.flows, links)

    return on


def stream_cycles_on(counts: StreamCounts) -> Callable[[Machines], StreamCycles]:
    """Return a function from machines to the cycles of a host transfer."""

    def on(machines: Machines) -> StreamCycles:
        return StreamCycles(machines.evaluate(counts.cycles, len(counts.ipu_bytes)), counts.earlier)

    return on
