"""Divergence: variables that may differ between replicas, and decisions on which replicas may therefore disagree.

Input: a graph and a program. Output: for each decision of data-dependent control whether replicas may disagree on it.

Replicas run one program on memory of their own, so a value differs where it comes from one that does: a constant of
each replica, a stream that is not broadcast, a remote buffer, memory from before the run, a cycle counter, or a copy
between replicas (unless all receive one value, or it is one of the rounds of a `Collective` after which all agree).
Results of such values differ; so does everything written under a decision on which replicas disagree. The analysis
walks the program, to a fixpoint in loops; writing all of a variable makes it equal again.
Limits: by whole variables and whole vertex groups; values that agree by chance count as different.
"""

from __future__ import annotations

from collections.abc import Iterable

from ipujax.runtime.analysis.effects import EffectsOf, group_tensors, written_in_full
from ipujax.runtime.graph import (
    Block,
    Branch,
    Collective,
    Copy,
    CrossReplicaCopy,
    Decision,
    Execute,
    Graph,
    Loop,
    Program,
    RemoteIn,
    StreamIn,
    StreamOut,
    distinct,
    iteration,
)
from ipujax.runtime.tensor import Tensor, Variable


def joins_replicas(program: Program) -> bool:
    """Check whether replicas that run a program exchange data in it, with the host or with each other."""
    return any(isinstance(node, (StreamIn, StreamOut, CrossReplicaCopy)) for node in distinct(program))


def divergent_decisions(graph: Graph, program: Program, effects: EffectsOf) -> list[Decision]:
    """Return the decisions of a program on which replicas may disagree, in the order of the program."""
    if graph.replication_factor == 1:
        return []
    # Memory from before the run may differ, so every variable that is read first may.
    before = {v for v in effects(program).reads if not v.is_constant}
    walk = Divergence(graph, effects)
    walk.visit(program, before)
    return list(walk.divergent)


class Divergence:
    """Walk through a program; `differing` has, at each point of it, the variables that may differ.

    Attributes:
        divergent: decisions so far on which replicas may disagree, in order.
    """

    def __init__(self, graph: Graph, effects: EffectsOf) -> None:
        self._graph = graph
        self._effects = effects
        self.divergent: dict[Decision, None] = {}

    def visit(self, node: Program, differing: set[Variable]) -> None:
        """Walk a node; changes `differing`."""
        match node:
            case Block():
                for child in node.children():
                    self.visit(child, differing)
                if isinstance(node, Collective) and node.is_same:
                    for tensor in node.outputs:
                        _write(tensor, differing, is_same=True)
            case Execute(compute_set):
                outputs = [
                    [tensor for tensor, _ in writes]
                    for group in self._graph.groups[compute_set]
                    for reads, writes in [group_tensors(group)]
                    if group.codelet.reads_clock or _differ(reads, differing)
                ]
                # Kills first: a result of differing operands differs again, even if it is written in full.
                differing -= self._effects(node).kills
                differing |= {v for tensors in outputs for tensor in tensors for v in tensor.variables()}
            case Copy(source, destination):
                _write(destination, differing, is_same=not _differ([source], differing))
            case StreamIn(stream, destination):
                _write(destination, differing, is_same=stream.broadcast)
            case RemoteIn(_, destination):
                _write(destination, differing, is_same=False)
            case CrossReplicaCopy(source, destination):
                senders = set(node.sources(self._graph.replication_factor))
                is_same = None not in senders and (len(senders) == 1 or not _differ([source], differing))
                _write(destination, differing, is_same=is_same)
            case Loop():
                self._iterations(node, differing)
            case Branch():
                self._branches(node, differing)

    def loop(self, body: Program, differing: set[Variable]) -> None:
        """Walk a body any number of times, at least once, until nothing new differs; changes `differing`."""
        size = -1  # the set only grows, so an equal size is the fixpoint
        while size != len(differing):
            size = len(differing)
            inner = set(differing)
            self.visit(body, inner)
            differing |= inner

    def _iterations(self, node: Loop, differing: set[Variable]) -> None:
        if node.trips == 0:
            return
        if node.test is not None:
            self.visit(node.test, differing)
        body = iteration(node)
        self.loop(body, differing)
        # Replicas that leave the loop at different iterations have different values of all that it writes.
        if isinstance(node, Decision) and self._is_divergent(node, differing):
            differing |= self._effects(body).writes
            self.loop(body, differing)

    def _branches(self, node: Branch, differing: set[Variable]) -> None:
        is_divergent = self._is_divergent(node, differing)
        differing_after = []
        for branch in node.children():
            differing_after.append(set(differing))
            self.visit(branch, differing_after[-1])
            if is_divergent:  # some replicas run this branch and others do not
                differing_after[-1] |= self._effects(branch).writes
        differing.clear()
        differing.update(*differing_after)

    def _is_divergent(self, node: Decision, differing: set[Variable]) -> bool:
        if not _differ(node.reads, differing):
            return False
        self.divergent[node] = None
        return True


def _write(tensor: Tensor, differing: set[Variable], *, is_same: bool) -> None:
    """Remove or add the variables of a written tensor."""
    if is_same:
        differing -= written_in_full(tensor)
    else:
        differing.update(tensor.variables())


def _differ(tensors: Iterable[Tensor], differing: set[Variable]) -> bool:
    variables = (variable for tensor in tensors for variable in tensor.variables())
    return any(variable.by_replica or variable in differing for variable in variables)
