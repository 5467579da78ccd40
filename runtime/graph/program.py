"""Control programs: the tree of steps, in the order in which they run.

    program ::= Sequence(program…) | Execute(compute set) | Copy(source, destination)
              | Repeat(count, body) | RepeatWhile(condition, predicate, body)
              | If(predicate, then, else) | Switch(selector, cases, default) | Call(function)
              | StreamIn(stream, destination) | StreamOut(source, stream) | WriteUndef(destination)
              | RemoteIn(buffer, destination, offset) | RemoteOut(source, buffer, offset) | Wait(tensor) | Sync(kind)
              | CrossReplicaCopy(source, destination, replica map)
              | Collective(inputs, outputs, program…)

Nodes are frozen, except `Sequence`, which is a builder: `add` appends until the program is compiled. Control flow has
one of the forms in `forms`, which is all that most of the compiler looks at.
In a graph with several replicas each runs the program on its own memory; they meet in `CrossReplicaCopy` alone.

Tasks of pipelines as marks on calls: stage and kind of the work of a call.

A call carries a `PipelineTask`, without the number of its micro-batch: the tasks of a stage and kind take micro-batches
in order, so that the n-th call in a run of the pipeline is that of micro-batch n.
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
    ComputeSet as ComputeSet,
    Decision,
    HostStream as HostStream,
    Loop,
    Program as Program,
    RemoteBuffer as RemoteBuffer,
    Tensors,
    check_program as check_program,
    describe as describe,
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
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, Tensor

TASK_KINDS = ("forward", "backward", "backward_input", "backward_weight")
StageTask = tuple[int, str]  # a stage, and one of `TASK_KINDS`


@dataclass(frozen=True, slots=True, eq=False)
class PipelineLayout:
    """Stages of a pipeline, their IPUs, their tasks, and the values between them.

    Args:
        name: debug name.
        schedule: name of its schedule.
        ipus: the IPU of each stage, by its number; a number that is left out has the IPU of the next stage.
        micro_batches: number of micro-batches in one run.
        tasks: stage and kind of all its tasks; each runs once a micro-batch.
        links: (writer, reader) for each value that goes to another stage: the task that computes it, and the first one
            of the same micro-batch that reads it.
    """

    name: str
    schedule: str
    ipus: tuple[int, ...]
    micro_batches: int
    tasks: tuple[StageTask, ...]
    links: tuple[tuple[StageTask, StageTask], ...]

    @property
    def stages(self) -> list[int]:
        """Numbers of the stages that have tasks, in order."""
        return sorted({stage for stage, _ in self.tasks})


@dataclass(frozen=True, slots=True, eq=False)
class PipelineTask:
    """The work of one kind of one stage on one micro-batch.

    Args:
        pipeline: the pipeline.
        stage: number of the stage.
        kind: one of `TASK_KINDS`.
    """

    pipeline: PipelineLayout
    stage: int
    kind: str

    @property
    def ipu(self) -> int:
        """IPU of the stage."""
        return self.pipeline.ipus[self.stage]


class Sequence(Block):
    """Programs one after the other; a sequence inside of a sequence is equivalent to its programs."""

    __slots__ = ("_programs",)

    def __init__(self, *programs: Program) -> None:
        self._programs = [check_program(program) for program in programs]

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self._programs)} programs"

    def add(self, program: Program) -> None:
        """Append a program.

        Raises:
            GraphError: it is no program, or the sequence itself.
        """
        if program is self:
            raise GraphError(
                "a sequence cannot be added to itself", expected="another program", hint="Repeat(count, sequence)"
            )
        self._programs.append(check_program(program))

    def replace_all(self, programs: Iterable[Program]) -> None:
        """Replace all programs of the sequence."""
        self._programs = [check_program(program) for program in programs]

    def children(self) -> tuple[Program, ...]:
        """Return the programs inside this one, in order, with nested sequences flattened.

        Raises:
            GraphError: the sequence would be inside of itself.
        """
        programs: list[Program] = []
        # A stack of the sequences that are being read, by sequence; recursion would overflow on long chains.
        stack: dict[Program, Iterator[Program]] = {self: iter(self._programs)}
        while stack:
            for child in stack[next(reversed(stack))]:
                # A subclass, such as a `Collective`, stays one program.
                if type(child) is not Sequence:
                    programs.append(child)
                elif child in stack:
                    raise GraphError("a sequence cannot be inside of itself", expected="another program")
                else:
                    stack[child] = iter(child._programs)
                    break
            else:
                stack.popitem()
        return tuple(programs)

    def rebuild(self, children: Items[Program]) -> Program:
        return Sequence(*children)


class WholeOperation(Sequence):
    """A sequence of steps that together are one operation, and that operation as a function of whole arrays.

    The engine computes the function, once: a sort, where the machine merges parts of rows. With exact splits it runs
    the steps.

    Args:
        body: the steps.
        inputs: tensors that they read.
        outputs: tensors that they write in full and that are read later.
        compute: function from the arrays of inputs to those of outputs.
    """

    __slots__ = ("compute", "inputs", "outputs")

    def __init__(
        self,
        body: Program,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        compute: Callable[[list[jax.Array]], list[jax.Array]],
    ) -> None:
        super().__init__(body)
        self.inputs = inputs
        self.outputs = outputs
        self.compute = compute


Stacked = list[jax.Array]  # one array for each tensor, [replicas, *shape]


class Collective(WholeOperation):
    """A sequence in which all replicas take part, and its result as a function of the arrays of all of them.

    Its programs are the rounds of the machine. The function may reassociate sums.

    Args:
        body: the rounds.
        inputs: tensors that they read.
        outputs: tensors that they write in full and that are read later.
        compute: function from the arrays of inputs to those of outputs.
        senders: for each replica those whose inputs its outputs are computed from, by rank; output n from input n.
        has_ranks: whether outputs depend on the rank of a replica among its senders, too.
        is_sum: whether each output is the sum of its input over all replicas.
        name: debug name.
        origin: source line, layer and part.
    """

    __slots__ = ("has_ranks", "is_sum", "name", "origin", "senders")

    def __init__(
        self,
        body: Program,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        compute: Callable[[Stacked], Stacked],
        *,
        senders: tuple[tuple[int, ...], ...],
        has_ranks: bool = False,
        is_sum: bool = False,
        name: str,
        origin: Origin,
    ) -> None:
        super().__init__(body, inputs, outputs, compute)
        self.senders = senders
        self.has_ranks = has_ranks
        self.is_sum = is_sum
        self.name = name
        self.origin = origin

    @property
    def is_same(self) -> bool:
        """True if outputs are equal on all replicas, whatever the inputs."""
        return not self.has_ranks and len(set(self.senders)) == 1


@dataclass(frozen=True, eq=False, slots=True)
class Repeat(Loop):
    """Runs the body a fixed number of times, at most `MAX_COUNT`."""

    count: int
    body: Program
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        # NumPy's integers become int: the listing and saved profiles write the count.
        object.__setattr__(self, "count", whole_number(self.count, "the count of a Repeat"))
        check_program(self.body)

    @property
    def trips(self) -> int:
        return self.count

    def rebuild(self, children: Items[Program]) -> Program:
        (body,) = children
        return replace(self, body=body)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"count": self.count}


@dataclass(frozen=True, eq=False, slots=True)
class RepeatWhile(Loop, Decision):
    """Runs `condition`, then, while the scalar `predicate` that it computes is true, `body` and `condition`.

    With `until` it iterates while the predicate is false.
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
    def attributes(self) -> dict[str, Any]:
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

    # The engine records the predicate of an `If`, and the number of the child of other branches.
    def recorded_choice(self, outcome: int) -> int:
        return self.choice(outcome)


