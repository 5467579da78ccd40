"""Lowers equations into a graph, each by the rule of its primitive.

Input: jaxprs, and the tensors of their operands. Output: tensors of their results, and steps added to programs. A
primitive without a rule is lowered as its implementation in JAX, as those that libraries wrap functions in, else as
the StableHLO that JAX lowers it to; code that neither holds goes to `fallback`.

An array that several equations, one after the other, update in part has one destination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, traced_impl
from ipujax.lowering.jaxpr import ValueRoles, primitive_names
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.layout.mapping import copied_if_huge
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.popops import SCATTERS
from ipujax.lowering.refs import discharge
from ipujax.lowering.rules.base.context import Context, FunctionKey, LastReads, LaterValues, LoweredFunction, RowSum
from ipujax.lowering.rules.base.fallback import fallback, has_work
from ipujax.lowering.rules.base.probes import Probes
from ipujax.lowering.rules.table import rule_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.logs import count_part
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor

NO_ROW_SUMS: Mapping[Var, RowSum] = MappingProxyType({})
_UPDATES = ("dynamic_update_slice", *SCATTERS)  # the result is the first operand but for some elements


def _destinations_with_updated(eqns: Sequence[JaxprEqn], destinations: Mapping[Var, Tensor]) -> dict[Var, Tensor]:
    """Destinations by variable, extended to arrays before their updates, so that updates are in place.

    An array is computed where the result of its update goes, and is updated there.
    """
    extended = dict(destinations)
    # From last to first, so that all arrays of a chain of updates get the destination of the last.
    for eqn in reversed(eqns):
        updated = eqn.invars[0] if eqn.primitive.name in _UPDATES else None
        if isinstance(updated, Var) and eqn.outvars[0] in extended:
            extended.setdefault(updated, extended[eqn.outvars[0]])
    return extended


class _ScalarBits(NamedTuple):
    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """Lowers jaxprs into one graph.

    Args:
        graph: graph to add to.
        destinations: tensors that may be written at once, by the variables of jaxprs whose values go there.
        options: the user's options.
        roles: roles of values.
        probes: adds probes of all values to the program; None for a program without.
    """

    graph: Graph
    destinations: Mapping[Var, Tensor] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    roles: ValueRoles = field(default_factory=ValueRoles)
    probes: Probes | None = None
    _scalars: dict[_ScalarBits, Tensor] = field(default_factory=dict, init=False)  # the one constant of equal scalars
    _functions: dict[FunctionKey, LoweredFunction] = field(default_factory=dict, init=False)  # callees lowered by now

    def jaxpr(
        self, jaxpr: ClosedJaxpr, operands: Sequence[Tensor], prog: ProgramSequence, into: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Lowers a jaxpr on its operands; returns the tensors of its results.

        Args:
            jaxpr: jaxpr to lower.
            operands: a tensor for each of its operands.
            prog: program to add to.
            into: tensors that its first results may be written to.
        """
        body = jaxpr.jaxpr
        env: dict[Var, Tensor] = dict(zip(body.invars, operands, strict=True))
        self.note_roles(body.invars, operands)
        for var, value in zip(body.constvars, jaxpr.consts, strict=True):
            env[var] = self.graph.add_constant(value, "constant")
        places = {var: out for var, out in zip(body.outvars, into, strict=False) if isinstance(var, Var)}
        self.equations(body.eqns, env, prog, body.outvars, into=places)
        return [self.read(env, atom) for atom in body.outvars]

    def equations(
        self,
        eqns: Sequence[JaxprEqn],
        env: dict[Var, Tensor],
        prog: ProgramSequence,
        results: Sequence[Atom],
        after: Callable[[JaxprEqn], object] = lambda _: None,
        into: Mapping[Var, Tensor] | None = None,
        row_sums: Mapping[Var, RowSum] = NO_ROW_SUMS,
    ) -> None:
        """Lowers equations in order, adding to a program.

        A result is written to its destination, such as the carry of a loop, only where nothing still reads what that
        holds.

        Args:
            eqns: the equations.
            env: tensors of their operands; those of their results are added.
            prog: program to add to.
            results: values that are read after them.
            after: callback for each equation once it is lowered; it may read its results.
            into: destinations: for some results the tensor to write it to; in addition to `self.destinations`.
            row_sums: sums that rows of results of loops are added to; such a result has the tensor of its sum.
        """
        self.find_roles(eqns, results)
        last_read = {atom: n for n, eqn in enumerate(eqns) for atom in eqn.invars if isinstance(atom, Var)}
        last_read.update((atom, len(eqns)) for atom in results if isinstance(atom, Var))
        last_reads = LastReads(last_read, env.items())  # of variables of the graph, through all tensors that view them
        destinations = _destinations_with_updated(eqns, {**self.destinations, **(into or {})})
        for number, eqn in enumerate(eqns):
            operands = [self.read(env, atom) for atom in eqn.invars]
            with_destination = {var: destinations[var] for var in eqn.outvars if var in destinations}
            free = {
                var: out for var, out in with_destination.items() if last_reads.may_overwrite(out, operands, number)
            }
            later = LaterValues(env, last_reads, number)  # for calls, which overwrite results of the call before
            new_values = dict(zip(eqn.outvars, self.equation(eqn, operands, prog, free, later, row_sums), strict=True))
            last_reads.add(new_values.items())
            env.update(new_values)
            after(eqn)
            count_part("equations")
        # A function writes the results of each call to the same variables, and the next call may be in a program after
        # this one: what `results` read of these variables is copied, as before a call after the last equation.
        result_variables = [variable for function in self._functions.values() for variable in function.owned_results]
        LaterValues(env, last_reads, len(eqns) - 1).copy_before_call(self.graph, result_variables, prog)

    def equation(
        self,
        eqn: JaxprEqn,
        operands: list[Tensor],
        prog: ProgramSequence,
        into: Mapping[Var, Tensor],
        later: LaterValues | None = None,
        row_sums: Mapping[Var, RowSum] = NO_ROW_SUMS,
    ) -> Sequence[Tensor]:
        """Lowers one equation on its operands; returns the tensors of its results.

        With probes, the values of operands and results are sent to the host too.

        Args:
            eqn: the equation.
            operands: a tensor for each of its operands.
            prog: program to add to.
            into: tensors that its rule may write, by the variables of its results.
            later: values that are read after it; None where unknown.
            row_sums: sums that rows of its results are added to, if it is a loop.
        """
        graph = self.graph
        with graph.debug_origin(origin_of(eqn, graph.origin)):
            if self.probes is None:
                return self._apply_rule(eqn, operands, prog, into, later, row_sums)
            operand_streams = self.probes.enter(graph, prog, eqn, operands)
            results = self._apply_rule(eqn, operands, prog, into, later, row_sums)
            self.probes.leave(graph, prog, operand_streams, results)
            return results

    def _apply_rule(
        self,
        eqn: JaxprEqn,
        operands: list[Tensor],
        prog: ProgramSequence,
        into: Mapping[Var, Tensor],
        later: LaterValues | None,
        row_sums: Mapping[Var, RowSum],
    ) -> Sequence[Tensor]:
        """Results by the primitive's rule, else its fallback; checked to be of the types that the equation says.

        Args:
            eqn: the equation.
            operands: a tensor for each of its operands.
            prog: sequence to add its program to.
            into: tensors that the rule may write its results to, by their variables.
            later: values that equations after this one read; None where these are unknown.
            row_sums: sums that rows of its results are added to.
        """
        stack = name_stack(eqn)
        context = Context(
            graph=self.graph,
            prog=prog,
            name=f"{stack}/{eqn.primitive.name}" if stack else eqn.primitive.name,
            equation=eqn,
            out_avals=tuple(var.aval for var in eqn.outvars),
            functions=self._functions,
            options=self.options,
            lower_jaxpr=self.jaxpr,
            lower_alone=_lower_alone,
            into_tensors=tuple(into.get(var) for var in eqn.outvars),
            result_roles=tuple(map(self.roles.get, eqn.outvars)),
            row_sums=tuple(map(row_sums.get, eqn.outvars)),
            later=later,
        )
        rule = rule_of(eqn.primitive.name)
        mesh = jax.sharding.get_abstract_mesh()
        # The user's settings, such as `jax.threefry_partitionable`, without the mesh of the trace: operands have none.
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            results = self._without_rule(context, operands) if rule is None else rule(context, *operands, **eqn.params)
        results = [results] if isinstance(results, Tensor) else list(results)
        results = [copied_if_huge(Builder(self.graph, prog, context.name), result) for result in results]
        for result, var in zip(results, eqn.outvars, strict=True):
            aval: Any = var.aval
            is_sum = var in row_sums  # which may have a wider type than its terms
            is_of_type = result.shape == aval.shape and (is_sum or result.dtype == aval.dtype)
            assert is_of_type, f"{context.name}: {result}, not {aval}"
        self.note_roles(eqn.outvars, results)
        return results

    def find_roles(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> None:
        """Finds the roles of the values of a body before its equations are lowered; `results` are read after them."""
        self.roles.find_roles(eqns, results)

    def note_roles(self, values: Sequence[Var], tensors: Sequence[Tensor]) -> None:
        """Notes the roles of values in the graph, for their tensors."""
        for var, tensor in zip(values, tensors, strict=True):
            self.graph.note_role(tensor, self.roles.get(var))

    def _without_rule(self, ctx: Context, operands: Sequence[Tensor]) -> list[Tensor]:
        """Lowers an equation whose primitive has no rule; returns the tensors of its results.

        By the equations of JAX that implement the primitive, which have rules, else by the fallback: on one tile.
        """
        name = ctx.primitive.name
        if has_work(name):  # a fallback that can be costed, such as of a Cholesky decomposition
            return fallback(ctx, *operands)
        for implementation_of in (traced_impl, _lowered_callee):
            callee = implementation_of(ctx.equation)
            # One that binds the primitive itself would be lowered without end.
            if callee is not None and name not in primitive_names(callee.jaxpr):
                return self.jaxpr(inline(discharge(callee)), operands, ctx.prog)
        return fallback(ctx, *operands, is_priced=False)

    def read(self, env: Mapping[Var, Tensor], atom: Atom) -> Tensor:
        """Tensor of an operand: that in `env` of a variable, a constant of the graph for a literal.

        Equal scalars are one constant.
        """
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        value = np.asarray(atom.val, aval.dtype)
        if value.ndim > 0:
            return self.graph.add_constant(value, "literal")
        bits = _ScalarBits(value.dtype.name, value.tobytes())  # not the value: 0.0 equals -0.0, and NaN not itself
        if bits not in self._scalars:
            self._scalars[bits] = self.graph.add_constant(value, str(value))
        return self._scalars[bits]


def _lowered_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    from ipujax.lowering.stablehlo.exported_calls import lowered_callee  # few programs need it

    return lowered_callee(eqn)


def _lower_alone(jaxpr: ClosedJaxpr, target: Target) -> tuple[Graph, ProgramSequence]:
    """Lowers a jaxpr as a program of its own, to be costed by itself; returns its graph and program.

    Args:
        jaxpr: jaxpr, inlined.
        target: the machine, such as one tile of the user's.
    """
    graph = Graph(target)
    prog = ProgramSequence()
    operands = [graph.add_variable(aval.shape, aval.dtype, f"in{n}") for n, aval in enumerate(jaxpr.in_avals)]
    for x in operands:
        map_linearly(graph, x)
    Lowering(graph).jaxpr(jaxpr, operands, prog)
    for variable in graph.variables:  # results and intermediates that no rule has mapped; others keep their mapping
        map_linearly(graph, Tensor.of(variable))
    return graph, prog
