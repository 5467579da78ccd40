"""Runs hand-written programs by engine and tile interpreter, which must agree but for roundings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ipujax import poplar
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import HostStream, Program, Sequence as ProgramSequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.tensor import Tensor
from tests.lowering.helpers import assert_rounded_alike

TILES = 8


def small_graph(tiles: int = TILES, num_ipus: int = 1) -> poplar.Graph:
    """A graph for a Mk2 of few tiles."""
    return poplar.Graph(poplar.IPUModel(num_ipus=num_ipus, tiles_per_ipu=tiles).create_device())


def placed(graph: poplar.Graph, dtype: Any, shape: Sequence[int], name: str, tile: int = 0) -> Tensor:
    """A variable on one tile."""
    tensor = graph.add_variable(dtype, shape, name)
    graph.set_tile_mapping(tensor, tile)
    return tensor


def streamed(
    inner: Program, inputs: Mapping[Tensor, Any], outputs: Sequence[Tensor]
) -> tuple[ProgramSequence, dict[HostStream, np.ndarray], list[HostStream]]:
    """Program with its inputs streamed in first and its outputs streamed out last, and the values of the streams."""
    ins = [HostStream(f"in{n}", t.shape, t.dtype) for n, t in enumerate(inputs)]
    outs = [HostStream(f"out{n}", t.shape, t.dtype) for n, t in enumerate(outputs)]
    program = ProgramSequence(*(StreamIn(s, t) for s, t in zip(ins, inputs, strict=True)), inner)
    for tensor, stream in zip(outputs, outs, strict=True):
        program.add(StreamOut(tensor, stream))
    values = {s: np.asarray(v, t.dtype) for s, (t, v) in zip(ins, inputs.items(), strict=True)}
    return program, values, outs


def compiled(graph: Graph, inner: Program, inputs: Mapping[Tensor, Any], outputs: Sequence[Tensor]) -> Executable:
    """The program compiled, with its inputs streamed in and its outputs streamed out."""
    return compile(graph, streamed(inner, inputs, outputs)[0])


def run_both(graph: Graph, inner: Program, inputs: Mapping[Tensor, Any], outputs: Sequence[Tensor]) -> list[np.ndarray]:
    """The outputs of a program, verified, by engine, literal engine and tile interpreter."""
    program, values, outs = streamed(inner, inputs, outputs)
    compile(graph, program)
    by_engine = engine_function(graph, program)(values)
    literally = engine_function(graph, program, exact_splits=True)(values)
    by_tiles = interpret(graph, program, values)
    for stream in outs:
        assert_rounded_alike(by_engine[stream], by_tiles[stream])
        assert_rounded_alike(literally[stream], by_tiles[stream])
    return [np.asarray(by_engine[stream]) for stream in outs]
