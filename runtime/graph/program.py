"""Control programs: the tree that says what runs, in which order.

    program ::= Sequence(program…) | Execute(compute set) | Copy(source, destination)
              | Repeat(count, body) | RepeatWhile(condition, predicate, body)
              | If(predicate, then, else) | Switch(selector, cases, default) | Call(function)
              | StreamIn(stream, destination) | StreamOut(source, stream) | WriteUndef(destination)
              | RemoteIn(buffer, destination, offset) | RemoteOut(source, buffer, offset) | Wait(tensor) | Sync(kind)
              | CrossReplicaCopy(source, destination, replica map)
              | Collective(inputs, outputs, program…)

Nodes are frozen, but for `Sequence`, which is a builder: `add` appends until the program is compiled. Control is of one
of the forms in `forms`, by which most of the compiler knows it.
In a graph of several replicas each runs the program on memory of its own; they meet in `CrossReplicaCopy` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np

from ipujax.runtime.errors import GraphError, whole_number
from ipujax.runtime.graph.forms import (
    Block,
    Branch,
    Decision,
    Loop,
    Program as Program,
    Tensors,
    check_program as check_program,
    described as described,
)
from ipujax.runtime.graph.handles import (
    ComputeSet as ComputeSet,
    HostStream as HostStream,
    RemoteBuffer as RemoteBuffer,
)
from ipujax.runtime.graph.leaf_nodes import (
    Copy as Copy,
    CrossReplicaCopy as CrossReplicaCopy,
    Execute as Execute,
    RemoteIn as RemoteIn,
    RemoteOut as RemoteOut,
    StreamIn as StreamIn,
    StreamOut as StreamOut,
    Sync as Sync,
    SyncKind as SyncKind,
    Wait as Wait,
    WriteUndef as WriteUndef,
)
from ipujax.runtime.graph.pipeline_task import PipelineTask
from ipujax.runtime.tensor import Origin, Tensor


class Sequence(Block):
    """Programs one after the other; a sequence inside of a sequence is the same as its programs."""

    __slots__ = ("_programs",)

    def __init__(self, *programs: Program) -> None:
        self._programs = [check_program(program) for program in programs]

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self._programs)} programs"

    def add(self, program: Program) -> None:
        """Appends a program.

        Raises:
            GraphError: anything that is no program, or the sequence itself.
        """
        if program is self:
            raise GraphError(
                "a sequence is added to itself", expected="another program", hint="Repeat(count, sequence)"
            )
        self._programs.append(check_program(program))

    def replace_all(self, programs: Iterable[Program]) -> None:
        """Puts other programs in the place of all that it has."""
        self._programs = [check_program(program) for program in programs]

    def children(self) -> tuple[Program, ...]:
        """The programs inside this one, in order, those of sequences inside of it in their place.

        Raises:
            GraphError: a sequence that is inside of itself.
        """
        found: list[Program] = []
        open_ones: dict[Program, Iterator[Program]] = {self: iter(self._programs)}
        while open_ones:
            for child in open_ones[next(reversed(open_ones))]:
                if type(child) is not Sequence:
                    found.append(child)
                elif child in open_ones:
                    raise GraphError("a sequence is inside of itself", expected="another program")
                else:
                    open_ones[child] = iter(child._programs)
                    break
            else:
                open_ones.popitem()
        return tuple(found)

    def rebuild(self, children: Items[Program]) -> Program:
        return Sequence(*children)


Stacked = list[jax.Array]  # one array for each tensor, [replicas, *shape]


class Collective(Sequence):
    """A sequence in which all replicas take part, and its array semantics.

    Its programs are the rounds of the machine. The engine computes their result at once from the arrays of all
    replicas, which may reassociate sums; with exact splits it runs the rounds.

    Args:
        body: the rounds.
        inputs: what they read.
        outputs: what they write that is read later: all of each.
        compute: the values of outputs from those of inputs.
        is_same: whether outputs are equal on all replicas.
        name: debug name.
        origin: where it comes from.
    """

    __slots__ = ("compute", "inputs", "is_same", "name", "origin", "outputs")

    def __init__(
        self,
        body: Program,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        compute: Callable[[Stacked], Stacked],
        *,
        is_same: bool,
        name: str,
        origin: Origin,
    ) -> None:
        super().__init__(body)
        self.inputs, self.outputs, self.compute, self.is_same = inputs, outputs, compute, is_same
        self.name, self.origin = name, origin


@dataclass(frozen=True, eq=False, slots=True)
class Repeat(Loop):
    """Runs the body a fixed number of times, at most `MAX_COUNT`."""

    count: int
    body: Program
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number(self.count, "the count of a Repeat"))
        check_program(self.body)

    @property
    def trips(self) -> int:
        return self.count

    def rebuild(self, children: Items[Program]) -> Program:
        (body,) = children
        return replace(self, body=body)

    @property
    def facts(self) -> dict[str, Any]:
        return {"count": self.count}


@dataclass(frozen=True, eq=False, slots=True)
class RepeatWhile(Loop, Decision):
    """Runs `condition`, then, while the scalar `predicate` it computed is true, `body` and `condition` again.

    With `until` it goes on while the predicate is false.
    """

    condition: Program
    predicate: Tensor
    body: Program
    origin: Origin = Origin()
    until: bool = False

    @property
    def test(self) -> Program:
        return self.condition

    def rebuild(self, children: Items[Program]) -> Program:
        condition, body = children
        return replace(self, condition=condition, body=body)

    def choice(self, value: Any) -> int:
        return int(bool(value) != self.until)

    @property
    def facts(self) -> dict[str, Any]:
        return {"until": self.until}


@dataclass(frozen=True, eq=False, slots=True)
class If(Branch):
    """Runs one of two programs by a scalar bool."""

    predicate: Tensor
    then: Program
    otherwise: Program
    origin: Origin = Origin()

    def children(self) -> tuple[Program, ...]:
        return (self.then, self.otherwise)

    def rebuild(self, children: Items[Program]) -> Program:
        then, otherwise = children
        return replace(self, then=then, otherwise=otherwise)

    def choice(self, value: Any) -> int:
        return 0 if value else 1

    def recorded_choice(self, outcome: int) -> int:
        return self.choice(outcome)


@dataclass(frozen=True, eq=False, slots=True)
class Switch(Branch):
    """Runs the case of the int32 scalar's value, or `default` when there is none.

    Case k is for the value `values[k]`, which differ; for k itself when `values` is None.
    """

    selector: Tensor
    cases: tuple[Program, ...]
    default: Program
    origin: Origin = Origin()
    values: tuple[int, ...] | None = None
    decider_field: ClassVar[str] = "selector"
    decider_dtypes: ClassVar[tuple[np.dtype[Any], ...]] = (np.dtype(np.int32), np.dtype(np.uint32))

    def children(self) -> tuple[Program, ...]:
        return (*self.cases, self.default)

    def rebuild(self, children: Items[Program]) -> Program:
        *cases, default = children
        return replace(self, cases=tuple(cases), default=default)

    def choice(self, value: Any) -> int:
        values = self.values or range(len(self.cases))
        return values.index(value) if value in values else len(self.cases)

    @property
    def facts(self) -> dict[str, Any]:
        return {"values": list(range(len(self.cases)) if self.values is None else self.values)}


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A program compiled once and called from several places."""

    body: Program
    name: str = "function"

    def __post_init__(self) -> None:
        check_program(self.body)


@dataclass(frozen=True, eq=False, slots=True)
class Call(Block):
    """Runs a function from `origin`, see `runtime.tensor.compose`; `task` is that of a pipeline, if it is one."""

    function: Function
    origin: Origin = Origin()
    task: PipelineTask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.function, Function):
            raise GraphError(f"{described(self.function)} is no function", expected="what graph.add_function made")

    def children(self) -> tuple[Program, ...]:
        return (self.function.body,)

    def rebuild(self, children: Items[Program]) -> Program:
        (body,) = children
        return replace(self, function=replace(self.function, body=body))


def own_tensors(node: Program) -> Tensors:
    """The tensors a node touches itself, not through vertices or the programs inside it."""
    return node.reads + node.writes
