"""Rules of the verifier on replicas: copies between them that can be, and control that they all follow together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ipujax.runtime.analysis import divergent_decisions, meets
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import CrossReplicaCopy, Decision
from ipujax.runtime.verify.facts import Facts


def cross_replica(facts: Facts) -> Iterator[VerifyError]:
    """Copies between replicas are in a replicated graph, between replicas it has, and give each one value at most."""
    replicas = facts.graph.replication_factor
    for node in facts.nodes:
        if not isinstance(node, CrossReplicaCopy):
            continue
        if replicas == 1:
            what, hint = f"{node.name}: the graph is not replicated", "Graph(target, replication_factor=n)"
            yield VerifyError("cross-replica", what, where=node.origin, hint=hint)
        yield from map_errors(node, replicas)


def map_errors(copy: CrossReplicaCopy, replicas: int) -> Iterator[VerifyError]:
    """What is wrong with the replica map of a copy between some number of replicas."""
    outside = sorted({r for pair in copy.replica_map for r in pair if not 0 <= r < replicas})
    if outside:
        what, expected = f"{copy.name} names replicas there are not", f"0 … {replicas - 1}"
        yield VerifyError("cross-replica", what, where=copy.origin, expected=expected, got=outside)
    received = Counter(destination for _, destination in copy.replica_map)
    for replica, count in received.items():
        if count > 1:
            what = f"{copy.name} writes twice to replica {replica}"
            got = [pair for pair in copy.replica_map if pair[1] == replica]
            yield VerifyError("cross-replica", what, where=copy.origin, expected="one source each", got=got)


def divergent_control(facts: Facts) -> Iterator[VerifyError]:
    """All replicas reach every meeting: no decision on which they may disagree is around it."""
    if not any(isinstance(node, Decision) and any(map(meets, node.children())) for node in facts.nodes):
        return
    for node in divergent_decisions(facts.graph, facts.program, facts.effects):
        if any(meets(child) for child in node.children()):
            yield VerifyError(
                "divergent-control",
                f"replicas may disagree at this {type(node).__name__}, in which they would have to meet",
                where=node.origin,
                expected="a value that is the same in all replicas, around host streams and copies between replicas",
                hint="compute it from constants and broadcast streams, or move the streams and copies outside",
            )
