"""Programs of an engine, compiled together for a graph.

Input: a graph, the user's programs and options. Output: `EnginePrograms`. Programs on templates are expanded to those
of all replicas, and vertices get the copies between IPUs that they need (`copies`). Variables that the host or a
later program may read persist between runs; they occupy memory before, during and after each program.

Programs on tensors of a replicated graph are expanded to programs of the graph that holds all replicas. A step becomes
one step that runs in all replicas in parallel:

    Copy(a, b)               of [replicas, *shape] to [replicas, *shape]; a tensor of the parent goes to each
    StreamIn, StreamOut      of all replicas' data in one transfer
    CrossReplicaCopy         a copy of the senders' tensors, one after the other, to the receivers'
    RemoteIn, RemoteOut      a copy for each replica, with a remote buffer of its own
    a decision               on a tensor of replicas: one for each replica, one after the other, each with the
                             replica's part of its body

A graph without replicated graphs, and its programs, stay as they are.
Limits: control flow on a tensor of replicas runs one replica after the other, so that their cycles add up; inside it
replicas can neither communicate nor share compute sets with the parent's vertices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ipujax.compiled_programs import announce, compile_warnings
from ipujax.poplar.engine.copies import check_stream_sizes, split_large_copies, with_ipu_copies
from ipujax.poplar.engine.engine_options import EngineOptions
from ipujax.poplar.engine.streams import StreamPart
from ipujax.poplar.graph import Graph, Replicas, all_replicas, replicated_graph_of
from ipujax.poplar.program import AbortStream, PrintStream
from ipujax.runtime.analysis import EffectsOf, group_tensors
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.engine import remote_memories
from ipujax.runtime.errors import GraphError, calling_file
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.graph import (
    Copy,
    CrossReplicaCopy,
    Decision,
    Execute,
    Graph as RuntimeGraph,
    HostStream,
    Program,
    RemoteIn,
    RemoteOut,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
    distinct,
    program as nodes,
)
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Tensor, Variable, concat
from ipujax.runtime.verify import map_errors

# Nodes that become one node for each replica.
_PER_REPLICA = (Decision, nodes.RemoteIn, nodes.RemoteOut, nodes.WriteUndef)


def expanded(graph: Graph, programs: Sequence[Program]) -> tuple[RuntimeGraph, tuple[Program, ...]]:
    """Expand programs on templates to programs of all replicas, with the graph that holds these."""
    if not graph.replicated:
        return graph, tuple(programs)
    _check_parents_vertices(graph, programs)
    flat = graph.flat_copy()
    expander = _Expander(graph, flat)
    return flat, tuple(expander.in_all(program) for program in programs)


def _check_parents_vertices(graph: Graph, programs: Sequence[Program]) -> None:
    """Refuse vertices of the parent that are connected to templates."""
    for node in (node for program in programs for node in distinct(program)):
        if isinstance(node, nodes.Execute) and node.compute_set in graph.groups:
            for group in graph.groups[node.compute_set]:
                for access in group.accesses:
                    if replicated_graph_of(graph, access.tensor) is not None:
                        subject = f"a vertex of the parent graph in {node.compute_set.name} is connected to a tensor of"
                        raise GraphError(
                            f"{subject} a replicated graph",
                            where=group.origin,
                            got=access.tensor,
                            hint="graph.get_non_replicated_tensor, or add the vertex to the replicated graph",
                        )


class _Expander:
    """Expands programs of a top-level graph; adds the compute sets of single replicas to the graph that is compiled."""

    def __init__(self, graph: Graph, flat: RuntimeGraph) -> None:
        self._graph = graph
        self._flat = flat
        self._expanded: dict[Any, Any] = {}
        self._streams = {stream.host: stream for stream in graph.streams.values()}
        self._buffers = {buffer.remote: buffer for buffer in graph.remote_buffers.values()}

    def _memoised(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return an expanded part, made once: programs share functions and compute sets by identity."""
        if key not in self._expanded:
            self._expanded[key] = make()
        return self._expanded[key]

    def in_all(self, node: Program) -> Program:
        """Return the node for all replicas."""
        return self._memoised(node, lambda: self._in_all_replicas(node))

    def _in_all_replicas(self, node: Program) -> Program:
        """Expand a step of the parent graph: one on tensors of a replicated graph is done in each of its replicas."""
        graph = replicated_graph_of(self._graph, *nodes.direct_tensors(node))
        if graph is not None and isinstance(node, _PER_REPLICA):
            return nodes.Sequence(*(self.in_replica_of(node, graph, replica) for replica in range(graph.replicas)))
        match node:
            case nodes.Copy(source, destination) if graph is not None:
                self._check_receiver(node, destination)
                return replace(node, source=self._stack(source, graph), destination=self._stack(destination, graph))
            case nodes.CrossReplicaCopy():
                return self._cross_replica_copy(node, graph)
            case nodes.StreamIn(stream, tensor) | nodes.StreamOut(tensor, stream):
                return self._expand_transfer(node, stream, tensor, graph)
            case nodes.RemoteIn(buffer) | nodes.RemoteOut(_, buffer) if self._buffers[buffer].replicas > 1:
                message = f"remote buffer {buffer.name} of a replicated graph is used with a tensor of the parent"
                raise GraphError(message, where=node.origin, hint="graph.add_remote_buffer")
        return self._visit_children(node, self.in_all, None)

    def _check_receiver(self, node: Any, tensor: Tensor) -> None:
        if replicated_graph_of(self._graph, tensor) is None:
            message = f"{type(node).__name__}: all replicas would write one tensor of the parent graph"
            hint = "a tensor of the replicated graph, or graph.get_non_replicated_tensor for all of their values"
            raise GraphError(message, where=getattr(node, "origin", None), got=tensor, hint=hint)

    def _stack(self, tensor: Tensor, graph: Replicas) -> Tensor:
        """Return the tensor of all replicas, [replicas, *shape]; a tensor of the parent is broadcast."""
        if replicated_graph_of(self._graph, tensor) is not None:
            return all_replicas(self._graph, tensor)
        return tensor.expand_dims(0).broadcast(graph.replicas, 0)

    def _cross_replica_copy(self, node: nodes.CrossReplicaCopy, graph: Replicas | None) -> Program:
        """Return a copy between replicas as one copy between the senders' and the receivers' tensors, in order."""
        if graph is None:
            return node
        for error in map_errors(node, graph.replicas):
            raise error
        for tensor in (node.source, node.destination):
            self._check_receiver(node, tensor)
        if not node.replica_map:  # no replica sends: there is nothing to concatenate
            return nodes.Sequence()
        sources = [graph.in_replica(node.source, sender).expand_dims(0) for sender, _ in node.replica_map]
        destinations = [graph.in_replica(node.destination, receiver).expand_dims(0) for _, receiver in node.replica_map]
        return nodes.Copy(concat(sources), concat(destinations), node.name, node.origin, is_collective=True)

    def _expand_transfer(
        self, node: nodes.StreamIn | nodes.StreamOut, stream: nodes.HostStream, tensor: Tensor, graph: Any
    ) -> Program:
        """Expand a transfer to or from the host: of a tensor of replicas one stream has all of them, by row."""
        source = self._streams.get(stream.transfer if isinstance(stream, StreamPart) else stream)
        if source is not None and (source.replicas > 1) != (graph is not None):
            places = ("the replicated graph", "the parent graph")
            of_stream, of_tensor = places if source.replicas > 1 else places[::-1]
            message = f"stream {source.handle} of {of_stream} is used with a tensor of {of_tensor}"
            raise GraphError(message, where=node.origin, hint="add the stream to the graph of the tensor")
        if graph is None:
            return node
        stream_of_all = self._memoised(stream, lambda: self._stream_of_all(stream, graph.replicas))
        tensor = all_replicas(self._graph, tensor)
        if isinstance(node, nodes.StreamIn):
            return nodes.StreamIn(stream_of_all, tensor, node.origin)
        return nodes.StreamOut(tensor, stream_of_all, node.origin)

    def _stream_of_all(self, stream: nodes.HostStream, replicas: int) -> nodes.HostStream:
        # Prints and aborts show each replica's part under its number.
        shape = (replicas, *stream.shape)
        if isinstance(stream, PrintStream | AbortStream):
            return replace(stream, shape=shape, replicated=True)
        return replace(stream, shape=shape)

    def in_replica_of(self, node: Program, graph: Replicas, replica: int) -> Program:
        """Return the node for one replica."""
        return self._memoised((node, graph, replica), lambda: self._in_replica(node, graph, replica))

    def _in_replica(self, node: Program, graph: Replicas, replica: int) -> Program:
        """Return a step of a replicated graph with the tensors of one replica in the place of the graph's own."""

        def instance(tensor: Tensor) -> Tensor:
            return graph.in_replica(tensor, replica)

        match node:
            case nodes.Execute(compute_set):
                key = compute_set, graph, replica
                return nodes.Execute(self._memoised(key, lambda: self._make_compute_set(compute_set, graph, replica)))
            case nodes.Copy(source, destination):
                self._check_receiver(node, destination)
                return replace(node, source=instance(source), destination=instance(destination))
            case nodes.WriteUndef(destination):
                self._check_receiver(node, destination)
                return nodes.WriteUndef(instance(destination))
            case nodes.RemoteIn(buffer, destination, offset):
                self._check_receiver(node, destination)
                offset = None if offset is None else instance(offset)
                return nodes.RemoteIn(self._buffer(buffer, replica), instance(destination), offset, node.origin)
            case nodes.RemoteOut(source, buffer, offset):
                if self._buffers[buffer].replicas == 1:
                    message = f"all replicas would write remote buffer {buffer.name} of the parent graph"
                    raise GraphError(message, where=node.origin, hint="replicated_graph.add_remote_buffer")
                offset = None if offset is None else instance(offset)
                return nodes.RemoteOut(instance(source), self._buffer(buffer, replica), offset, node.origin)
            case nodes.StreamIn() | nodes.StreamOut() | nodes.CrossReplicaCopy():
                raise GraphError(
                    f"{type(node).__name__} under control flow on a tensor of replicas",
                    where=node.origin,
                    expected="control flow on a tensor of the parent graph",
                )
            case Decision():
                node = node.with_decider(instance(node.decider))
        return self._visit_children(node, lambda child: self.in_replica_of(child, graph, replica), (graph, replica))

    def _buffer(self, buffer: nodes.RemoteBuffer, replica: int) -> nodes.RemoteBuffer:
        if self._buffers[buffer].replicas == 1:
            return buffer
        memory = replace(buffer.memory, name=f"{buffer.name} of replica {replica}")
        return self._memoised((buffer, replica), lambda: replace(buffer, memory=memory))

    def _make_compute_set(self, compute_set: nodes.ComputeSet, graph: Replicas, replica: int) -> nodes.ComputeSet:
        """Make a compute set of the vertices of one replica in a compute set."""
        groups = [graph.group_in_replica(group, replica) for group in graph.groups[compute_set]]
        if len(self._flat.groups[compute_set]) != graph.replicas * len(groups):
            message = f"compute set {compute_set.name} has vertices of the parent graph too"
            hint = "a separate compute set, because it runs under control flow on a tensor of replicas"
            raise GraphError(message, where=compute_set.origin, hint=hint)
        instance = nodes.ComputeSet(compute_set.name, compute_set.origin)
        self._flat.groups[instance] = groups
        if compute_set in self._flat.notes.fallbacks:
            self._flat.notes.fallbacks[instance] = self._flat.notes.fallbacks[compute_set]
        return instance

    def _visit_children(self, node: Program, visit: Callable[[Program], Program], key: Any) -> Program:
        """Apply `visit` to the child programs of a node, and to the body of a called function once for each key."""
        if isinstance(node, nodes.Call):
            body = node.function.body
            function = self._memoised((node.function, key), lambda: replace(node.function, body=visit(body)))
            return nodes.Call(function)
        return node.rebuild([visit(child) for child in node.children()])


