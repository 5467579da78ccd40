"""A small machine for tests of the Poplar layer, and programs run by both engine and tile interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ipujax import poplar
from ipujax.poplar.engine.streams import CallbackChannel, StreamHost, as_callback
from ipujax.poplar.program import Sequence
from ipujax.runtime.graph.program import HostStream, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.tensor import Tensor

DEVICE = poplar.IPUModel(tiles_per_ipu=8).create_device()


def new_graph() -> poplar.Graph:
    """A graph for one IPU of eight tiles."""
    return poplar.Graph(DEVICE.get_target())


def on_tiles(graph: poplar.Graph, tensor: Tensor) -> Tensor:
    """Spreads a tensor's flat elements over the tiles, in turn."""
    graph.set_tile_mapping(tensor, np.arange(tensor.size) % graph.target.num_tiles)
    return tensor


def variable(
    graph: poplar.Graph, shape: list[int], dtype: Any = poplar.FLOAT, name: str = "v", value: Any = None
) -> Tensor:
    """A variable on tiles, with an initial value if one is given."""
    tensor = on_tiles(graph, graph.add_variable(dtype, shape, name))
    if value is not None:
        graph.set_initial_value(tensor, value)
    return tensor


def constant(graph: poplar.Graph, value: Any, dtype: Any = poplar.FLOAT) -> Tensor:
    """A constant on tiles."""
    value = np.asarray(value)
    return on_tiles(graph, graph.add_constant(dtype, list(value.shape), value))


def both(
    graph: poplar.Graph, program: Any, outputs: Mapping[str, Tensor], streams: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Outputs of a program, equal by engine and tile interpreter; `streams` makes the callback of each stream."""
    for name, tensor in outputs.items():
        if name not in graph.host_reads:
            graph.create_host_read(name, tensor)
    engine = poplar.Engine(graph, program)
    engine.load(DEVICE)
    for name, make in (streams or {}).items():
        engine.connect_stream_to_callback(name, make())
    engine.run(0)
    outputs_of_engine = {name: engine.read_tensor(name) for name in outputs}
    outputs_of_interpreter = _interpreted(graph, program, outputs, streams or {})
    for name, value in outputs_of_engine.items():
        assert outputs_of_interpreter[name].dtype == value.dtype
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, outputs_of_interpreter[name], rtol=3e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(value, outputs_of_interpreter[name])
    return outputs_of_engine


def _interpreted(
    graph: poplar.Graph, program: Any, outputs: Mapping[str, Tensor], streams: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    host = StreamHost()
    for name, make in streams.items():
        host.channels[name] = CallbackChannel(graph.streams[name].host, as_callback(make()), 0)
    recorders = {name: _Recorder() for name in outputs}
    looks = []
    for name, tensor in outputs.items():
        host.channels[f"look {name}"] = recorders[name]
        looks.append(StreamOut(tensor, HostStream(f"look {name}", tensor.shape, tensor.dtype)))
    interpret(graph, Sequence(program, *looks), {}, memory=graph.initial_values, host=host)
    return {name: channel.value for name, channel in recorders.items()}


class _Recorder:
    """Records the last value of a stream."""

    value: np.ndarray

    def push(self, value: np.ndarray) -> None:
        self.value = np.array(value)
