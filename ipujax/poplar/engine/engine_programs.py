"""Programs of an engine, compiled together for a graph.

Input: a graph, the user's programs and options. Output: `EnginePrograms`. Programs on templates are expanded to those
of all replicas, and vertices get the copies between IPUs that they need (`ipu_copies`). Variables that the host or a
later program may read persist between runs; they occupy memory before, during and after each program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ipujax.compiled_programs import announce, bound_warnings
from ipujax.poplar.engine.copies import check_stream_sizes, split_large_copies, with_ipu_copies
from ipujax.poplar.engine.engine_options import EngineOptions
from ipujax.poplar.engine.expand import expanded
from ipujax.poplar.graph import Graph
from ipujax.runtime.analysis import EffectsOf, group_tensors
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.engine import remote_memories
from ipujax.runtime.errors import GraphError, calling_file
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.graph import (
    Copy,
    CrossReplicaCopy,
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
)
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Tensor, Variable


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
    kept = [v for v in machine.variables if v in persistent]
    for program in programs:
        streams = [(HostStream(v.name, v.shape, v.dtype, resident=True), Tensor.of(v)) for v in kept]
        reads = (StreamIn(stream, tensor, v.origin) for v, (stream, tensor) in zip(kept, streams, strict=True))
        writes = (StreamOut(tensor, stream, v.origin) for v, (stream, tensor) in zip(kept, streams, strict=True))
        sequence.add(ProgramSequence(*reads, program, *writes))
    compiler_options = Options(
        exact_splits=options.exact_splits,
        allow_out_of_memory=options.allow_out_of_memory,
        verify_undefined=False,
    )
    with collecting_rarely():
        executable = compile(machine, sequence, options=compiler_options).named("", calling_file())
    announce("engine", bound_warnings(executable), lambda: Profile(executable))
    return executable