@dataclass(frozen=True, slots=True, eq=False)
class EnginePrograms:
    """Programs of an engine, as they run.

    Args:
        graph: the user's.
        programs: of all replicas.
        persistent: the variables whose values persist between runs.
        executable: all programs, each run once.
        readable: tensors that the host reads, by handle.
        writable: tensors that the host writes, by handle.
    """

    graph: Graph
    programs: tuple[Program, ...]
    persistent: frozenset[Variable]
    executable: Executable
    readable: Mapping[str, Tensor]
    writable: Mapping[str, Tensor]

    @classmethod
    def of(cls, graph: Graph, user_programs: Sequence[Program], options: EngineOptions) -> EnginePrograms:
        """Check, expand and compile programs.

        Raises:
            VerifyError, TileMemoryError, EngineError, GraphError: see `Engine`.
        """
        _check_parts(graph, user_programs)
        if options.split_large_copies:
            limit_bytes = graph.target.stream_buffer_limit_bytes
            user_programs = [split_large_copies(program, limit_bytes) for program in user_programs]
        machine, programs = with_ipu_copies(*expanded(graph, user_programs))
        check_stream_sizes(machine, ProgramSequence(*programs))
        persistent = _find_persistent(graph, machine, programs)
        executable = _compile(machine, programs, persistent, options)
        return cls(graph, programs, persistent, executable, dict(graph.host_reads), dict(graph.host_writes))


