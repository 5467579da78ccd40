"""Figures of a record: computed when they are first read, or read from the data of a file.

    class Report(FigureRecord):
        @figure
        def cycles(self) -> int: ...

A report with `data` has `cycles` from them, any other computes them. The annotations of figures are the schema of
files: `figure_kinds` has the kind of each. Figures may be in a part of the data, by its name.

Fields of files by their annotations: the kind of their data, values as data, and data as values.

    int, float, str, bool                   numbers from 0, texts and flags
    Literal["a", "b"]                       one of these texts
    X | None, tuple[X, ...], tuple[X, Y]    X or null; a list, as list[X]; a row
    Mapping[str, X], dict[str, X]           an object; keys may be a Literal
    a dataclass, a named tuple              an object of the annotations of its fields, without those of NOT_SAVED
    Annotated[X, Length("steps")]           a list with a named length, as of `kinds.List`
    Annotated[X, kind]                      data of another kind; an array or a class with `to_data` and `from_data`

Input: an annotation. Output: `FieldType`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np

from ipujax.runtime.files.figure_kinds import Flags, Nullable, Real, Row, Runs, numbers_of_runs, runs_of
from ipujax.runtime.files.kinds import Anything, Flag, Integer, Kind, List, Map, Record, Text
from ipujax.runtime.not_copied import ReadOnlyMapping

NOT_SAVED = {"is_saved": False}  # metadata of a field that files leave out, whose default is read in its place
_PLAIN: Mapping[Any, Kind] = {int: Integer(), float: Real(), str: Text(), bool: Flag(), Any: Anything()}


@dataclass(frozen=True, slots=True)
class Length:
    """Mark of a list: the name of its length, and a lower bound of it."""

    name: str
    minimum: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FieldType:
    """How files have the values of an annotation.

    Args:
        kind: kind of the data.
        to_data: value → JSON-able data.
        from_data: data of the kind → value.
    """

    kind: Kind
    to_data: Callable[[Any], Any]
    from_data: Callable[[Any], Any]


@cache
def field_type(annotation: Any) -> FieldType:
    """Return how files have the values of an annotation, as the module lists them."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _marked(args[0], args[1])
    if annotation in _PLAIN:
        return FieldType(_PLAIN[annotation], float if annotation is float else _same, _same)
    if origin is Literal:
        return FieldType(Text(args), _same, _same)
    if origin in (Union, UnionType) and len(args) == 2 and args[1] is NoneType:
        return _or_null(field_type(args[0]))
    if origin is tuple:
        return _tuple_type(args)
    if origin is list:
        of = field_type(args[0])
        return FieldType(
            List(of.kind), lambda value: list(map(of.to_data, value)), lambda x: list(map(of.from_data, x))
        )
    if origin in (dict, Mapping):
        return _mapping_type(field_type(args[0]), field_type(args[1]), dict if origin is dict else ReadOnlyMapping)
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "_fields"):
        return _object_type(annotation)
    raise TypeError(f"no file has values of {annotation}")


def data_of(value: Any) -> Any:
    """Return a value of a class with annotated fields as JSON-able data."""
    kind: Any = type(value)
    return field_type(kind).to_data(value)


def _same(value: Any) -> Any:
    return value


def _marked(annotation: Any, mark: Kind | Length) -> FieldType:
    """Return the type of an annotation whose mark says more of its data."""
    if isinstance(mark, Length):
        elements = field_type(annotation)
        assert isinstance(elements.kind, List)
        return dataclasses.replace(elements, kind=List(elements.kind.of, mark.name, mark.minimum))
    if annotation is np.ndarray:
        return _array_type(mark)
    if hasattr(annotation, "from_data"):
        return FieldType(mark, annotation.to_data, annotation.from_data)
    return dataclasses.replace(field_type(annotation), kind=mark)


def _or_null(of: FieldType) -> FieldType:
    """Return the type of a field that may also be None, null in files."""

    def to_data(value: Any) -> Any:
        return None if value is None else of.to_data(value)

    def from_data(data: Any) -> Any:
        return None if data is None else of.from_data(data)

    return FieldType(Nullable(of.kind), to_data, from_data)


def _tuple_type(args: tuple[Any, ...]) -> FieldType:
    """Return the type of a list, or of a row with a type for each element."""
    if args[1:] == (...,):
        of = field_type(args[0])
        return FieldType(
            List(of.kind), lambda value: list(map(of.to_data, value)), lambda x: tuple(map(of.from_data, x))
        )
    each = tuple(map(field_type, args))

    def to_data(value: Any) -> list[Any]:
        return [of.to_data(x) for of, x in zip(each, value, strict=True)]

    def from_data(data: Any) -> tuple[Any, ...]:
        return tuple(of.from_data(x) for of, x in zip(each, data, strict=True))

    return FieldType(Row(tuple(of.kind for of in each)), to_data, from_data)


