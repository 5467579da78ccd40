"""Set-up that tests of several rooms of the runtime share: a small machine, graphs of plain variables, streams."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ipujax.runtime.graph import Graph, HostStream
from ipujax.runtime.target import Target
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor import Tensor, Variable
from ipujax.runtime.tensor.mapping import grid

F32 = np.dtype("float32")
SIZE = 8
STRIDE = 10_000  # numbers of a variable, see `names`


def machine(tiles: int) -> Target:
    """One Mk2 IPU with a few tiles."""
    return preset("mk2").replace(tiles_per_ipu=tiles)


TARGET = machine(4)


def graph_of_variables(count: int = 4, target: Target = TARGET) -> tuple[Graph, list[Tensor]]:
    """A graph with `count` variables of SIZE floats, variable i spread over i + 1 tiles."""
    graph = Graph(target)
    tensors = [graph.add_variable((SIZE,), F32, f"v{i}", grid((SIZE,), (i % 4 + 1,))) for i in range(count)]
    return graph, tensors


def stream(name: str = "s") -> HostStream:
    """A stream of SIZE floats."""
    return HostStream(name, (SIZE,), F32)


def variable(*shape: int, name: str = "v", dtype: type = np.int32) -> Variable:
    """A variable of no graph."""
    return Variable(shape, np.dtype(dtype), name)


def names(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Distinct numbers, of another `STRIDE` for another `number`, int32[*shape]."""
    return (np.arange(prod(shape), dtype=np.int32) + STRIDE * number).reshape(shape)


def no_cycles(shapes: Any, target: Any) -> np.ndarray:
    """The cycle estimate of a codelet that costs nothing."""
    del shapes, target
    return np.zeros((), np.int64)
