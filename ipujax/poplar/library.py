"""Shared by the op libraries: registration with a graph, and checks of operands.

Each library's `add_codelets(graph)` notes its name in `graph.notes.libraries`, as a Poplar program does before it uses
one. Codelets here need no loading, so that operations work without it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np

from ipujax.lowering.emit import emit, placing
from ipujax.lowering.layout import add_like
from ipujax.runtime.errors import GraphError, shortened, user_line
from ipujax.runtime.graph import Copy, Graph, Sequence as Program, check_owned, tensors_in
from ipujax.runtime.signatures import check_call
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor, dtype_name


def registrar(library: str) -> Callable[[Graph], None]:
    """Make the `add_codelets` of a library."""

    def add_codelets(graph: Graph) -> None:
        graph.notes.libraries.add(library)

    add_codelets.__doc__ = f"Notes that a graph uses {library}."
    return checked("add_codelets", add_codelets)


def check_arguments(module: dict[str, Any]) -> None:
    """Make all functions of a library, not of others, check their arguments against their annotations."""
    for name, fun in list(module.items()):
        is_own = inspect.isroutine(fun) and fun.__module__.startswith(module["__name__"])
        if is_own and not name.startswith("_"):
            module[name] = checked(name, fun)


def checked(name: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function, called `name` by users, so that it refuses arguments of wrong number, name or annotated kind."""

    # Evaluated at the first call: annotations may name types that are imported later.
    @functools.cache
    def signature() -> inspect.Signature:
        return inspect.signature(fun, eval_str=True)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Check the arguments against the annotations, and that tensors are of the graph; then call the function."""
        for parameter, value in check_call(name, signature(), args, kwargs).arguments.items():
            declared = signature().parameters[parameter]
            values = value if declared.kind is declared.VAR_POSITIONAL else [value]
            misfits = [v for v in values if v is not declared.default and not _is_of(v, declared.annotation)]
            if misfits:
                message = f"{name}: argument {parameter}"
                expected = _describe_kind(declared.annotation)
                hint = (
                    "graph.add_constant"
                    if declared.annotation is Tensor and isinstance(misfits[0], int | float)
                    else None
                )
                raise GraphError(message, where=user_line(), expected=expected, got=shortened(misfits[0]), hint=hint)
        operands = [*args, *kwargs.values()]
        graph = next((operand for operand in operands if isinstance(operand, Graph)), None)
        if graph is not None:
            check_owned(graph, tensors_in(operands), name)
        return fun(*args, **kwargs)

    return call


_NUMBERS = {int: "__index__", float: "__float__"}  # the method that a number of this kind has


def _is_of(value: Any, kind: Any) -> bool:
    """Test a value against an annotation; literals and numbers are checked further by the functions themselves."""
    # Unions may be nested in sequences, and sequences in unions.
    origin = get_origin(kind)
    kinds = get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, alternative) for alternative in kinds)
    if kind in _NUMBERS:
        return any(hasattr(value, method) for method in (_NUMBERS[kind], "__index__"))
    if origin in (tuple, list, Sequence):
        is_several = isinstance(value, list | tuple | range | np.ndarray)
        return is_several and all(
            any(_is_of(v, element_kind) for element_kind in kinds if element_kind is not ...) for v in value
        )
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _describe_kind(kind: Any) -> str:
    origin = get_origin(kind)
    element_kinds = [element_kind for element_kind in get_args(kind) if element_kind is not ...]
    if origin in (Union, UnionType):
        return " or ".join(map(_describe_kind, element_kinds))
    if origin in (tuple, list, Sequence):
        return f"a list, each {' or '.join(dict.fromkeys(map(_describe_kind, element_kinds)))}"
    names = {int: "a whole number", float: "a number", NoneType: "None", bool: "True or False", str: "a string"}
    word = getattr(kind, "__name__", str(kind))
    return names.get(kind) or f"{'an' if word[0] in 'AEIOU' else 'a'} {word}"


def check_tensors(name: str, *operands: Any) -> None:
    """Refuse the first operand that is not a tensor."""
    for operand in operands:
        if not isinstance(operand, Tensor):
            hint = "graph.add_constant" if isinstance(operand, int | float) else None
            raise GraphError(f"{name}: operands must be tensors", where=user_line(), got=shortened(operand), hint=hint)


def same_type(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse operands of several types: Poplar does not convert implicitly."""
    check_tensors(name, *tensors)
    types = [dtype_name(t.dtype) for t in tensors]
    if len(set(types)) > 1:
        hint = "popops.cast"
        raise GraphError(f"{name}: operands differ in type", where=user_line(), got=", ".join(types), hint=hint)


def look_up(kind: str, table: Mapping[str, Any], noun: str) -> Any:
    """Return an entry of a table by its kind; `noun` is the word for an entry in the error."""
    if kind not in table:
        expected = f"one of {', '.join(table)}"
        hint = nearest(kind, table)
        raise GraphError(f"unknown {noun} {kind!r}", where=user_line(), expected=expected, got=repr(kind), hint=hint)
    return table[kind]


def add(
    graph: Graph,
    fun: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: Program,
    name: str,
    into: Sequence[Tensor | None] = (),
    keeps_layouts: bool = False,
) -> Any:
    """Add the operations of a JAX function of the operands; see `lowering.emit`.

    Raises:
        GraphError: operands that are not tensors, have no tile mapping, or have shapes that the function rejects.
    """
    check_tensors(name, *operands)
    if not isinstance(graph, Graph) or not isinstance(prog, Program):
        got = f"{type(graph).__name__} and {type(prog).__name__}"
        raise GraphError(
            f"{name}: must have a graph and a program to add to",
            where=user_line(),
            expected="a Graph and a Sequence",
            got=got,
        )
    # JAX's own errors of shapes and types, with the user's line and operands.
    try:
        return emit(graph, fun, operands, prog, name, into, keeps_layouts)
    except (TypeError, ValueError) as error:
        shapes = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in operands)
        raise GraphError(f"{name}: {error}", where=user_line(), got=shapes) from error


def add_elementwise(
    graph: Graph,
    fun: Callable[..., Any],
    operands: Sequence[Tensor],
    prog: Program,
    name: str,
    into: Sequence[Tensor | None] = (),
) -> Any:
    """Add an elementwise function like `add`; new results are mapped as an operand is.

    Source: popops createOutputForElementWiseOp.
    """
    return add(graph, fun, operands, prog, name, into, keeps_layouts=True)


def add_new(graph: Graph, fun: Callable[..., Any], operands: Sequence[Tensor], prog: Program, name: str) -> Tensor:
    """Add the operations of a function like `add`, and copy a result that aliases an operand."""
    result: Tensor = add(graph, fun, operands, prog, name)
    # Slices at constant offsets are views: a later write to the operand would change such a result.
    if not {v for x in operands for v in x.variables()} & {v for v in result.variables() if not v.is_constant}:
        return result
    with placing(graph):
        copy = add_like(graph, result, name)
    prog.add(Copy(result, copy, f"{name}/copy", graph.origin))
    return copy