def _mapping_type(keys: FieldType, of: FieldType, make: Callable[[dict[str, Any]], Any]) -> FieldType:
    """Return the type of an object, which `make` makes of a dict."""
    assert isinstance(keys.kind, Text)

    def to_data(value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: of.to_data(x) for name, x in value.items()}

    def from_data(data: Mapping[str, Any]) -> Any:
        return make({name: of.from_data(x) for name, x in data.items()})

    return FieldType(Map(of.kind, keys.kind), to_data, from_data)


def _object_type(of: Any) -> FieldType:
    """Return the type of a dataclass or a named tuple."""
    hints = get_type_hints(of, include_extras=True)
    if dataclasses.is_dataclass(of):
        names = [item.name for item in dataclasses.fields(of) if item.metadata.get("is_saved", True)]
    else:
        names = list(of._fields)
    types = {name: field_type(hints[name]) for name in names}

    def to_data(value: Any) -> dict[str, Any]:
        return {name: each.to_data(getattr(value, name)) for name, each in types.items()}

    def from_data(data: Mapping[str, Any]) -> Any:
        return of(**{name: each.from_data(data[name]) for name, each in types.items()})

    return FieldType(Record({name: each.kind for name, each in types.items()}), to_data, from_data)


def _array_type(kind: Kind) -> FieldType:
    """Return the type of an array of integers or flags, as runs, a list, or a list of rows."""
    if isinstance(kind, Runs):
        dtype = np.bool_ if isinstance(kind, Flags) else np.int64
        return FieldType(kind, runs_of, lambda data: _frozen(numbers_of_runs(data).astype(dtype)))
    assert isinstance(kind, List)
    shape = (-1, len(kind.of.kinds)) if isinstance(kind.of, Row) else (-1,)
    return FieldType(kind, np.ndarray.tolist, lambda data: _frozen(np.array(data, np.int64).reshape(shape)))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


T = TypeVar("T")


class FigureRecord:
    """Base of records of figures.

    Attributes:
        data: the figures as a file has them; None where they are computed.
    """

    data: Mapping[str, Any] | None

    def part_of_data(self, part: str) -> Mapping[str, Any] | None:
        """Return the data of the figures of a part, "" for those of none; None where they are computed."""
        return self.data

    def figures_as_data(self, part: str = "") -> dict[str, Any]:
        """Return the figures of a part as JSON-able data."""
        return {each.saved_name: each.type.to_data(getattr(self, name)) for name, each in _figures(type(self), part)}

    @classmethod
    def figure_kinds(cls, part: str = "") -> dict[str, Kind]:
        """Return the kind of the data of each figure of a part."""
        return {each.saved_name: each.type.kind for _, each in _figures(cls, part)}

    def replaced(self, **figures: Any) -> Self:
        """Return a copy with other figures, which shares those that are computed already."""
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__ | figures)
        return duplicate


class figure(cached_property[T], Generic[T]):
    """A figure of a record, which its method computes."""

    part: ClassVar[str] = ""

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value = self._value(instance)
        instance.__dict__[self.attrname] = value
        return value

    def _value(self, record: FigureRecord) -> T:
        data = record.part_of_data(self.part)
        return self.func(record) if data is None else self.type.from_data(data[self.saved_name])

    @property
    def saved_name(self) -> str:
        """Name of the field of a file."""
        return str(self.attrname)

    @property
    def type(self) -> FieldType:
        """Type of the figure in files."""
        return field_type(get_type_hints(self.func, include_extras=True)["return"])


class section(figure[T]):
    """JSON-able data as a figure, made anew at each access: the reader may change them. Files have `x_section` as x."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else self._value(instance)

    def _value(self, record: FigureRecord) -> Any:
        data = record.part_of_data(self.part)
        return self.func(record) if data is None else copy.deepcopy(data[self.saved_name])

    @property
    def saved_name(self) -> str:
        return str(self.attrname).removesuffix("_section")


def _figures(of: type[FigureRecord], part: str) -> Iterator[tuple[str, figure[Any]]]:
    """Yield the figures of a part of a class by name, in the order of their declaration."""
    for base in reversed(of.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, figure) and value.part == part:
                yield name, value
