"""Adds the operations of a JAX function to a graph and a program: compositions of operations for the op libraries.

Input: a function of arrays, and tensors for them. Output: tensors of its results. The function is traced to a jaxpr,
which goes through the passes and rules that compile entire programs, so that there is one implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, Var
from ipujax.lowering.layout import check_may_place, map_linearly
from ipujax.lowering.passes import traced
from ipujax.lowering.popops import kept_result
from ipujax.lowering.rules import Lowering
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, dtype_name


@contextmanager
def placing(graph: Graph, operands: Sequence[Tensor] = (), keeps_layouts: bool = False) -> Iterator[None]:
    """Lets operations inside the `with` map the variables they add to tiles; refuses operands that are not mapped.

    A Poplar program maps its variables itself, so what it has not mapped is an error.

    Args:
        graph: the graph.
        operands: the caller's operands.
        keeps_layouts: whether results of elementwise operations are mapped as PopLibs does it; see `kept_layout`.
    """
    for tensor in operands:
        for variable in tensor.variables():
            if variable not in graph.mappings:
                check_may_place(graph, variable)
    previous = graph.maps_automatically, graph.keeps_layouts
    num_variables = len(graph.variables)
    graph.maps_automatically, graph.keeps_layouts = True, keeps_layouts
    try:
        yield
        # Views and constants may be in no compute set; what no operation mapped is spread evenly.
        for variable in graph.variables[num_variables:]:
            if not graph.is_mapped(tensor := Tensor.of(variable)):
                map_linearly(graph, tensor)
    finally:
        graph.maps_automatically, graph.keeps_layouts = previous


def emit(
    graph: Graph,
    fun: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: ProgramSequence,
    name: str = "",
    into: Sequence[Tensor | None] = (),
    keeps_layouts: bool = False,
) -> Any:
    """Adds the operations of a JAX function to a Poplar program.

    Args:
        graph: graph to add to.
        fun: function of as many arrays as there are operands, of their shapes and dtypes; returns a pytree of arrays.
        operands: mapped tensors.
        prog: program to add to.
        name: debug name of all additions.
        into: for each result, the tensor to write it to, or None; all None when empty.
        keeps_layouts: whether the result, which is to be one, is mapped like the operands, as PopLibs does it.

    Returns:
        The pytree with tensors for arrays: those of `into`, else new tensors, or views of operands.

    Raises:
        GraphError: an unmapped operand, or a tensor in `into` of another shape or dtype than its result.
    """
    jaxpr, out_tree = traced(fun, operands, name, graph.byte_cost_cycles)
    targets = list(into) or [None] * len(jaxpr.out_avals)
    for target, aval in zip(targets, jaxpr.out_avals, strict=True):
        if target is not None and (target.shape, target.dtype) != (aval.shape, aval.dtype):
            expected = f"{dtype_name(aval.dtype)}{list(aval.shape)}"
            got = f"{dtype_name(target.dtype)}{list(target.shape)}"
            raise GraphError(
                f"{name or 'the result'} cannot be written to a tensor of another shape or dtype",
                expected=expected,
                got=got,
            )
    with placing(graph, [*operands, *(t for t in targets if t is not None)], keeps_layouts=keeps_layouts):
        if keeps_layouts and not into and operands and _is_computed(jaxpr):
            (aval,) = jaxpr.out_avals  # PopLibs' elementwise operations have one result
            targets = [kept_result(graph, operands, aval.shape, aval.dtype, name)]
        # A single result is computed in its target directly; several might overwrite each other's operands.
        direct = {
            var: target
            for var, target in zip(jaxpr.jaxpr.outvars, targets, strict=True)
            if target is not None and isinstance(var, Var) and len(targets) == 1
        }
        results = Lowering(graph, direct).jaxpr(jaxpr, operands, prog)
        outs = _copy_to_targets(graph, results, targets, prog, name)
    return jax.tree.unflatten(out_tree, outs)


def _is_computed(jaxpr: ClosedJaxpr) -> bool:
    """True if the only result of a function is that of an equation: neither an operand nor a constant."""
    return len(jaxpr.out_avals) == 1 and any(jaxpr.jaxpr.outvars[0] in eqn.outvars for eqn in jaxpr.jaxpr.eqns)


def _copy_to_targets(
    graph: Graph, results: Sequence[Tensor], targets: Sequence[Tensor | None], prog: ProgramSequence, name: str
) -> list[Tensor]:
    """Copies results to their targets, if they have any.

    A result that another of these copies would overwrite is first copied aside.

    Args:
        graph: the graph.
        results: tensors that were computed.
        targets: for each the tensor to write it to; None to leave it where it is.
        prog: program to add to.
        name: debug name of the copies.

    Returns:
        For each result its target, or the result without one.
    """
    copies = [(r, t) for r, t in zip(results, targets, strict=True) if t is not None and r is not t]
    written = {v for _, target in copies for v in target.variables()}
    sources = []
    for result, _ in copies:
        map_linearly(graph, result)
        if written & set(result.variables()):
            aside = graph.add_variable(result.shape, result.dtype, f"{name}/aside")
            map_linearly(graph, aside)
            prog.add(Copy(result, aside, f"{name}/aside", graph.origin))
            result = aside
        sources.append(result)
    for source, (_, target) in zip(sources, copies, strict=True):
        prog.add(Copy(source, target, name or "copy", graph.origin))
    return [result if target is None else target for result, target in zip(results, targets, strict=True)]
