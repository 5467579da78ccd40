"""Context of a lowering rule: its arguments besides the operands, and values that are read later.

A rule may compose other operations: they are traced and inlined like the user's code.

A value that is read after an equation overwrites its memory is copied elsewhere before. Only calls of functions
overwrite memory that other equations still read: results are in the function's own variables, and are read there until
its next call.

After the last read of a tensor an equation may write its result there. Input: the last equation that reads each value
of a jaxpr, and the tensors of values in order of definition. Output: whether an equation may overwrite a tensor, and
the values that are views of a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Primitive, Var, trace
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable, compose, is_key_dtype, substitute


class LastReads:
    """Last equation that reads each variable, through any view, from the last reads of values and their tensors."""

    def __init__(self, last_read: Mapping[Var, int], values: Iterable[tuple[Var, Tensor]]) -> None:
        self._last_read = last_read
        self._last: dict[Variable, int] = {}
        self._values: dict[Variable, list[Var]] = {}
        self.add(values)

    def add(self, values: Iterable[tuple[Var, Tensor]]) -> None:
        for var, tensor in values:
            last = self._last_read.get(var, -1)
            for variable in tensor.variables():
                self._last[variable] = max(last, self._last.get(variable, -1))
                self._values.setdefault(variable, []).append(var)

    def last(self, variable: Variable) -> int:
        """The last equation that reads a variable, as far as values have been made; −1 for none."""
        return self._last.get(variable, -1)

    def moved_from(self, variable: Variable) -> list[Var]:
        """Removes and returns the values that see a variable."""
        self._last.pop(variable, None)
        return self._values.pop(variable, [])

    def may_overwrite(self, out: Tensor, operands: Sequence[Tensor], number: int) -> bool:
        """True if equation `number` may write tensor `out`: nothing later reads it, and the equation no part of it."""
        # An operand that is the very tensor is read, element by element, before it is written.
        variables = set(out.variables())
        is_free = all(x.node is out.node or variables.isdisjoint(x.variables()) for x in operands)
        return is_free and all(self._last.get(variable, -1) <= number for variable in variables)


class LaterValues:
    """Values that are read after equation `number`; `env` has the tensors of all values, `reads` their last reads."""

    def __init__(self, env: MutableMapping[Var, Tensor], reads: LastReads, number: int) -> None:
        self._env = env
        self._reads = reads
        self._number = number

    def move_out(
        self, graph: Graph, variables: Iterable[Variable], prog: ProgramSequence
    ) -> Mapping[Variable, Variable]:
        """Copies the variables that are read later, in `prog`; returns old variable → copy."""
        copies: dict[Variable, Variable] = {}
        for old in variables:
            if self._reads.last(old) > self._number:
                name = f"{old.name}/kept"
                with graph.debug_origin(compose(graph.origin, old.origin)):
                    new = graph.add_variable(old.shape, old.dtype, name, graph.mappings[old])
                    copy_in_vertices(Builder(graph, prog, name), Tensor.of(old), new)
                (copies[old],) = new.variables()
        for old in copies:
            # From here on these values are views of the copies.
            values = {var: substitute(self._env[var], copies) for var in self._reads.moved_from(old)}
            self._env.update(values)
            self._reads.add(values.items())
        return copies


def copy_in_vertices(builder: Builder, source: Tensor, destination: Tensor) -> None:
    """Copies in vertices, so that adjacent copies share a compute set."""
    # Keys have no codelet.
    if is_key_dtype(source.dtype):
        builder.prog.add(Copy(source, destination, builder.name, builder.graph.origin))
    else:
        elementwise(builder, _copying(source.dtype), [source], destination)


@remembered
def _copying(dtype: np.dtype) -> Op:
    return Op("copy", lambda x: x, dtype, "copy")


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


def composed(ctx: Context, fun: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Lowers a function of arrays with the equation's results on the operands; one tensor for each result."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return ctx.lower_jaxpr(inline(trace(fun, shapes, {}, ()).jaxpr), operands, ctx.prog)
