"""Control programs: the tree that says what runs, in which order.

    program ::= Sequence(program…) | Execute(compute set) | Copy(source, destination)
              | Repeat(count, body) | RepeatWhile(condition, predicate, body)
              | If(predicate, then, else) | Switch(selector, cases, default) | Call(function)
              | StreamIn(stream, destination) | StreamOut(source, stream) | WriteUndef(destination)

Nodes are frozen, but for `Sequence`, which is a builder: `add` appends until the program is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import Origin


@dataclass(frozen=True, eq=False, slots=True)
class ComputeSet:
    """Vertices that run in parallel between two syncs; the graph holds its vertex groups."""

    name: str
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False, slots=True)
class HostStream:
    """A unidirectional channel between host and device, of one value of `shape` and `dtype` a transfer."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    resident: bool = False  # the value already lies on the device (or stays there): no bytes move


class Program:
    """Base of all program nodes."""

    __slots__ = ()

    def children(self) -> tuple[Program, ...]:
        """The programs inside this one, in order."""
        return ()


class Sequence(Program):
    """Programs one after the other."""

    __slots__ = ("_programs",)

    def __init__(self, *programs: Program) -> None:
        self._programs = list(programs)

    def add(self, program: Program) -> None:
        """Appends a program."""
        self._programs.append(program)

    def children(self) -> tuple[Program, ...]:
        return tuple(self._programs)


@dataclass(frozen=True, eq=False, slots=True)
class Execute(Program):
    """Runs a compute set: exchange its operands, run its vertices, exchange its results."""

    compute_set: ComputeSet


@dataclass(frozen=True, eq=False, slots=True)
class Copy(Program):
    """Copies one tensor to another of the same shape and dtype."""

    source: Tensor
    destination: Tensor
    name: str = "copy"
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        a, b = self.source, self.destination
        if a.shape != b.shape or a.dtype != b.dtype:
            expected, got = f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}"
            raise GraphError(f"copy {self.name} joins different tensors", where=self.origin, expected=expected, got=got)


@dataclass(frozen=True, eq=False, slots=True)
class Repeat(Program):
    """Runs the body a fixed number of times."""

    count: int
    body: Program
    origin: Origin = Origin()

    def children(self) -> tuple[Program, ...]:
        return (self.body,)


@dataclass(frozen=True, eq=False, slots=True)
class RepeatWhile(Program):
    """Runs `condition`, then, while the scalar `predicate` it computed is true, `body` and `condition` again."""

    condition: Program
    predicate: Tensor
    body: Program
    origin: Origin = Origin()

    def children(self) -> tuple[Program, ...]:
        return (self.condition, self.body)


@dataclass(frozen=True, eq=False, slots=True)
class If(Program):
    """Runs one of two programs by a scalar bool."""

    predicate: Tensor
    then: Program
    otherwise: Program
    origin: Origin = Origin()

    def children(self) -> tuple[Program, ...]:
        return (self.then, self.otherwise)


@dataclass(frozen=True, eq=False, slots=True)
class Switch(Program):
    """Runs `cases[selector]`, or `default` when the int32 scalar is out of range."""

    selector: Tensor
    cases: tuple[Program, ...]
    default: Program
    origin: Origin = Origin()

    def children(self) -> tuple[Program, ...]:
        return (*self.cases, self.default)


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A program compiled once and called from several places."""

    body: Program
    name: str = "function"


@dataclass(frozen=True, eq=False, slots=True)
class Call(Program):
    """Runs a function."""

    function: Function

    def children(self) -> tuple[Program, ...]:
        return (self.function.body,)


@dataclass(frozen=True, eq=False, slots=True)
class StreamIn(Program):
    """Moves one value from the host into a tensor."""

    stream: HostStream
    destination: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class StreamOut(Program):
    """Moves the value of a tensor to the host."""

    source: Tensor
    stream: HostStream


@dataclass(frozen=True, eq=False, slots=True)
class WriteUndef(Program):
    """Says that what a tensor held is dead, and that what it holds now is anything: no cycles, no bytes.

    Needed before parts of a buffer are written one by one, so that its memory is not live from the start.
    """

    destination: Tensor


def own_tensors(node: Program) -> tuple[Tensor, ...]:
    """The tensors a node touches itself, not through vertices or the programs inside it."""
    match node:
        case Copy(source, destination):
            return source, destination
        case StreamIn(_, tensor) | StreamOut(tensor, _) | WriteUndef(tensor):
            return (tensor,)
        case RepeatWhile(_, tensor, _) | If(tensor) | Switch(tensor):
            return (tensor,)
    return ()


def walk(program: Program) -> Iterator[Program]:
    """All nodes of the tree, parents first; the body of a function once a call."""
    yield program
    for child in program.children():
        yield from walk(child)
