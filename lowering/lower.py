"""From a jaxpr to a graph and a control program.

    lower(jaxpr, target, donated) → LoweredProgram(graph, program, inputs, outputs)

Arguments become variables filled from host streams, each equation adds compute sets by its rule, results go to host
streams. A donated argument stays on the device: the result that takes its place is copied into its variable, and
neither moves to or from the host. Variables no rule has placed are placed linearly at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.dense_layers import NO_ROLE, Role, roles
from ipujax.lowering.fallback import check_is_array, fallback
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, name_stack, source_line
from ipujax.lowering.pipelining.program import PipelineRun
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.lowering.replica_checks import check_results, of_one_replica
from ipujax.lowering.replicate import Dims, Replicated, joined, split, unwrapped
from ipujax.lowering.rules import RULES
from ipujax.lowering.stage_names import has_stages
from ipujax.lowering.staged import lower_staged
from ipujax.runtime.graph import Graph
from ipujax.runtime.instances import ALONE, Instances
from ipujax.runtime.program import Copy, HostStream, StreamIn, StreamOut
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import Origin

_UPDATE = Origin(path="results into donated arguments")


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A graph with its control program, and a host stream for each input and output of the jaxpr.

    Args:
        graph: variables, mappings and vertices.
        program: what runs in one call.
        inputs: one stream for each input of the jaxpr.
        outputs: one stream for each output.
        aliases: for each output, the number of the donated input whose variable it ends in, or None.
        in_dims: for each input the dimension that is split over replicas, None where all get the same.
        out_dims: for each output the dimension along which parts of replicas are joined, None where they are equal.
        pipelines: where pipelines with stages run.
    """

    graph: Graph
    program: ProgramSequence
    inputs: tuple[HostStream, ...]
    outputs: tuple[HostStream, ...]
    aliases: tuple[int | None, ...]
    in_dims: Dims
    out_dims: Dims
    pipelines: tuple[PipelineRun, ...] = ()

    def evaluate(
        self,
        operands: Sequence[jax.Array],
        run: Callable[..., Mapping[HostStream, Any]],
        instances: Instances = ALONE,
    ) -> list[jax.Array]:
        """The results of a run on whole arrays, which are split over replicas and joined again.

        Args:
            operands: one array for each input: what the replicas of this instance have of it.
            run: the engine's function of streams.
            instances: processes among which replicas are shared.
        """
        if self.graph.replication_factor == 1:
            outs = run(dict(zip(self.inputs, operands, strict=True)))
            return [outs[stream] for stream in self.outputs]
        replicas = instances.local(self.graph.replication_factor)
        parts = [split(x, dim, replicas) for x, dim in zip(operands, self.in_dims, strict=True)]
        outs = run(dict(zip(self.inputs, parts, strict=True)))
        return [joined(outs[stream], dim) for stream, dim in zip(self.outputs, self.out_dims, strict=True)]