@dataclass(frozen=True, eq=False, slots=True)
class Switch(Branch):
    """Runs the case that an int32 or uint32 scalar selects, else `default`.

    Case k is for the value `values[k]`, or for k if `values` is None. No two values are equal.
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
        return values.index(value) if value in values else len(self.cases)  # the default is the last child

    @property
    def attributes(self) -> dict[str, Any]:
        return {"values": list(range(len(self.cases)) if self.values is None else self.values)}


@dataclass(frozen=True, eq=False, slots=True)
class Function(OfGraph):
    """A program compiled once and called from several places."""

    body: Program
    name: str = "function"

    def __post_init__(self) -> None:
        check_program(self.body)


@dataclass(frozen=True, eq=False, slots=True)
class Call(Block):
    """Runs a function, from `origin` (see `runtime.tensor.compose`), as a `task` of a pipeline if there is one."""

    function: Function
    origin: Origin = Origin()
    task: PipelineTask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.function, Function):
            raise GraphError(
                f"{describe(self.function)} is not a function", expected="a function, as graph.add_function returns"
            )

    def children(self) -> tuple[Program, ...]:
        return (self.function.body,)

    def rebuild(self, children: Items[Program]) -> Program:
        (body,) = children
        # A new function for this call alone: others keep the old one.
        return replace(self, function=replace(self.function, body=body))


def direct_tensors(node: Program) -> Tensors:
    """Return the tensors that a node reads or writes itself, not through vertices or its children."""
    return node.reads + node.writes
