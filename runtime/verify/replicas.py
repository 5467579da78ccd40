"""Rules of the verifier on replicas: valid copies between them, and control flow that all of them follow together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ipujax.runtime.analysis import divergent_decisions, joins_replicas
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import CrossReplicaCopy, Decision
from ipujax.runtime.verify.inventory import Inventory


def cross_replica(inventory: Inventory) -> Iterator[VerifyError]:
    """A copy between replicas needs a replicated graph, names its replicas, and writes to each of them once at most."""
    replicas = inventory.graph.replication_factor
    for node in inventory.nodes:
        if not isinstance(node, CrossReplicaCopy):
            continue
        if replicas == 1:
            message = f"{node.name}: the graph is not replicated"
            hint = "Graph(target, replication_factor=n)"
            yield VerifyError("cross-replica", message, where=node.origin, hint=hint)
        yield from map_errors(node, replicas)


def map_errors(copy: CrossReplicaCopy, replicas: int) -> Iterator[VerifyError]:
    """Yield the errors in the replica map of a copy, in a graph with `replicas` replicas."""
    outside = sorted({r for pair in copy.replica_map for r in pair if not 0 <= r < replicas})
    if outside:
        message = f"{copy.name} names replicas that the graph lacks"
        expected = f"0 … {replicas - 1}"
        yield VerifyError("cross-replica", message, where=copy.origin, expected=expected, got=outside)
    received = Counter(destination for _, destination in copy.replica_map)
    for replica, count in received.items():
        if count > 1:
            message = f"{copy.name} writes twice to replica {replica}"
            got = [pair for pair in copy.replica_map if pair[1] == replica]
            yield VerifyError("cross-replica", message, where=copy.origin, expected="one source each", got=got)


def divergent_control(inventory: Inventory) -> Iterator[VerifyError]:
    """No decision on which replicas may disagree is around a step at which all of them meet."""
    # Most programs have no decision around such a step: they need no dataflow analysis.
    if not any(isinstance(node, Decision) and any(map(joins_replicas, node.children())) for node in inventory.nodes):
        return
    for node in divergent_decisions(inventory.graph, inventory.program, inventory.effects):
        if any(joins_replicas(child) for child in node.children()):
            yield VerifyError(
                "divergent-control",
                f"replicas may disagree at this {type(node).__name__}, which has steps that all of them must reach",
                where=node.origin,
                expected="a value that is the same in all replicas, around host streams and copies between replicas",
                hint="compute it from constants and broadcast streams, or move the streams and copies outside",
            )
