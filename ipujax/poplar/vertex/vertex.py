"""Codelets in Python: a class with typed fields and a JAX function of them.

    class SumVertex(poplar.Vertex):
        in_: poplar.Input[poplar.Vector[poplar.FLOAT]]
        out: poplar.Output[poplar.FLOAT]

        def compute(in_):
            return jnp.sum(in_)

A field is an annotated attribute: `Input`, `Output` or `InOut` of a type, of a `Vector` or of a `VectorList` (a tuple
of vectors, each of its own length); or a plain type, which is state of the vertex, with the attribute's value as its
default. A trailing underscore that avoids a keyword of Python is no part of a field's name: `in_` is connected as "in".

`compute` receives the fields named by its parameters: arrays, tuples of arrays for vector lists, scalars. It returns
the value of the written field, a tuple of values in order, or a dict by name. It is a JAX function without side
effects, traced once for vertices of equal shapes, and has no `self`.

`cycles`, if given, estimates the cycles of one vertex of one worker: a number of at most 2^32 − 1, rounded up. Its
parameters name its arguments: for a connected field its shape and dtype (`x.shape`, `x.size`; a tuple of them for a
vector list), `shapes`, the shape of each field by name, and `target`, the machine. Without it the estimate counts
operations (see `ipujax.poplar.vertex.codelets`).

Input: such a class. Output: its `fields`. Source: Poplar & PopLibs user guide, "Device code"; poplar::Vertex.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from ipujax.poplar.types import cast_values
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Language
from ipujax.runtime.target import nearest

FieldDirection = Literal["in", "out", "inout", "state"]
FieldKind = Literal["scalar", "vector", "list"]
NUM_DIMS: dict[FieldKind, int] = {"scalar": 0, "vector": 1, "list": 1}


@dataclass(frozen=True, slots=True)
class Vectors:
    """The value of `Vector[FLOAT]` or `VectorList[FLOAT]`."""

    kind: FieldKind
    dtype: np.dtype


def _element_type(of: Any) -> np.dtype:
    try:
        if of is None or isinstance(of, Vectors | Edge):
            raise TypeError("an element has a type of its own")
        return np.dtype(of)
    except TypeError as error:
        expected = "FLOAT, INT, …, or Vector or VectorList of one"
        raise GraphError("a field must have a type", expected=expected, got=repr(of)) from error


class Vector:
    """`Vector[type]`: a field of any number of elements."""

    def __class_getitem__(cls, dtype: Any) -> Vectors:
        return Vectors("vector", _element_type(dtype))


class VectorList:
    """`VectorList[type]`: a field of any number of vectors, each of its own length."""

    def __class_getitem__(cls, dtype: Any) -> Vectors:
        return Vectors("list", _element_type(dtype))


@dataclass(frozen=True, slots=True)
class Edge:
    """The value of `Input[FLOAT]` or `Output[Vector[FLOAT]]`."""

    direction: FieldDirection
    kind: FieldKind
    dtype: np.dtype


def _edge(direction: FieldDirection, of: Any) -> Edge:
    vectors = of if isinstance(of, Vectors) else Vectors("scalar", _element_type(of))
    return Edge(direction, vectors.kind, vectors.dtype)


class Input:
    """`Input[type]`: a field that is read."""

    def __class_getitem__(cls, of: Any) -> Edge:
        return _edge("in", of)


class Output:
    """`Output[type]`: a field that is written."""

    def __class_getitem__(cls, of: Any) -> Edge:
        return _edge("out", of)


class InOut:
    """`InOut[type]`: a field that is read and written."""

    def __class_getitem__(cls, of: Any) -> Edge:
        return _edge("inout", of)


@dataclass(frozen=True, slots=True)
class VertexField:
    """Field of a codelet.

    Args:
        name: key of `vertex["name"]`.
        attribute: name in the class, and of the parameter of `compute`.
        direction: "state" for a value of the vertex itself.
        kind: scalar, vector or list of vectors.
        dtype: type of its elements.
        default: value of unset state; None if it has to be set.
    """

    name: str
    attribute: str
    direction: FieldDirection
    kind: FieldKind
    dtype: np.dtype
    default: Any = None

    @property
    def is_state(self) -> bool:
        return self.direction == "state"

    @property
    def is_read(self) -> bool:
        return self.direction in ("in", "inout")

    @property
    def is_written(self) -> bool:
        return self.direction in ("out", "inout")


class Vertex:
    """Base of all codelets.

    Class attributes of a codelet, beside its fields, `compute` and `cycles`:
        vertex_name: name in graphs and profiles, `popops::Add<float>`; default that of the class.
        code_bytes: size of the code in tile memory (assumed: 256).
        language: of the code that it stands for, "C++" or "assembly", by which profiles divide cycles; default "C++".
    """

    vertex_name: ClassVar[str]
    fields: ClassVar[tuple[VertexField, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    cycle_parameters: ClassVar[tuple[str, ...]] = ()
    code_bytes: ClassVar[int] = 256
    language: ClassVar[Language] = "C++"
    compute: Callable[..., Any]
    cycles: ClassVar[Callable[..., Any] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "vertex_name" not in vars(cls):
            cls.vertex_name = cls.__name__
        for name in ("compute", "cycles"):
            if name in vars(cls) and not callable(vars(cls)[name]):
                expected = "a function"
                got = repr(vars(cls)[name])
                raise GraphError(f"{name} of codelet {cls.__name__} must be a function", expected=expected, got=got)
        if cls.language not in get_args(Language):
            expected, got = f"one of {get_args(Language)}", repr(cls.language)
            raise GraphError(f"language of codelet {cls.__name__}", expected=expected, got=got)
        # Fields of the base classes come first; a field declared again keeps its place.
        inherited = {field.attribute: field for field in cls.fields}
        declared = {field.attribute: field for field in _declared_fields(cls)}
        cls.fields = tuple((inherited | declared).values())
        read = [field.attribute for field in cls.fields if field.is_read or field.is_state]
        cls.parameters = _read_parameters(cls, "compute", "fields that are read, and state", read)
        connected = [field.attribute for field in cls.fields if not field.is_state]
        cls.cycle_parameters = _read_parameters(cls, "cycles", "connected fields", [*connected, "shapes", "target"])


_RESERVED = frozenset(Vertex.__annotations__)  # names that a codelet may annotate without declaring a field


def _checked_default(cls: type[Vertex], name: str, dtype: np.dtype, value: Any) -> Any:
    """Return the default of a state field; refuse one that the type cannot represent, as `set_initial_value` does."""
    label = f"default of field {name} of codelet {cls.__name__}"
    if value is not None and cast_values(value, dtype, label).shape != ():
        raise GraphError(label, expected="one number", got=repr(value))
    return value


def _declared_fields(cls: type[Vertex]) -> list[VertexField]:
    try:
        # Evaluated, because `from __future__ import annotations` leaves text.
        annotations = inspect.get_annotations(cls, eval_str=True)
    except NameError as error:
        raise GraphError(
            f"codelet {cls.__name__}: a field's type is not known here: {error}",
            hint="define codelets at the top of a module, or without `from __future__ import annotations`",
        ) from error
    return [_field(cls, name, of) for name, of in annotations.items() if name not in _RESERVED]


def _field(cls: type[Vertex], attribute: str, of: Any) -> VertexField:
    """Return the field that an annotated attribute declares: a connection, or state of a plain type."""
    # `in_` is the field "in": a keyword of Python cannot be an attribute.
    is_escaped = attribute.endswith("_") and keyword.iskeyword(attribute[:-1])
    name = attribute[:-1] if is_escaped else attribute
    if isinstance(of, Edge):
        return VertexField(name, attribute, of.direction, of.kind, of.dtype)
    if isinstance(of, np.dtype):
        default = _checked_default(cls, name, of, vars(cls).get(attribute))
        return VertexField(name, attribute, "state", "scalar", of, default)
    raise GraphError(
        f"field {name} of codelet {cls.__name__} has no type",
        expected="Input[…], Output[…] or InOut[…] of a type, or a type such as poplar.INT",
        got=repr(of),
    )


def _read_parameters(cls: type[Vertex], function: str, description: str, allowed: list[str]) -> tuple[str, ...]:
    """Return the parameters of `compute` or `cycles`; an unknown one is an error, unless it has a default."""
    fun = getattr(cls, function, None)
    if fun is None:
        return ()
    declared = inspect.signature(fun).parameters.values()
    # A parameter that is not a field keeps its default, if it has one.
    parameters = tuple(p.name for p in declared if p.name in allowed or p.default is p.empty)
    for name in parameters:
        if name not in allowed:
            is_self = name == "self"
            raise GraphError(
                f"{function} of codelet {cls.__name__} asks for {name!r}",
                expected=f"{description}: {allowed}",
                got=repr(name),
                hint=f"{function} is a function of the fields and has no self" if is_self else nearest(name, allowed),
            )
    return parameters
