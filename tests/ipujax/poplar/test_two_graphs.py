"""Tensors, programs and streams of another graph: every public function says that they are of another graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence as Items
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from ipujax import IpuError, poplar, poplin, popnn, popops, poprand, poputil
from ipujax.poplar.program import (
    AbortOn,
    Call,
    Copy,
    CrossReplicaCopy,
    ErrorProgram,
    Execute,
    If,
    PrintTensor,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Switch,
    WriteUndef,
)
from ipujax.popnn import gru, lstm
from ipujax.popsparse import dynamic, static_
from ipujax.runtime.graph import Graph as RuntimeGraph, Program
from tests.ipujax.poplar.helpers import small_graph
from tests.ipujax.poplar.test_bad_input_graph import SumVertex

LIBRARIES = (poplin, popnn, lstm, gru, popops, poprand, poputil, static_, dynamic)
BELONGS = "belongs to another graph|is not of this graph"


def mapped(graph: poplar.Graph, name: str, shape: Items[int] = (4,), dtype: Any = poplar.FLOAT) -> poplar.Tensor:
    tensor = graph.add_variable(dtype, list(shape), name)
    graph.set_tile_mapping(tensor, 0)
    return tensor


def functions(library: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions of a library that take a graph and a tensor."""
    for name in (name for name in dir(library) if not name.startswith("_")):
        function = getattr(library, name)
        if inspect.isroutine(function) and function.__module__.startswith(library.__name__):
            kinds = [parameter.annotation for parameter in parameters(function)]
            if any(map(is_graph, kinds)) and any(map(takes_tensors, kinds)):
                yield f"{library.__name__.removeprefix('ipujax.')}.{name}", function


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def is_graph(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, RuntimeGraph)


def takes_tensors(kind: Any) -> bool:
    record = get_type_hints(kind).values() if is_dataclass(kind) else ()
    return kind is poplar.Tensor or any(takes_tensors(each) for each in (*get_args(kind), *record))


def example(kind: Any, graph: poplar.Graph, tensor: poplar.Tensor) -> Any:
    """Return a value of an annotated kind; no function reads it, as tensors of another graph are refused first."""
    if is_graph(kind):
        return graph
    if kind is poplar.Tensor:
        return tensor
    if is_dataclass(kind):
        record = object.__new__(kind)
        for each in fields(kind):
            object.__setattr__(record, each.name, example(get_type_hints(kind)[each.name], graph, tensor))
        return record
    if get_origin(kind) is Callable:
        return lambda *operands: operands
    if get_origin(kind) in (list, tuple, Items):
        return [example(get_args(kind)[0], graph, tensor)]
    if get_args(kind):
        return example(next((k for k in get_args(kind) if takes_tensors(k)), get_args(kind)[0]), graph, tensor)
    simple = {int: 1, float: 1.0, str: "x", bool: True, Any: 1, Program: Sequence(), Sequence: Sequence()}
    return simple[kind] if kind in simple else object.__new__(kind) if isinstance(kind, type) else kind


FUNCTIONS = dict(each for library in LIBRARIES for each in functions(library))


def test_the_table_has_the_libraries() -> None:
    libraries = {name.rpartition(".")[0] for name in FUNCTIONS}
    assert libraries == {library.__name__.removeprefix("ipujax.") for library in LIBRARIES}
    assert len(FUNCTIONS) > 200


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_refuses_a_tensor_of_another_graph(name: str) -> None:
    function = FUNCTIONS[name]
    graph = small_graph()
    ours = mapped(graph, "ours")
    theirs = mapped(small_graph(), "theirs")
    declared = [each for each in parameters(function) if each.kind is not each.VAR_KEYWORD]
    for position in (n for n, each in enumerate(declared) if takes_tensors(each.annotation)):
        values = [example(each.annotation, graph, theirs if n == position else ours) for n, each in enumerate(declared)]
        positional = [v for v, each in zip(values, declared, strict=True) if each.kind is not each.KEYWORD_ONLY]
        keywords = {e.name: v for v, e in zip(values, declared, strict=True) if e.kind is e.KEYWORD_ONLY}
        with pytest.raises(IpuError, match=r"float32\[4\] of theirs\) belongs to another graph"):
            function(*positional, **keywords)
    assert len(graph.variables) == 1
    assert not graph.groups


class Two:
    """Two graphs with equal contents."""

    def __init__(self) -> None:
        self.graph = small_graph()
        self.other = small_graph()
        self.ours = mapped(self.graph, "ours")
        self.theirs = mapped(self.other, "theirs")
        self.flag = mapped(self.other, "flag", (), poplar.BOOL)
        self.number = mapped(self.other, "number", (), poplar.INT)
        self.compute_set = self.graph.add_compute_set("cs")
        self.foreign_compute_set = self.other.add_compute_set("foreign")
        self.foreign_vertex = self.other.add_vertex(self.foreign_compute_set, SumVertex)
        self.stream = self.other.add_host_to_device_fifo("in", poplar.FLOAT, 4)
        self.outward = self.other.add_device_to_host_fifo("out", poplar.FLOAT, 4)
        self.buffer = self.other.add_remote_buffer("buffer", poplar.FLOAT, 4)
        self.graph.add_host_to_device_fifo("in", poplar.FLOAT, 4)
        self.graph.add_device_to_host_fifo("out", poplar.FLOAT, 4)
        self.graph.add_remote_buffer("buffer", poplar.FLOAT, 4)

    @cached_property
    def vertex(self) -> poplar.VertexRef:
        return self.graph.add_vertex(self.compute_set, SumVertex)

    def engine(self, *programs: Program) -> poplar.Engine:
        return poplar.Engine(self.graph, list(programs))


