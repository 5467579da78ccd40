"""Steps of a run as nodes of execution traces: compute, messages between IPUs, transfers with the host.

Input: an `Executable` and the spans of a run, each step by itself. Output: a `TraceNode` for each part of each step on
an IPU, which are the ranks of a trace: rank r·n + i is IPU i of n of replica r. An IPU runs its steps in order, so a
node waits for those of the step before; a message is a node of its sender and one of its receiver, with the same tag.

Bytes are those that arrive, as in the profile: of messages, transfers, and exchanges inside the IPU of a compute node.
So those of all ranks add up to the profile's of all replicas, if each replica takes part in all copies between
replicas; the profile is one of a replica that does.
Limits: a collective is its rounds of messages, as it runs. Transfers on I/O tiles begin with their step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost
from ipujax.runtime.graph import CrossReplicaCopy, Leaf, Program, RemoteIn, StreamIn
from ipujax.runtime.profile.attribution import label
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.timeline import Spans

NodeKind = Literal["compute", "send", "receive", "load", "store"]
NO_PEER = -1


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A part of a step on one IPU.

    Args:
        name: of the step.
        kind: of the node.
        step: number of the step in the run; the tag of messages.
        start: cycle at which the step begins on the IPU.
        cycles: cycles until it ends there, waits inside it included.
        num_bytes: bytes that arrive; of a message to another IPU, bytes that leave.
        peer: rank of the other IPU of a message, else `NO_PEER`.
    """

    name: str
    kind: NodeKind
    step: int
    start: int
    cycles: int
    num_bytes: int
    peer: int = NO_PEER


def trace_nodes(executable: Executable, spans: Spans, rank: int) -> Iterator[TraceNode]:
    """Yield the nodes of a rank in order; spans must be of single steps."""
    num_ipus = executable.target.num_ipus
    replica, ipu = divmod(rank, num_ipus)
    for row in np.flatnonzero(spans.ipu == ipu).tolist():
        step = int(spans.step[row])
        node = spans.nodes[step]
        start, end = int(spans.start[row]), int(spans.end[row])
        for kind, num_bytes, peer in _nodes_of_step(executable, node, replica, ipu):
            yield TraceNode(readable_name(label(node)[1]), kind, step, start, end - start, num_bytes, peer)


def _nodes_of_step(
    executable: Executable, node: Program, replica: int, ipu: int
) -> Iterator[tuple[NodeKind, int, int]]:
    """Yield kind, bytes and peer of the nodes of one step on an IPU; messages first."""
    cost = executable.costs.get(node) if isinstance(node, Leaf) else None
    received = int(_received_bytes(cost, executable.target)[ipu])
    if isinstance(cost, StreamCost):
        if received:
            yield "load" if isinstance(node, StreamIn | RemoteIn) else "store", received, NO_PEER
        return
    num_messages = 0
    if isinstance(cost, CopyCost) and cost.flows is not None:
        flows = cost.flows
        other_replicas = _other_replicas(node, replica)
        ways = len(node.ways) if isinstance(node, CrossReplicaCopy) else 1  # of equal bytes, to different replicas
        for kind, own_ipus, peers, replicas in (
            ("send", flows.senders, flows.receivers, other_replicas[0]),
            ("receive", flows.receivers, flows.senders, other_replicas[1]),
        ):
            for pair in np.flatnonzero(own_ipus == ipu).tolist():
                num_bytes = int(flows.num_bytes[pair]) // ways
                for other in replicas:
                    num_messages += 1
                    received -= num_bytes if kind == "receive" else 0
                    yield kind, num_bytes, other * executable.target.num_ipus + int(peers[pair])  # type: ignore[misc]
    if received > 0 or not num_messages:
        yield "compute", max(0, received), NO_PEER


def _other_replicas(node: Program, replica: int) -> tuple[list[int], list[int]]:
    """Replicas to which a copy sends from one, and from which that receives; the same one within a replica."""
    if not isinstance(node, CrossReplicaCopy):
        return [replica], [replica]
    pairs = [pair for copy in node.ways for pair in copy.replica_map if pair[0] != pair[1]]
    return [b for a, b in pairs if a == replica], [a for a, b in pairs if b == replica]


def _received_bytes(cost: object, target: Target) -> np.ndarray:
    """Return the bytes that arrive on the tiles of each IPU in one run of a step, or that the host exchanges."""
    total = np.zeros(target.num_ipus, np.int64)
    match cost:
        case StreamCost():
            parts = [(cost.first_ipu, cost.tile_bytes)]
        case CopyCost():
            parts = [(cost.first_ipu, _arriving(cost.exchange))]
        case ComputeSetCost():
            parts = [(cost.first_ipu, _arriving(exchange)) for exchange in (cost.before, cost.after)]
        case _:
            parts = []
    for first_ipu, tile_bytes in parts:
        by_ipu = tile_bytes.reshape(-1, target.tiles_per_ipu).sum(1)
        total[first_ipu : first_ipu + len(by_ipu)] += by_ipu
    return total


def _arriving(exchange: ExchangeCost) -> np.ndarray:
    """Return the bytes that arrive on each tile."""
    return np.asarray(exchange.received_bytes)
