"""Divergence: variables that may differ between replicas, and decisions on which replicas may therefore disagree.

Input: a graph and a program. Output: for each decision of data-dependent control on which some may disagree the classes
of replicas that agree (`agreement`).

Replicas run one program on memory of their own, so a value differs where it comes from one that does: a constant of
each replica, a stream that is not broadcast, memory from before the run, a cycle counter, or a copy
between replicas. Replicas that receive equal values have equal values, and so have those of one group of a `Collective`
after its rounds. Results of values agree where all of these do; what is written under a decision agrees where the
decision does too. The analysis walks the program, to a fixpoint in loops; writing all of a variable begins anew.
Limits: by whole variables; values that agree by chance count as different.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ipujax.runtime.analysis import agreement
from ipujax.runtime.analysis.agreement import Classes
from ipujax.runtime.analysis.effects import EffectsOf, computed_from, written_in_full
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
    RemoteOut,
    StreamIn,
    StreamOut,
    WriteUndef,
    distinct,
    iteration,
)
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Concat, Tensor, Variable

Differing = dict[Variable, Classes]  # the variables on which not all replicas agree: classes of those that do


def joins_replicas(program: Program) -> bool:
    """Check whether replicas that run a program exchange data in it, with the host or with each other."""
    return any(isinstance(node, (StreamIn, StreamOut, CrossReplicaCopy)) for node in distinct(program))


def meeting_groups(program: Program, replicas: int) -> list[list[int]]:
    """Return the groups of replicas that meet: all for a host stream, but one of a call, else those copies connect."""
    pairs: list[tuple[int, ...]] = []
    for node in distinct(program):
        if isinstance(node, (StreamIn, StreamOut)) and not isinstance(node.stream, CallStream):
            return [list(range(replicas))]
        if isinstance(node, CrossReplicaCopy):
            pairs += node.replica_map
    return agreement.joined(dict.fromkeys(pairs), replicas)


def divergent_decisions(graph: Graph, program: Program, effects: EffectsOf) -> dict[Decision, Classes]:
    """Return the decisions of a program on which replicas may disagree, and those that agree, in program order."""
    if graph.replication_factor == 1:
        return {}
    walk = Divergence(graph, effects)
    walk.visit(program, walk.before(program))
    return walk.divergent


def _remote_memory(program: Program, *kinds: type[RemoteIn | RemoteOut]) -> frozenset[Variable]:
    return frozenset(node.buffer.memory for node in distinct(program) if isinstance(node, kinds))


def _parts_of(source: Tensor, destination: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut a copy at the parts of a concatenation of rows: each moves values on which other replicas may agree."""
    bounds = {0}
    for tensor in (source, destination):
        if isinstance(tensor.node, Concat) and tensor.node.axis == 0:
            bounds.update(tensor.node.bounds)
    spans = pairwise(sorted(bounds))
    return [(source[a:b], destination[a:b]) for a, b in spans] if len(bounds) > 1 else [(source, destination)]


