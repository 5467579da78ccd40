"""Context of a lowering rule: its arguments besides the operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Primitive
from ipujax.lowering.rules.base.later_values import LaterValues
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


class LowerJaxpr(Protocol):
    """Lowers a jaxpr on its operands, adding to a program; returns the tensors of its results.

    The first results may be written to the tensors `into`.
    """

    def __call__(
        self, jaxpr: ClosedJaxpr, operands: Sequence[Tensor], prog: ProgramSequence, into: Sequence[Tensor] = ()
    ) -> list[Tensor]: ...


class LowerAlone(Protocol):
    """Lowers a jaxpr into a graph of its own, with all operands and results on tile 0; returns graph and program."""

    def __call__(self, jaxpr: ClosedJaxpr, target: Target) -> tuple[Graph, ProgramSequence]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """Context of one equation."""

    graph: Graph  # graph to add to; its `origin` is already set to the user's line
    prog: ProgramSequence
    name: str  # debug name of the equation
    equation: JaxprEqn
    out_avals: tuple[Any, ...]  # shape and dtype of each result
    lower_jaxpr: LowerJaxpr  # lowers the nested jaxprs of control flow
    lower_alone: LowerAlone  # lowers a jaxpr that one tile runs by itself, for its cost
    functions: dict[Any, Any]  # lowered functions by callee, for the rule of calls
    # For each result the tensor it may be written to, or None; a rule that writes it there returns it
    into_tensors: tuple[Tensor | None, ...]
    result_roles: tuple[str, ...]  # role of each result, "" where unknown
    options: Options
    later: LaterValues | None = None  # values that are read after the equation; None where unknown

    @property
    def primitive(self) -> Primitive:
        return self.equation.primitive

    @property
    def params(self) -> Mapping[str, Any]:
        return self.equation.params

    @property
    def builder(self) -> Builder:
        return Builder(self.graph, self.prog, self.name)

    def into(self, prog: ProgramSequence) -> Context:
        return replace(self, prog=prog)


@remembered
def bound(primitive: Primitive, /, **params: Any) -> Callable[..., Any]:
    """A primitive with parameters; equal ones give one function, which caches can compare."""
    return partial(primitive.bind, **params)


# A rule takes the context and the operands and returns the results: one tensor, or one for each of several results.
Rule = Callable[..., Tensor | Sequence[Tensor]]