def lower(
    jaxpr: ClosedJaxpr, target: Target, *, donated: Sequence[bool] = (), names: Sequence[str] = (), line: str = ""
) -> LoweredProgram:
    """Lowers a jaxpr for a target.

    Args:
        jaxpr: inlined jaxpr, see `passes`; of one `replicated` equation if there are several replicas.
        target: the machine, of all replicas together.
        donated: for each input whether its buffer may be reused; all False when empty.
        names: debug name of each input.
        line: the user's line that equations belong to of which no line is the user's, `file:line (function)`.

    Returns:
        The graph and the program of one call.

    Raises:
        GraphError: for an argument or constant that is no array, for more replicas than the machine has room for, or
            for a result that is to be the same on all replicas and may differ.
    """
    whole = unwrapped(jaxpr)
    jaxpr, replicas = whole.jaxpr, whole.replicas
    check_results(whole)
    for number, aval in enumerate(jaxpr.in_avals):
        check_is_array(aval, f"argument {names[number] if names else number}")
    for var in jaxpr.jaxpr.constvars:
        check_is_array(var.aval, "a value that the function closes over")
    donated = donated or [False] * len(jaxpr.in_avals)
    names = names or [f"arg{n}" for n in range(len(jaxpr.in_avals))]
    graph, prog = Graph(of_one_replica(target, replicas), replicas), ProgramSequence()
    aliases = donated_aliases(whole, donated)
    arguments, inputs = [], []
    for number, aval in enumerate(jaxpr.in_avals):
        shared = replicas > 1 and whole.in_dims[number] is None
        stream = HostStream(names[number], aval.shape, aval.dtype, resident=number in aliases, broadcast=shared)
        with graph.debug_origin(Origin(path=f"argument {names[number]}")):
            arguments.append(graph.add_variable(aval.shape, aval.dtype, names[number]))
        inputs.append(stream)
        prog.add(StreamIn(stream, arguments[-1]))
    with graph.debug_origin(Origin(line)):
        if has_stages(jaxpr.jaxpr):
            results, pipelines = lower_staged(graph, Lowering, jaxpr, arguments, prog)
        else:
            pipelines = ()
            results = Lowering(graph).jaxpr(jaxpr, arguments, prog)
    results = _set_aside_arguments(graph, prog, results, arguments, aliases)
    outputs = []
    for number, (result, alias) in enumerate(zip(results, aliases, strict=True)):
        if alias is not None and result is not arguments[alias]:
            map_linearly(graph, result)
            prog.add(Copy(result, arguments[alias], f"{names[alias]}/update", _UPDATE))
            result = arguments[alias]
        outputs.append(HostStream(f"out{number}", result.shape, result.dtype, resident=alias is not None))
        prog.add(StreamOut(result, outputs[-1]))
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    return LoweredProgram(graph, prog, tuple(inputs), tuple(outputs), aliases, whole.in_dims, whole.out_dims, pipelines)


def donated_aliases(whole: Replicated, donated: Sequence[bool]) -> tuple[int | None, ...]:
    """For each output the first free donated input of its shape, dtype and split, as JAX pairs them."""
    free = [n for n, given in enumerate(donated) if given]
    jaxpr, in_dims = whole.jaxpr, whole.in_dims
    aliases: list[int | None] = []
    for aval, dim in zip(jaxpr.out_avals, whole.out_dims, strict=True):
        match = next((n for n in free if _same_buffer(jaxpr.in_avals[n], aval) and in_dims[n] == dim), None)
        if match is not None:
            free.remove(match)
        aliases.append(match)
    return tuple(aliases)