class Divergence:
    """Walk through a program; `differing` has, at each point of it, the variables that may differ.

    Attributes:
        divergent: decisions so far on which replicas may disagree, in order, with the classes of replicas that agree.
    """

    def __init__(self, graph: Graph, effects: EffectsOf) -> None:
        self._graph = graph
        self._replicas = graph.replication_factor
        self._effects = effects
        self._apart = agreement.apart(self._replicas)
        self._of_constants: dict[Variable, Classes] = {}  # remembered, of constants by replica
        self._of_calls: dict[HostCall, Classes] = {}  # of the operands of a call so far
        self._parts: dict[Copy, list[tuple[Tensor, Tensor]]] = {}  # remembered results of `_parts_of`
        self.divergent: dict[Decision, Classes] = {}

    def before(self, program: Program) -> Differing:
        """Return the variables that may differ before a program: memory from before the run, which it reads first."""
        differing = {v: self._apart for v in self._effects(program).reads if not v.is_constant}
        for memory in _remote_memory(program, RemoteIn, RemoteOut):
            source = self._graph.off_chip[memory].filled_from if memory in self._graph.off_chip else None
            if source is not None:
                self._refine((memory,), self._of_blocks(source.blocks, is_same=source.broadcast), differing)
            elif memory not in self._graph.off_chip:  # that of the graph is written first
                self._refine((memory,), self._apart, differing)
        return differing

    def visit(self, node: Program, differing: Differing) -> None:
        """Walk a node; changes `differing`."""
        match node:
            case Collective():
                of_inputs = [self._classes([x], differing) for x in node.inputs]
                self._block(node, differing)
                for tensor, of_input in zip(node.outputs, of_inputs, strict=True):
                    of_output = agreement.of_results(node.senders, of_input, has_ranks=node.has_ranks)
                    self._write(tensor, differing, of_output)
            case Block():
                self._block(node, differing)
            case Execute(compute_set):
                outputs = [
                    (tensor, self._apart if group.codelet.reads_clock else self._classes(operands, differing))
                    for group in self._graph.groups[compute_set]
                    for tensor, operands in computed_from(group)
                ]
                # Kills first: a result of differing operands differs again, even if it is written in full.
                for variable in self._effects(node).kills:
                    differing.pop(variable, None)
                for tensor, classes in outputs:
                    self._refine(tensor.variables(), classes, differing)
            case Copy():
                if node not in self._parts:
                    self._parts[node] = _parts_of(node.source, node.destination)
                of_sources = [self._classes([source], differing) for source, _ in self._parts[node]]
                for (_, destination), of_source in zip(self._parts[node], of_sources, strict=True):
                    self._write(destination, differing, of_source)
            case StreamOut(source, CallStream(call=HostCall(is_pure=True) as call, number=number)):
                # The operands of a call come one after the other, its results right behind.
                before = self._of_calls[call] if number else agreement.same(self._replicas)
                self._of_calls[call] = agreement.common((before, self._classes([source], differing)), self._replicas)
            case StreamIn(CallStream(call=HostCall() as call), destination):
                of_groups = agreement.by_key(replica // call.sharing for replica in range(self._replicas))
                self._write(destination, differing, self._of_calls[call] if call.is_pure else of_groups)
            case StreamIn(stream, destination):
                self._write(destination, differing, self._of_blocks(stream.blocks, is_same=stream.broadcast))
            case WriteUndef(destination):
                self._write(destination, differing, agreement.same(self._replicas))
            case RemoteIn(buffer, destination, offset):
                read = [Tensor.of(buffer.memory), *(() if offset is None else (offset,))]
                self._write(destination, differing, self._classes(read, differing))
            case RemoteOut(source, buffer, offset):
                written = [source, *(() if offset is None else (offset,))]
                self._refine((buffer.memory,), self._classes(written, differing), differing)
            case CrossReplicaCopy():
                for way in node.ways:
                    sent = self._classes([way.source], differing)
                    classes_here = self._classes([way.destination], differing)
                    received = agreement.by_key(
                        (True, classes_here[replica]) if sender is None else (False, sent[sender])
                        for replica, sender in enumerate(way.sources(self._replicas))
                    )
                    self._write(way.destination, differing, received)
            case Loop():
                self._visit_loop(node, differing)
            case Branch():
                self._visit_branches(node, differing)

    def _block(self, node: Block, differing: Differing) -> None:
        for child in node.children():
            self.visit(child, differing)

    def loop(self, body: Program, differing: Differing) -> None:
        """Walk a body until nothing new differs after it: `differing`, which changes, then holds in all iterations."""
        before: Differing | None = None
        while before != differing:  # a fixed point is reached, as classes of replicas only split
            before = dict(differing)
            inner = dict(differing)
            self.visit(body, inner)
            self._join(differing, inner)

    def _visit_loop(self, node: Loop, differing: Differing) -> None:
        """Walk a loop; where replicas may run different numbers of iterations, all that it writes differs."""
        if node.trips == 0:
            return
        if node.test is not None:
            self.visit(node.test, differing)
        body = iteration(node)
        self.loop(body, differing)
        if not isinstance(node, Decision):
            return
        before: Differing | None = None
        # Replicas that leave the loop at different iterations have different values of all that it writes.
        while (classes := self._decided(node, differing)) is not None and before != differing:
            before = dict(differing)
            self._refine(self._written(body), classes, differing)
            self.loop(body, differing)

    def _visit_branches(self, node: Branch, differing: Differing) -> None:
        """Walk all branches from the same state; afterwards replicas agree where they do behind each branch."""
        classes = self._decided(node, differing)
        outcomes = []
        for branch in node.children():
            outcomes.append(dict(differing))
            self.visit(branch, outcomes[-1])
            if classes is not None:  # some replicas run this branch and others do not
                self._refine(self._written(branch), classes, outcomes[-1])
        differing.clear()
        for outcome in outcomes:
            self._join(differing, outcome)

    def _decided(self, node: Decision, differing: Differing) -> Classes | None:
        """Return the classes of replicas that agree on a decision; None if all do."""
        classes = self._classes(node.reads, differing)
        if not any(classes):
            return None
        self.divergent[node] = agreement.common((classes, self.divergent.get(node, classes)), self._replicas)
        return classes

    def _written(self, program: Program) -> frozenset[Variable]:
        """Return the variables and the remote memory that a program writes."""
        return self._effects(program).writes | _remote_memory(program, RemoteOut)

    def _classes(self, tensors: Iterable[Tensor], differing: Differing) -> Classes:
        """Return the classes of a value computed from tensors."""
        return agreement.common(self._of_variables(tensors, differing), self._replicas)

    def _of_variables(self, tensors: Iterable[Tensor], differing: Differing) -> Iterator[Classes]:
        """Yield the classes of replicas that agree on each variable of tensors; nothing for those on which all do."""
        for variable in (variable for tensor in tensors for variable in tensor.variables()):
            if variable.by_replica:
                if variable not in self._of_constants:
                    self._of_constants[variable] = agreement.of_rows(variable.value)
                yield self._of_constants[variable]
            elif variable in differing:
                yield differing[variable]

    def _of_blocks(self, blocks: Classes | None, *, is_same: bool) -> Classes:
        if blocks is not None:
            return agreement.by_key(blocks)
        return agreement.same(self._replicas) if is_same else self._apart

    def _write(self, tensor: Tensor, differing: Differing, classes: Classes) -> None:
        """Write a tensor: whole variables begin anew, others agree where they did before, too."""
        for variable in written_in_full(tensor):
            differing.pop(variable, None)
        self._refine(tensor.variables(), classes, differing)

    def _refine(self, variables: Iterable[Variable], classes: Classes, differing: Differing) -> None:
        """Split the classes of variables."""
        if not any(classes):
            return
        for variable in variables:
            old = differing.get(variable, classes)
            differing[variable] = old if old == classes else agreement.common((old, classes), self._replicas)

    def _join(self, differing: Differing, other: Differing) -> None:
        """Split the classes of variables by those that they may have instead."""
        for variable, classes in other.items():
            self._refine((variable,), classes, differing)
