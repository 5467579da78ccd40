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
from ipujax.runtime.graph import Builder, Copy, Function, Graph, Sequence as ProgramSequence
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable, compose, is_key_dtype, substitute


class LastReads:
    """Last equation that reads each variable, through any view, from the last reads of values and their tensors."""

    def __init__(self, last_reads: Mapping[Var, int], values: Iterable[tuple[Var, Tensor]]) -> None:
        self._last_reads = last_reads
        self._last_reads_of_variables: dict[Variable, int] = {}
        self._values_viewing: dict[Variable, list[Var]] = {}
        self.add(values)

    def add(self, values: Iterable[tuple[Var, Tensor]]) -> None:
        """Adds values with their tensors; a variable is read as late as any value that views it."""
        for var, tensor in values:
            for variable in tensor.variables():
                last = max(self._last_reads.get(var, -1), self.last(variable))
                self._last_reads_of_variables[variable] = last
                self._values_viewing.setdefault(variable, []).append(var)

    def last(self, variable: Variable) -> int:
        """Number of the last equation that reads a variable through the values added so far; −1 for none."""
        return self._last_reads_of_variables.get(variable, -1)

    def remove_values_viewing(self, variable: Variable) -> list[Var]:
        """Removes and returns the values whose tensors view a variable."""
        self._last_reads_of_variables.pop(variable, None)
        return self._values_viewing.pop(variable, [])

    def may_overwrite(self, out: Tensor, operands: Sequence[Tensor], equation_number: int) -> bool:
        """True if an equation may write its result to `out`: no later equation reads it, nor do its own operands.

        An operand that is `out` itself is allowed: a rule reads each element of it before it writes that element.
        """
        variables = set(out.variables())
        is_free = all(x.node is out.node or variables.isdisjoint(x.variables()) for x in operands)
        return is_free and all(self.last(variable) <= equation_number for variable in variables)


class LaterValues:
    """Values that are read after an equation.

    Args:
        env: tensors of all values; updated as values move to copies.
        last_reads: the last equation that reads each value; updated likewise.
        equation_number: number of the equation.
    """

    def __init__(self, env: MutableMapping[Var, Tensor], last_reads: LastReads, equation_number: int) -> None:
        self._env = env
        self._last_reads = last_reads
        self._equation_number = equation_number

    def copy_before_call(
        self, graph: Graph, variables: Iterable[Variable], prog: ProgramSequence
    ) -> Mapping[Variable, Variable]:
        """Copies what a call overwrites although an equation after it reads it; values then view the copies.

        Args:
            graph: graph of the program.
            variables: variables that the called function writes its results to.
            prog: program to add the copies to, before the call.

        Returns:
            The copy of each variable that was copied.
        """
        copies: dict[Variable, Variable] = {}
        for old in variables:
            if self._last_reads.last(old) > self._equation_number:
                name = f"{old.name}/kept"
                with graph.debug_origin(compose(graph.origin, old.origin)):
                    new = graph.add_variable(old.shape, old.dtype, name, graph.mappings[old])
                    graph.note_role(new, graph.role_of(Tensor.of(old)))
                    copy_in_vertices(Builder(graph, prog, name), Tensor.of(old), new)
                (copies[old],) = new.variables()
        for old in copies:
            values = {var: substitute(self._env[var], copies) for var in self._last_reads.remove_values_viewing(old)}
            self._env.update(values)
            self._last_reads.add(values.items())
        return copies


def copy_in_vertices(builder: Builder, source: Tensor, destination: Tensor) -> None:
    """Copies in vertices, so that adjacent copies share a compute set; keys, which have no codelet, by exchange."""
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
class LoweredFunction:
    """Function with the tensors of its operands and results.

    Args:
        function: the function.
        operands: a tensor for each operand, which a call copies there; a fixed one is the caller's tensor.
        results: a tensor for each result.
        owned_results: variables that only the function writes and of which each element is one of a result. Callers
            read them in place until the next call, before which those that are read later are copied; other results
            are copied after each call.
    """

    function: Function
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    owned_results: tuple[Variable, ...]


class RowSum(Protocol):
    """A sum of stacks whose rows a loop computes: each row is added to that of the sum, and no stack is stored."""

    def stack_for(self, row: Tensor, rows: int) -> Tensor:
        """Adds the sum, a stack of so many rows of the layout of `row`, and returns it."""

    def add(self, row: Tensor, total: Tensor, prog: ProgramSequence) -> None:
        """Adds to a program the addition of a row to the same row of the sum, `total`, in place."""


# Jaxpr of a callee, and the nodes of operands that it reads in place.
FunctionKey = tuple[Any, ...]


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
    functions: dict[FunctionKey, LoweredFunction]  # callees that were lowered by now, for the rule of calls
    # For each result the tensor it may be written to, or None; a rule that writes it there returns it
    into_tensors: tuple[Tensor | None, ...]
    result_roles: tuple[str, ...]  # role of each result, "" where unknown
    row_sums: tuple[RowSum | None, ...]  # for each result the sum that its rows are added to, or None
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


def lower_array_function(ctx: Context, fun: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Lowers a function of arrays with the equation's results on the operands; one tensor for each result."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return ctx.lower_jaxpr(inline(trace(fun, shapes, {}, ()).jaxpr), operands, ctx.prog)