def _same_buffer(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _set_aside_arguments(
    graph: Graph,
    prog: ProgramSequence,
    results: Sequence[Tensor],
    arguments: Sequence[Tensor],
    aliases: Sequence[int | None],
) -> list[Tensor]:
    """Copies results that are views of a donated argument, before that argument is overwritten."""
    overwritten = {v for alias in aliases if alias is not None for v in arguments[alias].variables()}
    kept = []
    for result, alias in zip(results, aliases, strict=True):
        in_place = alias is not None and result is arguments[alias]
        if not in_place and overwritten & set(result.variables()):
            copy = graph.add_variable(result.shape, result.dtype, "aside")
            map_linearly(graph, copy)
            prog.add(Copy(result, copy, "aside", _UPDATE))
            result = copy
        kept.append(result)
    return kept


class Lowering:
    """Lowers jaxprs into one graph.

    Args:
        graph: graph to add to.
        into: tensors that may be written at once, by the variables of jaxprs whose values go there.
    """

    def __init__(self, graph: Graph, into: Mapping[Var, Tensor] | None = None) -> None:
        self._graph, self._into = graph, into or {}
        self._scalars: dict[tuple[str, bytes], Tensor] = {}
        self._functions: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: ClosedJaxpr, operands: Sequence[Tensor], prog: ProgramSequence) -> list[Tensor]:
        """Lowers a jaxpr on given tensors; returns the tensors of its results."""
        body = jaxpr.jaxpr
        env: dict[Var, Tensor] = dict(zip(body.invars, operands, strict=True))
        for var, value in zip(body.constvars, jaxpr.consts, strict=True):
            env[var] = self._graph.add_constant(value, "constant")
        self.equations(body.eqns, env, prog, roles(body))
        return [self.read(env, atom) for atom in body.outvars]

    def equations(
        self, eqns: Sequence[JaxprEqn], env: dict[Var, Tensor], prog: ProgramSequence, known: Mapping[int, Role]
    ) -> None:
        """Lowers equations in order.

        Args:
            eqns: the equations.
            env: the tensors of what they read, and of weights that their roles name; theirs are added.
            prog: program to add to.
            known: roles of equations, see `dense_layers.roles`.
        """
        for eqn in eqns:
            role = known.get(id(eqn), NO_ROLE)
            laid_as = None if role.gradient_of is None else env.get(role.gradient_of)
            if laid_as is not None and role.is_transposed:
                laid_as = laid_as.transpose((1, 0))
            operands = [self.read(env, atom) for atom in eqn.invars]
            results = self.equation(eqn, operands, prog, later=role.later, laid_as=laid_as)
            env.update(zip(eqn.outvars, results, strict=True))

    def equation(self, eqn: JaxprEqn, operands: list[Tensor], prog: ProgramSequence, **layer: Any) -> Sequence[Tensor]:
        """Lowers one equation on given tensors; returns the tensors of its results.

        Args:
            eqn: the equation.
            operands: a tensor for each of its operands.
            prog: program to add to.
            **layer: what `Context` says of products of dense layers.
        """
        outer = self._graph.origin
        with self._graph.debug_origin(Origin(source_line(eqn) or outer.line, name_stack(eqn) or outer.path)):
            return self._apply_rule(eqn, operands, prog, layer)

    def _apply_rule(
        self, eqn: JaxprEqn, operands: list[Tensor], prog: ProgramSequence, layer: Mapping[str, Any]
    ) -> Sequence[Tensor]:
        stack = name_stack(eqn)
        context = Context(
            graph=self._graph,
            prog=prog,
            name=f"{stack}/{eqn.primitive.name}" if stack else eqn.primitive.name,
            equation=eqn,
            out_avals=tuple(var.aval for var in eqn.outvars),
            lower_jaxpr=self.jaxpr,
            functions=self._functions,
            into_tensor=self._target(eqn, operands),
            **layer,
        )
        rule: Rule | None = RULES.get(eqn.primitive.name)
        results = fallback(context, *operands) if rule is None else rule(context, *operands, **eqn.params)
        results = [results] if isinstance(results, Tensor) else list(results)
        for result, var in zip(results, eqn.outvars, strict=True):
            aval: Any = var.aval
            assert (result.shape, result.dtype) == (aval.shape, aval.dtype), f"{context.name}: {result}, not {aval}"
        return results

    def _target(self, eqn: JaxprEqn, operands: Sequence[Tensor]) -> Tensor | None:
        """Where the only result of an equation may go at once: not where another part of an operand lies."""
        out = self._into.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if out is None:
            return None
        own = set(out.variables())
        return out if all(x.node is out.node or own.isdisjoint(x.variables()) for x in operands) else None

    def read(self, env: Mapping[Var, Tensor], atom: Atom) -> Tensor:
        """The tensor of a variable or a literal."""
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        value = np.asarray(atom.val, aval.dtype)
        key = (value.dtype.name, value.tobytes()) if value.ndim == 0 else None
        if key is None:
            return self._graph.add_constant(value, "literal")
        if key not in self._scalars:
            self._scalars[key] = self._graph.add_constant(value, str(value))
        return self._scalars[key]
