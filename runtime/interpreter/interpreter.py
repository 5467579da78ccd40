"""The tile interpreter: a program run tile by tile and vertex by vertex, the living definition of the machine.

Input: a graph, a program and the values of its input streams. Output: the values of its output streams. A compute set
is an exchange of operands, its vertices one after the other in a random order, and an exchange of results; a vertex
reads and writes the memory of its tile only. An `InterpreterError` is anything that has no meaning on the machine: a
read of an element that was not delivered or never written, two vertices that race, a result that does not reach the
tile it is mapped to.

The engine, the exchange plan and the verifier are tested against it.
Limits: slow and literal; for machines of at most 64 tiles and small tensors. One IPU's exchange reaches all tiles; that
vertices stay on their IPU is a rule of the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import (
    ComputeSet,
    Copy,
    Decision,
    Execute,
    Graph,
    HostStream,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    Sequence,
    StreamIn,
    StreamOut,
    Sync,
    VertexGroup,
    Wait,
    WriteUndef,
    direct_tensors,
    distinct,
)
from ipujax.runtime.host import CallStream, Host, HostCall
from ipujax.runtime.interpreter.replicated import Replicas, Runner
from ipujax.runtime.interpreter.tile_memory import (
    Actor,
    Messages,
    RaceLog,
    TileMemory,
    from_raw,
    list_messages,
    raw_empty,
    to_raw,
)
from ipujax.runtime.interpreter.tile_vertex import Vertex, Views, check_writable, run_vertex, type_name, vertices_of
from ipujax.runtime.memory.frames import frames_of
from ipujax.runtime.memory.overwritten_operands import with_results_in_place
from ipujax.runtime.tensor import Tensor, Variable, is_key_dtype

MAX_TILES = 64

# (graph, group, number of the field, results) -> messages of operands before the compute set, or of results after it.
ExchangePlan = Callable[[Graph, VertexGroup, int, bool], Messages]


def interpret(
    graph: Graph,
    program: Program,
    inputs: Mapping[HostStream, Any],
    *,
    seed: int = 0,
    exchange: ExchangePlan = list_messages,
    memory: Mapping[Variable, Any] | None = None,
    host: Host | None = None,
) -> dict[HostStream, Any]:
    """Run a program tile by tile and vertex by vertex.

    Args:
        graph: variables, mappings and vertices, for a target of at most 64 tiles.
        program: the program.
        inputs: an array of the stream's shape and dtype for each stream that the program reads. With several replicas
            these, the arrays of `memory` and the results have a leading axis of replicas; broadcast streams have none.
        seed: seed of the order in which the vertices of a compute set run.
        exchange: the exchange plan, which delivers operands and results.
        memory: arrays of variables at the start, zeros for the others; None if unwritten elements must not be read.
        host: answers transfers one by one, instead of `inputs` and the results; its errors pass through.

    Returns:
        The last value of each output stream that was written: NumPy arrays, or JAX arrays of PRNG keys.

    Raises:
        InterpreterError: an access that the machine does not allow, with vertex, tile, variable and index.
        ArgumentError: the target is too large, or an input is missing or of another shape or dtype.
    """
    if graph.target.num_tiles > MAX_TILES:
        got = f"{graph.target.num_tiles} tiles"
        raise ArgumentError("the tile interpreter is for small targets", expected=f"≤ {MAX_TILES} tiles", got=got)
    rng = np.random.default_rng(seed)
    replicas = graph.replication_factor
    if replicas == 1:
        machines = [_Machine(graph, program, inputs, rng, exchange, host)]
    else:
        by_replica = [{s: v if s.broadcast else v[r] for s, v in inputs.items()} for r in range(replicas)]
        # With a host, `Replicas` itself makes the transfers of all machines.
        machines = [_Machine(graph, program, by_replica[r], rng, exchange, None, r) for r in range(replicas)]
    if memory is not None:
        for number, machine in enumerate(machines):
            machine.fill(memory if replicas == 1 else {v: value[number] for v, value in memory.items()})
    frames = with_results_in_place(graph, frames_of(liveness(program, EffectsOf(graph))))
    for machine in machines:  # not before: at the start all variables have the values of `memory`
        machine.share(frames.memory)
    runner = machines[0] if replicas == 1 else Replicas(machines, host)
    runner.run(program)
    return runner.outputs


class _Machine(Runner):
    """The state of a run: the memory of all tiles and the values sent to the host.

    Args:
        graph: the graph.
        program: the whole program, whose variables get memory.
        inputs: values of the input streams.
        rng: chooses the order of vertices.
        exchange: the exchange plan.
        host: answers transfers; None if `inputs` has their values.
        replica: number of the replica.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        inputs: Mapping[HostStream, Any],
        rng: np.random.Generator,
        exchange: ExchangePlan,
        host: Host | None,
        replica: int = 0,
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._rng = rng
        self._exchange = exchange
        self._host = host
        tensors = [tensor for node in distinct(program) for tensor in _tensors(graph, node)]
        self._variables = list(dict.fromkeys(v for tensor in tensors for v in tensor.variables()))
        self._memory = TileMemory(graph, self._variables, replica)
        # The host fills buffers of a graph before a run, and reads them after it.
        self._remote: dict[Variable, np.ndarray] = {}
        self._views = Views()
        self._call_operands: dict[HostCall, list[Any]] = {}
        self._call_results: dict[HostCall, list[np.ndarray]] = {}
        self.outputs: dict[HostStream, Any] = {}
        for memory, buffer in graph.off_chip.items():
            initial = None if buffer.filled_from is None else _input(buffer.filled_from, inputs)
            values = np.zeros(memory.shape, memory.dtype) if initial is None else np.array(initial)
            self._remote[memory] = values.reshape(memory.shape)
            if buffer.read_into is not None:
                # A view of the array, not a copy: the run writes to it.
                self.outputs[buffer.read_into] = self._remote[memory].reshape(buffer.read_into.shape)

    def fill(self, memory: Mapping[Variable, Any]) -> None:
        """Write all variables but constants; those not in `memory` get zeros."""
        for variable in self._variables:
            if not variable.is_constant:
                raw = raw_empty(variable.dtype, variable.shape)
                raw = to_raw(memory[variable]) if variable in memory else np.zeros_like(raw)
                self.store(Tensor.of(variable), raw, Sequence())
        self._remote.update({v: np.array(value) for v, value in memory.items() if v not in self._variables})

    def share(self, memory: Mapping[Variable, Variable]) -> None:
        """Let variables take the memory of others, as `Frames.memory`: from now on a write destroys what was there."""
        self._memory.share(memory)

    def step(self, program: Program) -> None:
        """Run a node other than control flow."""
        match program:
            case Execute(compute_set):
                self._run_compute_set(compute_set)
            case Copy(source, destination):
                self.store(destination, self.load(source, program), program)
            case StreamIn(CallStream(call=HostCall() as call, number=number), destination):
                self.store(destination, to_raw(self._call_results[call][number]), program)
            case StreamOut(source, CallStream(call=HostCall() as call)):
                self._receive_operand(call, from_raw(self.load(source, program), source.dtype))
            case StreamIn(stream, destination):
                raw = _input(stream, self._inputs) if self._host is None else to_raw(self._host.pull(stream))
                self.store(destination, raw, program)
            case RemoteIn():
                self._remote_in(program)
            case RemoteOut():
                self._remote_out(program)
            case Sync() | Wait():
                pass  # the interpreter runs one step after the other, without time
            case WriteUndef(destination):
                self.store(destination, raw_empty(destination.dtype, destination.shape), program)
            case StreamOut(source, stream):
                raw = self.load(source, program)
                if self._host is not None:
                    self._host.push(stream, raw)
                    return
                self.outputs[stream] = from_raw(raw, source.dtype) if is_key_dtype(source.dtype) else raw
            case _:
                raise AssertionError(f"unknown program node {program!r}")

    def _receive_operand(self, call: HostCall, value: Any) -> None:
        """Store the next operand of a call of the host; the last one makes the call."""
        operands = self._call_operands.setdefault(call, [])
        operands.append(value)
        if len(operands) == call.num_operands:
            self._call_results[call] = call(self._call_operands.pop(call))

    def _buffer_array(self, buffer: RemoteBuffer) -> np.ndarray:
        memory = buffer.memory
        return self._remote.setdefault(memory, np.zeros(memory.shape, memory.dtype))

    def _remote_in(self, step: RemoteIn) -> None:
        """Load a remote buffer, or the rows that `offset` names, to tiles."""
        array = self._buffer_array(step.buffer)
        value = array
        if step.offset is not None:
            rows = self.load(step.offset, step)
            # A row outside of the buffer reads zeros and is not written, as in the engine.
            inside = (rows >= 0) & (rows < len(array))
            value = np.zeros(step.destination.shape, array.dtype)
            value[inside] = array[rows[inside]]
        self.store(step.destination, value, step)

    def _remote_out(self, step: RemoteOut) -> None:
        """Store a tensor to a remote buffer, or to the rows that `offset` names."""
        array = self._buffer_array(step.buffer)
        value = self.load(step.source, step)
        if step.offset is None:
            array[...] = value
            return
        rows = self.load(step.offset, step)
        inside = (rows >= 0) & (rows < len(array))
        array[rows[inside]] = value[inside]

    def choice(self, node: Decision) -> int:
        return node.choice(self.load(node.decider, node).item())

    def load(self, tensor: Tensor, step: Program) -> np.ndarray:
        """Return the raw value of a tensor, from the tiles that its elements are mapped to."""
        view = self._views.of_tensor(tensor)
        actor = _actor(step)
        raw = raw_empty(tensor.dtype, view.which.shape)
        for variable, mask, elements in view.parts():
            raw[mask] = self._memory.read(self._memory.home(variable)[elements], variable, elements, actor)
        return raw.reshape(view.shape)

    def store(self, tensor: Tensor, raw: np.ndarray, step: Program) -> None:
        """Write a raw value to the tiles that the elements of a tensor are mapped to."""
        check_writable(tensor, _actor(step))
        for variable, mask, elements in self._views.of_tensor(tensor).parts():
            self._memory.write(self._memory.home(variable)[elements], variable, elements, raw.ravel()[mask])
        self._memory.retire()

    def _run_compute_set(self, compute_set: ComputeSet) -> None:
        """Run a compute set: exchange of operands, vertices in random order, exchange of results."""
        groups = self._graph.groups[compute_set]
        races = RaceLog()
        actor = Actor(compute_set.name, where=compute_set.origin)
        vertices: list[Vertex] = []
        for group in groups:
            vertices += vertices_of(group, compute_set.name, len(vertices))
        self._exchange_fields(groups, actor, results=False)
        for number in self._rng.permutation(len(vertices)):
            run_vertex(vertices[number], self._memory, races, self._views)
        # All results leave after the last vertex: no vertex reads a result of its own compute set.
        self._exchange_fields(groups, actor, results=True)
        self._memory.check_results_home(actor)
        self._memory.retire()

    def _exchange_fields(self, groups: list[VertexGroup], actor: Actor, *, results: bool) -> None:
        """Deliver the operands of a compute set, or its results."""
        for group in (group for group in groups if group.num_vertices):
            for number, field in enumerate(group.codelet.fields):
                if field.is_written if results else field.is_read:
                    messages = self._exchange(self._graph, group, number, results)
                    self._memory.deliver(messages, actor, to_home=results)


def _actor(step: Program) -> Actor:
    return Actor(type(step).__name__, where=getattr(step, "origin", None))


def _input(stream: HostStream, inputs: Mapping[HostStream, Any]) -> np.ndarray:
    """Return the raw value of an input stream, after a check of its shape and dtype."""
    if stream not in inputs:
        raise ArgumentError(f"no value for input stream {stream.name}")
    value = inputs[stream]
    value = value if hasattr(value, "dtype") else np.asarray(value, stream.dtype)
    expected = type_name(stream.dtype, stream.shape)
    got = type_name(value.dtype, value.shape)
    if expected != got:
        raise ArgumentError(f"input stream {stream.name} has the wrong type", expected=expected, got=got)
    return to_raw(value)


def _tensors(graph: Graph, node: Program) -> list[Tensor]:
    """Return the tensors that one node reads or writes, itself or through vertices."""
    groups = graph.groups[node.compute_set] if isinstance(node, Execute) else ()
    return [*direct_tensors(node), *(access.tensor for group in groups for access in group.accesses)]
