"""Rules of the verifier on replicas: valid copies between them, and control flow that all of them follow together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from ipujax.runtime.analysis import agreement, divergent_decisions, joins_replicas, meeting_groups
from ipujax.runtime.analysis.agreement import Classes
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import (
    Collective,
    CrossReplicaCopy,
    Decision,
    Loop,
    ReplicaAxes,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
    distinct,
)
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
        for copy in node.ways:
            yield from map_errors(copy, replicas)


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
    """No decision is around a step at which replicas meet that may disagree on it."""
    # Most programs have no decision around such a step: they need no dataflow analysis.
    if not any(isinstance(node, Decision) and any(map(joins_replicas, node.children())) for node in inventory.nodes):
        return
    graph = inventory.graph
    for node, classes in divergent_decisions(graph, inventory.program, inventory.effects).items():
        groups = meeting_groups(ProgramSequence(*node.children()), graph.replication_factor)
        if agreement.is_apart_in(classes, groups):
            yield _disagreement(graph.replica_axes, node, classes, groups)


def _disagreement(axes: ReplicaAxes, node: Decision, classes: Classes, groups: Sequence[Sequence[int]]) -> VerifyError:
    """Return the error of a decision inside of which replicas meet that may disagree on it.

    Args:
        axes: of the replicas, named for users of JAX; none in a program for Poplar.
        node: the decision.
        classes: replicas that agree on it.
        groups: replicas that meet inside of it.
    """
    return _disagreement_along(axes, node, classes, groups) if axes else _disagreement_of_replicas(node)


def _disagreement_of_replicas(node: Decision) -> VerifyError:
    kind = type(node).__name__
    return VerifyError(
        "divergent-control",
        f"replicas may disagree at this {kind}, which has steps that all of them must reach",
        where=node.origin,
        expected="a value that is the same in all replicas, around host streams and copies between replicas",
        hint="compute it from constants and broadcast streams, or move the streams and copies outside",
    )


def _disagreement_along(
    axes: ReplicaAxes, node: Decision, classes: Classes, groups: Sequence[Sequence[int]]
) -> VerifyError:
    """Return the error of a decision on a mesh: it names the axes, and the step at which replicas would meet."""
    names = _axes_apart(axes, classes, groups)
    along = f"{'axis' if len(names) == 1 else 'axes'} {' and '.join(map(repr, names))}"
    subject = "the condition of this loop" if isinstance(node, Loop) else "this choice of a branch"
    meeting = _first_meeting_apart(node, classes)
    steps = meeting.name if isinstance(meeting, Collective | CrossReplicaCopy) else "the host"
    place = f", at {meeting.origin.line}" if meeting.origin.line else ""
    return VerifyError(
        "divergent-control",
        f"IPUs along {along} may disagree on {subject}, and would have to meet for {steps} inside it{place}",
        where=node.origin,
        expected=f"a value that is equal along {along}",
        got=f"a value that may differ, over {', '.join(f'{name}: {size}' for name, size in axes)}",
        hint=f"reduce it first, jax.lax.pmax(x, {names[0] if len(names) == 1 else names!r}), or move {steps} outside",
    )


def _axes_apart(axes: ReplicaAxes, classes: Classes, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Names of the axes along which two replicas of a group may have unequal values."""
    coordinates = np.stack(np.unravel_index(np.arange(len(classes)), [size for _, size in axes]), -1)
    differing: set[str] = set()
    for first, second in (pair for group in groups for pair in combinations(group, 2)):
        dims = np.flatnonzero(coordinates[first] != coordinates[second])
        if classes[first] != classes[second] and len(dims) == 1:
            differing.add(axes[dims[0]][0])
    return tuple(name for name, size in axes if name in differing or (not differing and size > 1))


def _first_meeting_apart(node: Decision, classes: Classes) -> Meeting:
    """The first step inside of a decision at which replicas meet that may disagree on it."""
    # Groups that steps connect are apart only if those of one of the steps are.
    return next(
        step
        for step in distinct(node)
        if isinstance(step, Meeting) and agreement.is_apart_in(classes, meeting_groups(step, len(classes)))
    )


Meeting = Collective | CrossReplicaCopy | StreamIn | StreamOut
