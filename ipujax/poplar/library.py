"""Shared by the op libraries: registration with a graph, and checks of operands.

Each library's `add_codelets(graph)` notes its name in `graph.libraries`, as a Poplar program does before it uses one.
Codelets here need no loading, so that operations work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipujax.lowering.emit import emit, placing
from ipujax.lowering.poputil import add_like
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.graph import Copy, Graph, Sequence as Program
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor, dtype_name


def registrar(library: str) -> Callable[[Graph], None]:
    """Makes the `add_codelets` of a library."""

    def add_codelets(graph: Graph) -> None:
        graph.libraries.add(library)

    add_codelets.__doc__ = f"Notes that a graph uses {library}."
    return add_codelets


def check_tensors(name: str, *operands: Any) -> None:
    """Checks that all operands are tensors.

    Raises:
        GraphError: naming the first.
    """
    for operand in operands:
        if not isinstance(operand, Tensor):
            hint = "graph.add_constant" if isinstance(operand, int | float) else None
            raise GraphError(f"{name}: an operand is no tensor", where=user_line(), got=repr(operand), hint=hint)


def same_type(name: str, tensors: Sequence[Tensor]) -> None:
    """Checks that operands have one type: Poplar does not convert implicitly.

    Raises:
        GraphError: naming the types, or an operand that is no tensor.
    """
    check_tensors(name, *tensors)
    types = [dtype_name(t.dtype) for t in tensors]
    if len(set(types)) > 1:
        hint = "popops.cast"
        raise GraphError(f"{name}: operands differ in type", where=user_line(), got=", ".join(types), hint=hint)


def known(kind: str, table: Mapping[str, Any], what: str) -> Any:
    """The entry of a table of kinds.

    Args:
        kind: its key.
        table: entries by key.
        what: what an entry is, for the error.

    Raises:
        GraphError: no such entry.
    """
    if kind not in table:
        expected, hint = f"one of {', '.join(table)}", nearest(kind, table)
        raise GraphError(f"no {what} {kind!r}", where=user_line(), expected=expected, hint=hint)
    return table[kind]


def add(
    graph: Graph,
    fun: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: Program,
    name: str,
    into: Sequence[Tensor | None] = (),
) -> Any:
    """Adds the operations of a JAX function of the operands; see `lowering.emit`.

    Raises:
        GraphError: operands that are no tensors, have no tile mapping, or have shapes that the function rejects.
    """
    check_tensors(name, *operands)
    if not isinstance(graph, Graph) or not isinstance(prog, Program):
        got = f"{type(graph).__name__} and {type(prog).__name__}"
        raise GraphError(f"{name}: nowhere to add it", where=user_line(), expected="a Graph and a Sequence", got=got)
    try:
        return emit(graph, fun, operands, prog, name, into)
    except (TypeError, ValueError) as error:
        shapes = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in operands)
        raise GraphError(f"{name}: {error}", where=user_line(), got=shapes) from error


def add_new(graph: Graph, fun: Callable[..., Any], operands: Sequence[Tensor], prog: Program, name: str) -> Tensor:
    """As `add`, for one result that never aliases an operand.

    Raises:
        GraphError: as `add`.
    """
    result: Tensor = add(graph, fun, operands, prog, name)
    if not {v for x in operands for v in x.variables()} & {v for v in result.variables() if not v.is_constant}:
        return result
    with placing(graph):
        own = add_like(graph, result, name)
    prog.add(Copy(result, own, f"{name}/copy", graph.origin))
    return own
