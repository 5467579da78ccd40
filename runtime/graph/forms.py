"""Forms of control flow: the ways in which a node of the program tree runs its children.

    form     ::= Leaf     computes, moves or waits itself, and has no children
               | Block    runs each child once, in order
               | Loop     runs its body `trips` times
               | Branch   runs one of its children
    Decision ::= control that depends on the value of a tensor: any Branch, and a Loop with a `test`

Analyses, cost models and profiles ask a node for its form, its children and its tensors, so a new kind of node that
subclasses a form needs no change there. The engine, the tile interpreter and the listing have a case for each node.

Handles that programs refer to: compute sets, host streams and remote buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ipujax.runtime.errors import GraphError, shortened
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, Tensor, Variable


@dataclass(frozen=True, eq=False, slots=True)
class ComputeSet(OfGraph):
    """Vertices that run in parallel between two syncs; the graph holds its vertex groups."""

    name: str
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False, slots=True)
class HostStream(OfGraph):
    """A unidirectional channel between host and device, of one value of `shape` and `dtype` a transfer.

    With several replicas one transfer has the values of all: [replicas, *shape].
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    resident: bool = False  # the value is on the device already, or stays there: no bytes move
    broadcast: bool = False  # to the device: one value of `shape` for all replicas
    blocks: tuple[int, ...] | None = None  # to the device: replicas of equal numbers get equal values


@dataclass(frozen=True, eq=False, slots=True)
class RemoteBuffer(OfGraph):
    """Off-chip memory, moved by rows of its first axis or all at once; its values last from run to run.

    Args:
        name: its handle.
        memory: variable for its elements; of no graph, since it is mapped to no tile.
        filled_from: stream whose value the host writes to it before a run, element by element in the order of both.
        read_into: stream that the host reads it into after a run, in the same way.
        on_host: whether it is memory of the host, not streaming memory.
    """

    name: str
    memory: Variable
    filled_from: HostStream | None = None
    read_into: HostStream | None = None
    on_host: bool = False
    resident: ClassVar[bool] = False  # as of `HostStream`: its bytes always move

    @staticmethod
    def of(name: str, dtype: Any, num_elements: int, repeats: int = 1) -> RemoteBuffer:
        """Return a buffer of `repeats` rows of `num_elements`, all zeros."""
        return RemoteBuffer(name, Variable((repeats, num_elements), dtype, name))

    @property
    def row(self) -> int:
        """Elements of one row."""
        return self.memory.shape[1]

    @property
    def repeats(self) -> int:
        """Number of rows."""
        return self.memory.shape[0]


Tensors = tuple[Tensor, ...]


class Program(OfGraph):
    """Base of all program nodes."""

    # Nodes are dataclasses with slots; a base without would give each of them a `__dict__`.
    __slots__ = ()

    def __post_init__(self) -> None:
        # A wrong child is refused where the node is made, so that the error has the user's line.
        for child in self.children():
            check_program(child)

    def children(self) -> tuple[Program, ...]:
        """Return the programs inside this one, in order."""
        return ()

    def rebuild(self, children: Sequence[Program]) -> Program:
        """Return a copy with other children, one for each of `children()`."""
        return self

    @property
    def child_runs(self) -> int:
        """Runs of each child in one run of the node; 1 if data decide."""
        return 1

    @property
    def attributes(self) -> dict[str, Any]:
        """JSON-able values that distinguish the node from others of its kind: a trip count, say."""
        return {}

    @property
    def reads(self) -> Tensors:
        """The tensors that the node reads itself, not through vertices or the programs inside it."""
        return ()

    @property
    def writes(self) -> Tensors:
        """The tensors that the node writes itself, not through vertices or the programs inside it."""
        return ()


class Leaf(Program, ABC):
    """A program that computes, moves or waits itself.

    Attributes:
        origin: source line, layer and part.
    """

    __slots__ = ()

    origin: Origin

    @property
    @abstractmethod
    def label(self) -> str:
        """Debug name."""

    @property
    def shown_origin(self) -> Origin:
        """Origin in profiles."""
        return self.origin

    @property
    def builder_part(self) -> str:
        """Part of training that it was added for; in profiles, transfers are a part of their own."""
        return self.origin.part


class Block(Program):
    """Control that runs each of its children once, in order."""

    __slots__ = ()


class Decision(Program, ABC):
    """Control that reads a scalar tensor, its decider, and runs its children accordingly.

    Attributes:
        origin: source line, layer and part.
        decider_field: field of the node that holds the decider.
        decider_dtypes: dtypes that the decider may have.
    """

    __slots__ = ()

    origin: Origin
    # Class variables, so that a new decision names its field and dtypes, and all passes find its tensor.
    decider_field: ClassVar[str] = "predicate"
    decider_dtypes: ClassVar[tuple[np.dtype[Any], ...]] = (np.dtype(bool),)

    @property
    def decider(self) -> Tensor:
        """The scalar tensor that it reads."""
        tensor: Tensor = getattr(self, self.decider_field)
        return tensor

    def with_decider(self, tensor: Tensor) -> Program:
        """Return a copy that reads another tensor."""
        node: Program = replace(self, **{self.decider_field: tensor})  # type: ignore[type-var]
        return node

    @property
    def reads(self) -> Tensors:
        return (self.decider,)

    @abstractmethod
    def choice(self, value: Any) -> int:
        """Return, by the decider's value, the number of the child of a Branch; 1 for another iteration of a Loop."""


class Branch(Decision):
    """Control that runs one of its children."""

    __slots__ = ()

    def recorded_choice(self, outcome: int) -> int:
        """Return the number of the child that ran, from the outcome that the engine recorded."""
        return outcome


class Loop(Program):
    """Control that runs its body for a number of iterations.

    Without a test that number is `trips`. With one the loop is a Decision too: it runs `test`, and, while `choice` is
    1, `body` and `test`.
    """

    __slots__ = ()

    body: Program
    origin: Origin

    @property
    def trips(self) -> int | None:
        """Trip count; None if data decide."""
        return None

    @property
    def test(self) -> Program | None:
        """The program that computes the decider."""
        return None

    @property
    def child_runs(self) -> int:
        return 1 if self.trips is None else self.trips

    def children(self) -> tuple[Program, ...]:
        return (self.body,) if self.test is None else (self.test, self.body)


def check_program(value: Any) -> Program:
    """Return `value` if it is a program, else refuse it."""
    if not isinstance(value, Program):
        hints = {ComputeSet: "Execute(compute_set)", list: "Sequence(*programs)", tuple: "Sequence(*programs)"}
        got = f"compute set {value.name}" if isinstance(value, ComputeSet) else describe(value)
        raise GraphError(
            f"{got} is not a program", expected="a program, as Copy(a, b) makes", hint=hints.get(type(value))
        )
    return value


def describe(value: Any) -> str:
    """Return a value as errors show it."""
    return repr(value) if isinstance(value, Tensor) else shortened(value)
