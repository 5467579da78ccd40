"""Programs with replicas run by the poplar engine and by the tile interpreter, which must agree to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax import poplar
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from ipujax.poplar.engine.engine_programs import expanded
from ipujax.poplar.engine.streams import CallbackChannel, ReplicaChannels, StreamHost, as_callback
from ipujax.runtime.graph.program import Program
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.tensor import Tensor
from tests.lowering.helpers import assert_rounded_alike

TILES = 4


class AddVertex(Vertex):
    a: Input[Vector[FLOAT]]
    b: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]

    def compute(a, b):
        return a + b


class LessVertex(Vertex):
    a: Input[FLOAT]
    b: Input[FLOAT]
    out: Output[poplar.BOOL]

    def compute(a, b):
        return jnp.less(a, b)


def device(num_ipus: int, tiles: int = TILES) -> poplar.Device:
    """A Mk2 of few tiles."""
    return poplar.IPUModel(num_ipus=num_ipus, tiles_per_ipu=tiles).create_device()


def placed(graph: poplar.Graph, shape: Sequence[int], name: str, dtype: Any = FLOAT, tile: int = 0) -> Tensor:
    """A variable on one tile."""
    tensor = graph.add_variable(dtype, list(shape), name)
    graph.set_tile_mapping(tensor, tile)
    return tensor


def constant(graph: poplar.Graph, value: Any, dtype: Any = FLOAT, tile: int = 0) -> Tensor:
    """A constant on one tile."""
    value = np.asarray(value)
    tensor = graph.add_constant(dtype, list(value.shape), value)
    graph.set_tile_mapping(tensor, tile)
    return tensor


def vertex(graph: poplar.Graph, codelet: type[Vertex], a: Tensor, b: Tensor, out: Tensor, tile: int = 0) -> Program:
    """A compute set of one vertex."""
    compute_set = graph.add_compute_set(codelet.__name__)
    ref = graph.add_vertex(compute_set, codelet, {"a": a, "b": b, "out": out})
    graph.set_tile_mapping(ref, tile)
    return poplar.program.Execute(compute_set)


Callbacks = Mapping[str, Sequence[Callable[[], Any]]]  # by stream, one for each replica, or one for all


def run(
    graph: poplar.Graph, on: poplar.Device, program: Program, callbacks: Callbacks, **options: Any
) -> poplar.Engine:
    """An engine that has run a program once."""
    engine = poplar.Engine(graph, program, options)
    engine.load(on)
    for name, makes in callbacks.items():
        for replica, make in enumerate(makes):
            engine.connect_stream_to_callback(name, make(), replica if len(makes) > 1 else None)
    engine.run(0)
    return engine


def interpreted(graph: poplar.Graph, program: Program, callbacks: Callbacks) -> None:
    """Runs a program in the tile interpreter, from initial values."""
    host = StreamHost()
    for name, makes in callbacks.items():
        stream = graph.streams[name]
        channels = [CallbackChannel(stream.host, as_callback(make()), 0) for make in makes]
        host.channels[name] = channels[0]
        if stream.is_by_replica:
            host.channels[name] = together = ReplicaChannels(stream.replicas)
            for replica, channel in enumerate(channels):
                together.connect(channel, replica if len(channels) > 1 else None)
    flat, (expanded_program,) = expanded(graph, [program])
    replicas = graph.replication_factor
    memory = {
        v: value if replicas == 1 else np.broadcast_to(value, (replicas, *value.shape))
        for v, value in graph.initial_values.items()
    }
    interpret(flat, expanded_program, {}, memory=memory, host=host)


class Feed:
    """Makes callbacks that give rows of an array, one a transfer."""

    def __init__(self, rows: Any) -> None:
        self._rows = np.asarray(rows)

    def __call__(self) -> Callable[[np.ndarray], None]:
        rows = iter(self._rows)

        def fill(buffer: np.ndarray) -> None:
            buffer[:] = next(rows)

        return fill


class Sink:
    """Makes callbacks that record transfers, in a list for each callback."""

    def __init__(self) -> None:
        self.transfers: list[list[np.ndarray]] = []

    def __call__(self) -> Callable[[np.ndarray], None]:
        self.transfers.append([])
        return lambda buffer: self.transfers[-1].append(np.array(buffer))


def both(
    graph: poplar.Graph,
    on: poplar.Device,
    program: Program,
    feeds: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Data of streams from the device, [replicas, transfers, elements], equal by engine and interpreter.

    Args:
        graph: the top-level graph.
        on: a device of its target.
        program: program to run once.
        feeds: for each stream to the device its data, [transfers, elements] for each replica, or one for all.
        outputs: streams from the device, with the number of replicas that use each.
    """
    transfers: list[dict[str, np.ndarray]] = []
    for go in (lambda c: run(graph, on, program, c), lambda c: interpreted(graph, program, c)):
        sinks = {name: [Sink() for _ in range(count)] for name, count in outputs.items()}
        go({name: [Feed(rows) for rows in callbacks] for name, callbacks in feeds.items()} | sinks)
        transfers.append({name: np.array([s.transfers[-1] for s in callbacks]) for name, callbacks in sinks.items()})
    for name in outputs:
        assert_rounded_alike(transfers[0][name], transfers[1][name])
    return transfers[0]
