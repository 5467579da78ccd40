"""Codelets as operations of JAX code: `ipu.codelet_call(DotVertex, matrix, vector, gradient=...)`.

Input: a codelet class and an array for each field it reads. An array with one dimension more than its field has a row
for each vertex; an array of the field's dimensions is the same for all vertices. Output: an array for each field
that is written, with a row for each vertex, or without if no array has rows.

Under `ipu.jit` each row is a vertex on a tile, with the codelet's cycles and name; elsewhere plain JAX computes the
same numbers. `jax.vmap` adds vertices. It is differentiable only with `gradient=`.
Limits: no vector lists; no empty fields.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.arguments import has_tracer
from ipujax.lowering.digests import NoDigestError, digest_of
from ipujax.lowering.rules import codelet_call_p
from ipujax.poplar.types import cast_values
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
    """Run a codelet on arrays.

    Args:
        codelet: the class; profiles have its name.
        arrays: an array for each field that is read, in order, of the field's dtype.
        tiles: tile of each vertex, or of all; None spreads the vertices over one IPU.
        gradient: function of a tuple of arrays and a tuple of cotangents of the results, which returns a tuple with the
            cotangent of each array.
        **state: a number for each state field without a default.

    Returns:
        The array of the field that is written, or a tuple of them.

    Raises:
        ArgumentError: arrays that do not match the fields, tiles that do not match the vertices, or unknown state.
        GraphError: a codelet whose results do not match its fields, or an abstract one.
    """
    (cls,) = codelets_in(codelet)
    if gradient is not None and not callable(gradient):
        expected = "a function of arrays and cotangents"
        raise ArgumentError(f"gradient of codelet {cls.vertex_name}", expected=expected, got=repr(gradient))
    operands = _operands(cls, arrays)
    # The rank decides, not the shape: a row for each vertex has one dimension more than the field.
    stacked = tuple(x.ndim > NUM_DIMS[field.kind] for field, x in zip(_read(cls), operands, strict=True))
    counts = {x.shape[0] for x, rows in zip(operands, stacked, strict=True) if rows}
    if len(counts) > 1 or 0 in counts or any(0 in x.shape for x in operands):
        got = [x.shape for x in operands]
        raise ArgumentError(
            f"codelet_call of {cls.vertex_name}",
            expected="arrays with equally many rows, and elements in each row",
            got=got,
        )
    num_vertices = counts.pop() if counts else 1
    shapes = [x.shape[1:] if rows else x.shape for x, rows in zip(operands, stacked, strict=True)]
    params = _params(cls, shapes, state) | {"num_vertices": num_vertices, "tiles": _tiles(cls, tiles, num_vertices)}

    def call(*values: jax.Array) -> tuple[jax.Array, ...]:
        have_rows = list(stacked)
        inputs = list(values)
        for number, field in enumerate(_read(cls)):
            if field.is_written and not have_rows[number]:  # each vertex updates a copy of its own
                inputs[number] = jnp.broadcast_to(inputs[number], (num_vertices, *inputs[number].shape))
                have_rows[number] = True
        with jax.named_scope(cls.vertex_name):
            results = codelet_call_p.bind(*inputs, stacked=tuple(have_rows), **params)
        return tuple(results if any(stacked) else [y[0] for y in results])

    results = _differentiable(cls, call, gradient)(*operands)
    return results[0] if len(results) == 1 else results


def _read(cls: type[Vertex]) -> list[VertexField]:
    return [field for field in connected_fields(cls) if field.is_read]


def _operands(cls: type[Vertex], arrays: Sequence[Any]) -> list[jax.Array]:
    """Return the arrays, checked against the fields that are read."""
    fields = _read(cls)
    name = f"codelet_call of {cls.vertex_name}"
    if any(field.kind == "list" for field in cls.fields):
        raise ArgumentError(f"{name}: vector lists cannot be given as arrays", hint="poplar.Graph.add_vertex")
    if len(arrays) != len(fields):
        expected = f"an array for each of {[field.name for field in fields]}"
        raise ArgumentError(f"{name} got {len(arrays)} arrays", expected=expected)
    pairs = zip(fields, arrays, strict=True)
    operands = [_operand(f"{name}: array of field {field.name}", field, x) for field, x in pairs]
    for field, x in zip(fields, operands, strict=True):
        dims = NUM_DIMS[field.kind]
        if x.dtype != field.dtype or x.ndim not in (dims, dims + 1):
            expected = f"{dtype_name(field.dtype)} of {dims} dimensions, or {dims + 1} with a row for each vertex"
            got = f"{dtype_name(x.dtype)}{list(x.shape)}"
            raise ArgumentError(f"{name}: array of field {field.name}", expected=expected, got=got)
    return operands


def _operand(label: str, field: VertexField, x: Any) -> jax.Array:
    """Return an argument as an array: numbers and lists take the dtype of the field, arrays must have it."""
    try:
        if hasattr(x, "dtype"):
            return jnp.asarray(x)
        if has_tracer(jax.tree.leaves(x)):
            return jnp.asarray(x, field.dtype)
        return jnp.asarray(cast_values(x, field.dtype, label))
    except (GraphError, TypeError, ValueError) as error:  # ValueError: masked arrays
        expected = f"an array, or numbers that {dtype_name(field.dtype)} holds"
        raise ArgumentError(label, expected=expected, got=f"{' '.join(repr(x).split()):.60}") from error


def _params(cls: type[Vertex], shapes: list[tuple[int, ...]], state: dict[str, Any]) -> dict[str, Any]:
    """Return the codelet of these shapes and this state, and the shapes and dtypes of its results."""
    values = {field.attribute: field.default for field in state_fields(cls)}
    for name, value in state.items():
        if name not in values or np.shape(value) != ():
            got = f"{name}={value!r}"
            problem = f"codelet_call of {cls.vertex_name}: state {got}"
            expected = f"a number for one of {list(values)}"
            raise ArgumentError(problem, expected=expected, got=got, hint=nearest(name, values))
    values |= state
    if None in values.values():
        missing = [name for name, value in values.items() if value is None]
        raise ArgumentError(f"codelet_call of {cls.vertex_name}: state {missing} has no value")
    written = [field for field in connected_fields(cls) if field.is_written]
    results = dict(zip([field.name for field in written], result_shapes(cls, shapes), strict=True))
    read = dict(zip([field.name for field in _read(cls)], shapes, strict=True))
    all_shapes = tuple(tuple((read | results)[field.name]) for field in connected_fields(cls))
    outs = tuple((tuple(results[field.name]), field.dtype) for field in written)
    converted = tuple((name, _converted(cls, name, value)) for name, value in values.items())
    return {"codelet": codelet_of_call(cls, all_shapes, converted, _code(cls)), "outs": outs}


def _code(cls: type[Vertex]) -> Hashable:
    """Return the digest of a class with all that its code reads; for code that may read more, an object of no other."""
    try:
        return digest_of(cls)
    except NoDigestError:
        return object()


def _converted(cls: type[Vertex], name: str, value: Any) -> Any:
    """Return the value of a state field in its dtype."""
    (field,) = (field for field in state_fields(cls) if field.attribute == name)
    problem = f"codelet_call of {cls.vertex_name}: state {name}"
    try:
        return cast_values(value, field.dtype, problem).item()
    except GraphError as error:
        expected = f"a number that {dtype_name(field.dtype)} holds"
        raise ArgumentError(problem, expected=expected, got=repr(value)) from error


def _tiles(cls: type[Vertex], tiles: int | Sequence[int] | None, num_vertices: int) -> tuple[int, ...] | None:
    """Return the tile of each vertex, None for a choice by the compiler; one number is the tile of all."""
    if tiles is None:
        return None
    numbers = np.asarray(tiles)
    problem = f"codelet_call of {cls.vertex_name}: tiles"
    if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or np.any(numbers < 0):
        raise ArgumentError(problem, expected="a whole number, at least 0, or a list of them", got=repr(tiles))
    tile_of_vertex = tuple(np.broadcast_to(numbers, num_vertices).tolist() if numbers.ndim == 0 else numbers.tolist())
    if len(tile_of_vertex) != num_vertices:
        raise ArgumentError(problem, expected=f"one for each of {num_vertices} vertices", got=len(tile_of_vertex))
    return tile_of_vertex


def _differentiable(cls: type[Vertex], call: Callable[..., Any], gradient: Gradient | None) -> Callable[..., Any]:
    """Return the call with `gradient`; if that is None, differentiating it raises an error."""

    def forward(*values: jax.Array) -> tuple[Any, Any]:
        return call(*values), values

    def backward(values: tuple[jax.Array, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        if gradient is None:
            problem = f"codelet_call of {cls.vertex_name} is differentiated, and has no gradient"
            raise ArgumentError(problem, hint="gradient=, a function of arrays and cotangents")
        grads = gradient(values, cotangents)
        if not isinstance(grads, tuple | list) or len(grads) != len(values):
            expected = f"a tuple of {len(values)} cotangents"
            raise ArgumentError(f"gradient of codelet {cls.vertex_name}", expected=expected, got=type(grads).__name__)
        return tuple(grads)

    # Also without `gradient`: JAX's error about a primitive without a rule would not name the codelet.
    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(forward, backward)
    return differentiable
