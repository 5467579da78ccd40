"""Forms of control: how a node of the program tree runs the programs inside it.

    form     ::= Leaf     computes, moves or waits itself, and has no children
               | Block    runs each child once, in order
               | Loop     runs its body `trips` times
               | Branch   runs one of its children
    Decision ::= control that depends on the value of a tensor: any Branch, and a Loop with a `test`

Analyses, cost models and profiles ask a node for its form, its children and its tensors, so that they know a new kind
of node without naming it: it subclasses a form. Only what gives each node a meaning of its own, as the engine and the
listing do, has to learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ipujax.runtime.errors import GraphError, shortened
from ipujax.runtime.graph.handles import ComputeSet
from ipujax.runtime.tensor import Origin, Tensor

Tensors = tuple[Tensor, ...]


class Program:
    """Base of all program nodes."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for child in self.children():
            check_program(child)

    def children(self) -> tuple[Program, ...]:
        """The programs inside this one, in order."""
        return ()

    def rebuild(self, children: Sequence[Program]) -> Program:
        """Makes a node like this one of other programs, one for each of `children()`."""
        return self

    @property
    def child_runs(self) -> int:
        """Runs of each child in one run of the node; 1 where data decides."""
        return 1

    @property
    def facts(self) -> dict[str, Any]:
        """JSON-able data that tells control from other control of its form."""
        return {}

    @property
    def reads(self) -> Tensors:
        """The tensors that the node reads itself, not through vertices or the programs inside it."""
        return ()

    @property
    def writes(self) -> Tensors:
        """The tensors that the node writes itself, not through vertices or the programs inside it."""
        return ()


class Leaf(Program):
    """A program that computes, moves or waits itself.

    Attributes:
        origin: where it comes from.
    """

    __slots__ = ()

    origin: Origin

    @property
    def label(self) -> str:
        """Debug name."""
        raise NotImplementedError

    @property
    def shown_origin(self) -> Origin:
        """Where it comes from, as profiles show it."""
        return self.origin


class Block(Program):
    """Control that runs each of its children once, in order."""

    __slots__ = ()


class Decision(Program):
    """Control that reads a scalar tensor, its decider, and runs the programs inside it accordingly.

    Attributes:
        origin: where it comes from.
        decider_field: field of the node that holds the decider.
        decider_dtypes: dtypes that the decider may have.
    """

    __slots__ = ()

    origin: Origin
    decider_field: ClassVar[str] = "predicate"
    decider_dtypes: ClassVar[tuple[np.dtype[Any], ...]] = (np.dtype(bool),)

    @property
    def decider(self) -> Tensor:
        """The scalar tensor that is read."""
        tensor: Tensor = getattr(self, self.decider_field)
        return tensor

    def with_decider(self, tensor: Tensor) -> Program:
        """Makes a node like this one that reads another tensor."""
        node: Program = replace(self, **{self.decider_field: tensor})  # type: ignore[type-var]
        return node

    @property
    def reads(self) -> Tensors:
        return (self.decider,)

    def choice(self, value: Any) -> int:
        """Decides on a value of the decider: number of the child of a Branch, 1 for another iteration of a Loop."""
        raise NotImplementedError


class Branch(Decision):
    """Control that runs one of its children."""

    __slots__ = ()

    def recorded_choice(self, outcome: int) -> int:
        """Number of the child that ran, from what the engine records of the node."""
        return outcome


class Loop(Program):
    """Control that runs its body again and again.

    Without a test it runs `body` `trips` times. With one it is a Decision too and runs `test`, decides, and, as long as
    it decides to go on, runs `body` and `test` and decides again.
    """

    __slots__ = ()

    body: Program
    origin: Origin

    @property
    def trips(self) -> int | None:
        """Trip count; None if data decides."""
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


def check_program(what: Any) -> Program:
    """What is to run, if it is a program.

    Raises:
        GraphError: anything else.
    """
    if not isinstance(what, Program):
        hints = {ComputeSet: "Execute(compute_set)", list: "Sequence(*programs)", tuple: "Sequence(*programs)"}
        got = f"compute set {what.name}" if isinstance(what, ComputeSet) else described(what)
        raise GraphError(f"{got} is no program", expected="a program, as Copy(a, b) makes", hint=hints.get(type(what)))
    return what


def described(what: Any) -> str:
    """What a value is, for an error."""
    return repr(what) if isinstance(what, Tensor) else shortened(what)
