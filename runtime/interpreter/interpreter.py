"""The tile interpreter: a program run tile by tile and vertex by vertex, the living definition of the machine.

Input: a graph, a program and the values of its input streams. Output: the values of its output streams. A compute set
is an exchange of operands, its vertices one after the other in a random order, and an exchange of results; a vertex
sees the memory of its tile and nothing else. What has no meaning on the machine raises `InterpreterError`: reading what
was not delivered or never written, two vertices that race, a result that does not reach its owner.

The engine, the exchange plan and the verifier are tested against it.
Limits: slow and literal; for machines of at most 64 tiles and small tensors. One IPU's exchange reaches all tiles; that
vertices stay on their IPU is a rule of the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

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
    distinct,
    own_tensors,
)
from ipujax.runtime.host import CallStream, Host, HostCall
from ipujax.runtime.interpreter.messages import messages
from ipujax.runtime.interpreter.replicated import Replicas, Runner
from ipujax.runtime.interpreter.tile_memory import Actor, Messages, RaceLog, TileMemory, from_raw, raw_empty, to_raw
from ipujax.runtime.interpreter.tile_vertex import Vertex, Views, check_writable, run_vertex, type_name, vertices_of
from ipujax.runtime.tensor import Tensor, Variable, is_key_dtype

MAX_TILES = 64

# (graph, group, number of the field, results) -> operands moved before, or results moved after the compute set.
ExchangePlan = Callable[[Graph, VertexGroup, int, bool], Messages]


def interpret(
    graph: Graph,
    program: Program,
    inputs: Mapping[HostStream, Any],
    *,
    seed: int = 0,
    exchange: ExchangePlan = messages,
    memory: Mapping[Variable, Any] | None = None,
    host: Host | None = None,
) -> dict[HostStream, Any]:
    """Runs a program literally.

    Args:
        graph: variables, mappings and vertices, for a target of at most 64 tiles.
        program: what runs.
        inputs: an array of the stream's shape and dtype for each stream that the program reads. With several replicas
            these, what `memory` holds and what is returned have a leading axis of them, but for broadcast streams.
        seed: seed of the order in which the vertices of a compute set run.
        exchange: the exchange plan, which delivers operands and results.
        memory: what variables hold at the start, the others zeros; None if reading what was not written is an error.
        host: answers transfers one by one, instead of `inputs` and what is returned; its errors pass through.

    Returns:
        The last value of each output stream written: numpy arrays, or JAX arrays of PRNG keys.

    Raises:
        InterpreterError: if the program does what the machine cannot, naming vertex, tile, variable and index.
        ArgumentError: if the target is too big, or an input is missing or of another shape or dtype.
    """
    if graph.target.num_tiles > MAX_TILES:
        got = f"{graph.target.num_tiles} tiles"
        raise ArgumentError("the tile interpreter is for small targets", expected=f"≤ {MAX_TILES} tiles", got=got)
    rng, replicas = np.random.default_rng(seed), graph.replication_factor
    if replicas == 1:
        machines = [_Machine(graph, program, inputs, rng, exchange, host)]
    else:
        held = [{s: v if s.broadcast else v[r] for s, v in inputs.items()} for r in range(replicas)]
        machines = [_Machine(graph, program, held[r], rng, exchange, None, r) for r in range(replicas)]
    if memory is not None:
        for number, machine in enumerate(machines):
            machine.fill(memory if replicas == 1 else {v: value[number] for v, value in memory.items()})
    whole = machines[0] if replicas == 1 else Replicas(machines, host)
    whole.run(program)
    return whole.outputs


class _Machine(Runner):
    """The state of a run: the memory of all tiles and the values sent to the host.

    Args:
        graph: the graph.
        program: all that may run, for the variables to make room for.
        inputs: values of the input streams.
        rng: chooses the order of vertices.
        exchange: the exchange plan.
        host: answers transfers, if anybody does.
        replica: its number among several.
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
        self._graph, self._inputs, self._rng, self._exchange, self._host = graph, inputs, rng, exchange, host
        tensors = [tensor for node in distinct(program) for tensor in _tensors(graph, node)]
        self._variables = list(dict.fromkeys(v for tensor in tensors for v in tensor.variables()))
        self._memory = TileMemory(graph, self._variables, replica)
        # The host fills buffers of a graph before a run, and has what they hold in the end.
        self._remote: dict[Variable, np.ndarray] = {}
        self._views = Views()
        self._arrived: dict[HostCall, list[Any]] = {}
        self._answers: dict[HostCall, list[np.ndarray]] = {}
        self.outputs: dict[HostStream, Any] = {}
        for memory, buffer in graph.off_chip.items():
            filled = None if buffer.filled_from is None else _input(buffer.filled_from, inputs)
            self._remote[memory] = np.zeros(memory.shape, memory.dtype) if filled is None else np.array(filled)
            if buffer.read_into is not None:
                self.outputs[buffer.read_into] = self._remote[memory]

    def fill(self, memory: Mapping[Variable, Any]) -> None:
        """Writes all variables but constants, those not in `memory` with zeros."""
        for variable in self._variables:
            if not variable.is_constant:
                raw = raw_empty(variable.dtype, variable.shape)
                raw = to_raw(memory[variable]) if variable in memory else np.zeros_like(raw)
                self.store(Tensor.of(variable), raw, Sequence())
        self._remote.update({v: np.array(value) for v, value in memory.items() if v not in self._variables})

    def step(self, program: Program) -> None:
        """Runs a node that is no control."""
        match program:
            case Execute(compute_set):
                self._execute(compute_set)
            case Copy(source, destination):
                self.store(destination, self.load(source, program), program)
            case StreamIn(CallStream(call=HostCall() as call, number=number), destination):
                self.store(destination, to_raw(self._answers[call][number]), program)
            case StreamOut(source, CallStream(call=HostCall() as call)):
                self._operand(call, from_raw(self.load(source, program), source.dtype))
            case StreamIn(stream, destination):
                raw = _input(stream, self._inputs) if self._host is None else to_raw(self._host.pull(stream))
                self.store(destination, raw, program)
            case RemoteIn():
                self._remote_in(program)
            case RemoteOut():
                self._remote_out(program)
            case Sync() | Wait():
                pass  # one step after the other is all there is here
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

    def _operand(self, call: HostCall, value: Any) -> None:
        """Takes the next operand of a call of the host's, and makes it with the last one."""
        arrived = self._arrived.setdefault(call, [])
        arrived.append(value)
        if len(arrived) == call.num_operands:
            self._answers[call] = call(self._arrived.pop(call))

    def _held(self, buffer: RemoteBuffer) -> np.ndarray:
        """What a remote buffer holds."""
        memory = buffer.memory
        return self._remote.setdefault(memory, np.zeros(memory.shape, memory.dtype))

    def _remote_in(self, step: RemoteIn) -> None:
        value = held = self._held(step.buffer)
        if step.offset is not None:
            rows = self.load(step.offset, step)
            inside = (rows >= 0) & (rows < len(held))
            value = np.zeros(step.destination.shape, held.dtype)
            value[inside] = held[rows[inside]]
        self.store(step.destination, value, step)

    def _remote_out(self, step: RemoteOut) -> None:
        held, value = self._held(step.buffer), self.load(step.source, step)
        if step.offset is None:
            held[...] = value
            return
        rows = self.load(step.offset, step)
        inside = (rows >= 0) & (rows < len(held))
        held[rows[inside]] = value[inside]

    def choice(self, node: Decision) -> int:
        return node.choice(self.load(node.decider, node).item())

    def load(self, tensor: Tensor, step: Program) -> np.ndarray:
        """The raw value of a tensor, from the tiles that own its elements."""
        view, actor = self._views.whole(tensor), _actor(step)
        raw = raw_empty(tensor.dtype, view.which.shape)
        for variable, chosen, elements in view.parts():
            raw[chosen] = self._memory.read(self._memory.home(variable)[elements], variable, elements, actor)
        return raw.reshape(view.shape)

    def store(self, tensor: Tensor, raw: np.ndarray, step: Program) -> None:
        """Writes a raw value to the tiles that own the elements of a tensor."""
        check_writable(tensor, _actor(step))
        for variable, chosen, elements in self._views.whole(tensor).parts():
            self._memory.write(self._memory.home(variable)[elements], variable, elements, raw.ravel()[chosen])
        self._memory.retire()

    def _execute(self, compute_set: ComputeSet) -> None:
        """Runs one compute set: exchange, vertices in random order, exchange."""
        groups, races = self._graph.groups[compute_set], RaceLog()
        actor = Actor(compute_set.name, where=compute_set.origin)
        vertices: list[Vertex] = []
        for group in groups:
            vertices += vertices_of(group, compute_set.name, len(vertices))
        self._move(groups, actor, results=False)
        for number in self._rng.permutation(len(vertices)):
            run_vertex(vertices[number], self._memory, races, self._views)
        self._move(groups, actor, results=True)
        self._memory.check_results_home(actor)
        self._memory.retire()

    def _move(self, groups: list[VertexGroup], actor: Actor, *, results: bool) -> None:
        """The exchange of operands before a compute set, or of results after it."""
        for group in (group for group in groups if group.num_vertices):
            for number, field in enumerate(group.codelet.fields):
                if field.is_written if results else field.is_read:
                    moved = self._exchange(self._graph, group, number, results)
                    self._memory.deliver(moved, actor, to_home=results)


def _actor(step: Program) -> Actor:
    return Actor(type(step).__name__, where=getattr(step, "origin", None))


def _input(stream: HostStream, inputs: Mapping[HostStream, Any]) -> np.ndarray:
    """The raw value of an input stream."""
    if stream not in inputs:
        raise ArgumentError(f"no value for input stream {stream.name}")
    value = inputs[stream]
    value = value if hasattr(value, "dtype") else np.asarray(value, stream.dtype)
    expected, got = type_name(stream.dtype, stream.shape), type_name(value.dtype, value.shape)
    if expected != got:
        raise ArgumentError(f"input stream {stream.name} has another type", expected=expected, got=got)
    return to_raw(value)


def _tensors(graph: Graph, node: Program) -> list[Tensor]:
    """The tensors one node touches, itself or through vertices."""
    groups = graph.groups[node.compute_set] if isinstance(node, Execute) else ()
    return [*own_tensors(node), *(access.tensor for group in groups for access in group.accesses)]
