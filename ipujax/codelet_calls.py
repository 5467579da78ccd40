"""Codelets as operations of JAX code: `ipu.codelet_call(DotVertex, matrix, vector, gradient=...)`.

Input: a codelet class and an array for each field it reads. An array with one dimension more than its field holds a row
for each vertex; one of the field's own dimensions is the same for all vertices. Output: an array for each field that is
written, with a row a vertex, or without if no array has rows.

Under `ipu.jit` each row is a vertex on a tile, with the codelet's cycles and name; anywhere else plain JAX computes the
same. `jax.vmap` makes more vertices of it. It is differentiable only with a given gradient.
Limits: no vector lists; no fields without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.rules import codelet_call_p
from ipujax.poplar.arguments import held
from ipujax.poplar.vertex import (
    NUM_DIMS,
    Vertex,
    VertexField,
    codelet_of_call,
    codelets_in,
    connected_fields,
    result_shapes,
    state_fields,
)
from ipujax.runtime.errors import ArgumentError, GraphError
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import dtype_name

Gradient = Callable[..., Any]


def codelet_call(
    codelet: type[Vertex],
    *arrays: Any,
    tiles: int | Sequence[int] | None = None,
    gradient: Gradient | None = None,
    **state: Any,
) -> Any:
    """Runs a codelet on arrays.

    Args:
        codelet: the class; its name is kept in profiles.
        arrays: one for each field that is read, in order, of the field's type.
        tiles: the tile of each vertex, or the tile of all; spread over one IPU when None.
        gradient: `gradient(arrays, cotangents)` returns the cotangent of each array, in a tuple; `arrays` and
            `cotangents` (of the results) are tuples.
        **state: the value of each state field that has no default, a number.

    Returns:
        The array of the field that is written, or a tuple of them.

    Raises:
        ArgumentError: arrays that do not fit the fields, tiles that are not one a vertex, or unknown state.
        GraphError: a codelet whose result does not match its fields, or an unfinished one.
    """
    (cls,) = codelets_in(codelet)
    if gradient is not None and not callable(gradient):
        expected = "a function of arrays and cotangents"
        raise ArgumentError(f"gradient of codelet {cls.vertex_name}", expected=expected, got=repr(gradient))
    operands = _operands(cls, arrays)
    stacked = tuple(x.ndim > NUM_DIMS[field.kind] for field, x in zip(_read(cls), operands, strict=True))
    counts = {x.shape[0] for x, rows in zip(operands, stacked, strict=True) if rows}
    if len(counts) > 1 or 0 in counts or any(0 in x.shape for x in operands):
        got = [x.shape for x in operands]
        raise ArgumentError(f"codelet_call of {cls.vertex_name}", expected="equally many rows, and elements", got=got)
    num_vertices = counts.pop() if counts else 1
    shapes = [x.shape[1:] if rows else x.shape for x, rows in zip(operands, stacked, strict=True)]
    params = _params(cls, shapes, state) | {"num_vertices": num_vertices, "tiles": _tiles(cls, tiles, num_vertices)}

    def call(*values: jax.Array) -> tuple[jax.Array, ...]:
        rows, given = list(stacked), list(values)
        for number, field in enumerate(_read(cls)):
            if field.is_written and not rows[number]:  # each vertex updates a copy of its own
                given[number] = jnp.broadcast_to(given[number], (num_vertices, *given[number].shape))
                rows[number] = True
        with jax.named_scope(cls.vertex_name):
            results = codelet_call_p.bind(*given, stacked=tuple(rows), **params)
        return tuple(results if any(stacked) else [y[0] for y in results])

    results = _differentiable(cls, call, gradient)(*operands)
    return results[0] if len(results) == 1 else results


def _read(cls: type[Vertex]) -> list[VertexField]:
    return [field for field in connected_fields(cls) if field.is_read]


def _operands(cls: type[Vertex], arrays: Sequence[Any]) -> list[jax.Array]:
    """The arrays, checked against the fields that are read."""
    fields, name = _read(cls), f"codelet_call of {cls.vertex_name}"
    if any(field.kind == "list" for field in cls.fields):
        raise ArgumentError(f"{name}: vector lists cannot be given as arrays", hint="poplar.Graph.add_vertex")
    if len(arrays) != len(fields):
        expected = f"an array for each of {[field.name for field in fields]}"
        raise ArgumentError(f"{name} got {len(arrays)} arrays", expected=expected)
    pairs = zip(fields, arrays, strict=True)
    operands = [jnp.asarray(x) if hasattr(x, "dtype") else jnp.asarray(x, field.dtype) for field, x in pairs]
    for field, x in zip(fields, operands, strict=True):
        dims = NUM_DIMS[field.kind]
        if x.dtype != field.dtype or x.ndim not in (dims, dims + 1):
            expected = f"{dtype_name(field.dtype)} of {dims} dimensions, or {dims + 1} with a row for each vertex"
            got = f"{dtype_name(x.dtype)}{list(x.shape)}"
            raise ArgumentError(f"{name}: array of field {field.name}", expected=expected, got=got)
    return operands


def _params(cls: type[Vertex], shapes: list[tuple[int, ...]], state: dict[str, Any]) -> dict[str, Any]:
    """The codelet of these shapes and this state, and the shapes and types of its results."""
    values = {field.attribute: field.default for field in state_fields(cls)}
    for name, value in state.items():
        if name not in values or np.shape(value) != ():
            got, expected = f"{name}={value!r}", f"a number for one of {list(values)}"
            what, hint = f"codelet_call of {cls.vertex_name}: state {got}", nearest(name, values)
            raise ArgumentError(what, expected=expected, got=got, hint=hint)
    values |= state
    if None in values.values():
        missing = [name for name, value in values.items() if value is None]
        raise ArgumentError(f"codelet_call of {cls.vertex_name}: state {missing} has no value")
    written = [field for field in connected_fields(cls) if field.is_written]
    results = dict(zip([field.name for field in written], result_shapes(cls, shapes), strict=True))
    read = dict(zip([field.name for field in _read(cls)], shapes, strict=True))
    all_shapes = tuple(tuple((read | results)[field.name]) for field in connected_fields(cls))
    outs = tuple((tuple(results[field.name]), field.dtype) for field in written)
    plain = tuple((name, _held(cls, name, value)) for name, value in values.items())
    return {"codelet": codelet_of_call(cls, all_shapes, plain), "outs": outs}


def _held(cls: type[Vertex], name: str, value: Any) -> Any:
    """The value of a state field, converted to its type."""
    (field,) = (field for field in state_fields(cls) if field.attribute == name)
    what = f"codelet_call of {cls.vertex_name}: state {name}"
    try:
        return held(value, field.dtype, what).item()
    except GraphError as error:
        expected = f"a number that {dtype_name(field.dtype)} holds"
        raise ArgumentError(what, expected=expected, got=repr(value)) from error


def _tiles(cls: type[Vertex], tiles: int | Sequence[int] | None, num_vertices: int) -> tuple[int, ...] | None:
    if tiles is None:
        return None
    given, what = np.asarray(tiles), f"codelet_call of {cls.vertex_name}: tiles"
    if given.dtype.kind not in "iu" or given.ndim > 1 or np.any(given < 0):
        raise ArgumentError(what, expected="a whole number, at least 0, or a list of them", got=repr(tiles))
    each = tuple(np.broadcast_to(given, num_vertices).tolist() if given.ndim == 0 else given.tolist())
    if len(each) != num_vertices:
        raise ArgumentError(what, expected=f"one for each of {num_vertices} vertices", got=len(each))
    return each


def _differentiable(cls: type[Vertex], call: Callable[..., Any], gradient: Gradient | None) -> Callable[..., Any]:
    """The call with the gradient given; without, an error once it is differentiated."""

    def forward(*values: jax.Array) -> tuple[Any, Any]:
        return call(*values), values

    def backward(values: tuple[jax.Array, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        if gradient is None:
            what = f"codelet_call of {cls.vertex_name} is differentiated, and has no gradient"
            raise ArgumentError(what, hint="gradient=, a function of arrays and cotangents")
        found = gradient(values, cotangents)
        if not isinstance(found, tuple | list) or len(found) != len(values):
            expected = f"a tuple of {len(values)} cotangents"
            raise ArgumentError(f"gradient of codelet {cls.vertex_name}", expected=expected, got=type(found).__name__)
        return tuple(found)

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(forward, backward)
    return differentiable
