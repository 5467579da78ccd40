"""Forms of control flow: the ways in which a node of the program tree runs its children.

    form     ::= Leaf     computes, moves or waits itself, and has no children
               | Block    runs each child once, in order
               | Loop     runs its body `trips` times
               | Branch   runs one of its children
    Decision ::= control that depends on the value of a tensor: any Branch, and a Loop with a `test`

Analyses, cost models and profiles ask a node for its form, its children and its tensors, so a new kind of node that
subclasses a form needs no change there. The engine, the tile interpreter and the listing have a case for each node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ipujax.runtime.errors import GraphError, shortened
from ipujax.runtime.graph.handles import ComputeSet
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, Tensor

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
