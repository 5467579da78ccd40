"""The engine: a graph and its programs, compiled, loaded on a device and run by number.

    engine = Engine(graph, prog)
    engine.load(device)
    engine.connect_stream("in", data)
    engine.run(0)
    engine.read_tensor("result")

Each program is one jitted function of memory, so that a run is one call of XLA. Values persist between runs for
variables that a program reads before it writes them, variables with a host handle, remote buffers, and results that
nothing in the graph reads. Memory that was never written is zero.

After a callback, an abort or a print raises, later transfers of that run call no callback and deliver zeros, loops with
data-dependent trip counts end, and memory holds the values of that incomplete run; the engine stays usable.
Source: Poplar & PopLibs user guide, tutorials 1 to 4, "Profiling"; names from poplar/Engine.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Items
from functools import cached_property
from typing import Any, TextIO

import jax
import numpy as np

from ipujax.poplar.device import Device
from ipujax.poplar.engine.device_memory import DeviceMemory, Runs
from ipujax.poplar.engine.engine_options import EngineOptions, print_summary
from ipujax.poplar.engine.engine_programs import EnginePrograms
from ipujax.poplar.engine.streams import (
    StreamCallback,
    StreamHost,
    StreamPart,
    as_callback,
    buffer_channel,
    callback_channel,
    unconnected,
)
from ipujax.poplar.graph import Graph, ReplicatedGraph, VirtualGraph, all_replicas
from ipujax.poplar.program import AbortStream, PrintStream
from ipujax.poplar.types import DataStream
from ipujax.runtime.engine import StateFunction
from ipujax.runtime.errors import ArgumentError, EngineError, ProfileError
from ipujax.runtime.graph import Program, StreamIn, StreamOut, check_program, distinct
from ipujax.runtime.host import CallStream, GuardedHost
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.not_copied import NotCopied
from ipujax.runtime.report import Profile
from ipujax.runtime.target import Target, nearest
from ipujax.runtime.tensor import Tensor


class Engine(NotCopied):
    """A session on a device.

    Args:
        graph: variables, tile mappings, vertices, streams and handles; later additions are ignored.
        programs: the program, or several that `run` calls by number.
        options: see `EngineOptions`; `IPUJAX_ENGINE_OPTIONS` in the environment overrides them.

    Raises:
        VerifyError: a program that breaks a rule of the machine.
        TileMemoryError: programs that overflow a tile.
        EngineError: a stream copy over the size limit.
        GraphError: a compute set, stream or remote buffer of another graph.
        ArgumentError: an unknown option.
    """

    COPY_HINT = "an engine of its own for each process, from the same function that builds the graph"

    def __init__(
        self, graph: Graph, programs: Program | Items[Program], options: Mapping[str, Any] | None = None
    ) -> None:
        self._options = EngineOptions.of(options)
        if not isinstance(graph, Graph):
            got = type(graph).__name__
            raise ArgumentError("an engine must have a graph", expected="a Graph, then programs", got=got)
        if not isinstance(programs, Program | list | tuple):
            got = type(programs).__name__
            raise ArgumentError("an engine must have programs", expected="a program or a list of them", got=got)
        user_programs = (
            [programs] if isinstance(programs, Program) else [check_program(program) for program in programs]
        )
        if isinstance(graph, ReplicatedGraph | VirtualGraph):
            raise ArgumentError(
                "an engine cannot run a virtual or replicated graph", hint="graph.get_top_level_graph()", got=graph
            )
        self._compiled = EnginePrograms.of(graph, user_programs, self._options)
        self._host = StreamHost()
        self._guard = GuardedHost(self._host)
        self._functions: dict[int, tuple[StateFunction, Callable[..., Any]]] = {}
        self._state: DeviceMemory | None = None
        self._is_running = False
        self._history = Runs()

    def _function(self, index: int) -> tuple[StateFunction, Callable[..., Any]]:
        """Return a program as a function of memory, plain and jitted; overwritten variables are donated."""
        if index not in self._functions:
            function = StateFunction(
                self._compiled.executable.graph,
                self._compiled.programs[index],
                self._compiled.persistent,
                self._guard,
                exact_splits=self._options.exact_splits,
                log=self._history.log if self._options.instrument else None,
            )

            # By number: JAX sorts the keys of dicts, and variables have no order.
            def step(changed: dict[int, Any], read_only: dict[int, Any]) -> list[Any]:
                arrays = changed | read_only
                values = function({v: arrays[number] for number, v in enumerate(function.reads)})
                return [values[v] for v in function.writes]

            self._functions[index] = function, jax_jit(step, donate_argnums=0)
        return self._functions[index]

    def load(self, device: Device) -> None:
        """Load the compiled programs; variables hold their initial values, or zeros.

        Raises:
            EngineError: a device of another machine than the graph's, or no device, or while a program runs.
        """
        self._check_idle("load")
        if not isinstance(device, Device):
            expected = "a Device, as IPUModel().create_device() makes"
            got = type(device).__name__
            raise EngineError("an engine must be loaded on a device", expected=expected, got=got)
        if device.get_target() != self._compiled.graph.system_target:
            expected = self._compiled.graph.target.name
            got = device.get_target().name
            message = "the device is not of the graph's target"
            raise EngineError(message, expected=expected, got=f"{got}: another machine, or other constants of it")
        self._state = DeviceMemory(self._compiled.graph.initial_values, self._compiled.graph.replication_factor)

    def load_and_run(self, device: Device, index: int = 0) -> None:
        """Load the programs and run one of them."""
        self.load(device)
        self.run(index)

    def run(self, index: int = 0) -> None:
        """Run a program and wait for its end.

        Raises:
            EngineError: nothing loaded, no such program, a stream not connected, or a program that ended itself.
            Exception: whatever a callback raised.
        """
        state = self._check_loaded("run")
        if not isinstance(index, int | np.integer) or not 0 <= index < len(self._compiled.programs):
            raise EngineError(f"there is no program {index!r}", expected=f"0 … {len(self._compiled.programs) - 1}")
        has_transfers = self._check_connections(self._compiled.programs[index])
        function, jitted = self._function(int(index))
        # Only arrays that the program overwrites are donated; the others stay in `state`.
        read_only = {number: state[v] for number, v in enumerate(function.reads)}
        changed = {number: read_only.pop(number) for number, v in enumerate(function.reads) if v in function.writes}
        self._history.start(int(index))
        self._is_running = True
        try:
            results = jax.block_until_ready(jitted(changed, read_only))
            if has_transfers or self._options.instrument:
                jax.effects_barrier()  # callbacks may run after the results are ready
        finally:
            self._is_running = False
        # Before the error of a callback: donated arrays are gone, so that the new ones must be stored.
        state.update(zip(function.writes, results, strict=True))
        self._guard.raise_error()

    def _check_loaded(self, action: str) -> DeviceMemory:
        if self._state is None:
            raise EngineError(f"{action} before the engine is loaded", hint="engine.load(device)")
        self._check_idle(action)
        return self._state

    def _check_idle(self, action: str) -> None:
        if self._is_running:
            hint = "streams carry values in and out of a running program"
            raise EngineError(f"{action} while a program of the engine runs", hint=hint)

    def connect_stream(self, handle: str | DataStream, buffer: np.ndarray) -> None:
        """Connect a stream to an array, used as a circular buffer of transfers.

        Args:
            handle: the stream, or its name.
            buffer: contiguous array of the stream's type, of one or several transfers, accessed during runs;
                [replicas, …] if each replica has separate data.

        Raises:
            EngineError: no such stream.
            ArgumentError: an array of another type or size.
        """
        stream = self._stream(handle)
        self._host.channels[stream.handle] = buffer_channel(stream, buffer)

    def connect_stream_to_callback(
        self,
        handle: str | DataStream,
        callback: StreamCallback | Callable[[np.ndarray], Any],
        replica: int | None = None,
    ) -> None:
        """Connect a stream to a callback, or to a function that is called with a flat array at each transfer.

        The array is to be filled for a stream to the device, and holds the data for one from it.

        Args:
            handle: the stream, or its name.
            callback: called once a transfer.
            replica: the replica to connect; when None all of them, in the order of their numbers.

        Raises:
            EngineError: no such stream or replica.
            ArgumentError: something that cannot be called.
        """
        stream = self._stream(handle)
        fills = stream.direction == "host_to_device"
        depth = self._options.prefetch_depth if fills else 0
        hook = as_callback(callback, fills=fills)
        current = self._host.channels.get(stream.handle)
        self._host.channels[stream.handle] = callback_channel(stream, hook, depth, replica, current)

    def _stream(self, handle: str | DataStream) -> DataStream:
        name = handle.handle if isinstance(handle, DataStream) else handle
        streams = self._compiled.graph.streams
        if isinstance(handle, DataStream) and streams.get(name) is not handle:
            raise EngineError(f"stream {name} belongs to another graph", expected="a stream of the engine's graph")
        if name not in streams:
            message = f"no stream is called {name!r}"
            expected = f"one of {sorted(streams)}"
            raise EngineError(message, expected=expected, got=repr(name), hint=nearest(name, streams))
        return streams[name]

    def _check_connections(self, program: Program) -> bool:
        """Check that all streams of a program are connected; returns True if it moves data to or from the host."""
        has_transfers = False
        for node in distinct(program):
            if isinstance(node, (StreamIn, StreamOut)) and not isinstance(node.stream, CallStream):
                has_transfers = True
                stream = node.stream
                name = stream.transfer.name if isinstance(stream, StreamPart) else stream.name
                defect = unconnected(self._host.channels.get(name))
                if defect and not isinstance(stream, (PrintStream, AbortStream)):
                    hint = "engine.connect_stream or engine.connect_stream_to_callback"
                    raise EngineError(f"stream {name} {defect}", where=node.origin, hint=hint)
        return has_transfers

    def set_print_stream(self, stream: TextIO) -> None:
        """Set the stream that `PrintTensor` prints to; the default is the standard error stream.

        Raises:
            ArgumentError: something that cannot be printed to.
        """
        if not hasattr(stream, "write"):
            raise ArgumentError("set_print_stream", expected="a text stream, as sys.stdout", got=repr(stream))
        self._host.print_to = stream

    def write_tensor(self, handle: str, value: Any) -> None:
        """Write a tensor that has a host write handle.

        Args:
            handle: name of the write handle.
            value: as many elements as the tensor has, in all replicas, of a type that converts to the tensor's without
                loss of kind.

        Raises:
            EngineError: nothing loaded, or no such handle.
            ArgumentError: another size or type.
            GraphError: a value that the tensor's type cannot represent.
        """
        state = self._check_loaded("write_tensor")
        tensor = self._handle(handle, self._compiled.writable, "write")
        state.write(handle, tensor, value)

    def read_tensor(self, what: str | Tensor) -> np.ndarray:
        """Read a tensor, by its host read handle or itself if its variables persist; `[replicas, *shape]` of replicas.

        Raises:
            EngineError: nothing loaded, no such handle, or a tensor that does not outlive runs.
        """
        state = self._check_loaded("read_tensor")
        if isinstance(what, Tensor):
            tensor = all_replicas(self._compiled.graph, what)
        else:
            tensor = self._handle(what, self._compiled.readable, "read")
        # The memory of other variables may be reused by the end of the run.
        transient = [v for v in tensor.variables() if v not in self._compiled.persistent and not v.is_constant]
        if transient:
            hint = "graph.create_host_read before making the engine"
            raise EngineError(f"{transient[0]!r} does not outlive a run: nothing needs it afterwards", hint=hint)
        return state.read(tensor)

    def _handle(self, handle: str, tensors: Mapping[str, Tensor], direction: str) -> Tensor:
        if handle not in tensors:
            expected = (
                f"one of {sorted(tensors)}" if tensors else f"graph.create_host_{direction} before making the engine"
            )
            message = f"no host {direction} handle is called {handle!r}"
            raise EngineError(message, expected=expected, got=repr(handle), hint=nearest(handle, tensors))
        return tensors[handle]

    def get_target(self) -> Target:
        """Return the machine that the programs are compiled for."""
        return self._compiled.graph.target

    @cached_property
    def profile(self) -> Profile:
        """The static profile of all programs, each run once."""
        if self._compiled.graph.target.name == "cpu":
            raise ProfileError("the CPU has no profile", hint="an IPUModel")
        return Profile(self._compiled.executable)

    @property
    def execution(self) -> Profile:
        """The profile of all runs since the last reset, one after the other."""
        if self._compiled.graph.target.name == "cpu":
            raise ProfileError("the CPU has no profile", hint="an IPUModel")
        return self._history.profile(
            self._compiled.executable, self._compiled.programs, is_recorded=self._options.instrument
        )

    def get_graph_profile(self) -> dict[str, Any]:
        """Return the graph profile: memory and cycle estimates, JSON-able."""
        return self.profile.graph()

    def get_execution_profile(self) -> dict[str, Any]:
        """Return the execution profile of all runs since the last reset, JSON-able.

        Raises:
            ProfileError: loops with data-dependent trip counts ran without `debug.instrument`.
        """
        return self.execution.execution()

    def reset_execution_profile(self) -> None:
        """Discard the record of all runs so far."""
        self._history.reset()

    def print_profile_summary(self, stream: TextIO | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Print a human-readable summary of both profiles.

        Args:
            stream: the output, standard output when None.
            options: `showExecutionSteps`, `showVarStorage`, `showOptimizations`, `showPerIpuMemoryUsage` and `colours`,
                each "true" or "false".

        Raises:
            ArgumentError: an unknown option.
        """
        print_summary(self.execution, stream, options or {})
