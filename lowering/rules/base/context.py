"""Context of a lowering rule: its arguments besides the operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Primitive
from ipujax.lowering.rules.base.later_values import LaterValues
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.options import Options
from ipujax.runtime.tensor import Tensor


class LowerJaxpr(Protocol):
    """Lowers a jaxpr on its operands, adding to a program; returns the tensors of its results.

    The first results may be written to the tensors `into`.
    """

    def __call__(
        self, jaxpr: ClosedJaxpr, operands: Sequence[Tensor], prog: ProgramSequence, into: Sequence[Tensor] = ()
    ) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """Context of one equation.

    Args:
        graph: graph to add to; its `origin` is already set to the user's line.
        prog: program to add to.
        name: debug name of the equation.
        equation: the equation itself.
        out_avals: shape and dtype of each result.
        lower_jaxpr: lowers the nested jaxprs of control flow.
        functions: lowered functions by callee, for the rule of calls.
        into_tensors: for each result the tensor it may be written to, or None; a rule that writes it there returns it.
        options: the user's options.
        later: values that are read after the equation; None where unknown.
    """

    graph: Graph
    prog: ProgramSequence
    name: str
    equation: JaxprEqn
    out_avals: tuple[Any, ...]
    lower_jaxpr: LowerJaxpr
    functions: dict[Any, Any]
    into_tensors: tuple[Tensor | None, ...]
    options: Options
    later: LaterValues | None = None

    @property
    def primitive(self) -> Primitive:
        """Primitive of the equation."""
        return self.equation.primitive

    @property
    def params(self) -> Mapping[str, Any]:
        """All parameters of the equation."""
        return self.equation.params

    def into(self, prog: ProgramSequence) -> Context:
        """Context that adds to another program."""
        return replace(self, prog=prog)


@remembered
def bound(primitive: Primitive, /, **params: Any) -> Callable[..., Any]:
    """A primitive with parameters; equal ones give one function, which caches can compare."""
    return partial(primitive.bind, **params)


# A rule takes the context and the operands and returns the results: one tensor, or one for each of several results.
Rule = Callable[..., Tensor | Sequence[Tensor]]
