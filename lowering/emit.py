"""Adds what a JAX function computes to a graph and a program: how op libraries offer compositions of operations.

Input: a function of arrays, and tensors for them. Output: tensors of its results. The function is traced to a jaxpr,
which goes through the passes and rules that compile whole programs, so that there is one implementation of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from ipujax.lowering.jax_compat import Var
from ipujax.lowering.layout import check_may_place, map_linearly
from ipujax.lowering.passes import traced
from ipujax.lowering.rules import Lowering
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, dtype_name


@contextmanager
def placing(graph: Graph, operands: Sequence[Tensor] = ()) -> Iterator[None]:
    """Lets operations place what they add, though not what their caller left unplaced.

    Args:
        graph: graph that is added to.
        operands: the caller's tensors.

    Raises:
        GraphError: an operand of which an element lies on no tile.
    """
    for tensor in operands:
        for variable in tensor.variables():
            if variable not in graph.mappings:
                check_may_place(graph, variable)
    before, first = graph.maps_automatically, len(graph.variables)
    graph.maps_automatically = True
    try:
        yield
        for variable in graph.variables[first:]:
            if not graph.is_mapped(whole := Tensor.of(variable)):
                map_linearly(graph, whole)
    finally:
        graph.maps_automatically = before


def emit(
    graph: Graph,
    fun: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: ProgramSequence,
    name: str = "",
    into: Sequence[Tensor | None] = (),
) -> Any:
    """Adds what a function computes.

    Args:
        graph: graph to add to.
        fun: function of as many arrays as there are operands, of their shapes and dtypes; returns a pytree of arrays.
        operands: tensors that lie on tiles.
        prog: program the steps are added to.
        name: debug name of all that is added.
        into: for each result, a tensor it is to be written to, or None; all None when empty.

    Returns:
        The pytree with tensors for arrays: those of `into`, else new tensors, or views of operands.

    Raises:
        GraphError: an operand that lies on no tile, or a tensor in `into` of another shape or dtype than its result.
    """
    jaxpr, out_tree = traced(fun, operands, name, graph.byte_price_cycles)
    targets = list(into) or [None] * len(jaxpr.out_avals)
    for target, aval in zip(targets, jaxpr.out_avals, strict=True):
        if target is not None and (target.shape, target.dtype) != (aval.shape, aval.dtype):
            expected = f"{dtype_name(aval.dtype)}{list(aval.shape)}"
            got = f"{dtype_name(target.dtype)}{list(target.shape)}"
            raise GraphError(f"{name or 'the result'} is to be written to another tensor", expected=expected, got=got)
    with placing(graph, [*operands, *(t for t in targets if t is not None)]):
        direct = {
            var: target
            for var, target in zip(jaxpr.jaxpr.outvars, targets, strict=True)
            if target is not None and isinstance(var, Var) and len(targets) == 1
        }
        results = Lowering(graph, direct).jaxpr(jaxpr, operands, prog)
        outs = _delivered(graph, results, targets, prog, name)
    return jax.tree.unflatten(out_tree, outs)


def _delivered(
    graph: Graph, results: Sequence[Tensor], targets: Sequence[Tensor | None], prog: ProgramSequence, name: str
) -> list[Tensor]:
    """Copies results where they are wanted, unless they are there; one that another copy would spoil is set aside."""
    moving = [(r, t) for r, t in zip(results, targets, strict=True) if t is not None and r is not t]
    written = {v for _, target in moving for v in target.variables()}
    sources = []
    for result, _ in moving:
        map_linearly(graph, result)
        if written & set(result.variables()):
            aside = graph.add_variable(result.shape, result.dtype, f"{name}/aside")
            map_linearly(graph, aside)
            prog.add(Copy(result, aside, f"{name}/aside", graph.origin))
            result = aside
        sources.append(result)
    for source, (_, target) in zip(sources, moving, strict=True):
        prog.add(Copy(source, target, name or "copy", graph.origin))
    return [result if target is None else target for result, target in zip(results, targets, strict=True)]