def _check_parts(graph: Graph, programs: Sequence[Program]) -> None:
    """Refuse programs with compute sets, streams or remote buffers of another graph."""
    # Tensors of another graph are refused by the verifier, and where they are added.
    streams = {stream.host for stream in graph.streams.values()}
    buffers = {buffer.remote for buffer in graph.remote_buffers.values()}
    for node in (node for program in programs for node in distinct(program)):
        match node:
            case Execute(compute_set):
                graph.check_compute_set(compute_set)
            # Streams of other classes are made by programs, such as those that print, and belong to no graph.
            case StreamIn(stream) | StreamOut(_, stream) if type(stream) is HostStream and stream not in streams:
                raise _foreign(f"stream {stream.name}", node, "graph.add_host_to_device_fifo or its counterpart")
            case RemoteIn(buffer) | RemoteOut(_, buffer) if buffer not in buffers:
                raise _foreign(f"remote buffer {buffer.name}", node, "graph.add_remote_buffer")


def _foreign(name: str, node: StreamIn | StreamOut | RemoteIn | RemoteOut, hint: str) -> GraphError:
    return GraphError(
        f"{name} belongs to another graph", where=node.origin, expected="one of the engine's graph", hint=hint
    )


def _find_persistent(graph: Graph, machine: RuntimeGraph, programs: Sequence[Program]) -> frozenset[Variable]:
    """Return the variables whose values persist between runs."""
    effects = EffectsOf(machine)
    handles = [*graph.host_reads.values(), *graph.host_writes.values()]
    variables = {v for tensor in handles for v in tensor.variables()} | set(graph.initial_values)
    written: set[Variable] = set()
    for program in programs:
        variables |= effects(program).reads
        variables |= set(remote_memories(program))
        written |= effects(program).writes
    # A result that nothing on the tiles reads would be dead code, but the host may ask for it.
    unread = written - _find_read_on_tiles(machine, ProgramSequence(*programs))
    return frozenset(v for v in variables | unread if not v.is_constant)