USES: dict[str, Callable[[Two], Any]] = {
    "set_tile_mapping": lambda s: s.graph.set_tile_mapping(s.theirs, 0),
    "set_tile_mapping of a slice": lambda s: s.graph.set_tile_mapping(s.theirs[:2], 0),
    "set_tile_mapping of a variable": lambda s: s.graph.set_tile_mapping(s.theirs.variables()[0], 0),
    "set_tile_mapping of a vertex": lambda s: s.graph.set_tile_mapping(s.foreign_vertex, 0),
    "get_tile_mapping": lambda s: s.graph.get_tile_mapping(s.theirs),
    "clone": lambda s: s.graph.clone(s.theirs),
    "set_initial_value": lambda s: s.graph.set_initial_value(s.theirs, 1),
    "create_host_write": lambda s: s.graph.create_host_write("w", s.theirs),
    "create_host_read": lambda s: s.graph.create_host_read("r", s.theirs),
    "connect": lambda s: s.graph.connect(s.vertex["in"], s.theirs),
    "connect a field of another graph": lambda s: s.graph.connect(s.foreign_vertex["in"], s.ours),
    "add_vertex with a tensor": lambda s: s.graph.add_vertex(s.compute_set, SumVertex, {"in": s.theirs}),
    "add_vertex to a compute set": lambda s: s.graph.add_vertex(s.foreign_compute_set, SumVertex),
    "get_non_replicated_tensor": lambda s: s.graph.get_non_replicated_tensor(s.theirs),
    "virtual graph": lambda s: s.graph.create_virtual_graph(0, 2).set_tile_mapping(s.theirs, 0),
    "replicated graph": lambda s: s.graph.create_replicated_graph(2).set_tile_mapping(s.theirs, 0),
    "concat": lambda s: poplar.concat([s.ours, s.theirs]),
    "append": lambda s: poplar.append(s.ours.reshape([1, 4]), s.theirs),
    "duplicate": lambda s: poputil.duplicate(s.graph, s.theirs, Sequence()),
    "keyword": lambda s: popops.add(s.graph, s.ours, b=s.theirs, prog=Sequence(), name="add"),
    "slice": lambda s: popops.neg(s.graph, s.theirs[1:3], Sequence(), "neg"),
    "copy from": lambda s: s.engine(Copy(s.theirs, s.ours)),
    "copy to": lambda s: s.engine(Copy(s.ours, s.theirs)),
    "constant": lambda s: s.engine(Copy(s.other.add_constant(poplar.FLOAT, [4], 1.0, "theirs"), s.ours)),
    "cross-replica copy": lambda s: s.engine(CrossReplicaCopy(s.theirs, s.ours, {0: 0})),
    "stream": lambda s: s.engine(Copy(s.stream, s.ours)),
    "stream to the host": lambda s: s.engine(Copy(s.ours, s.outward)),
    "stream to a tensor": lambda s: s.engine(Copy(s.graph.streams["in"], s.theirs)),
    "remote buffer": lambda s: s.engine(Copy(s.buffer, s.ours)),
    "remote buffer to fill": lambda s: s.engine(Copy(s.ours, s.buffer)),
    "connect_stream": lambda s: s.engine(Sequence()).connect_stream(s.stream, np.zeros(4, np.float32)),
    "connect_stream_to_callback": lambda s: s.engine(Sequence()).connect_stream_to_callback(s.stream, print),
    "execute": lambda s: s.engine(Sequence(Execute(s.foreign_compute_set))),
    "if": lambda s: s.engine(If(s.flag, Copy(s.ours, s.ours), Sequence())),
    "switch": lambda s: s.engine(Switch(s.number, [(0, Copy(s.ours, s.ours))])),
    "while": lambda s: s.engine(RepeatWhileTrue(Sequence(), s.flag, Copy(s.ours, s.ours))),
    "repeat": lambda s: s.engine(Repeat(2, Copy(s.theirs, s.ours))),
    "function": lambda s: s.engine(Call(s.other.add_function(Copy(s.theirs, s.theirs)))),
    "print": lambda s: s.engine(PrintTensor("theirs", s.theirs)),
    "abort": lambda s: s.engine(AbortOn(s.flag, "stop")),
    "error": lambda s: s.engine(ErrorProgram("stop", s.theirs)),
    "undefined": lambda s: s.engine(WriteUndef(s.theirs)),
    "engine of another program": lambda s: s.engine(library_program(s)),
}  # fmt: skip


def library_program(s: Two) -> Program:
    program = Sequence()
    popops.neg(s.other, s.theirs, program, "neg")
    return program


@pytest.mark.parametrize("name", USES)
def test_use_of_another_graph_is_refused(name: str) -> None:
    setting = Two()
    variables = list(setting.graph.variables)
    with pytest.raises(IpuError, match=BELONGS):
        USES[name](setting)
    assert setting.graph.variables[: len(variables)] == variables
    assert setting.graph.get_tile_mapping(setting.ours)[0] == [(0, 4)]
    assert setting.other.get_tile_mapping(setting.theirs)[0] == [(0, 4)]