def _find_read_on_tiles(machine: RuntimeGraph, program: Program) -> set[Variable]:
    """Return the variables that vertices or copies between tensors read."""
    variables: set[Variable] = set()
    for node in distinct(program):
        tensors: list[Tensor] = []
        if isinstance(node, Execute):
            groups = machine.groups.get(node.compute_set, ())
            tensors = [t for group in groups for t in group_tensors(group)[0]]
        elif isinstance(node, (Copy, CrossReplicaCopy, RemoteOut)):
            tensors = [node.source]
        variables.update(v for tensor in tensors for v in tensor.variables())
    return variables


def _compile(
    machine: RuntimeGraph, programs: Sequence[Program], persistent: frozenset[Variable], options: EngineOptions
) -> Executable:
    """Compile all programs to one executable."""
    # Resident streams in and out of each program keep persistent variables live around it, at no cost.
    sequence = ProgramSequence()
    lasting = [v for v in machine.variables if v in persistent]
    for program in programs:
        streams = [(HostStream(v.name, v.shape, v.dtype, resident=True), Tensor.of(v)) for v in lasting]
        reads = (StreamIn(stream, tensor, v.origin) for v, (stream, tensor) in zip(lasting, streams, strict=True))
        writes = (StreamOut(tensor, stream, v.origin) for v, (stream, tensor) in zip(lasting, streams, strict=True))
        sequence.add(ProgramSequence(*reads, program, *writes))
    compiler_options = Options(
        exact_splits=options.exact_splits,
        allow_out_of_memory=options.allow_out_of_memory,
        verify_undefined=False,
    )
    with collecting_rarely():
        executable = compile(machine, sequence, options=compiler_options).named("", calling_file())
    announce("engine", compile_warnings(executable), lambda: Profile(executable))
    return executable
